package explain

import (
	"crypto"
	"encoding/hex"
	"slices"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
)

// steps returns a measurement of PCR 11 for each character.
func steps(s string) (out []Step) {
	for _, r := range s {
		out = append(out, Step{PCR: 11, Digest: []byte{byte(r)}, What: string(r)})
	}
	return out
}

func TestMeasurementsAreComparedOneByOne(t *testing.T) {
	for name, tt := range map[string]struct {
		want, have string
		out        []string
	}{
		"the same":            {"abc", "abc", nil},
		"a changed one":       {"abc", "axc", []string{"another b; the log calls it x"}},
		"the last changed":    {"abc", "abx", []string{"another c; the log calls it x"}},
		"one missing":         {"abc", "ac", []string{"missing: b"}},
		"all missing":         {"ab", "", []string{"missing: a", "missing: b"}},
		"one more":            {"abc", "abxc", []string{"not expected: x"}},
		"one more at the end": {"abc", "abcd", []string{"not expected: d"}},
		"two changed":         {"abcd", "axyd", []string{"another b; the log calls it x", "another c; the log calls it y"}},
		"another order":       {"ab", "ba", []string{"missing: a", "not expected: a"}},
	} {
		t.Run(name, func(t *testing.T) {
			var got []string
			for _, d := range Compare(steps(tt.want), steps(tt.have)) {
				got = append(got, d.String())
			}
			if !slices.Equal(got, tt.out) {
				t.Errorf("%q, want %q", got, tt.out)
			}
		})
	}
	if d := Compare(steps("abc"), steps("abx")); len(d) != 1 || d[0].Position != 3 || d[0].PCR != 11 {
		t.Errorf("%+v", d)
	}
	other := []Step{{PCR: 4, Digest: []byte{1}}}
	if d := Compare(steps("abc"), append(steps("abc"), other...)); len(d) != 0 {
		t.Errorf("a PCR that is not expected is compared: %v", d)
	}
}

func TestTheClosestImageIsTheOneWithFewestDifferences(t *testing.T) {
	pcrs := func(values string) (out []*attestv1.PcrValue) {
		for i, v := range values {
			out = append(out, &attestv1.PcrValue{Index: uint32(i), Value: hex.EncodeToString([]byte{byte(v)})})
		}
		return out
	}
	p := &attestv1.Policy{Tpm2: &attestv1.Tpm2Policy{
		Images:  []*attestv1.Image{{Name: "far", Pcrs: pcrs("xxx")}, {Name: "near", Pcrs: pcrs("abx")}, {Name: "middle", Pcrs: pcrs("axx")}},
		Classes: []*attestv1.MachineClass{{Name: "one", Pcrs: pcrs("xbc")}, {Name: "newer", Pcrs: pcrs("axc")}},
	}}
	fits := Closest(p, map[int][]byte{0: []byte("a"), 1: []byte("b"), 2: []byte("c")})
	if len(fits) != 2 || fits[0].Name != "near" || len(fits[0].PCRs) != 1 || fits[0].PCRs[0] != (Register{2, "78", "63"}) || fits[1].Name != "newer" {
		t.Errorf("%+v", fits)
	}
	if fits := Closest(p, map[int][]byte{0: []byte("a"), 1: []byte("b"), 2: []byte("x")}); len(fits[0].PCRs) != 0 {
		t.Errorf("%+v", fits)
	}
	if fits := Closest(&attestv1.Policy{}, nil); len(fits) != 0 {
		t.Errorf("%+v", fits)
	}
}

// The vector is SHA-256(SHA-256(0…0 || 01) || 02).
func TestValuesAreTheChainOfTheSpecification(t *testing.T) {
	h := func(b []byte) []byte { d := crypto.SHA256.New(); d.Write(b); return d.Sum(nil) }
	want := h(append(h(append(make([]byte, 32), 1)), 2))
	got := Values(crypto.SHA256, []Step{{PCR: 4, Digest: []byte{1}}, {PCR: 9, Digest: []byte{7}}, {PCR: 4, Digest: []byte{2}}})
	if len(got) != 2 || !slices.Equal(got[4], want) {
		t.Errorf("%x, want %x", got, want)
	}
}
