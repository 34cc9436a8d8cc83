package atls_test

import (
	"context"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
)

// slow is a verifier that takes some time.
type slow struct {
	attest.Verifier
	began chan<- struct{}
	goes  <-chan struct{}
}

func (s slow) Verify(ctx context.Context, ev *attestv1.Evidence, st attest.Statement, b attest.Binding) (attest.Pending, error) {
	s.began <- struct{}{}
	<-s.goes
	return s.Verifier.Verify(ctx, ev, st, b)
}

// slowAttester is an attester that takes some time.
type slowAttester struct {
	attest.Attester
	began chan<- struct{}
	goes  <-chan struct{}
}

func (s slowAttester) Attest(ctx context.Context, f attestv1.Format, b attest.Binding) (*attestv1.Evidence, error) {
	s.began <- struct{}{}
	<-s.goes
	return s.Attester.Attest(ctx, f, b)
}

// While the server makes its evidence or checks a machine's, which takes long if many machines come
// at one time, new connections do not take the machine's place.
func TestAMachineKeepsItsPlaceWhileTheServerWorks(t *testing.T) {
	for name, slowed := range map[string]func(sc *atls.ServerConfig, began chan<- struct{}, goes <-chan struct{}){
		"making evidence": func(sc *atls.ServerConfig, b chan<- struct{}, g <-chan struct{}) {
			sc.Attester = slowAttester{sc.Attester, b, g}
		},
		"checking evidence": func(sc *atls.ServerConfig, b chan<- struct{}, g <-chan struct{}) {
			sc.Verifier = slow{sc.Verifier, b, g}
		},
	} {
		t.Run(name, func(t *testing.T) { keepsItsPlace(t, slowed) })
	}
}

func keepsItsPlace(t *testing.T, slowed func(sc *atls.ServerConfig, began chan<- struct{}, goes <-chan struct{})) {
	t.Helper()
	w := newFixture(t)
	sc := w.serverConfig(t)
	sc.Patient()
	sc.Limits.SetUp, sc.Limits.Total = 1, 100000
	began, goes := make(chan struct{}, 1), make(chan struct{})
	slowed(&sc, began, goes)
	var full atomic.Int64
	sc.Observe = func(s atls.SetUp) {
		if s.Dropped == "setup_full" {
			full.Add(1)
		}
	}
	s := serve(t, sc, whoami)
	cc := w.clientConfig(t)
	cc.Patient()
	from(&cc, "127.0.5.1")
	client := dial(t, cc)
	answer := make(chan error, 1)
	go func() {
		_, err := get(t.Context(), client, s.url)
		answer <- err
	}()
	<-began
	// A place whose peer does nothing is safe for 2 s.
	attempts := int64(0)
	for start := time.Now(); time.Since(start) < 2500*time.Millisecond; attempts++ {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP("127.0.7.1")}}
		conn, err := d.DialContext(t.Context(), "tcp", strings.TrimPrefix(s.url, "https://"))
		if err != nil {
			t.Fatal(err)
		}
		_, _ = conn.Read(make([]byte, 1)) // until the server has closed it
		_ = conn.Close()
	}
	close(goes)
	if err := <-answer; err != nil {
		t.Errorf("the machine: %v", err)
	}
	waitFor(t, "all newcomers are counted", func() bool { return full.Load() >= attempts })
	if got := full.Load(); got != attempts {
		t.Errorf("%d of %d newcomers found no place", got, attempts)
	}
}
