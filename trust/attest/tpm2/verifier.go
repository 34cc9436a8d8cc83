package tpm2

import (
	"context"
	"crypto"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"time"

	gotpm "github.com/google/go-tpm/tpm2"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/hardware"
	"github.com/muster-k8s/muster/trust/attest/tpm2/eventlog"
	"github.com/muster-k8s/muster/trust/internal/checked"
	"github.com/muster-k8s/muster/trust/internal/endorsement"
	"github.com/muster-k8s/muster/trust/internal/endorsement/registry"
	"github.com/muster-k8s/muster/trust/tpm"
)

// VerifierConfig configures a Verifier. All fields except KnownPairs are required.
type VerifierConfig struct {
	// Roots returns the certificate authorities of all endorsements. It is called again for each
	// evidence, so that a changed policy takes effect at once. Without roots no evidence is genuine
	// (A3).
	Roots func() []*x509.Certificate
	// Now returns the time for certificates' validity and for the expiry of known pairs.
	Now func() time.Time
	// KnownPairs is how many pairs of EK and AK are remembered; 0 means 16,384, which takes about 3
	// MiB.
	KnownPairs int
}

// Verifier implements [attest.Verifier] for the format TPM2.
type Verifier struct {
	roots func() []*x509.Certificate
	now   func() time.Time
	known *pairs
	// open has the pairs of endorsements that any peer can make, so that such peers displace none of
	// the others.
	open *pairs
}

// openPairs bounds those pairs: about 200 KiB.
const openPairs = 1024

// NewVerifier returns a Verifier. The error names the part of cfg that is missing.
func NewVerifier(cfg VerifierConfig) (*Verifier, error) {
	if cfg.Roots == nil {
		return nil, errors.New("tpm2: NewVerifier: Roots is missing: without roots no evidence can be genuine")
	}
	if cfg.Now == nil {
		return nil, errors.New("tpm2: NewVerifier: Now is missing: use time.Now")
	}
	if cfg.KnownPairs < 0 {
		return nil, errors.New("tpm2: NewVerifier: KnownPairs is negative")
	}
	if cfg.KnownPairs == 0 {
		cfg.KnownPairs = 16384
	}
	return &Verifier{roots: cfg.Roots, now: cfg.Now, known: newPairs(cfg.KnownPairs), open: newPairs(min(openPairs, cfg.KnownPairs))}, nil
}

// Formats implements [attest.Verifier].
func (v *Verifier) Formats() []attestv1.Format {
	return []attestv1.Format{attestv1.Format_FORMAT_TPM2}
}

// Verify implements [attest.Verifier]. Refusals: EVIDENCE_MALFORMED, AK_TEMPLATE,
// SIGNATURE_INVALID, BINDING_MISMATCH, EK_UNTRUSTED, EVENTLOG_REPLAY, DEADLINE.
func (v *Verifier) Verify(ctx context.Context, ev *attestv1.Evidence, s attest.Statement, b attest.Binding) (attest.Pending, error) {
	if err := ctx.Err(); err != nil {
		return nil, refuse(attestv1.Reason_REASON_DEADLINE, "%w", err)
	}
	e := ev.GetTpm2()
	if ev.GetFormat() != attestv1.Format_FORMAT_TPM2 || e == nil {
		return nil, refuse(malformed, "format %s without its body", ev.GetFormat())
	}
	if err := checkSizes(e); err != nil {
		return nil, err
	}
	by, err := registry.Of(e)
	if err != nil {
		return nil, err
	}
	ak, err := ParseAttestationKey(e.GetAkPublic())
	if err != nil {
		return nil, err
	}
	siblings := make([]digest, len(e.GetPath()))
	for i, h := range e.GetPath() {
		siblings[i] = digest(h)
	}
	top, ok := rootFrom(leaf(s), e.GetLeafIndex(), siblings)
	if !ok {
		return nil, refuse(malformed, "no tree has leaf %d with a path of %d hashes", e.GetLeafIndex(), len(siblings))
	}
	q, err := VerifyQuote(ak, e, top) // A1: over the statement of this session
	if err != nil {
		return nil, err
	}
	endorsed, err := by.Verify(endorsement.Input{Evidence: e, AKName: ak.Name, AK: ak.Key, Signed: top, Roots: v.roots(), Now: v.now()})
	if err != nil {
		return nil, err
	}
	facts, err := v.facts(ev, ak, q, endorsed, top)
	if err != nil {
		return nil, err
	}
	p := &pending{verifier: v, facts: facts, binding: b, known: v.known}
	if endorsed.Activate == nil {
		return p, nil
	}
	if endorsed.Open {
		p.known = v.open
	}
	p.pair = pairOf(endorsed.Machine, ak.Name)
	if p.known.has(p.pair, v.now()) {
		return p, nil
	}
	return p, p.challengeFor(endorsed.Activate, ak)
}

