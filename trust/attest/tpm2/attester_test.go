package tpm2_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
	"github.com/muster-k8s/muster/trust/attest/tpm2/eventlog"
	"github.com/muster-k8s/muster/trust/attest/tpm2/eventlog/eventlogtest"
	"github.com/muster-k8s/muster/trust/tpm"
)

// slow is a TPM that makes a quote only when the test lets it.
type slow struct {
	*attesttest.Machine
	begun chan context.Context // one for each quote that begins
	goOn  chan struct{}        // one for each that may end
}

func (s *slow) Quote(ctx context.Context, extraData [32]byte, bank tpm.Bank) (tpm.Quote, error) {
	s.begun <- ctx
	select {
	case <-s.goOn:
		return s.Machine.Quote(ctx, extraData, bank)
	case <-ctx.Done():
		return tpm.Quote{}, ctx.Err()
	}
}

func newSlow(t testing.TB, ca *attesttest.CA) (*slow, *tpm2.Attester) {
	t.Helper()
	s := &slow{attesttest.NewMachine(t, ca, attesttest.Options{}), make(chan context.Context, 10), make(chan struct{}, 10)}
	a, err := tpm2.NewAttester(tpm2.Config{TPM: s, Purpose: attest.PurposeMachine, Bank: tpm.SHA256})
	if err != nil {
		t.Fatal(err)
	}
	return s, a
}

func bindingOf(i int) attest.Binding { return attest.Binding{byte(i), byte(i >> 8), 0xB1} }

type result struct {
	i   int
	ev  *attestv1.Evidence
	err error
}

func TestStatementsThatWaitShareAQuote(t *testing.T) {
	const n = 1030 // six more than fit into one
	ca := attesttest.NewCA(t)
	s, a := newSlow(t, ca)
	results := make(chan result, n+1)
	ask := func(i int) {
		ev, err := a.Attest(t.Context(), tpmFormat, bindingOf(i))
		results <- result{i, ev, err}
	}
	var wg sync.WaitGroup
	wg.Go(func() { ask(0) })
	<-s.begun // the first quote has begun
	for i := 1; i <= 1024; i++ {
		wg.Go(func() { ask(i) })
	}
	waitFor(t, func() bool { return tpm2.Waiting(a) == 1024 }) // the next quote is full
	for i := 1025; i <= n; i++ {
		wg.Go(func() { ask(i) })
	}
	waitFor(t, func() bool { return tpm2.Waiting(a) == n-1024 }) // and the one after it has the others
	for range 3 {
		s.goOn <- struct{}{}
	}
	wg.Wait()
	close(results)
	if got := s.Quotes(); got != 3 {
		t.Errorf("%d quotes, want 3", got)
	}
	v := attesttest.Verifier(t, ca)
	paths := map[int]int{}
	for r := range results {
		if r.err != nil {
			t.Fatal(r.err)
		}
		e := r.ev.GetTpm2()
		paths[len(e.GetPath())]++
		b := bindingOf(r.i)
		if _, err := v.Verify(t.Context(), r.ev, attest.NewStatement(attest.PurposeMachine, b), b); err != nil {
			t.Fatalf("statement %d: %v", r.i, err)
		}
		if r.i%100 == 0 { // another caller's place in the tree
			b := bindingOf(r.i + 1)
			if _, err := v.Verify(t.Context(), r.ev, attest.NewStatement(attest.PurposeMachine, b), b); attest.ReasonOf(err) != badBinding {
				t.Fatalf("statement %d passes for another: %v", r.i, err)
			}
		}
	}
	if paths[0] != 1 || paths[10] != 1024 {
		t.Errorf("paths by length: %v", paths)
	}
}

