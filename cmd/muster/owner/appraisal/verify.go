// Package appraisal verifies machines from the owner's workstation, and describes what they booted.
//
// The owner's program appraises, and does not attest. It sends no secret before it has accepted the machine at the other end
// of the same connection (A6).
package appraisal

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/muster-k8s/muster/cmd/muster/owner/peerdial"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/trust/attest"
)

// Report is the evidence of a machine in one exchange, and the appraisal by a policy.
type Report struct {
	Endpoint string `json:"endpoint"`
	Purpose  string `json:"purpose"`
	// Node is the node that was verified by an order. Record is the cluster's record of it, which is unverified, if that was not possible.
	Node   string  `json:"node,omitempty"`
	Record *Record `json:"clusterRecord,omitempty"`
	// Disk is the UUID of the node's state disk, also if only the cluster's record names it.
	Disk string `json:"recordedDisk,omitempty"`
	// Accepted is the verdict. Problem is the reason of a refusal.
	Accepted bool             `json:"accepted"`
	Problem  *problem.Problem `json:"problem,omitempty"`
	// Err is the refusal itself; nil if the machine was accepted.
	Err error `json:"-"`
	// The following fields are empty if the evidence was not genuine: such evidence is not shown.
	Machine string `json:"machine,omitempty"`
	Lock    string `json:"lock,omitempty"`
	Bank    string `json:"bank,omitempty"`
	PCRs    []PCR  `json:"pcrs,omitempty"`
	Root    string `json:"ekRoot,omitempty"`
	// Endorsement names the proof that the attestation key is in a genuine TPM.
	Endorsement string `json:"endorsement,omitempty"`
	// Instance is the virtual machine that it names; empty if it names none.
	Instance        string `json:"instance,omitempty"`
	EKKind          string `json:"ekKind,omitempty"`
	AKName          string `json:"akName,omitempty"`
	ResetCount      uint32 `json:"resetCount,omitempty"`
	RestartCount    uint32 `json:"restartCount,omitempty"`
	FirmwareVersion string `json:"firmwareVersion,omitempty"`
	// Chain are the certificates from the endorsement key's to the root's, as tpm2.revoked of a policy names them.
	Chain []EKCertificate `json:"ekChain,omitempty"`
	// Image and Class are the names, in the policy, of the measured image and class, or of the closest ones; Firmware
	// describes the measurements of its firmware.
	Image          string   `json:"image,omitempty"`
	Class          string   `json:"class,omitempty"`
	Firmware       []string `json:"firmware,omitempty"`
	SecureBoot     string   `json:"secureBoot,omitempty"`
	EvidenceDigest string   `json:"evidenceDigest,omitempty"`
	PolicySerial   uint64   `json:"policySerial,omitempty"`
	// Hardware describes the hardware report, also a genuine one that the rules refuse.
	Hardware string    `json:"hardware,omitempty"`
	Events   []string  `json:"events,omitempty"`
	At       time.Time `json:"time"`

	claims attest.Claims
}

// EKCertificate is one certificate of an endorsement key's chain.
type EKCertificate struct {
	Subject string `json:"subject"`
	// Key is SHA-256 of its SubjectPublicKeyInfo, Serial its serial number, both in hexadecimal digits.
	Key    string `json:"key"`
	Serial string `json:"serial"`
}

// PCR is one register with the policy's expectation.
type PCR struct {
	Index    int    `json:"index"`
	Seen     string `json:"seen"`
	Expected string `json:"expected,omitempty"`
	// Match is nil for a register that the policy does not check.
	Match *bool `json:"match,omitempty"`
	// Why describes the mismatch, if the event log shows it.
	Why string `json:"why,omitempty"`
}

// VerifyConfig configures [Look] and [Verify].
type VerifyConfig struct {
	peerdial.Target
	// ClusterID identifies the owner's cluster in the text about the lock; nil if it is not known.
	ClusterID *[32]byte
}

// Look runs one exchange, and returns the machine's evidence. An error means that it was refused.
func Look(ctx context.Context, cfg VerifyConfig) (attest.Claims, *Report, error) {
	s, j, err := look(ctx, cfg)
	switch {
	case err != nil:
		return attest.Claims{}, nil, err
	case s.Err != nil:
		return attest.Claims{}, nil, s.Err
	}
	return j.Claims, s, nil
}

// Verify runs one exchange. If there is a report to show, the error is nil, also if the machine is refused.
func Verify(ctx context.Context, cfg VerifyConfig) (*Report, error) {
	s, _, err := look(ctx, cfg)
	return s, err
}

