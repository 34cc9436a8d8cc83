package lan

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// patience is how long a step may take on a computer that builds at the same time.
const patience = 5 * time.Minute

// greeting accepts connections, sends its name to each, and keeps it open until the other end closes.
func greeting(t *testing.T, name string) net.Listener {
	t.Helper()
	l := listen(t)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				_, _ = io.WriteString(c, name)
				_, _ = io.Copy(io.Discard, c)
				_ = c.Close()
			})
		}
	})
	t.Cleanup(func() { _ = l.Close(); wg.Wait() })
	return l
}

// greeted connects and returns the name of the back end.
func greeted(t *testing.T, addr string) (net.Conn, string) {
	t.Helper()
	c, err := net.DialTimeout("tcp", addr, patience)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 1)
	if _, err := io.ReadFull(c, b); err != nil {
		return c, ""
	}
	return c, string(b)
}

func TestABackEndThatIsDownLosesItsConnectionsAndGetsNoMore(t *testing.T) {
	a, b := greeting(t, "a"), greeting(t, "b")
	var dead atomic.Value // address of the back end that fails its checks
	dead.Store("")
	l := listen(t)
	ctx, cancel := context.WithCancel(t.Context())
	f := Forwarder{
		Backends: func() []string { return []string{a.Addr().String(), b.Addr().String()} }, Timeout: patience, Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
		Healthy: func(_ context.Context, addr string) error {
			if addr == dead.Load() {
				return errors.New("gone")
			}
			return nil
		},
	}
	done := make(chan error)
	go func() { done <- f.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	addr := l.Addr().String()
	first := func(name string) net.Conn {
		deadline := time.Now().Add(patience)
		for {
			c, got := greeted(t, addr)
			if got == name {
				return c
			}
			_ = c.Close()
			if time.Now().After(deadline) {
				t.Fatalf("no connection to %s", name)
			}
		}
	}
	toA, toB := first("a"), first("b")
	dead.Store(a.Addr().String())
	if _, err := toA.Read(make([]byte, 1)); !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the connection to the dead one ended with %v", err)
	}
	if err := toB.SetReadDeadline(time.Now()); err != nil {
		t.Fatal(err)
	}
	if _, err := toB.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the connection to the other ended with %v", err)
	}
	for range 6 {
		if _, got := greeted(t, addr); got != "b" {
			t.Errorf("connected to %q", got)
		}
	}
	dead.Store("")
	first("a") // up again
}

func TestAnAPIServerIsAskedWhetherItIsReady(t *testing.T) {
	code := http.StatusOK
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/readyz" {
			t.Errorf("asked for %s", r.URL)
		}
		w.WriteHeader(code)
	}))
	defer s.Close()
	addr := strings.TrimPrefix(s.URL, "https://")
	if err := APIServerReady(t.Context(), addr); err != nil {
		t.Error(err)
	}
	code = http.StatusInternalServerError
	if err := APIServerReady(t.Context(), addr); err == nil {
		t.Error("one that is not ready is")
	}
	s.Close()
	if err := APIServerReady(t.Context(), addr); err == nil {
		t.Error("one that is gone is ready")
	}
}
