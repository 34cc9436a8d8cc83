package policyfile_test

import (
	"slices"
	"strings"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
)

const (
	machines, bare  = "tpm2.machineIds", "tpm2.bareMachineIds"
	platform, nitro = "tpm2.platformRoots[0].machineIds", "tpm2.nitroRoots[0].machineIds"
)

// withPlatform returns a policy that also has rules for virtual machines.
func withPlatform(t *testing.T) []byte {
	t.Helper()
	tp := template(t)
	tp.Platforms = []*attestv1.PlatformRoot{{Pem: tp.Roots[0].PEM, Provider: "gcp", Key: "ecc-p256", Projects: []string{"ours"}}}
	tp.Nitro = []*attestv1.NitroRoot{{Pem: tp.Roots[0].PEM, MachineIds: []string{attest.MachineID{99}.String()}}}
	tp.Roots[0].Key = attest.EKP256
	made, err := policyfile.Build(tp)
	if err != nil {
		t.Fatal(err)
	}
	return made
}

func TestMachinesAreListedInPlace(t *testing.T) {
	one, two, three, four := attest.MachineID{1}, attest.MachineID{2}, attest.MachineID{3}, attest.MachineID{4}
	made := withPlatform(t)
	json, err := policyfile.ToJSON(made)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string][]byte{"as made": made, "as JSON": json} {
		t.Run(name, func(t *testing.T) {
			add := []policyfile.Listing{{Field: bare, Machine: one}, {Field: machines, Machine: two}, {Field: platform, Machine: three}, {Field: nitro, Machine: four}}
			out, err := policyfile.ListMachines(text, 9, add)
			if err != nil {
				t.Fatal(err)
			}
			p, _, err := policyfile.Parse(out)
			if err != nil || p.Serial() != 9 {
				t.Fatalf("%v\n%s", err, out)
			}
			for _, l := range add {
				if has, err := policyfile.Lists(out, l); !has || err != nil {
					t.Errorf("%v is not listed: %v\n%s", l, err, out)
				}
				if has, err := policyfile.Lists(text, l); has || err != nil {
					t.Errorf("%v was listed: %v", l, err)
				}
			}
			if name == "as made" && !strings.Contains(string(out), "# Switches that weaken the cluster") {
				t.Errorf("a comment is missing:\n%s", out)
			}
			if again, err := policyfile.ListMachines(out, 9, add); err != nil || string(again) != string(out) {
				t.Errorf("what is listed already was changed: %v\n%s", err, again)
			}
			more, only, err := policyfile.MoreMachines(text, out)
			want := []policyfile.Listing{add[1], add[0], add[2], add[3]}
			if err != nil || !only || !slices.Equal(more, want) {
				t.Errorf("%v, %v, %v", more, only, err)
			}
		})
	}
}

func TestMachinesAreNotListedWhereThePolicyHasNoPlace(t *testing.T) {
	one := attest.MachineID{1}
	good := string(withPlatform(t))
	for name, tt := range map[string]struct {
		text string
		add  policyfile.Listing
		want string // part of the error; empty: accepted
	}{
		"a list of the policy":          {good, policyfile.Listing{Field: machines, Machine: one}, ""},
		"the first platform root":       {good, policyfile.Listing{Field: platform, Machine: one}, ""},
		"a platform root that it lacks": {good, policyfile.Listing{Field: "tpm2.platformRoots[1].machineIds", Machine: one}, "no tpm2.platformRoots[1]"},
		"the first root of AWS":         {good, policyfile.Listing{Field: nitro, Machine: one}, ""},
		"a root of AWS that it lacks":   {good, policyfile.Listing{Field: "tpm2.nitroRoots[1].machineIds", Machine: one}, "no tpm2.nitroRoots[1]"},
		"roots of no kind":              {good, policyfile.Listing{Field: "tpm2.otherRoots[0].machineIds", Machine: one}, "no tpm2.otherRoots[0]"},
		"control planes":                {good, policyfile.Listing{Field: "controlPlanes", Machine: one}, "no controlPlanes"},
		"no list":                       {good, policyfile.Listing{Machine: one}, "it has no"},
		"a machine that is revoked":     {good + "  revoked: {keys: [\"" + one.String() + "\"]}\n", policyfile.Listing{Field: bare, Machine: one}, "revoked"},
		"one with a certificate":        {strings.Replace(good, "machineIds: []", "machineIds: [\""+one.String()+"\"]", 1), policyfile.Listing{Field: bare, Machine: one}, "both list"},
		"no policy":                     {"version: 9\n", policyfile.Listing{Field: machines, Machine: one}, "no tpm2.machineIds"},
		"no object":                     {"[]", policyfile.Listing{Field: machines, Machine: one}, "policy"},
	} {
		t.Run(name, func(t *testing.T) {
			out, err := policyfile.ListMachines([]byte(tt.text), 9, []policyfile.Listing{tt.add})
			if tt.want == "" {
				if err != nil {
					t.Errorf("%v\n%s", err, tt.text)
				}
			} else if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want one about %q\n%s", err, tt.want, out)
			}
		})
	}
}

