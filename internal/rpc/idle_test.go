package rpc_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"weak"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	healthv1 "github.com/muster-k8s/muster/gen/grpc/health/v1"
	"github.com/muster-k8s/muster/gen/grpc/health/v1/healthv1connect"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// accepted is a listener that tracks which of its connections are open, and which are still in memory.
type accepted struct {
	net.Listener

	open  atomic.Int32
	mu    sync.Mutex
	conns []weak.Pointer[kept]
}

type kept struct {
	net.Conn

	close func() error
}

func (k *kept) Close() error { return k.close() }

func (a *accepted) Accept() (net.Conn, error) {
	c, err := a.Listener.Accept()
	if err != nil {
		return nil, err
	}
	a.open.Add(1)
	k := &kept{c, sync.OnceValue(func() error { a.open.Add(-1); return c.Close() })}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.conns = append(a.conns, weak.Make(k))
	return k, nil
}

// inMemory returns how many of the connections that were accepted are still in memory.
func (a *accepted) inMemory() (n int) {
	runtime.GC()
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, c := range a.conns {
		if c.Value() != nil {
			n++
		}
	}
	return n
}

// all returns how many connections were accepted.
func (a *accepted) all() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.conns)
}

// clients are the ways to call, with a function that closes the client's connections.
func clients(t *testing.T, r *running) map[string]func() (c *http.Client, off func()) {
	recorded := func(dial func(ctx context.Context, network, addr string) (net.Conn, error)) (func(ctx context.Context, network, addr string) (net.Conn, error), func()) {
		var mu sync.Mutex
		var conns []net.Conn
		return func(ctx context.Context, network, addr string) (net.Conn, error) {
				c, err := dial(ctx, network, addr)
				if err == nil {
					mu.Lock()
					defer mu.Unlock()
					conns = append(conns, c)
				}
				return c, err
			}, func() {
				mu.Lock()
				defer mu.Unlock()
				for _, c := range conns {
					_ = c.Close()
				}
			}
	}
	plain := func(http2 bool) func() (*http.Client, func()) {
		return func() (*http.Client, func()) {
			dial, off := recorded(new(net.Dialer).DialContext)
			tr := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ForceAttemptHTTP2: http2, DialContext: dial}
			t.Cleanup(tr.CloseIdleConnections)
			return &http.Client{Transport: tr}, off
		}
	}
	session := func(a attest.Attester) func() (*http.Client, func()) {
		return func() (*http.Client, func()) {
			dial, off := recorded(new(net.Dialer).DialContext)
			tr, err := atls.NewTransport(atls.ClientConfig{
				Attester: a, Verifier: attesttest.Verifier(t, r.ca), Appraiser: r.policy.For(attest.Unlocked()), PeerPurpose: attest.PurposeKMS, DialContext: dial,
			})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = tr.Close() })
			return rpc.HTTPClient(tr), off
		}
	}
	return map[string]func() (*http.Client, func()){
		"HTTP/1.1": plain(false), "HTTP/2": plain(true), "session": session(atls.NoAttester), "attested": session(r.client.Attester(attest.PurposeJoinservice)),
	}
}

// many connections are opened for each way to call.
const many = 40

// All memory of a connection is free after it is closed, also with calls in progress.
func TestAClosedConnectionHoldsNoMemory(t *testing.T) {
	var l *accepted
	r := run(t, keyService{}, func(c *rpc.Config) {
		l = &accepted{Listener: c.Listener}
		c.Listener = l
	})
	for name, client := range clients(t, r) {
		t.Run(name, func(t *testing.T) {
			before := l.inMemory()
			for range many {
				c, off := client()
				watch, err := healthv1connect.NewHealthClient(c, r.url).Watch(t.Context(), &healthv1.HealthCheckRequest{})
				if err != nil {
					t.Fatal(err)
				}
				if !watch.Receive() {
					t.Fatal(watch.Err())
				}
				off()
				_ = watch.Close()
			}
			// Go's scheduler drops stopped timers when they are a fourth of all.
			wait(t, "closed connections are free", func() bool { return l.inMemory() < before+many/2 })
		})
	}
}

func TestAConnectionWithoutACallIsClosed(t *testing.T) {
	t.Parallel()
	const idle = 2 * time.Second
	for _, name := range []string{"HTTP/1.1", "HTTP/2", "session", "attested"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // they wait, each with a server of its own
			var l *accepted
			r := run(t, keyService{}, func(c *rpc.Config) {
				l = &accepted{Listener: c.Listener}
				c.Listener, c.IdleTimeout = l, idle
			})
			c, _ := clients(t, r)[name]()
			health := healthv1connect.NewHealthClient(c, r.url)
			long, err := health.Watch(t.Context(), &healthv1.HealthCheckRequest{})
			if err != nil {
				t.Fatal(err)
			}
			ended := make(chan struct{})
			go func() {
				for long.Receive() {
				}
				close(ended)
			}()
			for range 3 {
				if _, err := health.Check(t.Context(), &healthv1.HealthCheckRequest{}); err != nil {
					t.Fatal(err)
				}
			}
			select {
			case <-ended:
				t.Errorf("a call under way ended: %v", long.Err())
			case <-time.After(2 * idle): // twice as long as one without a call stays
			}
			_ = long.Close()
			<-ended
			wait(t, "an idle connection is closed", func() bool { return l.open.Load() == 0 })
		})
	}
}

