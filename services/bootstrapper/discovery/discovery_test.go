package discovery

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var endpoint = rapid.SampledFrom([]string{"a:1", "b:1", "c:1", "d:1", "e:1"})

func TestTheOrderHasWhatIsNamedNowAndKeepsWhoFailedLast(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		var order []string
		for range rapid.IntRange(1, 20).Draw(rt, "rounds") {
			now := rapid.SliceOfDistinct(endpoint, rapid.ID).Draw(rt, "now")
			merged := Merge(order, now)
			if len(merged) != len(now) || slices.ContainsFunc(now, func(e string) bool { return !slices.Contains(merged, e) }) {
				rt.Fatalf("%v and %v give %v", order, now, merged)
			}
			kept := slices.DeleteFunc(slices.Clone(order), func(e string) bool { return !slices.Contains(now, e) })
			if !slices.Equal(merged[:len(kept)], kept) {
				rt.Fatalf("%v and %v give %v, want %v first", order, now, merged, kept)
			}
			if order = merged; len(order) > 0 {
				failed := rapid.SampledFrom(order).Draw(rt, "failed")
				order = Demote(order, failed)
				if len(order) != len(merged) || order[len(order)-1] != failed {
					rt.Fatalf("%v after %s failed: %v", merged, failed, order)
				}
			}
		}
	})
}

