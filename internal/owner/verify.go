package owner

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/muster-k8s/muster/internal/owner/peerdial"
	"github.com/muster-k8s/muster/internal/owner/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
)

// Sight is what a machine said of itself in one exchange, and what a policy makes of it.
type Sight struct {
	Endpoint string `json:"endpoint"`
	Purpose  string `json:"purpose"`
	// Accepted is the verdict. Problem says why not.
	Accepted bool     `json:"accepted"`
	Problem  *Problem `json:"problem,omitempty"`
	// Err is the refusal itself; nil if the machine was accepted.
	Err error `json:"-"`
	// What follows is empty if the evidence was not genuine: then nothing it says is worth showing.
	Machine         string    `json:"machine,omitempty"`
	Lock            string    `json:"lock,omitempty"`
	Bank            string    `json:"bank,omitempty"`
	PCRs            []PCR     `json:"pcrs,omitempty"`
	Root            string    `json:"ekRoot,omitempty"`
	EKKind          string    `json:"ekKind,omitempty"`
	AKName          string    `json:"akName,omitempty"`
	ResetCount      uint32    `json:"resetCount,omitempty"`
	RestartCount    uint32    `json:"restartCount,omitempty"`
	FirmwareVersion string    `json:"firmwareVersion,omitempty"`
	SecureBoot      string    `json:"secureBoot,omitempty"`
	EvidenceDigest  string    `json:"evidenceDigest,omitempty"`
	PolicySerial    uint64    `json:"policySerial,omitempty"`
	Warnings        []string  `json:"warnings,omitempty"`
	Events          []string  `json:"events,omitempty"`
	At              time.Time `json:"time"`
}

// PCR is one register beside what the policy expects of it.
type PCR struct {
	Index    int      `json:"index"`
	Seen     string   `json:"seen"`
	Expected []string `json:"expected,omitempty"`
	Mode     string   `json:"mode,omitempty"`
	// Match is nil for a register without a rule.
	Match *bool `json:"match,omitempty"`
}

// VerifyConfig says whom to look at.
type VerifyConfig struct {
	peerdial.Target
	// PolicyJSON is the policy's text, for its rules to be shown.
	PolicyJSON []byte
	// ClusterID tells the owner's cluster from others in what is shown of the lock; nil if it is not known.
	ClusterID *[32]byte
}

// Verify runs one exchange. The error is nil whenever there is something to show, also if
// the machine is refused.
func Verify(ctx context.Context, cfg VerifyConfig) (*Sight, error) {
	s, err := peerdial.Open(cfg.Target)
	if err != nil {
		return nil, err
	}
	defer func() { _ = s.Close() }()
	out := &Sight{Endpoint: cfg.Addr, Purpose: string(cfg.Purpose), At: time.Now().UTC()}
	_, err = s.Exchange(ctx)
	if err != nil {
		if _, refused := errors.AsType[*attest.Refusal](err); !refused {
			return nil, fmt.Errorf("%s: %w", cfg.Addr, err)
		}
		p := Explain(err)
		out.Problem = &p
	}
	out.Accepted, out.Err = err == nil, err
	if j, ok := s.Judged(); ok {
		out.show(j, cfg)
	}
	return out, nil
}

func (s *Sight) show(j peerdial.Judgement, cfg VerifyConfig) {
	c := j.Claims
	digest, clock := c.EvidenceDigest(), c.Clock()
	s.Machine, s.Bank = c.Machine().String(), c.Bank().String()
	s.Lock = lockText(c, cfg.ClusterID)
	s.EKKind, s.AKName, s.EvidenceDigest = string(c.EKKind()), hex.EncodeToString(c.AKName()), hex.EncodeToString(digest[:])
	s.ResetCount, s.RestartCount = clock.ResetCount, clock.RestartCount
	s.FirmwareVersion = fmt.Sprintf("%#x", c.FirmwareVersion())
	s.PolicySerial, s.Warnings = j.Appraisal.PolicySerial, j.Appraisal.Warnings
	if r := c.EKRoot(); r != nil {
		s.Root = r.Subject.String()
	}
	switch on, known := c.SecureBoot(); {
	case !known:
		s.SecureBoot = "unknown"
	case on:
		s.SecureBoot = "on"
	default:
		s.SecureBoot = "off"
	}
	rules := policyfile.Rules(cfg.PolicyJSON)
	for i := range 16 {
		p := PCR{Index: i, Seen: hex.EncodeToString(c.PCR(i))}
		if r, ok := rules[i]; ok {
			match := false
			for _, v := range r.Values {
				match = match || v == p.Seen
			}
			p.Expected, p.Mode, p.Match = r.Values, r.Mode, &match
		}
		s.PCRs = append(s.PCRs, p)
	}
	for _, e := range c.Events() {
		s.Events = append(s.Events, fmt.Sprintf("PCR %2d  %s  %s", e.PCR, e.Type, e.Text))
	}
}

// lockText tells what PCR 15 says.
func lockText(c attest.Claims, clusterID *[32]byte) string {
	if attest.CheckLock(c, attest.Unlocked()) == nil {
		return "unlocked"
	}
	switch {
	case clusterID == nil:
		return "locked to a cluster"
	case attest.CheckLock(c, attest.LockedTo(*clusterID)) == nil:
		return "locked to this cluster"
	default:
		return "locked to another cluster"
	}
}
