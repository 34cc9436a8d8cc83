package serve_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/internal/serve"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func waits(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }

func TestPartsStartAndStopTogether(t *testing.T) {
	cause := errors.New("the disk is gone")
	for name, tt := range map[string]struct {
		parts []serve.Part
		want  []string // in the error's text; none: no error
	}{
		"a part that fails ends the others, and its name is in the error": {
			parts: []serve.Part{{Name: "waiter", Run: waits}, {Name: "disk", Run: func(context.Context) error { return cause }}},
			want:  []string{"disk: the disk is gone"},
		},
		"a part that just ends, ends the others": {
			parts: []serve.Part{{Name: "waiter", Run: waits}, {Name: "short", Run: func(context.Context) error { return nil }}},
		},
		"all errors are reported": {
			parts: []serve.Part{
				{Name: "first", Run: func(context.Context) error { return cause }},
				{Name: "second", Run: func(ctx context.Context) error { <-ctx.Done(); return errors.New("cannot clean up") }},
			},
			want: []string{"first: the disk is gone", "second: cannot clean up"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			err := serve.All(t.Context(), tt.parts...)
			if len(tt.want) == 0 && err != nil {
				t.Fatalf("error %v, want none", err)
			}
			for _, want := range tt.want {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("error %v, want %q in it", err, want)
				}
			}
		})
	}
	t.Run("the end of the context is no error", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := serve.All(ctx, serve.Part{Name: "waiter", Run: waits}); err != nil {
			t.Fatal(err)
		}
	})
}

func TestProbesTellWhatIsNotReady(t *testing.T) {
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	reg := prometheus.NewRegistry()
	reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "muster_test_answer"}, func() float64 { return 42 }))
	missing := make(chan error, 4)
	for range cap(missing) {
		missing <- errors.New("no policy yet")
	}
	p := serve.Probes{
		Listener: l,
		Metrics:  reg,
		Ready: map[string]func(context.Context) error{
			"policy": func(context.Context) error {
				select {
				case err := <-missing:
					return err
				default:
					return nil
				}
			},
			"evidence": func(context.Context) error { return nil },
		},
		Log: slog.New(slog.DiscardHandler),
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- serve.All(ctx, p.Part()) }()

	base := "http://" + l.Addr().String()
	if code, body := get(t, base+"/healthz"); code != http.StatusOK || body != "ok\n" {
		t.Errorf("healthz: %d %q", code, body)
	}
	if code, body := get(t, base+"/metrics"); code != http.StatusOK || !strings.Contains(body, "muster_test_answer 42") {
		t.Errorf("metrics: %d %q", code, body)
	}
	if _, body := get(t, base+"/metrics"); !strings.Contains(body, `muster_ready{check="evidence"} 1`) || !strings.Contains(body, `muster_ready{check="policy"} 0`) {
		t.Errorf("metrics while it is not ready: %q", body)
	}
	for range 2 {
		if code, body := get(t, base+"/readyz"); code != http.StatusServiceUnavailable || body != "policy: no policy yet\n" {
			t.Errorf("readyz: %d %q", code, body)
		}
	}
	if code, body := get(t, base+"/readyz"); code != http.StatusOK || body != "ok\n" {
		t.Errorf("readyz once ready: %d %q", code, body)
	}
	if _, body := get(t, base+"/metrics"); !strings.Contains(body, `muster_ready{check="policy"} 1`) {
		t.Errorf("metrics once it is ready: %q", body)
	}
	if code, _ := get(t, base+"/debug/pprof/"); code != http.StatusNotFound {
		t.Errorf("pprof: %d, want 404", code)
	}
	cancel()
	select {
	case err := <-done:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(5 * time.Minute):
		t.Fatal("it does not stop")
	}
}

func TestProbesRefuseToCheckNothing(t *testing.T) {
	if err := (serve.Probes{}).Run(t.Context()); err == nil {
		t.Fatal("an empty Probes runs")
	}
}

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

// A client that asks repeatedly takes little processor time, and the kubelet's probe is answered nevertheless.
func TestRequestsOfASourceAreRationed(t *testing.T) {
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- serve.Probes{Listener: l, Metrics: prometheus.NewRegistry(), Ready: map[string]func(context.Context) error{}, Log: slog.New(slog.DiscardHandler)}.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	base := "http://" + l.Addr().String()
	from := func(ip string) func(path string) int {
		c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}}).DialContext}}
		return func(path string) int {
			resp, err := c.Get(base + path)
			if err != nil {
				t.Error(err)
				return 0
			}
			_ = resp.Body.Close()
			return resp.StatusCode
		}
	}
	for net, path := range []string{"/metrics", "/healthz"} {
		for i := range 4 {
			get, began, answered := from(fmt.Sprintf("127.0.%d.%d", net, 2+i)), time.Now(), 0
			for range 200 {
				if get(path) == http.StatusOK {
					answered++
				}
			}
			if most := 61 + int(20*time.Since(began).Seconds()); answered > most || i == 0 && answered < 60 {
				t.Errorf("%d of 200 requests of one source for %s were answered, want 60 to %d", answered, path, most)
			}
		}
	}
	// It asks so often that it never counts as a source that asks seldom.
	var others sync.WaitGroup
	stop := make(chan struct{})
	for i := range 8 {
		others.Go(func() {
			get := from(fmt.Sprintf("127.0.2.%d", 1+i))
			for {
				select {
				case <-stop:
					return
				default:
					get("/healthz")
				}
			}
		})
	}
	kubelet := from("127.0.0.9")
	for range 50 {
		if code := kubelet("/healthz"); code != http.StatusOK {
			t.Errorf("the kubelet's probe: %d", code)
		}
	}
	close(stop)
	others.Wait()
}