func TestACallerThatGivesUpHoldsNobodyUp(t *testing.T) {
	s, a := newSlow(t, attesttest.NewCA(t))
	first, second := make(chan error, 1), make(chan error, 1)
	go func() { _, err := a.Attest(t.Context(), tpmFormat, bindingOf(1)); first <- err }()
	<-s.begun
	ctx, cancel := context.WithCancel(t.Context())
	go func() { _, err := a.Attest(ctx, tpmFormat, bindingOf(2)); second <- err }()
	waitFor(t, func() bool { return tpm2.Waiting(a) == 1 })
	cancel()
	if err := <-second; !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	waitFor(t, func() bool { return tpm2.Waiting(a) == 0 })
	s.goOn <- struct{}{}
	if err := <-first; err != nil {
		t.Error(err)
	}
	if s.Quotes() != 1 {
		t.Errorf("%d quotes, one was for canceled callers", s.Quotes())
	}
	// The next quote starts a new batch.
	s.goOn <- struct{}{}
	if _, err := a.Attest(t.Context(), tpmFormat, bindingOf(3)); err != nil {
		t.Error(err)
	}
}

func TestAQuoteEndsWhenNobodyWantsIt(t *testing.T) {
	s, a := newSlow(t, attesttest.NewCA(t))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { _, err := a.Attest(ctx, tpmFormat, bindingOf(1)); done <- err }()
	running := <-s.begun
	cancel()
	<-running.Done()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

func TestAQuoteOutlivesTheCallerThatBeganIt(t *testing.T) {
	s, a := newSlow(t, attesttest.NewCA(t))
	block, unblock := make(chan error, 1), make(chan error, 1)
	go func() { _, err := a.Attest(t.Context(), tpmFormat, bindingOf(0)); block <- err }()
	<-s.begun
	ctx, cancel := context.WithCancel(t.Context())
	began := make(chan error, 1)
	go func() { _, err := a.Attest(ctx, tpmFormat, bindingOf(1)); began <- err }()
	waitFor(t, func() bool { return tpm2.Waiting(a) == 1 })
	go func() { _, err := a.Attest(t.Context(), tpmFormat, bindingOf(2)); unblock <- err }()
	waitFor(t, func() bool { return tpm2.Waiting(a) == 2 })
	cancel()
	if err := <-began; !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	s.goOn <- struct{}{}
	s.goOn <- struct{}{}
	if err := errors.Join(<-block, <-unblock); err != nil {
		t.Error(err)
	}
}

func TestThePublicGetsOneQuoteASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := attesttest.NewCAValid(t, time.Now().Add(-time.Hour), time.Now().Add(time.Hour))
		m := attesttest.NewMachine(t, ca, attesttest.Options{})
		a := m.Attester(attest.PurposePublic)
		start := time.Now()
		for second := range 4 {
			var wg sync.WaitGroup
			for i := range 50 {
				wg.Go(func() {
					if _, err := a.Attest(t.Context(), tpmFormat, bindingOf(100*second+i)); err != nil {
						t.Error(err)
					}
				})
			}
			wg.Wait()
		}
		if got, took := m.Quotes(), time.Since(start); got > 5 || took < time.Duration(got-1)*time.Second {
			t.Errorf("%d quotes in %s", got, took)
		}
	})
}

func TestTheThousandthStrangerComesAgainLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{})
		a := m.Attester(attest.PurposePublic)
		if _, err := a.Attest(t.Context(), tpmFormat, bindingOf(0)); err != nil {
			t.Fatal(err)
		}
		var busy, served atomic.Int32
		var wg sync.WaitGroup
		for i := range 1100 {
			wg.Go(func() {
				_, err := a.Attest(t.Context(), tpmFormat, bindingOf(i))
				switch r, _ := errors.AsType[*attest.Refusal](err); {
				case err == nil:
					served.Add(1)
				case r != nil && r.Reason == attestv1.Reason_REASON_BUSY && r.RetryAfter == time.Second:
					busy.Add(1)
				default:
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if served.Load() != 1024 || busy.Load() != 76 {
			t.Errorf("%d were served, %d refused as busy", served.Load(), busy.Load())
		}
	})
}

func TestAnAttesterSaysWhatIsMissing(t *testing.T) {
	m := attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{})
	for name, cfg := range map[string]tpm2.Config{
		"no TPM":          {Purpose: attest.PurposeMachine, Bank: tpm.SHA256},
		"no purpose":      {TPM: m, Bank: tpm.SHA256},
		"another purpose": {TPM: m, Purpose: "anything", Bank: tpm.SHA256},
		"no bank":         {TPM: m, Purpose: attest.PurposeMachine},
		"the SHA-1 bank":  {TPM: m, Purpose: attest.PurposeMachine, Bank: 4},
	} {
		if _, err := tpm2.NewAttester(cfg); err == nil {
			t.Errorf("%s: an attester was made", name)
		}
	}
}

