package lan

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"
)

// connectTimeout is how long a control plane may take to accept before the next is tried.
const connectTimeout = 500 * time.Millisecond

// A Forwarder is a TCP load balancer: each connection goes to the first back end that
// accepts, beginning with a different one each time. Connecting is the health check.
type Forwarder struct {
	Backends func() []string // host:port; asked for each connection
	Log      *slog.Logger

	turn int
	mu   sync.Mutex
}

// Serve forwards connections until ctx ends; then it closes the listener and all
// connections and returns when the last one is gone.
func (f *Forwarder) Serve(ctx context.Context, l net.Listener) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	context.AfterFunc(ctx, func() { _ = l.Close() })
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
	server, err := f.dial(ctx)
	if err != nil {
		f.Log.Debug("no control plane accepts", "err", err)
		return
	}
	defer server.Close()
	defer context.AfterFunc(ctx, func() { _, _ = client.Close(), server.Close() })()
	var wg sync.WaitGroup
	wg.Go(func() { pump(server, client) })
	pump(client, server)
	wg.Wait()
}

// pump copies one direction and hands on its end.
func pump(to, from net.Conn) {
	_, _ = io.Copy(to, from)
	if t, ok := to.(*net.TCPConn); ok {
		_ = t.CloseWrite()
	}
}

func (f *Forwarder) dial(ctx context.Context) (net.Conn, error) {
	backends := f.Backends()
	f.mu.Lock()
	f.turn++
	first := f.turn
	f.mu.Unlock()
	errs := []error{errors.New("no back end accepted the connection")}
	for i := range backends {
		d := net.Dialer{Timeout: connectTimeout}
		c, err := d.DialContext(ctx, "tcp", backends[(first+i)%len(backends)])
		if err == nil {
			return c, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}
