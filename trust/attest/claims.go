package attest

import (
	"bytes"
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/internal/checked"
	"github.com/muster-k8s/muster/trust/internal/endorsement/platformak"
	"github.com/muster-k8s/muster/trust/internal/hwreport"
)

// Claims is the content of genuine evidence. Only a verifier of this module can make non-empty
// claims (A2). Every policy refuses the zero value.
type Claims struct {
	facts    *checked.Facts
	evidence *checked.Evidence // nil: not received over a connection
}

// NewClaims is for verifiers: code outside this module can pass only the zero argument, which
// returns empty claims.
func NewClaims(f checked.Sealed[checked.Facts]) Claims { return Claims{facts: checked.Open(f)} }

// From is for package atls: it returns the claims with the data that the connection adds about
// their evidence.
func (c Claims) From(e checked.Sealed[checked.Evidence]) Claims {
	if known := checked.Open(e); known != nil {
		c.evidence = known
	}
	return c
}

// valid reports whether a verifier made c.
func (c Claims) valid() bool { return c.facts != nil }

// Format returns the evidence's format.
func (c Claims) Format() attestv1.Format {
	if !c.valid() {
		return attestv1.Format_FORMAT_UNSPECIFIED
	}
	return c.facts.Format
}

// Bank returns the hash of the quoted PCR bank; 0 for empty claims.
func (c Claims) Bank() crypto.Hash {
	if !c.valid() {
		return 0
	}
	return c.facts.Bank
}

// PCR returns a copy of PCR i, 0 to 15, as long as the bank's digest; nil if i is out of range.
func (c Claims) PCR(i int) []byte {
	return bytes.Clone(c.pcr(i))
}

// pcr is PCR without a copy.
func (c Claims) pcr(i int) []byte {
	if !c.valid() || i < 0 || i >= len(c.facts.PCRs) {
		return nil
	}
	return c.facts.PCRs[i]
}

// Machine returns the machine's ID.
func (c Claims) Machine() MachineID {
	if !c.valid() {
		return MachineID{}
	}
	return c.facts.Machine
}

// EKPublic returns the endorsement key's SubjectPublicKeyInfo in DER; nil for empty claims, and
// if the machine is known by another key. Its SHA-256 is the machine's ID.
func (c Claims) EKPublic() []byte {
	if !c.valid() {
		return nil
	}
	return bytes.Clone(c.facts.EKPublic)
}

// Endorsement returns the name of the endorsement: why the attestation key is believed to be in a
// genuine TPM (docs/endorsements.md); empty for empty claims.
func (c Claims) Endorsement() string {
	if !c.valid() {
		return ""
	}
	return c.facts.EndorsedBy
}

// Root returns the root certificate to which the endorsed key's certificate chains; nil if it has no
// certificate.
func (c Claims) Root() *x509.Certificate {
	if !c.valid() {
		return nil
	}
	return c.facts.Root
}

// Chain returns the certificates from the endorsed key's to the root's, 2 to 5 of them. A key
// without a certificate is the only entry, without a serial number. It is nil for empty claims.
func (c Claims) Chain() []Certificate {
	if !c.valid() {
		return nil
	}
	return slices.Clone(c.facts.Chain)
}

// Instance is a virtual machine of a cloud.
type Instance = checked.Instance

// Instance returns the virtual machine that the endorsement names; zero if it names none.
func (c Claims) Instance() Instance {
	if !c.valid() {
		return Instance{}
	}
	return c.facts.Instance
}

// EKKind returns the kind of the endorsed key; empty for empty claims.
func (c Claims) EKKind() EKKind {
	if !c.valid() {
		return ""
	}
	return EKKind(c.facts.KeyKind)
}

// AKKind returns the kind of the attestation key; empty for empty claims.
func (c Claims) AKKind() AKKind {
	if !c.valid() {
		return ""
	}
	return AKKind(c.facts.AKKind)
}

// AKName returns the attestation key's name (TPM 2.0 Library, Part 1, section 16).
func (c Claims) AKName() []byte {
	if !c.valid() {
		return nil
	}
	return bytes.Clone(c.facts.AKName)
}

// Clock is TPMS_CLOCK_INFO (TPM 2.0 Library, Part 2, section 10.11.1).
type Clock struct {
	// ResetCount counts TPM resets, RestartCount restarts and resumes since the last one.
	ResetCount, RestartCount uint32
	// Clock is the time for which the TPM was powered, with a resolution of milliseconds.
	Clock time.Duration
	// Safe reports that the TPM never reported a higher value of Clock.
	Safe bool
}

// Clock returns the TPM's counters at the time of the quote.
func (c Claims) Clock() Clock {
	if !c.valid() {
		return Clock{}
	}
	f := c.facts
	return Clock{ResetCount: f.ResetCount, RestartCount: f.RestartCount, Clock: f.Clock, Safe: f.Safe}
}

// FirmwareVersion returns the TPM's firmware version as the quote states it.
func (c Claims) FirmwareVersion() uint64 {
	if !c.valid() {
		return 0
	}
	return c.facts.FirmwareVersion
}

// Firmware is the part of a replayed event log that precedes the boot loader.
type Firmware = checked.Firmware

var errNoEventLog = errors.New("the machine sent no event log")

