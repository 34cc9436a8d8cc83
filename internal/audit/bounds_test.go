package audit

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"pgregory.net/rapid"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
)

// recorded returns the record of a refusal in the file.
func recorded(t require, refuse func(s *UnattestedRefusals, r *RefusalLimits)) string {
	var out bytes.Buffer
	s, err := NewUnattestedRefusals("joinservice", NewStream(&out), slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	if err != nil {
		t.Fatalf("%v", err)
	}
	r, err := NewRefusalLimits(s)
	if err != nil {
		t.Fatalf("%v", err)
	}
	s.now = func() time.Time { return time.Date(9999, 12, 31, 23, 59, 59, 123456789, time.UTC) }
	refuse(s, r)
	select {
	case rec := <-s.records:
		s.take(rec)
	default:
	}
	return out.String()
}

type require interface {
	Fatalf(format string, args ...any)
}

// Whatever a peer sends, the record of its refusal is one line of at most MaxRefusal bytes, of which it has chosen at most
// MaxChosen: every byte that a peer can cause is counted after JSON's escapes.
func TestARefusalsRecordIsSmallWhateverThePeerSends(t *testing.T) {
	texts := rapid.OneOf(rapid.String(), rapid.StringOfN(rapid.Rune(), 0, 4000, -1), rapid.SampledFrom([]string{
		strings.Repeat("\x00", 4096), strings.Repeat("<", 4096), strings.Repeat(`"`, 4096), strings.Repeat(`\`, 4096), strings.Repeat("\xff", 4096), strings.Repeat("\u2028", 2000),
	}))
	// A peer's bytes are a character that none of our own texts has.
	const theirs = "~"
	check := func(t require, line string) {
		if len(line) > MaxRefusal || strings.Count(line, "\n") != 1 || !strings.HasSuffix(line, "\n") {
			t.Fatalf("a record of %d bytes: %.3000q", len(line), line)
		}
	}
	rapid.Check(t, func(rt *rapid.T) {
		why, name, remote := texts.Draw(rt, "error"), texts.Draw(rt, "name"), texts.Draw(rt, "remote")
		machine := rapid.SampledFrom([]string{"", strings.Repeat("m", 64)}).Draw(rt, "machine")
		refusal := attest.Refuse(attestv1.Reason_REASON_SESSION_REQUIRED, "%s for %q", why, name)
		check(rt, recorded(rt, func(s *UnattestedRefusals, _ *RefusalLimits) {
			s.Connection(atls.SetUp{Remote: remote, Err: refusal}, machine)
		}))
		check(rt, recorded(rt, func(s *UnattestedRefusals, _ *RefusalLimits) { s.Call(name, remote, machine, refusal) }))
		check(rt, recorded(rt, func(_ *UnattestedRefusals, r *RefusalLimits) {
			rec := Record{
				Time: time.Date(9999, 12, 31, 23, 59, 59, 123456789, time.UTC), Service: name, Event: name, Reason: name, Detail: why, Machine: name, Node: name, Role: name, Disk: name,
				Ticket: name, Request: name, Serials: []string{name, name}, Purpose: name, PolicySerial: 1<<64 - 1, PolicyGeneration: 1<<63 - 1, Evidence: name, Image: name, Class: name,
			}
			if err := r.Write("x", rec); err != nil {
				rt.Fatalf("%v", err)
			}
		}))
	})

	long := strings.Repeat(theirs, 4096)
	for name, refuse := range map[string]func(s *UnattestedRefusals, r *RefusalLimits){
		"a connection": func(s *UnattestedRefusals, _ *RefusalLimits) {
			s.Connection(atls.SetUp{Remote: "192.0.2.1:1", Err: attest.Refuse(attestv1.Reason_REASON_FRAME_INVALID, "%w", errors.New(long))}, "")
		},
		"an unknown procedure": func(s *UnattestedRefusals, _ *RefusalLimits) {
			s.Call("/"+long, "192.0.2.1:1", "", attest.Refuse(attestv1.Reason_REASON_INTERNAL, "%s has no access level", long))
		},
		"a machine's connection": func(s *UnattestedRefusals, _ *RefusalLimits) {
			s.Connection(atls.SetUp{Remote: "192.0.2.1:1", Err: attest.Refuse(attestv1.Reason_REASON_POLICY_REFUSED, "it says %q and %q", long, long)}, "m1")
		},
		"a machine's request": func(_ *UnattestedRefusals, r *RefusalLimits) {
			node := strings.Repeat(theirs, 63)
			_ = r.Write("m1", Record{Machine: "m1", Node: node, Detail: fmt.Sprintf("node name %q is another's; `muster forget %s` frees it; %q", node, node, long)})
		},
		"a node's certificate request": func(_ *UnattestedRefusals, r *RefusalLimits) {
			_ = r.Write("n1", Record{Node: strings.Repeat(theirs, 63), Request: long, Detail: fmt.Sprintf("usage %q", long)})
		},
	} {
		line := recorded(t, refuse)
		check(t, line)
		if n := strings.Count(line, theirs); n == 0 || n > MaxChosen {
			t.Errorf("%s: %d bytes of a record are the peer's, want 1 to %d: %s", name, n, MaxChosen, line)
		}
	}
}

// Records of actions are bounded as well.
func TestARecordIsSmallWhateverIsInIt(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		text := rapid.String().Draw(rt, "text")
		var out bytes.Buffer
		l := NewStream(&out)
		r := Record{
			Service: text, Event: text, Reason: text, Detail: text + strings.Repeat(`"`, 9000), Machine: text, Node: text, Role: text, Disk: text, Ticket: text, Request: text, Purpose: text, Evidence: text,
			PolicySerial: 1<<64 - 1, PolicyGeneration: 1<<63 - 1,
			Serials: rapid.SliceOf(rapid.String()).Draw(rt, "serials"), Image: text, Class: text,
		}
		if err := l.Write(r); err != nil {
			rt.Fatal(err)
		}
		if out.Len() > MaxRecord || bytes.Count(out.Bytes(), []byte("\n")) != 1 {
			rt.Fatalf("%d bytes: %s", out.Len(), &out)
		}
	})
}

// The record shows an owner what the machine measured and what the policy accepts, also while a new image is rolled out.
func TestARefusalsRecordHasThePCRs(t *testing.T) {
	mismatch := &attest.MismatchError{Kind: "image", Name: strings.Repeat("n", 63), Others: 63}
	var want []string
	for i, pcr := range []int{4, 9, 11} {
		m := attest.Mismatch{PCR: pcr, Seen: bytes.Repeat([]byte{byte(i)}, 32)}
		m.Expected, m.Why = bytes.Repeat([]byte{byte(16 * i)}, 32), strings.Repeat(`EV_IPL "initrd" `, 32)
		mismatch.Mismatches = append(mismatch.Mismatches, m)
		want = append(want, m.String())
	}
	line := recorded(t, func(s *UnattestedRefusals, _ *RefusalLimits) {
		s.Connection(atls.SetUp{Remote: "[2001:db8:1111:2222:3333:4444:5555:6666]:65535", Err: attest.Refuse(attestv1.Reason_REASON_POLICY_REFUSED, "%w", mismatch)}, strings.Repeat("a", 64))
	})
	for _, w := range want {
		if !strings.Contains(line, w) {
			t.Errorf("the record has no %q: %s", w, line)
		}
	}
}
