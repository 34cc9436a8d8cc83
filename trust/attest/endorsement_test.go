package attest

import (
	"slices"
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

func TestRulesOfPlatformKeysAreParsed(t *testing.T) {
	_, pemRoot := ca(t, "operator")
	_, cloud := ca(t, "cloud")
	id := strings.Repeat("ab", 32)
	change := func(f func(*attestv1.PlatformRoot)) func(*attestv1.Policy) {
		return func(p *attestv1.Policy) {
			r := &attestv1.PlatformRoot{Pem: cloud, Provider: "gcp", Key: "ecc-p256", Projects: []string{"ours"}}
			f(r)
			p.Tpm2.PlatformRoots = append(p.Tpm2.PlatformRoots, r)
		}
	}
	good := change(func(*attestv1.PlatformRoot) {})
	azure := func(f func(*attestv1.PlatformRoot)) func(*attestv1.Policy) {
		return change(func(r *attestv1.PlatformRoot) {
			r.Provider, r.Key, r.Projects, r.MachineIds = "azure", "rsa-2048", nil, []string{id}
			f(r)
		})
	}
	for name, tt := range map[string]struct {
		change []func(*attestv1.Policy)
		want   string // part of the error; empty: accepted
	}{
		"projects are read":                     {[]func(*attestv1.Policy){good}, ""},
		"two rules of an authority are read":    {[]func(*attestv1.Policy){good, change(func(r *attestv1.PlatformRoot) { r.Projects = []string{"others"} })}, ""},
		"a rule beside no EK root is read":      {[]func(*attestv1.Policy){good, func(p *attestv1.Policy) { p.Tpm2.EkRoots = nil }}, ""},
		"listed machines are read":              {[]func(*attestv1.Policy){change(func(r *attestv1.PlatformRoot) { r.Projects, r.MachineIds = nil, []string{id} })}, ""},
		"listed machines of Azure are read":     {[]func(*attestv1.Policy){azure(func(*attestv1.PlatformRoot) {})}, ""},
		"any machine is read if that is wanted": {[]func(*attestv1.Policy){change(func(r *attestv1.PlatformRoot) { r.Projects = nil }), func(p *attestv1.Policy) { p.Insecure = &attestv1.InsecureSwitches{AnyMachine: true} }}, ""},
		"neither project nor machine":           {[]func(*attestv1.Policy){change(func(r *attestv1.PlatformRoot) { r.Projects = nil })}, "A6"},
		"a zone alone":                          {[]func(*attestv1.Policy){change(func(r *attestv1.PlatformRoot) { r.Projects, r.Zones = nil, []string{"a"} })}, "A6"},
		"no machine of Azure":                   {[]func(*attestv1.Policy){azure(func(r *attestv1.PlatformRoot) { r.MachineIds = nil })}, "A6"},
		"a project of Azure":                    {[]func(*attestv1.Policy){azure(func(r *attestv1.PlatformRoot) { r.Projects = []string{"ours"} })}, "name none"},
		"a zone of Azure":                       {[]func(*attestv1.Policy){azure(func(r *attestv1.PlatformRoot) { r.Zones = []string{"a"} })}, "name none"},
		"an ECC key of Azure":                   {[]func(*attestv1.Policy){azure(func(r *attestv1.PlatformRoot) { r.Key = "ecc-p256" })}, "key is"},
		"no kind of key":                        {[]func(*attestv1.Policy){change(func(r *attestv1.PlatformRoot) { r.Key = "" })}, "key is"},
		"a P-384 key":                           {[]func(*attestv1.Policy){change(func(r *attestv1.PlatformRoot) { r.Key = "ecc-p384" })}, "key is"},
		"another provider":                      {[]func(*attestv1.Policy){change(func(r *attestv1.PlatformRoot) { r.Provider = "aws" })}, "provider is"},
		"no provider":                           {[]func(*attestv1.Policy){change(func(r *attestv1.PlatformRoot) { r.Provider = "" })}, "provider is"},
		"no certificate":                        {[]func(*attestv1.Policy){change(func(r *attestv1.PlatformRoot) { r.Pem = "" })}, "one PEM certificate"},
		"two kinds of one authority":            {[]func(*attestv1.Policy){good, change(func(r *attestv1.PlatformRoot) { r.Key = "rsa-2048" })}, "another key or provider"},
		"two providers of one authority":        {[]func(*attestv1.Policy){change(func(r *attestv1.PlatformRoot) { r.Key = "rsa-2048" }), azure(func(*attestv1.PlatformRoot) {})}, "another key or provider"},
		"an empty project":                      {[]func(*attestv1.Policy){change(func(r *attestv1.PlatformRoot) { r.Projects = []string{""} })}, "printable"},
		"too many zones":                        {[]func(*attestv1.Policy){change(func(r *attestv1.PlatformRoot) { r.Zones = slices.Repeat([]string{"a"}, 257) })}, "at most 256"},
		"a machine ID in capitals":              {[]func(*attestv1.Policy){change(func(r *attestv1.PlatformRoot) { r.MachineIds = []string{strings.ToUpper(id)} })}, "machineIds"},
		"too many authorities":                  {slices.Repeat([]func(*attestv1.Policy){good}, 33), "more than 32"},
		"a revoked machine": {[]func(*attestv1.Policy){azure(func(*attestv1.PlatformRoot) {}), func(p *attestv1.Policy) {
			p.Tpm2.Revoked = &attestv1.Revoked{Keys: []string{id}}
		}}, "platformRoots[0].machineIds lists it"},
	} {
		t.Run(name, func(t *testing.T) {
			p := goodPolicy(pemRoot)
			for _, c := range tt.change {
				c(p)
			}
			policy, err := ParsePolicy(encode(t, p))
			switch {
			case tt.want == "":
				if err != nil {
					t.Error(err)
				} else if last := policy.Authorities(); !strings.HasPrefix(last[len(last)-1].Field, "tpm2.platformRoots[") {
					t.Errorf("authorities %+v", last)
				}
			case err == nil || !strings.Contains(err.Error(), tt.want):
				t.Errorf("error %v, want one about %q", err, tt.want)
			case ReasonOf(err) != attestv1.Reason_REASON_POLICY_INVALID:
				t.Errorf("reason %s", ReasonOf(err))
			}
		})
	}
}

func TestRulesOfNitroDocumentsAreParsed(t *testing.T) {
	_, pemRoot := ca(t, "operator")
	_, cloud := ca(t, "cloud")
	id := strings.Repeat("ab", 32)
	rule := func(f func(*attestv1.NitroRoot)) func(*attestv1.Policy) {
		return func(p *attestv1.Policy) {
			r := &attestv1.NitroRoot{Pem: cloud, MachineIds: []string{id}}
			f(r)
			p.Tpm2.NitroRoots = append(p.Tpm2.NitroRoots, r)
		}
	}
	good := rule(func(*attestv1.NitroRoot) {})
	none := rule(func(r *attestv1.NitroRoot) { r.MachineIds = nil })
	for name, tt := range map[string]struct {
		change []func(*attestv1.Policy)
		want   string // part of the error; empty: accepted
	}{
		"listed machines are read":              {[]func(*attestv1.Policy){good}, ""},
		"a rule beside no EK root is read":      {[]func(*attestv1.Policy){good, func(p *attestv1.Policy) { p.Tpm2.EkRoots = nil }}, ""},
		"two rules of an authority are read":    {[]func(*attestv1.Policy){good, good}, ""},
		"any machine is read if that is wanted": {[]func(*attestv1.Policy){none, func(p *attestv1.Policy) { p.Insecure = &attestv1.InsecureSwitches{AnyMachine: true} }}, ""},
		"no machine":                            {[]func(*attestv1.Policy){none}, "A6"},
		"no machine in one of two rules":        {[]func(*attestv1.Policy){good, none}, "A6"},
		"no certificate":                        {[]func(*attestv1.Policy){rule(func(r *attestv1.NitroRoot) { r.Pem = "" })}, "one PEM certificate"},
		"two certificates":                      {[]func(*attestv1.Policy){rule(func(r *attestv1.NitroRoot) { r.Pem += r.GetPem() })}, "one PEM certificate"},
		"a machine ID in capitals":              {[]func(*attestv1.Policy){rule(func(r *attestv1.NitroRoot) { r.MachineIds = []string{strings.ToUpper(id)} })}, "machineIds"},
		"a machine ID that is too short":        {[]func(*attestv1.Policy){rule(func(r *attestv1.NitroRoot) { r.MachineIds = []string{id[2:]} })}, "machineIds"},
		"too many authorities":                  {slices.Repeat([]func(*attestv1.Policy){good}, 33), "more than 32"},
		"a revoked machine": {[]func(*attestv1.Policy){good, func(p *attestv1.Policy) {
			p.Tpm2.Revoked = &attestv1.Revoked{Keys: []string{id}}
		}}, "nitroRoots[0].machineIds lists it"},
	} {
		t.Run(name, func(t *testing.T) {
			p := goodPolicy(pemRoot)
			for _, c := range tt.change {
				c(p)
			}
			policy, err := ParsePolicy(encode(t, p))
			switch {
			case tt.want == "":
				if err != nil {
					t.Error(err)
				} else if last := policy.Authorities(); !strings.HasPrefix(last[len(last)-1].Field, "tpm2.nitroRoots[") || !policy.OnlyECC() {
					t.Errorf("authorities %+v", last)
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
		"an endorsement without rules is refused": {facts: func(f *checked.Facts) { f.EndorsedBy = "bare-ek" }, locks: []Lock{Unlocked()}, want: attestv1.Reason_REASON_EK_UNTRUSTED},
		"an unknown endorsement is refused":       {facts: func(f *checked.Facts) { f.EndorsedBy = "another" }, locks: []Lock{Unlocked()}, want: attestv1.Reason_REASON_EK_UNTRUSTED},
		"no endorsement is refused":               {facts: func(f *checked.Facts) { f.EndorsedBy = "" }, locks: []Lock{Unlocked()}, want: attestv1.Reason_REASON_EK_UNTRUSTED},
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