// What an interrupted approval left can be told from an edit that its owner has not finished.
func TestOtherEditsAreNoInterruptedApproval(t *testing.T) {
	before := withPlatform(t)
	listed, err := policyfile.ListMachines(before, 9, []policyfile.Listing{{Field: bare, Machine: attest.MachineID{1}}})
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		before, after string
		only          bool
	}{
		"one more machine":      {string(before), string(listed), true},
		"and another role":      {string(before), strings.Replace(string(listed), "roles: [worker, control-plane]", "roles: [worker]", 1), false},
		"and another switch":    {string(before), strings.Replace(string(listed), "anyMachine: false", "anyMachine: true", 1), false},
		"the serial of before":  {string(before), strings.Replace(string(listed), "serial: 9", "serial: 1", 1), false},
		"a lower serial":        {strings.Replace(string(before), "serial: 1", "serial: 10", 1), string(listed), false},
		"one machine less":      {string(listed), strings.Replace(string(before), "serial: 1", "serial: 10", 1), false},
		"one more and one less": {string(listed), strings.Replace(strings.Replace(string(listed), attest.MachineID{1}.String(), attest.MachineID{2}.String(), 1), "serial: 9", "serial: 10", 1), false},
	} {
		if tt.after == string(listed) && !tt.only && tt.before == string(before) {
			t.Fatalf("%s: the edit changes nothing:\n%s", name, listed)
		}
		if _, only, err := policyfile.MoreMachines([]byte(tt.before), []byte(tt.after)); err != nil || only != tt.only {
			t.Errorf("%s: %v, %v", name, only, err)
		}
	}
}

func TestPoliciesThatDifferInTheSerialHaveTheSameRules(t *testing.T) {
	text := withPlatform(t)
	json, err := policyfile.ToJSON(text)
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		b    string
		same bool
	}{
		"the same file":                 {string(text), true},
		"its JSON":                      {string(json), true},
		"another serial":                {strings.Replace(string(text), "serial: 1", "serial: 10", 1), true},
		"the serial in quotation marks": {strings.Replace(string(text), "serial: 1", `serial: "10"`, 1), true},
		"another role":                  {strings.Replace(string(text), "roles: [worker, control-plane]", "roles: [worker]", 1), false},
		"another switch":                {strings.Replace(string(text), "anyMachine: false", "anyMachine: true", 1), false},
		"another role and serial":       {strings.NewReplacer("roles: [worker, control-plane]", "roles: [worker]", "serial: 1", "serial: 2").Replace(string(text)), false},
	} {
		if tt.b == string(text) && name != "the same file" {
			t.Fatalf("%s: the edit changes nothing:\n%s", name, text)
		}
		if same, err := policyfile.SameRules(text, []byte(tt.b)); err != nil || same != tt.same {
			t.Errorf("%s: %v, %v", name, same, err)
		}
	}
	one, two := policyfile.Listing{Field: machines, Machine: attest.MachineID{1}}, policyfile.Listing{Field: machines, Machine: attest.MachineID{2}}
	control := []policyfile.ControlPlane{{Machine: one.Machine}, {Machine: two.Machine}}
	lists := func(l []policyfile.Listing, c []policyfile.ControlPlane) []byte {
		t.Helper()
		out, err := policyfile.ListMachines(text, 2, l)
		if err == nil {
			out, err = policyfile.ListControlPlanes(out, 3, c, nil)
		}
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	ordered := lists([]policyfile.Listing{one, two}, control)
	if same, err := policyfile.SameRules(ordered, lists([]policyfile.Listing{two, one}, []policyfile.ControlPlane{control[1], control[0]})); err != nil || !same {
		t.Errorf("another order: %v, %v", same, err)
	}
	if same, err := policyfile.SameRules(ordered, lists([]policyfile.Listing{one, two}, control[:1])); err != nil || same {
		t.Errorf("another control plane: %v, %v", same, err)
	}
	if _, err := policyfile.SameRules(text, []byte(`{"noSuchRule": true}`)); err == nil {
		t.Error("a policy with an unknown rule was compared")
	}
}