// opened is a connection of HTTP/2 whose frames the test writes itself.
type opened struct {
	*http2.Framer

	t       *testing.T
	conn    net.Conn
	out     bytes.Buffer // what is not sent yet
	block   bytes.Buffer
	encoder *hpack.Encoder
}

func openHTTP2(t *testing.T, addr string, settings ...http2.Setting) *opened {
	t.Helper()
	c, err := (&tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}}}).DialContext(t.Context(), "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	o := &opened{t: t, conn: c}
	o.Framer, o.encoder = http2.NewFramer(&o.out, c), hpack.NewEncoder(&o.block)
	o.out.WriteString(http2.ClientPreface)
	o.must(o.WriteSettings(settings...))
	return o
}

func (o *opened) must(err error) {
	o.t.Helper()
	if err != nil {
		o.t.Fatal(err)
	}
}

// request starts a request, and ends it if it has a body.
func (o *opened) request(stream uint32, path string, body []byte, fields ...string) {
	o.t.Helper()
	o.block.Reset()
	fields = append([]string{":method", "POST", ":scheme", "https", ":authority", "muster", ":path", path}, fields...)
	for i := 0; i < len(fields); i += 2 {
		o.must(o.encoder.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1]}))
	}
	o.must(o.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: o.block.Bytes(), EndHeaders: true}))
	if body != nil {
		o.must(o.WriteData(stream, true, body))
	}
}

func (o *opened) flush() {
	o.t.Helper()
	_, err := o.conn.Write(o.out.Bytes())
	o.must(err)
	o.out.Reset()
}

// sent sends the written frames, and reports whether the server has answered its PING.
func (o *opened) sent() bool {
	o.t.Helper()
	_, err := o.conn.Write(o.out.Bytes())
	o.out.Reset()
	o.must(o.conn.SetReadDeadline(time.Now().Add(patience)))
	for err == nil {
		var f http2.Frame
		if f, err = o.ReadFrame(); err == nil && f.Header().Type == http2.FramePing {
			return true
		}
	}
	return false
}

// until reads frames up to one of that type.
func (o *opened) until(want http2.FrameType) {
	o.t.Helper()
	o.must(o.conn.SetReadDeadline(time.Now().Add(patience)))
	for {
		f, err := o.ReadFrame()
		if err != nil {
			o.t.Fatalf("no frame %s: %v", want, err)
		}
		if f.Header().Type == want {
			return
		}
	}
}

// A call that is canceled before its handler has started leaves no memory allocated either.
func TestACallThatIsCanceledAtOnceHoldsNoMemory(t *testing.T) {
	var l *accepted
	r := run(t, keyService{}, func(c *rpc.Config) {
		l = &accepted{Listener: c.Listener}
		c.Listener = l
	})
	for range many {
		o := openHTTP2(t, r.addr)
		for stream := uint32(1); stream < 16; stream += 2 {
			o.request(stream, healthv1connect.HealthWatchProcedure, nil, "content-type", "application/grpc")
			o.must(o.WriteRSTStream(stream, http2.ErrCodeCancel))
		}
		o.must(o.WritePing(false, [8]byte{}))
		o.flush()
		o.until(http2.FramePing)
		_ = o.conn.Close()
	}
	wait(t, "closed connections are free", func() bool { return l.open.Load() == 0 && l.inMemory() < many/2 })
}

// If a peer opens no window for an answer, its call ends, also if the handler has returned, or if there was none.
func TestAnAnswerThatIsNotTakenEndsItsCall(t *testing.T) {
	t.Parallel()
	r := run(t, keyService{}, func(c *rpc.Config) { c.Timeout = 500 * time.Millisecond })
	for name, request := range map[string]func(o *opened){
		"an answer": func(o *opened) {
			o.request(1, healthv1connect.HealthCheckProcedure, []byte("{}"), "content-type", "application/json")
		},
		"not found":  func(o *opened) { o.request(1, "/nothing", []byte("{}")) },
		"net/http's": func(o *opened) { o.request(1, "/", []byte("{}"), "connection", "x") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := openHTTP2(t, r.addr, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
			request(o)
			o.flush()
			o.until(http2.FrameRSTStream)
		})
	}
}

// A connection is closed if its request was answered before it was complete, and the rest does not arrive.
func TestARestOfARequestThatDoesNotComeEndsItsConnection(t *testing.T) {
	t.Parallel()
	r := run(t, keyService{}, nil)
	for name, request := range map[string]string{
		"not found":    "POST /x HTTP/1.1\r\nHost: muster\r\nContent-Length: 10\r\n\r\n",
		"another type": "POST " + healthv1connect.HealthCheckProcedure + " HTTP/1.1\r\nHost: muster\r\nContent-Type: text/plain\r\nContent-Length: 10\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, err := (&tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"http/1.1"}}}).DialContext(t.Context(), "tcp", r.addr)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = c.Close() }()
			_, err = c.Write([]byte(request))
			if err = errors.Join(err, c.SetReadDeadline(time.Now().Add(patience))); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadAll(c); errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("it is still open after %s", patience)
			}
		})
	}
}