func TestTheEventLogIsSent(t *testing.T) {
	m := attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{})
	log, err := eventlog.Read(m.EventLog(), tpm.SHA256)
	if err != nil {
		t.Fatal(err)
	}
	want, err := log.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	ev, err := m.Attester(attest.PurposeMachine).Attest(t.Context(), tpmFormat, attest.Binding{1})
	if err != nil || len(want) == 0 || !bytes.Equal(ev.GetTpm2().GetEvents(), want) {
		t.Errorf("%x, %v; want %x", ev.GetTpm2().GetEvents(), err, want)
	}
	if _, err := m.Attester(attest.PurposeMachine).Attest(t.Context(), 9, attest.Binding{1}); attest.ReasonOf(err) != attestv1.Reason_REASON_FORMAT_NONE {
		t.Errorf("another format: %v", err)
	}
}

func TestAnEventLogThatCannotBeSent(t *testing.T) {
	m := attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{})
	file := func(content []byte) string {
		path := filepath.Join(t.TempDir(), "log")
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	many := eventlogtest.NewWriter(tpm.SHA256)
	for range 1025 {
		if _, err := many.Measure(4, eventlog.IPL, []byte("x")); err != nil {
			t.Fatal(err)
		}
	}
	for name, tt := range map[string]struct {
		path string
		sent bool
	}{
		"a log of no known format is left out": {path: file(make([]byte, 100)), sent: true},
		"one that is too long is left out":     {path: file(make([]byte, eventlog.MaxSize+1)), sent: true},
		"one of too many events is left out":   {path: file(many.Bytes()), sent: true},
		"one that is not there is an error":    {path: "/nonexistent"},
	} {
		t.Run(name, func(t *testing.T) {
			a, err := tpm2.NewAttester(tpm2.Config{TPM: m, Purpose: attest.PurposeMachine, Bank: tpm.SHA256, EventLog: tt.path})
			if err != nil {
				t.Fatal(err)
			}
			ev, err := a.Attest(t.Context(), tpmFormat, attest.Binding{1})
			if (err == nil) != tt.sent || len(ev.GetTpm2().GetEvents()) > 0 {
				t.Errorf("%d bytes of events, %v", len(ev.GetTpm2().GetEvents()), err)
			}
		})
	}
}

// Invariant A2.
func TestEvidenceOfOtherBanks(t *testing.T) {
	ca := attesttest.NewCA(t)
	for _, bank := range []tpm.Bank{tpm.SHA384, tpm.SHA512} {
		m := attesttest.NewMachine(t, ca, attesttest.Options{Bank: bank})
		m.LockTo([32]byte{5})
		c, err := attesttest.Claims(t.Context(), m.Attester(attest.PurposeMachine), attesttest.Verifier(t, ca), attest.PurposeMachine, attest.Binding{1})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := attesttest.ParsedPolicy(t, ca, []*attesttest.Machine{m}).Appraise(c, attest.LockedTo([32]byte{5})); err != nil {
			t.Errorf("%s: %v", bank, err)
		}
	}
}

// waitFor returns once ok holds.
func waitFor(t testing.TB, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	deadline := time.NewTimer(5 * time.Minute)
	defer deadline.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatal("it did not come about within 5 minutes")
		}
	}
}
