package policyfile_test

import (
	"encoding/hex"
	"strings"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// policyOf is a policy that lists no classes yet, and accepts the image that machines of attesttest boot.
func policyOf(t *testing.T, ca *attesttest.CA, m *attesttest.Machine) []byte {
	t.Helper()
	p := template(t)
	p.Classes = nil
	p.Roots = []policyfile.Root{{PEM: ca.PEM(), Operator: true, Key: attest.EKP256}}
	p.Measurements[0].PCRs = map[string]string{}
	for _, i := range []int{4, 8, 9, 11, 12, 13, 14} {
		p.Measurements[0].PCRs[strings.TrimLeft(hex.EncodeToString([]byte{byte(i/10)<<4 | byte(i%10)}), "0")] = hex.EncodeToString(m.PCRs()[i])
	}
	text, err := policyfile.Build(p)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func claims(t *testing.T, ca *attesttest.CA, m *attesttest.Machine) attest.Claims {
	t.Helper()
	c, err := attesttest.Claims(t.Context(), m.Attester(attest.PurposeMachine), attesttest.Verifier(t, ca), attest.PurposeMachine, attest.Binding{1})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// A class made from one machine accepts machines with the same firmware, and no others.
func TestAClassIsTakenFromAMachine(t *testing.T) {
	ca := attesttest.NewCA(t)
	machine := func(o attesttest.Options) *attesttest.Machine { return attesttest.NewMachine(t, ca, o) }
	first := machine(attesttest.Options{SecureBoot: true, Drivers: []string{"network ROM"}})
	for name, tt := range map[string]struct {
		eventLog bool
		machine  *attesttest.Machine
		accepted bool
		pcr      string
	}{
		"values: the same firmware":   {machine: machine(attesttest.Options{SecureBoot: true, Drivers: []string{"network ROM"}}), accepted: true},
		"values: another driver":      {machine: machine(attesttest.Options{SecureBoot: true, Drivers: []string{"network ROM", "implant"}}), pcr: "PCR 2"},
		"values: one driver fewer":    {machine: machine(attesttest.Options{SecureBoot: true}), pcr: "PCR 2"},
		"values: Secure Boot off":     {machine: machine(attesttest.Options{Drivers: []string{"network ROM"}}), pcr: "PCR 7"},
		"event log: the same":         {eventLog: true, machine: machine(attesttest.Options{SecureBoot: true, Drivers: []string{"network ROM"}}), accepted: true},
		"event log: one driver fewer": {eventLog: true, machine: machine(attesttest.Options{SecureBoot: true}), accepted: true},
		"event log: another driver":   {eventLog: true, machine: machine(attesttest.Options{SecureBoot: true, Drivers: []string{"implant"}}), pcr: "PCR 2"},
		"event log: Secure Boot off":  {eventLog: true, machine: machine(attesttest.Options{}), pcr: "PCR 7"},
	} {
		t.Run(name, func(t *testing.T) {
			text := policyOf(t, ca, first)
			if _, _, err := policyfile.Parse(text); attest.ReasonOf(err) != attestv1.Reason_REASON_POLICY_INVALID {
				t.Fatalf("a policy without classes: %v", err)
			}
			p, err := policyfile.ParseForClass(text)
			if err != nil {
				t.Fatal(err)
			}
			seen := claims(t, ca, first)
			if _, err := p.Appraise(seen, attest.Unlocked()); err != nil {
				t.Fatal(err)
			}
			c, err := policyfile.ClassOf("rack-1", seen, tt.eventLog)
			if err != nil {
				t.Fatal(err)
			}
			made, err := policyfile.AddClass(text, 2, c)
			if err != nil {
				t.Fatal(err)
			}
			if p, _, err = policyfile.Parse(made); err != nil || p.Serial() != 2 || !strings.Contains(string(made), "# firmware") && !strings.Contains(string(made), "# What machines may boot") {
				t.Fatalf("%v\n%s", err, made)
			}
			a, err := p.Appraise(claims(t, ca, tt.machine), attest.Unlocked())
			if (err == nil) != tt.accepted || tt.accepted && a.Class != "rack-1" || !tt.accepted && !strings.Contains(err.Error(), tt.pcr) {
				t.Errorf("%+v, %v", a, err)
			}
			if _, err := policyfile.AddClass(made, 3, c); err == nil || !strings.Contains(err.Error(), "stands twice") {
				t.Errorf("a class of the same name: %v", err)
			}
		})
	}
}

func TestNoRulesAreMadeOfALogThatSaysNothing(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{Tamper: attesttest.Tamper{Evidence: func(e *attestv1.Evidence) { e.GetTpm2().Events = nil }}})
	if c, err := policyfile.ClassOf("x", claims(t, ca, m), true); err == nil || !strings.Contains(err.Error(), "no event log") {
		t.Errorf("%v, %v", c, err)
	}
	if _, err := policyfile.ClassOf("x", claims(t, ca, m), false); err != nil {
		t.Errorf("values: %v", err)
	}
}

func TestRulesOfBeforeAreKept(t *testing.T) {
	const revoked = "  revoked:\n    keys: [\"" + zeros + "\"]\n    certificates:\n      - {issuerKey: \"" + zeros + "\", serial: \"1e5\"}\n"
	const least = "    - minFirmwareVersion: \"0x0007005500110500\"\n      operator:"
	before := strings.Replace(string(read(t, "policy.yaml")), "    - operator:", least, 1)
	before = strings.Replace(before, "  bank:", revoked+"  bank:", 1)
	p := template(t)
	p.Classes, p.Serial = nil, 9
	built, err := policyfile.Build(p)
	if err != nil {
		t.Fatal(err)
	}
	got, what, err := policyfile.KeepRules(built, []byte(before))
	if err != nil || len(what) != 3 {
		t.Fatalf("%q, %v", what, err)
	}
	if p, json, err := policyfile.Parse(got); err != nil || p.Serial() != 9 || !strings.Contains(string(got), "rack-1") || !strings.Contains(string(json), `"serial":"1e5"`) || !strings.Contains(string(json), `"0x0007005500110500"`) {
		t.Errorf("%v\n%s", err, got)
	}
	if again, what, err := policyfile.KeepRules(got, []byte(before)); err != nil || len(what) != 0 || string(again) != string(got) {
		t.Errorf("of a policy with these rules were kept: %q, %v", what, err)
	}
	json, err := policyfile.ToJSON([]byte(before))
	if err != nil {
		t.Fatal(err)
	}
	for name, other := range map[string]*strings.Replacer{
		"no line break at its end": strings.NewReplacer(`-----END CERTIFICATE-----\n"`, `-----END CERTIFICATE-----"`),
		"line breaks of Windows":   strings.NewReplacer(`\n`, `\r\n`),
		"a comment before it":      strings.NewReplacer(`"-----BEGIN`, `"our authority\n-----BEGIN`),
	} {
		text := other.Replace(string(json))
		if text == string(json) {
			t.Fatalf("%s: nothing was changed", name)
		}
		if got, what, err := policyfile.KeepRules(built, []byte(text)); err != nil || len(what) != 3 || !strings.Contains(string(got), "0x0007005500110500") {
			t.Errorf("a root in PEM with %s: %q, %v", name, what, err)
		}
	}
	full := read(t, "policy-full.yaml")
	if got, what, err := policyfile.KeepRules(full, read(t, "policy.yaml")); err != nil || len(what) != 0 || string(got) != string(full) {
		t.Errorf("of a policy that accepts any firmware: %q, %v", what, err)
	}
	lifted := strings.Replace(string(full), "  bank:", "  revoked: {}\n  bank:", 1)
	if got, what, err := policyfile.KeepRules([]byte(lifted), []byte(before)); err != nil || strings.Contains(string(got), "1e5") {
		t.Errorf("what the owner no longer revokes stays revoked: %q, %v", what, err)
	}
}

func TestParseFirmwareRefuses(t *testing.T) {
	for name, change := range map[string][2]string{
		"another version":   {`"version": 1`, `"version": 2`},
		"an unknown field":  {`"version"`, `"versions"`},
		"another bank":      {`sha256`, `sha384`},
		"a PCR with a sign": {`"7"`, `"+7"`},
		"no number":         {`"7"`, `"seven"`},
	} {
		text := strings.Replace(firmware, change[0], change[1], 1)
		if c, err := policyfile.ParseFirmware("x", []byte(text), "sha256"); err == nil {
			t.Errorf("%s: %v", name, c)
		}
	}
	for name, change := range map[string][2]string{"no PCR 2": {`"2"`, `"1"`}, "the image's PCR": {`"7"`, `"4"`}, "a short value": {zeros, "00"}} {
		p := template(t)
		p.Classes = []*attestv1.MachineClass{class(t, "x", strings.Replace(firmware, change[0], change[1], 1))}
		if b, err := policyfile.Build(p); err == nil {
			t.Errorf("%s: built\n%s", name, b)
		}
	}
}