func listener(t *testing.T) net.Listener {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

func TestARaceIsWonByTheFirstWhoAnswers(t *testing.T) {
	l := listener(t)
	gone := listener(t)
	_ = gone.Close()
	// A refused connection starts the next at once, for every head start.
	at, c, err := Race(t.Context(), []string{gone.Addr().String(), gone.Addr().String(), l.Addr().String()}, time.Hour, time.Minute)
	if err != nil || at != l.Addr().String() {
		t.Fatalf("%s, %v", at, err)
	}
	_ = c.Close()
	if _, _, err := Race(t.Context(), []string{gone.Addr().String()}, time.Hour, time.Minute); ReasonOf(err) != attestv1.Reason_REASON_NOT_READY {
		t.Errorf("no endpoint answers: %v", err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := Race(ended, []string{l.Addr().String()}, time.Hour, time.Minute); err == nil {
		t.Error("a race that was over was won")
	}
}

func TestPausesAreShortWhileNobodyAnswersAndTheHintWins(t *testing.T) {
	p := NewPauses(500*time.Millisecond, 30*time.Second)
	unreachable := fmt.Errorf("%w: %w", ErrUnreachable, &net.OpError{})
	refused := attest.RefuseFor(0, attestv1.Reason_REASON_NOT_ENROLLED, "no")
	for range 50 {
		if d := p.Next(unreachable); d > maxDialPause {
			t.Fatalf("%s while no endpoint answers", d)
		}
		if d := p.Next(fmt.Errorf("10.0.0.1:30090: %w", io.ErrUnexpectedEOF)); d > maxDialPause {
			t.Fatalf("%s after it hung up", d)
		}
	}
	if d := p.Next(refused); d > 500*time.Millisecond {
		t.Errorf("%s after the first refusal", d)
	}
	longest := time.Duration(0)
	for range 50 {
		longest = max(longest, p.Next(refused))
	}
	if longest > 30*time.Second || longest < 15*time.Second {
		t.Errorf("%s at most", longest)
	}
	if d := p.Next(attest.RefuseFor(time.Hour, attestv1.Reason_REASON_BUSY, "later")); d < time.Hour {
		t.Errorf("%s, and an hour was asked for", d)
	}
	p.Next(unreachable)
	if d := p.Next(attest.RefuseFor(0, attestv1.Reason_REASON_CONTROL_PLANE_BUSY, "another")); d > 500*time.Millisecond {
		t.Errorf("%s: it would miss its join lease", d)
	}
}

// A network attacker without a TPM who answers for a joinservice delays a machine by seconds, during the attack and after it.
func TestPausesStayShortAfterAStrangersRefusals(t *testing.T) {
	for _, least := range []time.Duration{500 * time.Millisecond, 10 * time.Second} { // of joins, and of re-attestations
		p := NewPauses(least, 2*time.Minute)
		for _, cause := range []error{
			&attest.Refusal{Reason: attestv1.Reason_REASON_BANNED, Remote: true},
			&attest.Refusal{Reason: attestv1.Reason_REASON_BUSY, Remote: true, RetryAfter: 5 * time.Second},
			attest.Refuse(attestv1.Reason_REASON_FRAME_INVALID, "what is this?"),
			attest.Refuse(attestv1.Reason_REASON_DEADLINE, "it said nothing"),
		} {
			for range 20 {
				if d := p.Next(fmt.Errorf("a:1: %w", &atls.ExchangeError{Err: cause})); d > maxDialPause {
					t.Fatalf("%s after %v", d, cause)
				}
			}
		}
		if d := p.Next(attest.RefuseFor(0, attestv1.Reason_REASON_NOT_ENROLLED, "no")); d > least {
			t.Errorf("%s after the first refusal by a joinservice", d)
		}
		longest := time.Duration(0)
		for range 20 {
			longest = max(longest, p.Next(&atls.ExchangeError{Accepted: true, Err: &attest.Refusal{Reason: attestv1.Reason_REASON_BANNED, Remote: true}}))
		}
		if longest < time.Minute {
			t.Errorf("%s at most after refusals by a proven joinservice", longest)
		}
	}
}

func TestReasonsOfErrors(t *testing.T) {
	for name, tt := range map[string]struct {
		err  error
		want attestv1.Reason
	}{
		"a refusal":          {fmt.Errorf("a:1: %w", attest.Refuse(attestv1.Reason_REASON_BANNED, "no")), attestv1.Reason_REASON_BANNED},
		"a deadline":         {context.DeadlineExceeded, attestv1.Reason_REASON_DEADLINE},
		"a broken line":      {&net.OpError{Op: "dial"}, attestv1.Reason_REASON_NOT_READY},
		"a refused line":     {&net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}, attestv1.Reason_REASON_NOT_READY},
		"a full disk":        {&fs.PathError{Op: "write", Path: "x", Err: syscall.ENOSPC}, attestv1.Reason_REASON_INTERNAL},
		"anything else":      {errors.New("x"), attestv1.Reason_REASON_INTERNAL},
		"nothing went wrong": {nil, attestv1.Reason_REASON_ACCEPTED},
	} {
		if got := ReasonOf(tt.err); got != tt.want {
			t.Errorf("%s: %s, want %s", name, got, tt.want)
		}
	}
}

// Serials of one owner only increase, and each belongs to one policy; a policy that is not kept has no effect.
func TestAMemoryTakesNoOlderPolicy(t *testing.T) {
	owner, other := ed25519.PublicKey(make([]byte, 32)), ed25519.PublicKey([]byte(strings.Repeat("x", 32)))
	rapid.Check(t, func(rt *rapid.T) {
		m, newest, digest := &Memory{}, uint64(0), byte(0)
		for range rapid.IntRange(1, 30).Draw(rt, "policies") {
			serial, d, keep := rapid.Uint64Range(1, 5).Draw(rt, "serial"), rapid.ByteRange(1, 2).Draw(rt, "digest"), rapid.Bool().Draw(rt, "keep")
			err := m.Newest(journal.Policy{OwnerKey: journal.Hex(owner), Serial: serial, Digest: []byte{d}}, attest.OwnerKeys{owner}, keep)
			fits := serial > newest || serial == newest && d == digest
			if (err == nil) != fits || err != nil && ReasonOf(err) != attestv1.Reason_REASON_POLICY_INVALID {
				rt.Fatalf("serial %d, digest %d after %d, %d: %v", serial, d, newest, digest, err)
			}
			if fits && keep {
				newest, digest = serial, d
			}
		}
	})
	m := &Memory{}
	if err := errors.Join(m.Newest(journal.Policy{OwnerKey: journal.Hex(owner), Serial: 9}, attest.OwnerKeys{owner}, true), m.Newest(journal.Policy{OwnerKey: journal.Hex(other), Serial: 1}, attest.OwnerKeys{other}, true)); err != nil {
		t.Errorf("another owner's serials are none of the first one's: %v", err)
	}
}
