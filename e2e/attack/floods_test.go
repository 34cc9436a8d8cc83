package attack

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/atls"
)

// from dials from an address of the loopback network: each is a separate source.
func from(source string) func(ctx context.Context, network, addr string) (net.Conn, error) {
	return (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}}).DialContext
}

// flood opens n TCP connections that send nothing.
func flood(t *testing.T, source, addr string, n int) []net.Conn {
	t.Helper()
	var conns []net.Conn
	for range n {
		c, err := from(source)(t.Context(), "tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
		t.Cleanup(func() { _ = c.Close() })
	}
	return conns
}

// closed counts the connections that the server has closed, and waits for that.
func closed(t *testing.T, conns []net.Conn) (n int) {
	t.Helper()
	until := time.Now().Add(patience)
	for _, c := range conns {
		if err := c.SetReadDeadline(until); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Read(make([]byte, 1)); err != nil && !isTimeout(err) {
			n++
		}
	}
	return n
}

func isTimeout(err error) bool {
	e, ok := err.(net.Error) //nolint:errorlint // of our own read
	return ok && e.Timeout()
}

// dropped waits for n connections that were closed before TLS, all for that cause.
func (x *target) dropped(t *testing.T, n int, cause string) {
	t.Helper()
	timeout := time.After(patience)
	for i := 0; i < n; {
		select {
		case s := <-x.seen:
			if s.Dropped == "" {
				continue
			}
			if s.Dropped != cause {
				t.Fatalf("dropped for %s, want %s", s.Dropped, cause)
			}
			i++
		case <-timeout:
			t.Fatalf("%d of %d connections dropped for %s", i, n, cause)
		}
	}
}

// One source cannot exclude the others: it has its own bucket.
func TestAFloodFromOneSource(t *testing.T) {
	t.Parallel()
	x := newTarget(t, func(c *rpc.Config) { c.ATLS.Limits = atls.Limits{Rate: 0.001, Burst: 50} })
	conns := flood(t, "127.0.0.2", x.addr, 500)
	x.dropped(t, 450, "source_rate")
	if err := reaches(t, x.transport(t, nil), x.addr); err != nil {
		t.Errorf("another source: %v", err)
	}
	if err := reach(t, x.transport(t, func(c *atls.ClientConfig) { c.DialContext = from("127.0.0.2") }), x.addr); err == nil {
		t.Error("the flooding source got through")
	}
	if n := closed(t, conns); n != len(conns) {
		t.Errorf("%d of %d idle connections were closed", n, len(conns))
	}
}

// Many sources together use all slots: a new source is accepted nevertheless, and they do not keep their slots.
func TestAFloodFromManySources(t *testing.T) {
	t.Parallel()
	x := newTarget(t, func(c *rpc.Config) { c.ATLS.Limits = atls.Limits{Rate: 0.001, Burst: 50, SetUp: 64} })
	var conns []net.Conn
	var err error
	for try := range 10 { // on a busy computer, also the server's limits may cut an honest client short
		for source := range 4 {
			conns = append(conns, flood(t, fmt.Sprintf("127.0.%d.%d", try, 2+source), x.addr, 50)...)
		}
		if err = reach(t, x.transport(t, nil), x.addr); !cutShort(err) {
			break
		}
	}
	if err != nil {
		t.Errorf("a source that holds nothing: %v", err)
	}
	if n := closed(t, conns); n != len(conns) {
		t.Errorf("%d of %d idle connections were closed", n, len(conns))
	}
	if err := reaches(t, x.transport(t, nil), x.addr); err != nil {
		t.Errorf("once the idle ones are gone: %v", err)
	}
}

// Many machines that attested and then idle use a limited number of connections, and the service goes on.
func TestManyIdleSessions(t *testing.T) {
	const sessions = 150
	x := newTarget(t, func(c *rpc.Config) { c.ATLS.Limits.AttestedPerMachine = sessions })
	quotes := x.client.Quotes()
	idle := make([]*http.Client, sessions)
	for i := range idle {
		idle[i] = x.transport(t, nil)
	}
	var calls atomic.Int64 // each makes a session at most
	all := func() {
		var wg sync.WaitGroup
		for clients := range slices.Chunk(idle, 10) {
			wg.Go(func() {
				for _, c := range clients {
					if err := insist(t, func() error { calls.Add(1); return reach(t, c, x.addr) }); err != nil {
						t.Errorf("a session: %v", err)
					}
				}
			})
		}
		wg.Wait()
	}
	all()
	if got := int64(x.client.Quotes() - quotes); got > calls.Load() {
		t.Errorf("%d quotes for %d sessions", got, calls.Load())
	}
	served := true
	for try := 0; served && try < 10; try++ {
		all() // sessions that idled; one that was lost meanwhile is made again
		more := x.transport(t, nil)
		served = reach(t, more, x.addr) == nil
		more.CloseIdleConnections()
	}
	if served {
		t.Error("a connection more than the limit was served")
	}
	idle[0].CloseIdleConnections()
	if err := reaches(t, x.transport(t, nil), x.addr); err != nil {
		t.Errorf("once one is gone: %v", err)
	}
}

// A peer that stops at any point does not prevent the server from stopping: the clean-up of each test here waits for
// that, and this test leaves as many open connections as possible.
func TestPeersThatStopInTheMiddle(t *testing.T) {
	x := newTarget(t, func(c *rpc.Config) { c.Grace = 2 * time.Second })
	flood(t, "127.0.0.2", x.addr, 10)
	for i := range 5 {
		w := open(t, x.addr, nil)
		if i == 0 {
			continue // no offer
		}
		sent := w.send(t, &attestv1.Offer{Gives: tpm2})
		_, theirs, err := w.receive()
		if err != nil {
			t.Fatal(err)
		}
		if i == 1 {
			continue // no evidence
		}
		ev, err := x.machine().Attest(t.Context(), attestv1.Format_FORMAT_TPM2, w.bind(client, sent, theirs))
		if err != nil {
			t.Fatal(err)
		}
		frame := encode(t, ev)
		if i == 2 {
			raw(t, w, frame[:len(frame)/2])
			continue
		}
		raw(t, w, frame)
		if _, _, err := w.receive(); err != nil { // its challenge
			t.Fatal(err)
		}
		if i == 3 {
			continue // no response
		}
		raw(t, w, []byte{0})
	}
	w := open(t, x.addr, nil)
	if got, err := w.play(t, honest(x.machine())); got != accepted {
		t.Fatal(got, err)
	}
	if _, err := io.WriteString(w, "PRI * HTTP/2.0\r\n"); err != nil { // half of the preface
		t.Fatal(err)
	}
}