// facts collects the checked values. It is the only function that makes [checked.Facts].
func (v *Verifier) facts(ev *attestv1.Evidence, ak AttestationKey, q *Quoted, endorsed endorsement.Result, top digest) (*checked.Facts, error) {
	bank := tpm.Bank(ev.GetTpm2().GetBank())
	hash, _ := bank.Hash() // checkSizes accepts known banks only
	f := &checked.Facts{
		Format:          attestv1.Format_FORMAT_TPM2,
		Bank:            hash,
		PCRs:            q.PCRs,
		Endorsement:     endorsed.Endorsement,
		AKName:          ak.Name,
		AKKind:          string(ak.kind()),
		ResetCount:      q.ResetCount,
		RestartCount:    q.RestartCount,
		Clock:           q.Clock,
		Safe:            q.Safe,
		FirmwareVersion: q.FirmwareVersion,
		Hardware:        ev.GetTpm2().GetHardware(),
		HardwareData:    hardware.NewReportData(ak.Name, top), // A1, A10: as fresh as the quote
		At:              v.now(),
		SignedPolicy:    ev.GetSignedPolicy(),
	}
	if events := ev.GetTpm2().GetEvents(); len(events) > 0 {
		log, err := eventlog.Unmarshal(events, bank)
		if err != nil {
			return nil, err
		}
		replayed, err := eventlog.Replay(log, q.PCRs)
		if err != nil {
			return nil, err
		}
		f.Events = shown(replayed.Events)
		fw, err := replayed.Firmware()
		if f.FirmwareErr = err; err == nil {
			f.Firmware = &checked.Firmware{Drivers: shown(fw.Drivers), DriverConfig: shown(fw.DriverConfig), SecureBoot: fw.SecureBoot, Keys: fw.Keys}
		}
	}
	return f, nil
}

func shown(events []eventlog.Event) (out []checked.Event) {
	for _, e := range events {
		out = append(out, checked.Event{PCR: e.PCR, Type: e.Type.String(), Digest: e.Digest, Text: e.Text})
	}
	return out
}

// pending is evidence whose quote is valid. It implements [attest.Pending].
type pending struct {
	verifier  *Verifier
	facts     *checked.Facts
	binding   attest.Binding
	known     *pairs
	pair      pair
	challenge *attestv1.Challenge
	secret    []byte
}

// challengeFor makes the credential that only the TPM with ek and ak can open (TPM2_MakeCredential,
// Part 1, section 24).
func (p *pending) challengeFor(ek crypto.PublicKey, ak AttestationKey) error {
	key, err := tpm.EncapsulationKey(ek)
	if err != nil {
		return refuse(badEK, "%w", err)
	}
	p.challenge, p.secret, err = newChallenge(key, ak.Name)
	return err
}

// newChallenge makes a credential for a fresh secret.
func newChallenge(ek gotpm.LabeledEncapsulationKey, akName []byte) (*attestv1.Challenge, []byte, error) {
	secret := make([]byte, sha256.Size)
	rand.Read(secret)
	blob, encrypted, err := gotpm.CreateCredential(rand.Reader, ek, akName, secret)
	if err != nil {
		return nil, nil, refuse(attestv1.Reason_REASON_INTERNAL, "make credential: %w", err)
	}
	return &attestv1.Challenge{CredentialBlob: blob, EncryptedSecret: encrypted}, secret, nil
}

// Challenge implements [attest.Pending].
func (p *pending) Challenge() *attestv1.Challenge { return p.challenge }

// Complete implements [attest.Pending]. The refusal is ACTIVATION_FAILED; after a refusal every
// further call is refused too.
func (p *pending) Complete(r *attestv1.Response) (attest.Claims, error) {
	if p.challenge == nil {
		if r != nil {
			return attest.Claims{}, refuse(attestv1.Reason_REASON_FRAME_INVALID, "a response without a challenge")
		}
		return attest.NewClaims(checked.Seal(*p.facts)), nil
	}
	secret := p.secret
	p.secret = nil
	if secret == nil {
		return attest.Claims{}, refuse(attestv1.Reason_REASON_ACTIVATION_FAILED, "the challenge was answered before")
	}
	if !hmac.Equal(ActivationMAC(secret, p.binding), r.GetMac()) {
		return attest.Claims{}, refuse(attestv1.Reason_REASON_ACTIVATION_FAILED, "the AK %x is not in the TPM of machine %s", p.facts.AKName, attest.MachineID(p.facts.Machine))
	}
	p.known.add(p.pair, p.verifier.now())
	return attest.NewClaims(checked.Seal(*p.facts)), nil
}

// ActivationMAC answers a challenge: HMAC-SHA256(secret, "muster-atls/1 activation" || 0x00 ||
// binding). It is bound to the session, and so useless in another one.
func ActivationMAC(secret []byte, b attest.Binding) []byte {
	m := hmac.New(sha256.New, secret)
	m.Write([]byte("muster-atls/1 activation\x00"))
	m.Write(b[:])
	return m.Sum(nil)
}
