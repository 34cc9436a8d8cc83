package policyfile_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/internal/policyfile"
)

// build returns the measurements of another build.
func build(t *testing.T, name string, digit string) policyfile.Measurements {
	t.Helper()
	m := template(t).Measurements[0]
	pcrs := map[string]string{}
	for i, v := range m.PCRs {
		pcrs[i] = strings.Repeat(digit, len(v))
	}
	m.Image, m.PCRs = name, pcrs
	return m
}

func TestImagesAreAddedAndRemovedInPlace(t *testing.T) {
	made := withPlatform(t)
	json, err := policyfile.ToJSON(made)
	if err != nil {
		t.Fatal(err)
	}
	first := template(t).Measurements[0]
	v2, secure := build(t, "muster-v2", "2"), build(t, "muster-v2", "3")
	for name, text := range map[string][]byte{"as made": made, "as JSON": json} {
		t.Run(name, func(t *testing.T) {
			out, names, err := policyfile.AddImages(text, 9, []policyfile.Measurements{first, v2})
			if err != nil || !slices.Equal(names, []string{"muster-v2"}) {
				t.Fatalf("%q, %v", names, err)
			}
			both, names, err := policyfile.AddImages(out, 10, []policyfile.Measurements{v2, secure})
			if err != nil || !slices.Equal(names, []string{"muster-v2-2"}) {
				t.Fatalf("%q, %v", names, err)
			}
			if p, _, err := policyfile.Parse(both); err != nil || p.Serial() != 10 {
				t.Fatalf("%v\n%s", err, both)
			}
			if name == "as made" && (!strings.Contains(string(both), "# Switches that weaken the cluster") || !strings.Contains(string(both), `{index: 4, value: "`+strings.Repeat("2", 64)+`"} # `)) {
				t.Errorf("a comment is missing:\n%s", both)
			}
			// Without the images it is the policy of before.
			for _, n := range []string{"muster-v2", "muster-v2-2"} {
				if both, err = policyfile.RemoveImage(both, 11, n); err != nil {
					t.Fatal(err)
				}
			}
			if same, err := policyfile.SameRules(both, text); err != nil || !same {
				t.Errorf("%v\n%s", err, both)
			}
		})
	}
}

func TestImagesThatCannotBeAddedOrRemoved(t *testing.T) {
	made := withPlatform(t)
	first, other := template(t).Measurements[0], build(t, "muster-v2", "2")
	wrong, short := build(t, "muster-v2", "2"), build(t, "muster-v2", "2")
	wrong.Bank = "sha384"
	for i, v := range wrong.PCRs {
		wrong.PCRs[i] = v + v[:32]
	}
	delete(short.PCRs, "4")
	for name, tt := range map[string]struct {
		text string
		add  policyfile.Measurements
		want string
	}{
		"an image that is there": {string(made), first, "these images already"},
		"another bank":           {string(made), wrong, "sha384"},
		"no PCR 4":               {string(made), short, "PCR 4"},
		"no policy":              {"- a", other, "policy"},
		"no tpm2":                {"version: 2\nserial: 1\n", other, "tpm2 is missing"},
	} {
		if out, _, err := policyfile.AddImages([]byte(tt.text), 9, []policyfile.Measurements{tt.add}); (err == nil) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v\n%s", name, err, out)
		}
	}
	if _, _, err := policyfile.AddImages(made, 9, []policyfile.Measurements{other}); err != nil {
		t.Errorf("corrected: %v", err)
	}
	if _, err := policyfile.RemoveImage(made, 9, "muster-v9"); err == nil || !strings.Contains(err.Error(), `no image "muster-v9"`) {
		t.Errorf("%v", err)
	}
	if _, err := policyfile.RemoveImage(made, 9, policyfile.NameOf(first.Image)); err == nil {
		t.Error("the last image can be removed")
	}
}

// A policy that is made anew loses what the owner has listed since.
func TestDroppedMachinesAreNamed(t *testing.T) {
	made := withPlatform(t)
	out, err := policyfile.ListMachines(made, 9, []policyfile.Listing{{Field: machines, Machine: [32]byte{1}}, {Field: bare, Machine: [32]byte{2}}})
	if err != nil {
		t.Fatal(err)
	}
	got, err := policyfile.DroppedMachines(out, made)
	if want := []policyfile.Listing{{Field: machines, Machine: [32]byte{1}}, {Field: bare, Machine: [32]byte{2}}}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	if got, err := policyfile.DroppedMachines(made, out); err != nil || len(got) != 0 {
		t.Errorf("%v, %v", got, err)
	}
}
