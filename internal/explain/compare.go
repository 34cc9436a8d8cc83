package explain

import (
	"bytes"
	"crypto"
	"encoding/hex"
	"fmt"
	"slices"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// Step is one measurement: what extended a PCR.
type Step struct {
	PCR    int    `json:"pcr"`
	Digest []byte `json:"digest"`
	// What describes it. The text of a machine's event log need not be what Digest covers.
	What string `json:"what"`
}

// Steps returns the measurements of a machine's event log.
func Steps(events []attest.Event) (out []Step) {
	for _, e := range events {
		out = append(out, Step{PCR: e.PCR, Digest: e.Digest, What: fmt.Sprintf("%s %q", e.Type, e.Text)})
	}
	return out
}

// Values returns the PCRs that measurements lead to from zero (TPM 2.0 Library, Part 1, section 17.2).
func Values(bank crypto.Hash, steps []Step) map[int][]byte {
	out := map[int][]byte{}
	for _, s := range steps {
		h := bank.New()
		if out[s.PCR] == nil {
			out[s.PCR] = make([]byte, bank.Size())
		}
		h.Write(out[s.PCR])
		h.Write(s.Digest)
		out[s.PCR] = h.Sum(nil)
	}
	return out
}

// Difference is a measurement that is not as expected.
type Difference struct {
	PCR int `json:"pcr"`
	// Position counts the PCR's measurements from 1, those that were expected and are missing included.
	Position int `json:"position"`
	// Expected is nil for a measurement too many, Seen for one that is missing.
	Expected *Step `json:"expected,omitempty"`
	Seen     *Step `json:"seen,omitempty"`
}

// String describes it in words.
func (d Difference) String() string {
	switch {
	case d.Seen == nil:
		return "missing: " + d.Expected.What
	case d.Expected == nil:
		return "not expected: " + d.Seen.What
	}
	return "another " + d.Expected.What + "; the log calls it " + d.Seen.What
}

// maxSteps bounds the measurements of one PCR that are compared; evidence has at most 1,024.
const maxSteps = 2048

// Compare returns how measurements differ from the expected ones, PCR by PCR, for those PCRs that expected has.
func Compare(expected, seen []Step) (out []Difference) {
	of := func(steps []Step, pcr int) (some []Step) {
		for _, s := range steps {
			if s.PCR == pcr && len(some) < maxSteps {
				some = append(some, s)
			}
		}
		return some
	}
	done := map[int]bool{}
	for _, s := range expected {
		if !done[s.PCR] {
			done[s.PCR] = true
			out = append(out, compare(of(expected, s.PCR), of(seen, s.PCR))...)
		}
	}
	return out
}

// compare aligns the measurements of one PCR by a longest common subsequence. A missing and an unexpected one at the same
// place are one changed measurement.
func compare(want, have []Step) (out []Difference) {
	same := func(i, j int) bool { return bytes.Equal(want[i].Digest, have[j].Digest) }
	common := make([][]int, len(want)+1) // length of the common subsequence of the rests
	for i := range common {
		common[i] = make([]int, len(have)+1)
	}
	for i := len(want) - 1; i >= 0; i-- {
		for j := len(have) - 1; j >= 0; j-- {
			if common[i][j] = max(common[i+1][j], common[i][j+1]); same(i, j) {
				common[i][j] = common[i+1][j+1] + 1
			}
		}
	}
	var missing, extra []Difference
	flush := func() {
		for i := range max(len(missing), len(extra)) {
			switch {
			case i >= len(missing):
				out = append(out, extra[i])
			case i >= len(extra):
				out = append(out, missing[i])
			default:
				changed := missing[i]
				changed.Seen = extra[i].Seen
				out = append(out, changed)
			}
		}
		missing, extra = nil, nil
	}
	for i, j := 0, 0; i < len(want) || j < len(have); {
		position := max(i, j) + 1
		switch {
		case i < len(want) && j < len(have) && same(i, j):
			flush()
			i, j = i+1, j+1
		case j == len(have) || i < len(want) && common[i+1][j] >= common[i][j+1]:
			missing = append(missing, Difference{PCR: want[i].PCR, Position: position, Expected: &want[i]})
			i++
		default:
			extra = append(extra, Difference{PCR: have[j].PCR, Position: position, Seen: &have[j]})
			j++
		}
	}
	flush()
	return out
}

// Fit is how PCRs compare with the matching or most similar image or class of a policy.
type Fit struct {
	// Kind is "image" or "class", Name is its name in the policy.
	Kind string `json:"kind"`
	Name string `json:"name"`
	// PCRs have other values; empty: it matches, as far as values decide.
	PCRs []Register `json:"differs,omitempty"`
}

// Register is a PCR with another value than the policy has.
type Register struct {
	PCR      int    `json:"pcr"`
	Expected string `json:"expected"`
	Seen     string `json:"seen"`
}

// Closest compares PCR values with the images and classes of a policy. It ignores rules over the event log.
func Closest(p *attestv1.Policy, values map[int][]byte) (out []Fit) {
	best := func(f Fit, pcrs []*attestv1.PcrValue) {
		for _, v := range pcrs {
			i := int(v.GetIndex())
			if seen := hex.EncodeToString(values[i]); seen != v.GetValue() {
				f.PCRs = append(f.PCRs, Register{PCR: i, Expected: v.GetValue(), Seen: seen})
			}
		}
		at := slices.IndexFunc(out, func(o Fit) bool { return o.Kind == f.Kind })
		switch {
		case at < 0:
			out = append(out, f)
		case len(f.PCRs) <= len(out[at].PCRs): // of equally similar ones the last, since new ones are appended
			out[at] = f
		}
	}
	for _, i := range p.GetTpm2().GetImages() {
		best(Fit{Kind: "image", Name: i.GetName()}, i.GetPcrs())
	}
	for _, c := range p.GetTpm2().GetClasses() {
		best(Fit{Kind: "class", Name: c.GetName()}, c.GetPcrs())
	}
	return out
}