func look(ctx context.Context, cfg VerifyConfig) (*Report, peerdial.Result, error) {
	s, err := peerdial.Open(cfg.Target)
	if err != nil {
		return nil, peerdial.Result{}, err
	}
	defer func() { _ = s.Close() }()
	out := &Report{Endpoint: cfg.Addr, Purpose: string(cfg.Purpose), At: time.Now().UTC()}
	_, err = s.Exchange(ctx)
	if err != nil {
		if _, refused := errors.AsType[*attest.Refusal](err); !refused {
			return nil, peerdial.Result{}, fmt.Errorf("%s: %w", cfg.Addr, s.Unanswered(err))
		}
		p := problem.Explain(err)
		out.Problem = &p
	}
	out.Accepted, out.Err = err == nil, err
	j, ok := s.Result()
	if ok {
		out.Show(j, cfg)
	}
	return out, j, nil
}

// Show copies the result of an appraisal.
func (s *Report) Show(j peerdial.Result, cfg VerifyConfig) {
	c := j.Claims
	s.claims = c
	digest, clock := c.EvidenceDigest(), c.Clock()
	s.Machine, s.Bank = c.Machine().String(), c.Bank().String()
	s.Endorsement = c.Endorsement()
	if i := c.Instance(); i.Provider != "" {
		s.Instance = i.String()
	}
	s.Lock = lockText(c, cfg.ClusterID)
	s.EKKind, s.AKName, s.EvidenceDigest = string(c.EKKind()), hex.EncodeToString(c.AKName()), hex.EncodeToString(digest[:])
	s.ResetCount, s.RestartCount = clock.ResetCount, clock.RestartCount
	s.FirmwareVersion = attest.FormatFirmwareVersion(c.FirmwareVersion())
	for _, e := range c.Chain() {
		s.Chain = append(s.Chain, EKCertificate{Subject: e.Subject, Key: hex.EncodeToString(e.Key[:]), Serial: e.Serial})
	}
	s.PolicySerial = j.Appraisal.PolicySerial
	refused, hardware := errors.AsType[*attest.HardwareError](j.Err)
	switch kind := c.HardwareKind(); {
	case kind == "":
	case hardware && refused.Report != "":
		s.Hardware = kind + ", genuine, not accepted: " + refused.Report
	case j.Appraisal.Hardware != "":
		s.Hardware = kind + ", accepted: " + j.Appraisal.Hardware
	case j.Err == nil:
		s.Hardware = kind + ", not verified: the policy has no rules for it"
	default:
		s.Hardware = kind + ", not accepted"
	}
	if r := c.Root(); r != nil {
		s.Root = r.Subject.String()
	}
	s.firmware(c)
	var differs []attest.Mismatch
	expected := map[int][]byte{}
	for _, cmp := range cfg.Policy.Compare(c) {
		if cmp.Kind == "image" {
			s.Image = cmp.Name
		} else {
			s.Class = cmp.Name
		}
		maps.Copy(expected, cmp.Values)
		differs = append(differs, cmp.Mismatches...)
	}
	for i := range 16 {
		p := PCR{Index: i, Seen: hex.EncodeToString(c.PCR(i)), Expected: hex.EncodeToString(expected[i])}
		if expected[i] != nil {
			p.Match = new(bool)
			*p.Match = p.Seen == p.Expected
		}
		for _, m := range differs {
			if m.PCR != i {
				continue
			}
			p.Match = new(bool)
			if m.Why != "" && p.Why != "" {
				p.Why += "; "
			}
			p.Why += m.Why
		}
		s.PCRs = append(s.PCRs, p)
	}
	for _, e := range c.Events() {
		s.Events = append(s.Events, fmt.Sprintf("PCR %2d  %s  %s", e.PCR, e.Type, e.Text))
	}
}

// firmware describes the events in the log from before the boot loader.
func (s *Report) firmware(c attest.Claims) {
	s.SecureBoot = "unknown"
	fw, err := c.Firmware()
	if err != nil {
		s.Firmware = append(s.Firmware, fmt.Sprintf("nothing is known about it: %v", err))
		return
	}
	s.SecureBoot = "off"
	if fw.SecureBoot {
		s.SecureBoot = "on"
	}
	for _, e := range c.Events() {
		if e.PCR == 0 && e.Type == "EV_S_CRTM_VERSION" {
			s.Firmware = append(s.Firmware, fmt.Sprintf("PCR 0  version %s (by the log)", e.Text))
		}
	}
	for _, e := range slices.Concat(fw.Drivers, fw.DriverConfig) {
		s.Firmware = append(s.Firmware, fmt.Sprintf("PCR %d  %s %q, digest %x", e.PCR, e.Type, e.Text, e.Digest))
	}
	if len(fw.Drivers) == 0 {
		s.Firmware = append(s.Firmware, "PCR 2  no drivers from outside the firmware")
	}
	for _, name := range []string{"PK", "KEK", "db", "dbx"} {
		s.Firmware = append(s.Firmware, fmt.Sprintf("PCR 7  %s, digest %x", name, fw.Keys[name]))
	}
}

// lockText describes the value of PCR 15.
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

// Refused returns the report with the reason of a refusal.
func (s *Report) Refused(err error) *Report {
	p := problem.Explain(err)
	s.Err, s.Problem = err, &p
	return s
}
