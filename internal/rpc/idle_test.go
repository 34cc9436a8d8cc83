package rpc_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
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

// accepted is a listener that knows which of its connections are open, and which are still in memory.
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

// clients are the ways to call, with a function that breaks the client's connections off.
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

// many connections are made for each way to call.
const many = 40

// Whatever a connection held is free once it is closed, also with calls under way.
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
			// Go's scheduler drops a timer that was stopped once a fourth of all are such.
			wait(t, "closed connections are free", func() bool { return l.inMemory() < before+many/2 })
		})
	}
}

func TestAConnectionWithoutACallIsClosed(t *testing.T) {
	var l *accepted
	r := run(t, keyService{}, func(c *rpc.Config) {
		l = &accepted{Listener: c.Listener}
		c.Listener, c.IdleTimeout = l, 200*time.Millisecond
	})
	for name, client := range clients(t, r) {
		t.Run(name, func(t *testing.T) {
			c, _ := client()
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
			case <-time.After(time.Second): // five times as long as one without a call stays
			}
			_ = long.Close()
			<-ended
			wait(t, "an idle connection is closed", func() bool { return l.open.Load() == 0 })
		})
	}
}

// A call that is canceled before its handler has begun leaves nothing behind either.
func TestACallThatIsCanceledAtOnceHoldsNoMemory(t *testing.T) {
	var l *accepted
	r := run(t, keyService{}, func(c *rpc.Config) {
		l = &accepted{Listener: c.Listener}
		c.Listener = l
	})
	for range many {
		c, err := (&tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}}}).DialContext(t.Context(), "tcp", r.addr)
		if err != nil {
			t.Fatal(err)
		}
		var frames, fields bytes.Buffer
		frames.WriteString(http2.ClientPreface)
		framer, encoder := http2.NewFramer(&frames, c), hpack.NewEncoder(&fields)
		errs := []error{framer.WriteSettings()}
		for stream := uint32(1); stream < 16; stream += 2 {
			fields.Reset()
			for _, f := range [][2]string{{":method", "POST"}, {":scheme", "https"}, {":authority", "muster"}, {":path", healthv1connect.HealthWatchProcedure}, {"content-type", "application/grpc"}} {
				errs = append(errs, encoder.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]}))
			}
			errs = append(errs, framer.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: fields.Bytes(), EndHeaders: true}),
				framer.WriteRSTStream(stream, http2.ErrCodeCancel))
		}
		errs = append(errs, framer.WritePing(false, [8]byte{}))
		if _, err := c.Write(frames.Bytes()); errors.Join(append(errs, err)...) != nil {
			t.Fatal(errors.Join(append(errs, err)...))
		}
		for answered := false; !answered; {
			f, err := framer.ReadFrame()
			if err != nil {
				t.Fatal(err)
			}
			answered = f.Header().Type == http2.FramePing
		}
		_ = c.Close()
	}
	wait(t, "closed connections are free", func() bool { return l.open.Load() == 0 && l.inMemory() < many/2 })
}
