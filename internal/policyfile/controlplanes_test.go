package policyfile_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
)

func TestControlPlanesAreListedInPlace(t *testing.T) {
	one, two, three := attest.MachineID{1}, attest.MachineID{2}, attest.MachineID{3}
	made, err := policyfile.Build(template(t))
	if err != nil {
		t.Fatal(err)
	}
	json, err := policyfile.ToJSON(made)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"as made":                        string(made),
		"without the field":              strings.Replace(string(made), "controlPlanes: []\n", "", 1),
		"without a value":                strings.Replace(string(made), "controlPlanes: []\n", "controlPlanes:\n", 1),
		"with a comment behind the list": strings.Replace(string(made), "controlPlanes: []\n", "controlPlanes: [] # nobody yet\n", 1),
		"as JSON":                        string(json),
	} {
		t.Run(name, func(t *testing.T) {
			change := func(text []byte, serial uint64, add []policyfile.ControlPlane, remove []attest.MachineID, want ...attest.MachineID) []byte {
				t.Helper()
				out, err := policyfile.ListControlPlanes(text, serial, add, remove)
				if err != nil {
					t.Fatalf("%v\n%s", err, text)
				}
				p, _, err := policyfile.Parse(out)
				if err != nil || p.Serial() != serial || !slices.Equal(p.ControlPlanes(), want) {
					t.Fatalf("%v\n%s", err, out)
				}
				return out
			}
			listed := change([]byte(text), 7, []policyfile.ControlPlane{{Machine: one, Name: "node1"}, {Machine: two}}, nil, one, two)
			if name != "as JSON" && (!strings.Contains(string(listed), one.String()+`" # node1`) || !strings.Contains(string(listed), "# Switches that weaken the cluster")) {
				t.Errorf("a comment is missing:\n%s", listed)
			}
			if again := change(listed, 7, []policyfile.ControlPlane{{Machine: one, Name: "other"}}, nil, one, two); string(again) != string(listed) {
				t.Errorf("what is listed already was changed:\n%s", again)
			}
			swapped := change(listed, 8, []policyfile.ControlPlane{{Machine: three}}, []attest.MachineID{one}, two, three)
			none := change(swapped, 9, nil, []attest.MachineID{two, three})
			if back := change(none, 1, nil, nil); name == "as JSON" && len(back) == 0 {
				t.Error("nothing is left")
			}
		})
	}
	if _, err := policyfile.ListControlPlanes([]byte("version: 9\n"), 1, nil, nil); attest.ReasonOf(err).String() != "REASON_POLICY_INVALID" {
		t.Errorf("no policy: %v", err)
	}
}
