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
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var endpoint = rapid.SampledFrom([]string{"a:1", "b:1", "c:1", "d:1", "e:1"})

func TestTheOrderHasWhatIsNamedNowAndKeepsWhoFailedLast(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		var o Order
		var failed []string
		for range rapid.IntRange(1, 20).Draw(rt, "rounds") {
			now := rapid.SliceOfDistinct(endpoint, rapid.ID).Draw(rt, "now")
			if err := o.update(t.Context(), named(now...), nil, nil, quiet()); err != nil {
				rt.Fatal(err)
			}
			failed = slices.DeleteFunc(failed, func(e string) bool { return !slices.Contains(now, e) })
			want := append(slices.DeleteFunc(slices.Clone(now), func(e string) bool { return slices.Contains(failed, e) }), failed...)
			if !slices.Equal(o.List(), want) {
				rt.Fatalf("%v after %v failed: %v, want %v", now, failed, o.List(), want)
			}
			if len(now) > 0 {
				e := rapid.SampledFrom(now).Draw(rt, "failed")
				before := o
				o.Failed(e)
				failed = append(slices.DeleteFunc(failed, func(f string) bool { return f == e }), e)
				if !slices.Equal(before.List(), want) || o.List()[len(now)-1] != e {
					rt.Fatalf("%v after %s failed: %v; a copy: %v", want, e, o.List(), before.List())
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

// Each of 63 endpoints drops connections: the kernel accepts none if the listener's queue is full.
func TestARaceIsWonByTheLastOfManyEndpoints(t *testing.T) {
	const timeout = 8 * time.Second
	last := time.Duration(0)
	for n := 1; n < metadata.MaxEndpoints; n++ {
		d := headStart(n, metadata.MaxEndpoints, 250*time.Millisecond, timeout)
		if n <= 8 && d != 250*time.Millisecond {
			t.Errorf("the head start of endpoint %d is %s", n, d)
		}
		last += d
	}
	if last > timeout/2 {
		t.Errorf("the last one is tried after %s", last)
	}
	full := silent(t)
	l := listener(t)
	began := time.Now()
	at, c, err := Race(t.Context(), append(slices.Repeat([]string{full}, metadata.MaxEndpoints-1), l.Addr().String()), 250*time.Millisecond, timeout)
	if err != nil || at != l.Addr().String() {
		t.Fatalf("%s, %v after %s", at, err, time.Since(began))
	}
	_ = c.Close()
}

// silent returns an address that drops connections: a listener whose queue is full.
func silent(t *testing.T) string {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), unix.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	address := net.JoinHostPort("127.0.0.1", strconv.Itoa(name.(*unix.SockaddrInet4).Port))
	for {
		c, err := (&net.Dialer{Timeout: 300 * time.Millisecond}).DialContext(t.Context(), "tcp", address)
		if err != nil {
			return address
		}
		t.Cleanup(func() { _ = c.Close() })
	}
}

// A host name with many addresses costs a bounded number of connections.
func TestFewAddressesOfAHostNameAreTried(t *testing.T) {
	control := newDialer().ControlContext
	for i := range 1000 {
		if err := control(t.Context(), "tcp4", "192.0.2.1:1", nil); errors.Is(err, errAddresses) != (i >= maxHostAddresses) {
			t.Fatalf("address %d: %v", i, err)
		}
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
