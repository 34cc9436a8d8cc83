package serve_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/muster-k8s/muster/internal/probe"
	"github.com/muster-k8s/muster/internal/serve"
)

// The kubelet's command gets its answer also while all connections of the port are taken.
func TestAProbeAsksOnASocketOfItsOwn(t *testing.T) {
	socket := fmt.Sprintf("@muster-probes-test-%d", os.Getpid())
	local, err := new(net.ListenConfig).Listen(t.Context(), "unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	port, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	failing := errors.New("no policy")
	probes := serve.Probes{
		Listener: port, Local: local, Metrics: prometheus.NewRegistry(), Log: slog.New(slog.DiscardHandler),
		Ready: map[string]func(context.Context) error{"policy": func(context.Context) error { return failing }},
	}
	wg.Go(func() {
		if err := probes.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	for i := range 300 { // from as many sources as there are connections, and more
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 7, byte(i/250), byte(1+i%250))}}
		c, err := d.DialContext(t.Context(), "tcp", port.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
	}
	for range 100 { // more than one source may ask in a second on the port
		if err := probe.Ask(t.Context(), []string{"/healthz", socket}); err != nil {
			t.Fatal(err)
		}
	}
	if err := probe.Ask(t.Context(), []string{"/readyz", socket}); err == nil || !strings.Contains(err.Error(), "no policy") {
		t.Errorf("not ready: %v", err)
	}
	for _, args := range [][]string{nil, {"healthz"}, {"/healthz", socket, "x"}, {"/healthz", socket + "-none"}, {"/nothing", socket}, {"/metrics", socket}} {
		if err := probe.Ask(t.Context(), args); err == nil {
			t.Errorf("probe %q: no error", args)
		}
	}
}
