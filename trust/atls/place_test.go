package atls_test

import (
	"context"
	"fmt"
	"net"
	"runtime"
	"strings"
	"sync"
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

// busy is an appraiser that takes some time, and counts how many of its calls run at one time.
type busy struct {
	attest.Appraiser
	running, most *atomic.Int64
	tooMany       chan struct{} // one for each call beside as many as there are cores
}

func (b busy) Appraise(ctx context.Context, c attest.Claims) (attest.Appraisal, error) {
	n := b.running.Add(1)
	defer b.running.Add(-1)
	for most := b.most.Load(); n > most && !b.most.CompareAndSwap(most, n); most = b.most.Load() {
	}
	if n > int64(runtime.GOMAXPROCS(0)) {
		b.tooMany <- struct{}{}
	}
	select { // long enough for others to come, if they may
	case <-b.tooMany:
	case <-time.After(100 * time.Millisecond):
	}
	return b.Appraiser.Appraise(ctx, c)
}

// Appraisal may have to verify a hardware report, so it runs for as many unproven peers at one time as
// there are cores (A10).
func TestPeersAreAppraisedInTheirQueue(t *testing.T) {
	w := newFixture(t)
	sc := w.serverConfig(t)
	sc.Patient()
	slow := busy{sc.Appraiser, new(atomic.Int64), new(atomic.Int64), make(chan struct{}, 4*runtime.GOMAXPROCS(0))}
	sc.Appraiser = slow
	s := serve(t, sc, whoami)
	var wg sync.WaitGroup
	for i := range 4 * runtime.GOMAXPROCS(0) {
		cc := w.clientConfig(t)
		cc.Patient()
		from(&cc, fmt.Sprintf("127.0.6.%d", 1+i))
		client := dial(t, cc)
		wg.Go(func() {
			if _, err := get(t.Context(), client, s.url); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if most := slow.most.Load(); most > int64(runtime.GOMAXPROCS(0)) || most == 0 {
		t.Errorf("%d peers were appraised at one time, by %d cores", most, runtime.GOMAXPROCS(0))
	}
}
