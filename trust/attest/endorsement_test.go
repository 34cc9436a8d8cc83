package attest

import (
	"strings"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/internal/checked"
)

func TestRulesOfEndorsementsAreParsed(t *testing.T) {
	_, pemRoot := ca(t, "operator")
	for name, tt := range map[string]struct {
		change func(*attestv1.Policy)
		want   string // part of the error; empty: accepted
	}{
		"a bare machine ID in capitals is refused": {func(p *attestv1.Policy) { p.Tpm2.BareMachineIds = []string{strings.Repeat("AB", 32)} }, "bareMachineIds"},
		"machines without certificates alone are read": {change: func(p *attestv1.Policy) {
			p.Tpm2.EkRoots, p.Tpm2.BareMachineIds = nil, []string{strings.Repeat("ab", 32)}
		}},
		"a machine with and without a certificate is refused": {func(p *attestv1.Policy) {
			p.Tpm2.MachineIds, p.Tpm2.BareMachineIds = []string{strings.Repeat("ab", 32)}, []string{strings.Repeat("ab", 32)}
		}, "both list"},
		"machineIds without roots are refused": {func(p *attestv1.Policy) {
			p.Tpm2.EkRoots, p.Tpm2.MachineIds, p.Tpm2.BareMachineIds = nil, []string{strings.Repeat("cd", 32)}, []string{strings.Repeat("ab", 32)}
		}, "ekRoots is empty"},
		"a revoked machine without a certificate is refused": {func(p *attestv1.Policy) {
			p.Tpm2.BareMachineIds, p.Tpm2.Revoked = []string{strings.Repeat("ab", 32)}, &attestv1.Revoked{Keys: []string{strings.Repeat("ab", 32)}}
		}, "tpm2.bareMachineIds lists it"},
		"a list of machines without certificates opens no vendor's root": {func(p *attestv1.Policy) {
			p.Tpm2.EkRoots[0].Operator = false
			p.Tpm2.BareMachineIds = []string{strings.Repeat("ab", 32)}
		}, "A6"},
	} {
		t.Run(name, func(t *testing.T) {
			p := goodPolicy(pemRoot)
			tt.change(p)
			_, err := ParsePolicy(encode(t, p))
			switch {
			case tt.want == "":
				if err != nil {
					t.Error(err)
				}
			case err == nil || !strings.Contains(err.Error(), tt.want):
				t.Errorf("error %v, want one about %q", err, tt.want)
			case ReasonOf(err) != attestv1.Reason_REASON_POLICY_INVALID:
				t.Errorf("reason %s", ReasonOf(err))
			}
		})
	}
}

func TestAnEndorsementIsAppraisedByItsOwnRules(t *testing.T) {
	root, pemRoot := ca(t, "operator")
	for name, tt := range map[string]struct {
		policy func(*attestv1.Policy)
		facts  func(*checked.Facts)
		locks  []Lock
		want   attestv1.Reason
	}{
		"a certified key is accepted by its root": {locks: []Lock{Unlocked()}},
		"an RSA AK beside a machine without a certificate is refused": {
			policy: func(p *attestv1.Policy) {
				p.Tpm2.EkRoots[0].Key = "rsa-2048"
				p.Tpm2.BareMachineIds = []string{strings.Repeat("00", 32)}
			},
			facts: func(f *checked.Facts) { f.KeyKind, f.AKKind = "rsa-2048", "rsa-2048" },
			locks: []Lock{Unlocked()}, want: attestv1.Reason_REASON_EK_UNTRUSTED,
		},
		"an endorsement without rules is refused": {facts: func(f *checked.Facts) { f.Name = "bare-ek" }, locks: []Lock{Unlocked()}, want: attestv1.Reason_REASON_EK_UNTRUSTED},
		"an unknown endorsement is refused":       {facts: func(f *checked.Facts) { f.Name = "another" }, locks: []Lock{Unlocked()}, want: attestv1.Reason_REASON_EK_UNTRUSTED},
		"no endorsement is refused":               {facts: func(f *checked.Facts) { f.Name = "" }, locks: []Lock{Unlocked()}, want: attestv1.Reason_REASON_EK_UNTRUSTED},
	} {
		t.Run(name, func(t *testing.T) {
			m, f := goodPolicy(pemRoot), facts(root)
			if tt.policy != nil {
				tt.policy(m)
			}
			if tt.facts != nil {
				tt.facts(f)
			}
			p, err := ParsePolicy(encode(t, m))
			if err != nil {
				t.Fatal(err)
			}
			want := tt.want
			if want == 0 {
				want = attestv1.Reason_REASON_ACCEPTED
			}
			if _, err := p.Appraise(NewClaims(checked.Seal(*f)), tt.locks...); ReasonOf(err) != want {
				t.Errorf("%v, want %s", err, ReasonName(want))
			}
		})
	}
}
