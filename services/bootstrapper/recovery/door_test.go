package recovery

import (
	"context"
	"io"
	"net"
	"strconv"
	"sync"
	"testing"
	"time"
)

// What many connections from a few addresses do, that send nothing or do nothing, is to close each other.
func TestConnectionsThatDoNothingDoNotKeepTheOwnerOut(t *testing.T) {
	const addresses, each = 32, 8
	for name, open := range map[string]func(w *world, t *testing.T, ip string){
		"sessions": func(w *world, t *testing.T, ip string) { _, _ = w.session(t, ip) }, // some are closed at once, and should be
		"no handshakes": func(w *world, t *testing.T, ip string) {
			conn, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}}).DialContext(t.Context(), "tcp", w.addr)
			if err != nil {
				t.Error(err)
				return
			}
			t.Cleanup(func() { _ = conn.Close() })
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			if err := w.stop(); err != nil {
				t.Fatal(err)
			}
			w.server.idle = time.Hour // they are not to go by themselves
			w.run()
			var wg sync.WaitGroup
			for i := range addresses {
				wg.Go(func() {
					for range each {
						open(w, t, "127.0.4."+strconv.Itoa(i+1))
					}
				})
			}
			wg.Wait()
			eventually(t, "all places are taken", func() bool {
				w.server.door.mu.Lock()
				defer w.server.door.mu.Unlock()
				return len(w.server.door.guests) == maxPlaces
			})
			w.opens(t, w.from("127.0.0.1"))
		})
	}
}

func TestAConnectionWithoutACallIsClosed(t *testing.T) {
	w := newWorld(t)
	if err := w.stop(); err != nil {
		t.Fatal(err)
	}
	w.server.idle = 100 * time.Millisecond
	w.run()
	conn, err := w.session(t, "127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	w.preface(conn)
	if err := conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, conn); err != nil {
		t.Errorf("it is open after %s: %v", patience, err)
	}
}

// A call whose answer nobody takes does not keep its connection from being without a call.
func TestACallThatNobodyReadsEnds(t *testing.T) {
	w := newWorld(t)
	if err := w.stop(); err != nil {
		t.Fatal(err)
	}
	w.server.idle, w.server.call = 100*time.Millisecond, 100*time.Millisecond
	w.run()
	conn := w.deaf(t, "127.0.0.1", 0)
	if err := conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, conn); err != nil {
		t.Errorf("it is open after %s: %v", patience, err)
	}
}

// from is a connection from an address, with nobody at its end.
type from struct {
	net.Conn
	at     net.Addr
	closed bool
}

func (c *from) RemoteAddr() net.Addr { return c.at }

func (c *from) Close() error { c.closed = true; return nil }

// visit lets somebody come from host n.
func visit(d *door, host byte, port int) (*guest, *from) {
	c := &from{at: &net.TCPAddr{IP: net.IPv4(192, 0, 2, host), Port: port}}
	return d.admit(c), c
}

func TestWhoHasTheMostPlacesMakesRoom(t *testing.T) {
	now := time.Now()
	d := newDoor(4, func() time.Time { now = now.Add(time.Millisecond); return now }, nil)
	_, a1 := visit(d, 1, 1)
	g2, a2 := visit(d, 1, 2)
	_, a3 := visit(d, 1, 3)
	_, b := visit(d, 2, 1)
	if g, _ := visit(d, 3, 1); g == nil || !a1.closed {
		t.Fatal("the oldest of host 1, which has three places, did not make room for host 3")
	}
	done := d.calling(a2.at.String())
	if g, _ := visit(d, 4, 1); g == nil || a2.closed || !a3.closed {
		t.Fatal("of host 1, the connection without a call did not make room for host 4")
	}
	// Four hosts with a place each, all of them young.
	if g, _ := visit(d, 5, 1); g != nil {
		t.Fatal("somebody who just came made room for one who has as much")
	}
	now = now.Add(settle)
	if g, _ := visit(d, 5, 1); g == nil || !b.closed || a2.closed {
		t.Fatal("after a while, the oldest without a call did not make room")
	}
	done()
	now = now.Add(settle)
	if g, _ := visit(d, 5, 2); g != nil || a2.closed {
		t.Fatal("host 5 took the place of one that has less")
	}
	_ = g2.Close()
	_ = g2.Close() // gives one place back, not two
	if g, _ := visit(d, 6, 1); g == nil || len(d.guests) != 4 {
		t.Errorf("%d places are taken, want 4", len(d.guests))
	}
	d.calling("nobody's address")()
	sum := 0
	for _, n := range d.of {
		sum += n
	}
	if sum != len(d.guests) {
		t.Errorf("the sources have %d places, want %d", sum, len(d.guests))
	}
}

// While all connections have a call whose turn comes, nobody makes room.
func TestCallsKeepTheirPlaces(t *testing.T) {
	w := newWorld(t)
	if err := w.stop(); err != nil {
		t.Fatal(err)
	}
	refused := make(chan net.Addr, 16)
	w.server.door = newDoor(1, time.Now, func(a net.Addr) {
		select {
		case refused <- a:
		default:
		}
	})
	w.run()
	trying, release := make(chan struct{}), make(chan struct{})
	w.lock.before = func(context.Context) error { close(trying); <-release; return nil }
	var wg sync.WaitGroup
	wg.Go(func() { w.opens(t, w.from("127.0.0.1")) })
	<-trying
	if _, err := w.session(t, "127.0.0.9"); err == nil {
		t.Error("another connection has a place")
	}
	<-refused
	close(release)
	wg.Wait()
}