// Firmware returns the firmware's part of the replayed event log, or the error why no part of it
// can be trusted.
func (c Claims) Firmware() (*Firmware, error) {
	known, err := c.firmware()
	if err != nil {
		return nil, err
	}
	fw := *known // a copy: claims do not change (A2)
	fw.Drivers, fw.DriverConfig, fw.Keys = slices.Clone(fw.Drivers), slices.Clone(fw.DriverConfig), maps.Clone(fw.Keys)
	return &fw, nil
}

// firmware is Firmware without a copy.
func (c Claims) firmware() (*Firmware, error) {
	switch {
	case !c.valid():
		return nil, errNoEventLog
	case c.facts.FirmwareErr != nil:
		return nil, c.facts.FirmwareErr
	case c.facts.Firmware == nil:
		return nil, errNoEventLog
	}
	return c.facts.Firmware, nil
}

const (
	// maxMeasured bounds the events of one PCR that a refusal lists.
	maxMeasured = 16
	// maxShown bounds the text of each of them, in bytes, so that long device paths do not hide the
	// events after them: an audit record has less than 1 KiB for all.
	maxShown = 48
)

// measured describes the event log's entries for a PCR.
func (c Claims) measured(pcr int) string {
	if !c.valid() {
		return ""
	}
	var all []string
	more := 0
	for _, e := range c.facts.Events { // without a copy: a log may have 1,024
		switch {
		case e.PCR != pcr:
		case len(all) == maxMeasured:
			more++
		default:
			all = append(all, e.Type+" "+shorten(strconv.QuoteToASCII(e.Text)))
		}
	}
	s := strings.Join(all, ", ")
	if more > 0 {
		s += fmt.Sprintf(" and %d more", more)
	}
	return s
}

// shorten leaves out the middle of a long text: paths differ at their ends.
func shorten(ascii string) string {
	const half = (maxShown - len("...")) / 2
	if len(ascii) <= maxShown {
		return ascii
	}
	return ascii[:half] + "..." + ascii[len(ascii)-half:]
}

// Event is one measurement of a replayed event log.
type Event = checked.Event

// Events returns the replayed event log if it was sent.
func (c Claims) Events() []Event {
	if !c.valid() {
		return nil
	}
	return append([]Event(nil), c.facts.Events...)
}

// HardwareKind returns the kind of the hardware report that the machine has sent, as policies name it;
// empty if it sent none. Nothing about the report is verified: [Policy.Appraise] does that.
func (c Claims) HardwareKind() string {
	if !c.valid() {
		return ""
	}
	kind, _ := hwreport.KindOf(c.facts.Hardware) // the verifier has checked the sizes
	return string(kind)
}

// hardware returns the hardware report with the value to which it must be bound.
func (c Claims) hardware() hwreport.Evidence {
	e := hwreport.Evidence{Report: c.facts.Hardware, Want: c.facts.HardwareData, Now: c.facts.At}
	if c.facts.EndorsedBy == platformak.Name {
		e.PlatformKey = c.facts.Chain[0].Key
	}
	return e
}

// EvidenceDigest returns the SHA-256 of the evidence's bytes as received, an encoded
// muster.attest.v1.Evidence; zero if it came over no connection.
func (c Claims) EvidenceDigest() [32]byte {
	if !c.valid() || c.evidence == nil {
		return [32]byte{}
	}
	return c.evidence.Digest
}

// SignedPolicy returns the policy that the peer presents, nil if none. It must not be used before
// [OpenPolicy] has checked its signature.
func (c Claims) SignedPolicy() *attestv1.SignedPolicy {
	if !c.valid() {
		return nil
	}
	return c.facts.SignedPolicy
}

// Peer is the machine at the other end of an attested connection.
type Peer struct {
	claims    Claims
	appraisal Appraisal
	session   checked.Session
}

// NewPeer is for package atls: code outside this module can pass only the zero value as last
// argument, which returns no peer.
func NewPeer(c Claims, a Appraisal, s checked.Sealed[checked.Session]) Peer {
	session := checked.Open(s)
	if session == nil {
		return Peer{}
	}
	return Peer{claims: c, appraisal: a, session: *session}
}

// Machine returns the peer's machine ID.
func (p Peer) Machine() MachineID { return p.claims.Machine() }

// Claims returns the claims of its evidence.
func (p Peer) Claims() Claims { return p.claims }

// Appraisal returns the rules that accepted it.
func (p Peer) Appraisal() Appraisal { return p.appraisal }

// Purpose returns the purpose of its evidence.
func (p Peer) Purpose() Purpose { return Purpose(p.session.Purpose) }

// VerifiedAt returns the time of the verdict. A caller that needs a recent verdict must check it.
func (p Peer) VerifiedAt() time.Time { return p.session.VerifiedAt }

// String returns a name of the peer for logs.
func (p Peer) String() string { return fmt.Sprintf("%s %s", p.Purpose(), p.Machine()) }

type peerKey struct{}

// WithPeer puts p into the context. Package atls does it for each attested connection.
func WithPeer(ctx context.Context, p Peer) context.Context {
	return context.WithValue(ctx, peerKey{}, p)
}

// PeerFrom returns the peer of the connection that a request came over (J1), and false if that peer
// is not attested.
func PeerFrom(ctx context.Context) (Peer, bool) {
	p, ok := ctx.Value(peerKey{}).(Peer)
	return p, ok && p.claims.valid()
}
