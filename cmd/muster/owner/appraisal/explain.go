package appraisal

import (
	"bytes"
	"crypto"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/explain"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/tpm2/eventlog"
	"github.com/muster-k8s/muster/trust/tpm"
)

// Seen describes a machine's boot, as far as it is known.
type Seen struct {
	// From describes where it is from, Verified reports that a quote proves the PCRs and the log's digests.
	From     string `json:"from"`
	Verified bool   `json:"verified"`
	// Refusal is why the machine was refused; nil if it was accepted, or if nothing has appraised it.
	Refusal *problem.Problem `json:"refusal,omitempty"`
	// Hardware is that of [Report].
	Hardware string `json:"hardware,omitempty"`
	// Rules are the violated rules over the event log.
	Rules []string `json:"rules,omitempty"`

	bank   crypto.Hash
	values map[int][]byte
	steps  []explain.Step
}

// SeenBy returns what a report of [Verify], or of a node by its order, shows. An error means that the evidence was not genuine, so the boot is unknown.
func SeenBy(s *Report, p *attest.Policy) (*Seen, error) {
	if s.Machine == "" {
		if s.Err != nil {
			return nil, s.Err
		}
		return nil, errors.New("nothing genuine is known of the machine")
	}
	out := &Seen{From: "the verified evidence of machine " + s.Machine, Verified: true, Refusal: s.Problem, Hardware: s.Hardware, bank: s.claims.Bank(), values: map[int][]byte{}, steps: explain.Steps(s.claims.Events())}
	for i := range tpm.PCRCount {
		out.values[i] = s.claims.PCR(i)
	}
	for _, found := range p.Compare(s.claims) {
		for _, m := range found.Mismatches {
			if m.Expected == nil {
				out.Rules = append(out.Rules, problem.Printable(m.String()))
			}
		}
	}
	return out, nil
}

// tcgLog begins an event log as firmware writes it: a TCG_PCClientPCREvent of type EV_NO_ACTION (PC Client Platform Firmware Profile, section 10.2.1).
var tcgLog = []byte{0, 0, 0, 0, 3, 0, 0, 0}

// SeenInFile reads an event log, as the kernel has it in binary_bios_measurements, or evidence, as a machine writes it for muster verify NODE. It is
// unverified: its PCRs are computed from the log, or copied from the evidence.
func SeenInFile(path string, bank crypto.Hash) (*Seen, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	raw, err := io.ReadAll(io.LimitReader(f, max(eventlog.MaxSize, ownerorder.MaxEvidence)+1))
	if err != nil {
		return nil, err
	}
	out := &Seen{From: "the file " + path, bank: bank, values: map[int][]byte{}}
	b, err := tpm.ParseBank(bankName(bank))
	if err != nil {
		return nil, err
	}
	var log *eventlog.Log
	var quoted [][]byte
	if bytes.HasPrefix(raw, tcgLog) {
		log, err = eventlog.Parse(raw, b)
	} else {
		log, quoted, err = evidenceFile(raw, b)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	replayed, err := eventlog.Replay(log, log.PCRs())
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	for i, v := range log.PCRs() {
		if out.values[i] = v; v == nil {
			out.values[i] = make([]byte, bank.Size())
		}
		if quoted != nil && !bytes.Equal(quoted[i], out.values[i]) && i != attest.LockPCR {
			return nil, attest.Refuse(attestv1.Reason_REASON_EVENTLOG_REPLAY, "%s: its event log leads to %x in PCR %d, and the evidence has %x", path, out.values[i], i, quoted[i])
		}
	}
	for _, e := range replayed.Events {
		out.steps = append(out.steps, explain.Step{PCR: e.PCR, Digest: e.Digest, What: fmt.Sprintf("%s %q", e.Type, e.Text)})
	}
	return out, nil
}

// bankName returns a policy's name of a bank.
func bankName(bank crypto.Hash) string {
	for name, h := range attest.Banks {
		if h == bank {
			return name
		}
	}
	return ""
}

// evidenceFile reads the event log and the PCRs of evidence.
func evidenceFile(raw []byte, bank tpm.Bank) (*eventlog.Log, [][]byte, error) {
	ev := &attestv1.Evidence{}
	if err := proto.Unmarshal(raw, ev); err != nil || ev.GetTpm2() == nil {
		return nil, nil, attest.Refuse(attestv1.Reason_REASON_EVIDENCE_MALFORMED, "it is neither an event log nor evidence")
	}
	t := ev.GetTpm2()
	if len(t.GetEvents()) == 0 {
		return nil, nil, errors.New("the evidence has no event log")
	}
	if t.GetBank() != uint32(bank) || len(t.GetPcrs()) != tpm.PCRCount {
		return nil, nil, fmt.Errorf("the evidence is of another bank than the policy's, %s", bank)
	}
	log, err := eventlog.Unmarshal(t.GetEvents(), bank)
	return log, t.GetPcrs(), err
}

// Explanation describes how a machine's boot differs from the expected one.
type Explanation struct {
	Seen
	// Fits are the closest image and class of the policy.
	Fits []explain.Fit `json:"fits"`
	// Differences are the measurements that differ from the image's, in the PCRs that the image determines.
	Differences []explain.Difference `json:"differences,omitempty"`
	// Log has the machine's measurements in other PCRs that differ.
	Log []explain.Step `json:"log,omitempty"`
	// OtherImage lists the PCRs for which the named image gives another value than the policy's image: then it is not the accepted image.
	OtherImage []int `json:"otherImage,omitempty"`
}

// ExplainBoot compares what was seen with a policy and, if the caller has the image, with each way in which the image may boot: the most similar one counts.
func ExplainBoot(s *Seen, policy []byte, ways [][]explain.Step) (*Explanation, error) {
	text, err := policyfile.ToJSON(policy)
	if err != nil {
		return nil, err
	}
	p := &attestv1.Policy{}
	if err := protojson.Unmarshal(text, p); err != nil {
		return nil, fmt.Errorf("policy: %w", err)
	}
	out := &Explanation{Seen: *s, Fits: explain.Closest(p, s.values)}
	var expected []explain.Step
	for i, way := range ways {
		if d := explain.Compare(way, s.steps); i == 0 || len(d) < len(out.Differences) {
			expected, out.Differences = way, d
		}
	}
	leads := explain.Values(s.bank, expected)
	for _, f := range out.Fits {
		for _, r := range f.PCRs {
			v, of := leads[r.PCR]
			switch {
			case !of:
				for _, step := range s.steps {
					if step.PCR == r.PCR {
						out.Log = append(out.Log, step)
					}
				}
			case hex.EncodeToString(v) != r.Expected:
				out.OtherImage = append(out.OtherImage, r.PCR)
			}
		}
	}
	return out, nil
}
