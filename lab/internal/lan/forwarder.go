package lan

import (
	"cmp"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"
)

// connectTimeout is the Timeout of a [Forwarder] that has none.
const connectTimeout = 500 * time.Millisecond

// A Forwarder is a TCP load balancer: each connection goes to the first back end that
// accepts, beginning with a different one each time.
type Forwarder struct {
	Backends func() []string // host:port; asked for each connection
	// Healthy, if set, is asked every second for each back end. One that is not healthy is tried
	// after all others, and loses the connections that it has.
	Healthy func(ctx context.Context, backend string) error
	// Timeout is how long a back end may take to accept before the next is tried; 0 for 500 ms.
	Timeout time.Duration
	Log     *slog.Logger

	first  int
	mu     sync.Mutex
	health health
}

// Serve forwards connections until ctx ends; then it closes the listener and all
// connections and returns when the last one is gone.
func (f *Forwarder) Serve(ctx context.Context, l net.Listener) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	context.AfterFunc(ctx, func() { _ = l.Close() })
	if f.Healthy != nil {
		wg.Go(func() { f.check(ctx) })
	}
	for {
		c, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		wg.Go(func() { f.forward(ctx, c) })
	}
}

func (f *Forwarder) forward(ctx context.Context, client net.Conn) {
	defer client.Close()
	server, backend, err := f.dial(ctx)
	if err != nil {
		f.Log.Debug("no control plane accepts", "err", err)
		return
	}
	defer server.Close()
	hangUp := func() { _, _ = client.Close(), server.Close() }
	defer f.health.enter(backend, hangUp)()
	defer context.AfterFunc(ctx, hangUp)()
	var wg sync.WaitGroup
	wg.Go(func() { pump(server, client) })
	pump(client, server)
	wg.Wait()
}

// pump copies one direction and forwards its end.
func pump(to, from net.Conn) {
	_, _ = io.Copy(to, from)
	if t, ok := to.(*net.TCPConn); ok {
		_ = t.CloseWrite()
	}
}

func (f *Forwarder) dial(ctx context.Context) (net.Conn, string, error) {
	f.mu.Lock()
	f.first++
	first := f.first
	f.mu.Unlock()
	errs := []error{errors.New("no back end accepted the connection")}
	for _, b := range f.health.order(f.Backends(), first) {
		d := net.Dialer{Timeout: cmp.Or(f.Timeout, connectTimeout)}
		c, err := d.DialContext(ctx, "tcp", b)
		if err == nil {
			return c, b, nil
		}
		errs = append(errs, err)
	}
	return nil, "", errors.Join(errs...)
}
