package policyfile_test

import (
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
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

func TestImagesThatCannotBeAddedOrReedited(t *testing.T) {
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

// An empty list accepts every machine: the same edit shuts machines out if an entry is left, and lets all in if none is.
func TestAListThatBecomesEmptyIsNamed(t *testing.T) {
	one, two := attest.MachineID{1}, attest.MachineID{2}
	made := withPlatform(t)
	full, err := policyfile.ListMachines(made, 9, []policyfile.Listing{{Field: machines, Machine: one}, {Field: machines, Machine: two}, {Field: platform, Machine: one}, {Field: bare, Machine: [32]byte{3}}})
	if err != nil {
		t.Fatal(err)
	}
	edited := func(change func(*attestv1.Tpm2Policy)) []byte {
		t.Helper()
		m := &attestv1.Policy{}
		out, err := policyfile.ToJSON(full)
		if err == nil {
			err = protojson.Unmarshal(out, m)
		}
		if err != nil {
			t.Fatal(err)
		}
		change(m.GetTpm2())
		if out, err = protojson.Marshal(m); err != nil {
			t.Fatal(err)
		}
		return out
	}
	for name, tt := range map[string]struct {
		before, after []byte
		want          []string
	}{
		"nothing changes":                    {full, full, nil},
		"one of two machines":                {full, edited(func(p *attestv1.Tpm2Policy) { p.MachineIds = p.GetMachineIds()[:1] }), nil},
		"both machines":                      {full, edited(func(p *attestv1.Tpm2Policy) { p.MachineIds = nil }), []string{machines}},
		"the machine of a cloud":             {full, edited(func(p *attestv1.Tpm2Policy) { p.PlatformRoots[0].MachineIds = nil }), []string{platform}},
		"the machine without a certificate":  {full, edited(func(p *attestv1.Tpm2Policy) { p.BareMachineIds = nil }), nil},
		"all, in a policy that is made anew": {full, made, []string{machines, platform}},
		"the list was empty before":          {made, made, nil},
		"the authority is gone, too":         {full, edited(func(p *attestv1.Tpm2Policy) { p.PlatformRoots = nil }), nil},
		"all authorities of TPMs are gone":   {full, edited(func(p *attestv1.Tpm2Policy) { p.EkRoots, p.MachineIds = nil, nil }), nil},
		"another rule for the same authority": {full, edited(func(p *attestv1.Tpm2Policy) {
			p.PlatformRoots[0].Projects, p.PlatformRoots[0].MachineIds = []string{"ours", "b"}, nil
		}), []string{platform}},
		"a second rule that was open before": {edited(second), edited(func(p *attestv1.Tpm2Policy) { second(p); p.PlatformRoots = p.GetPlatformRoots()[1:] }), nil},
		"the list of the second rule":        {edited(func(p *attestv1.Tpm2Policy) { second(p); p.PlatformRoots[1].MachineIds = []string{one.String()} }), edited(second), []string{"tpm2.platformRoots[1].machineIds"}},
		"a policy of before that is none":    {[]byte("{"), made, nil},
	} {
		got, err := policyfile.OpenedLists(tt.before, tt.after)
		if err != nil || !slices.Equal(got, tt.want) {
			t.Errorf("%s: %q, %v, want %q", name, got, err, tt.want)
		}
	}
	if _, err := policyfile.OpenedLists(full, []byte("{")); err == nil {
		t.Error("a text that is no policy was compared")
	}
}

// second adds a rule for the same authority and another project, which lists no machine.
func second(p *attestv1.Tpm2Policy) {
	r := proto.CloneOf(p.GetPlatformRoots()[0])
	r.Projects, r.MachineIds = []string{"other"}, nil
	p.PlatformRoots = append(p.PlatformRoots, r)
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
