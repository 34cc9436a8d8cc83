package attest

import (
	"context"
	"crypto"
	"crypto/ed25519"
	_ "crypto/sha256" // the bank sha256
	_ "crypto/sha512" // the banks sha384 and sha512
	"crypto/x509"
	"maps"
	"net/netip"
	"slices"

	"google.golang.org/protobuf/encoding/protojson"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/internal/endorsement"
	"github.com/muster-k8s/muster/trust/internal/endorsement/registry"
	"github.com/muster-k8s/muster/trust/internal/hwreport"
)

// MaxPolicySize is the limit of a policy's JSON, in bytes.
const MaxPolicySize = 256 << 10

// MaxControlPlanes is the largest number of control planes in a policy.
const MaxControlPlanes = 64

// Banks lists the PCR banks that a policy may name.
var Banks = map[string]crypto.Hash{
	"sha256": crypto.SHA256,
	"sha384": crypto.SHA384,
	"sha512": crypto.SHA512,
}

// Policy decides which claims are acceptable. It is immutable. The zero value accepts nothing (A3).
type Policy struct {
	message     *attestv1.Policy
	bank        crypto.Hash
	rules       registry.Rules // of the endorsements
	hardware    hwreport.Rules // of hardware reports
	servers     []MachineID    // control planes; empty if there is none
	revoked     revoked
	images      []boot
	classes     []boot
	anyFirmware bool // a machine may also match no class
	nodeCIDRs   []netip.Prefix
	acceptsTPM  bool
	signer      ed25519.PublicKey // see Signer
}

// Roles that a policy may list.
const (
	RoleWorker       = "worker"
	RoleControlPlane = "control-plane"
)

// ParsePolicy reads a policy in protobuf's JSON mapping. It refuses unknown fields, missing rules
// and contradictions with POLICY_INVALID.
func ParsePolicy(json []byte) (*Policy, error) { return parsePolicy(json, hwreport.RealVendors()) }

func parsePolicy(json []byte, vendors hwreport.Vendors) (*Policy, error) {
	if len(json) > MaxPolicySize {
		return nil, invalid("it has %d bytes, more than %d", len(json), MaxPolicySize)
	}
	m := &attestv1.Policy{}
	if err := protojson.Unmarshal(json, m); err != nil {
		return nil, invalid("%w", err)
	}
	if m.GetVersion() != 2 {
		return nil, invalid("version is %d, this program reads version 2: make a new one by muster policy from-measurements", m.GetVersion())
	}
	if m.GetSerial() == 0 {
		return nil, invalid("serial is missing: set it to 1, and increment it with every change")
	}
	p := &Policy{message: m}
	for _, r := range m.GetRoles() {
		if r != RoleWorker && r != RoleControlPlane {
			return nil, invalid("role %q: want %q or %q", r, RoleWorker, RoleControlPlane)
		}
	}
	for _, s := range m.GetNodeCidrs() {
		c, err := netip.ParsePrefix(s)
		if err != nil || c != c.Masked() {
			return nil, invalid("nodeCidrs: %q is not a network like 10.0.0.0/16", s)
		}
		p.nodeCIDRs = append(p.nodeCIDRs, c)
	}
	if err := p.parseControlPlanes(m.GetControlPlanes()); err != nil {
		return nil, err
	}
	var err error
	if p.hardware, err = hwreport.Parse(m.GetHardware(), vendors); err != nil {
		return nil, err
	}
	if m.GetTpm2() == nil {
		return p, nil
	}
	p.acceptsTPM = true
	return p, p.parseTPM(m.GetTpm2())
}

func (p *Policy) parseControlPlanes(list []string) error {
	if len(list) > MaxControlPlanes {
		return invalid("controlPlanes lists %d machines, more than %d", len(list), MaxControlPlanes)
	}
	for _, s := range list {
		id, err := ParseMachineID(s)
		if err != nil {
			return invalid("controlPlanes: %w", err)
		}
		if slices.Contains(p.servers, id) {
			return invalid("controlPlanes lists machine %s twice", id)
		}
		p.servers = append(p.servers, id)
	}
	return nil
}

func (p *Policy) parseTPM(t *attestv1.Tpm2Policy) error {
	var ok bool
	if p.bank, ok = Banks[t.GetBank()]; !ok {
		return invalid("tpm2.bank is %q: want sha256, sha384 or sha512", t.GetBank())
	}
	var err error
	if p.rules, err = registry.Parse(p.message); err != nil {
		return err
	}
	if err := p.parseRevoked(t.GetRevoked()); err != nil {
		return err
	}
	if err := p.parseImages(t.GetImages()); err != nil {
		return err
	}
	return p.parseClasses(t.GetClasses())
}

func invalid(format string, args ...any) error {
	return Refuse(attestv1.Reason_REASON_POLICY_INVALID, "policy: "+format, args...)
}

func policySigningInput(json []byte) []byte {
	return append([]byte("muster policy v1\x00"), json...)
}

// candidateDomain is the prefix of a candidate's signed text, so that a candidate's signature can't put the policy in force.
const candidateDomain = "muster policy candidate v1\x00"

// SignCandidate signs a policy by which a cluster appraises its nodes without any consequence. [OpenPolicy] refuses the result.
func SignCandidate(owner ed25519.PrivateKey, json []byte) *attestv1.SignedPolicy {
	return &attestv1.SignedPolicy{Policy: json, Signature: ed25519.Sign(owner, append([]byte(candidateDomain), json...))}
}

// OpenCandidate is [OpenPolicy] for what [SignCandidate] has signed.
func OpenCandidate(owner OwnerKeys, s *attestv1.SignedPolicy) (*Policy, error) {
	return open(owner, s, append([]byte(candidateDomain), s.GetPolicy()...))
}

// SignPolicy signs the policy's bytes. It does not check their content.
func SignPolicy(owner ed25519.PrivateKey, json []byte) *attestv1.SignedPolicy {
	return &attestv1.SignedPolicy{Policy: json, Signature: ed25519.Sign(owner, policySigningInput(json))}
}

// OpenPolicy checks the signature, which must be of one of the owner's keys, and parses what was signed, in that order. It
// refuses with POLICY_SIGNATURE or POLICY_INVALID.
func OpenPolicy(owner OwnerKeys, s *attestv1.SignedPolicy) (*Policy, error) {
	return open(owner, s, policySigningInput(s.GetPolicy()))
}

// OpenSerial checks the signature as [OpenPolicy] does, and returns the policy's serial. It does not check the rest: a policy that another version of this
// program has accepted, and this one refuses, still says which serials are older (B7). It refuses with POLICY_SIGNATURE, or with POLICY_INVALID if there is
// no serial.
func OpenSerial(owner OwnerKeys, s *attestv1.SignedPolicy) (uint64, error) {
	if _, err := signerOf(owner, s, policySigningInput(s.GetPolicy())); err != nil {
		return 0, err
	}
	m := &attestv1.Policy{}
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(s.GetPolicy(), m); err != nil {
		return 0, invalid("%w", err)
	}
	if m.GetSerial() == 0 {
		return 0, invalid("serial is missing")
	}
	return m.GetSerial(), nil
}

// signerOf returns the owner's key that signed input.
func signerOf(owner OwnerKeys, s *attestv1.SignedPolicy, input []byte) (ed25519.PublicKey, error) {
	if len(owner) == 0 {
		return nil, Refuse(attestv1.Reason_REASON_POLICY_SIGNATURE, "no public key of the owner is known here")
	}
	if len(s.GetPolicy()) > MaxPolicySize {
		return nil, invalid("it has %d bytes, more than %d", len(s.GetPolicy()), MaxPolicySize)
	}
	signer := owner.Signer(input, s.GetSignature())
	if signer == nil {
		return nil, Refuse(attestv1.Reason_REASON_POLICY_SIGNATURE, "the policy is not signed by a key of the owner")
	}
	return signer, nil
}

func open(owner OwnerKeys, s *attestv1.SignedPolicy, input []byte) (*Policy, error) {
	signer, err := signerOf(owner, s, input)
	if err != nil {
		return nil, err
	}
	p, err := ParsePolicy(s.GetPolicy())
	if err != nil {
		return nil, err
	}
	p.signer = signer
	return p, nil
}

// Signer returns the owner's key that signed the policy; nil if [OpenPolicy] did not return it.
func (p *Policy) Signer() ed25519.PublicKey { return p.signer }

// Serial returns the owner's count of changes.
func (p *Policy) Serial() uint64 { return p.message.GetSerial() }

// Authority is a certificate authority that a policy lists, and the field that lists it.
type Authority = endorsement.Authority

// Authorities lists the certificate authorities of all endorsements.
func (p *Policy) Authorities() (out []Authority) {
	for _, name := range slices.Sorted(maps.Keys(p.rules)) {
		out = append(out, p.rules[name].Authorities()...)
	}
	return out
}

// Roots lists the certificates of [Policy.Authorities], for verifiers.
func (p *Policy) Roots() (out []*x509.Certificate) {
	for _, a := range p.Authorities() {
		out = append(out, a.Certificate)
	}
	return out
}

// Bank returns the PCR bank that the policy appraises; 0 if the policy accepts no TPM.
func (p *Policy) Bank() crypto.Hash { return p.bank }

// AllowsRole reports whether machines may have the role.
func (p *Policy) AllowsRole(role string) bool { return slices.Contains(p.message.GetRoles(), role) }

// AllowsAddress reports whether a node may have the address.
func (p *Policy) AllowsAddress(a netip.Addr) bool {
	return slices.ContainsFunc(p.nodeCIDRs, func(c netip.Prefix) bool { return c.Contains(a.Unmap()) })
}

// AllowsPlainState reports whether machines may keep their state on a disk that is not
// encrypted.
func (p *Policy) AllowsPlainState() bool { return p.message.GetInsecure().GetAllowPlainState() }

// Insecure lists the insecure switches that are on, by their name in the policy.
func (p *Policy) Insecure() []string {
	var on []string
	s := p.message.GetInsecure()
	if s.GetAnyMachine() {
		on = append(on, "anyMachine")
	}
	if s.GetAllowSelfAsserted() {
		on = append(on, "allowSelfAsserted")
	}
	if s.GetAllowPlainState() {
		on = append(on, "allowPlainState")
	}
	if s.GetAnyFirmware() {
		on = append(on, "anyFirmware")
	}
	return on
}

// Appraise checks that the claims are acceptable and that the node lock is in one of the states.
// Refusals: FORMAT_NONE, EK_UNTRUSTED, POLICY_REFUSED (with a [MismatchError] if PCRs differ),
// LOCK_FOREIGN; for the hardware report, as a [HardwareError], EVIDENCE_MALFORMED, BINDING_MISMATCH,
// SIGNATURE_INVALID, HARDWARE_UNTRUSTED, HARDWARE_COLLATERAL, HARDWARE_TCB.
func (p *Policy) Appraise(c Claims, locks ...Lock) (Appraisal, error) {
	a, err := p.appraiseMachine(c, locks)
	if err != nil {
		return Appraisal{}, err
	}
	if a.Hardware, err = p.hardware.Check(c.hardware()); err != nil { // A10; last: it costs most
		return Appraisal{}, &HardwareError{Report: a.Hardware, err: err}
	}
	return a, nil
}

// A HardwareError is the refusal of a machine for its hardware report alone. All else of its evidence
// was accepted, so it is that machine's.
type HardwareError struct {
	// Report describes the report, as [Appraisal] does, if it is genuine and bound to this session, and
	// only the rules refuse it; empty otherwise.
	Report string
	err    error
}

// Error implements error.
func (e *HardwareError) Error() string { return e.err.Error() }

// Unwrap returns the refusal.
func (e *HardwareError) Unwrap() error { return e.err }

// CheckHardware appraises the hardware report alone. Use it only for a machine that is accepted
// otherwise ([Policy.AppraiseAsListed]): it costs most (A10). Refusals are those of [Policy.Appraise]
// for the report.
func (p *Policy) CheckHardware(c Claims) error {
	if !c.valid() || p == nil {
		return Refuse(attestv1.Reason_REASON_FORMAT_NONE, "there are no claims to appraise, or no policy")
	}
	if report, err := p.hardware.Check(c.hardware()); err != nil {
		return &HardwareError{Report: report, err: err}
	}
	return nil
}

// appraiseMachine appraises everything but the hardware report.
func (p *Policy) appraiseMachine(c Claims, locks []Lock) (Appraisal, error) {
	if !c.valid() || p == nil || !p.acceptsTPM || c.Format() != attestv1.Format_FORMAT_TPM2 {
		return Appraisal{}, Refuse(attestv1.Reason_REASON_FORMAT_NONE, "the policy accepts no evidence of format %s", c.Format())
	}
	rules := p.rules[c.Endorsement()]
	if rules == nil { // A3
		return Appraisal{}, Refuse(attestv1.Reason_REASON_EK_UNTRUSTED, "the policy has no rules for the endorsement %s, by which machine %s is known", c.Endorsement(), c.Machine())
	}
	if err := rules.CheckAuthority(c.facts); err != nil { // A8
		return Appraisal{}, err
	}
	if c.AKKind() != AKECC && p.OnlyECC() { // A8
		return Appraisal{}, Refuse(attestv1.Reason_REASON_EK_UNTRUSTED, "the attestation key is RSA, and the policy lists ECC keys: with another key, a TPM that is already enrolled could enroll as a second machine")
	}
	if err := p.revoked.check(c.Machine(), c.Chain()); err != nil {
		return Appraisal{}, err
	}
	if err := rules.CheckMachine(c.facts); err != nil {
		return Appraisal{}, err
	}
	return p.appraiseBoot(c, locks)
}

// appraiseBoot appraises what the machine booted, and its node lock.
func (p *Policy) appraiseBoot(c Claims, locks []Lock) (Appraisal, error) {
	if c.Bank() != p.bank {
		return Appraisal{}, Refuse(attestv1.Reason_REASON_POLICY_REFUSED, "bank %s was quoted, the policy has values for bank %s", c.Bank(), p.bank)
	}
	a := Appraisal{PolicySerial: p.Serial()}
	var bad *MismatchError
	if a.Image, bad = fit("image", p.images, c); bad != nil {
		return Appraisal{}, &Refusal{Reason: attestv1.Reason_REASON_POLICY_REFUSED, Err: bad}
	}
	if a.Class, bad = fit("class", p.classes, c); bad != nil && !p.anyFirmware { // A9
		return Appraisal{}, &Refusal{Reason: attestv1.Reason_REASON_POLICY_REFUSED, Err: bad}
	}
	if err := CheckLock(c, locks...); err != nil {
		return Appraisal{}, err
	}
	return a, nil
}

// AppraiseAsListed tells an owner whether listing a machine is sufficient: it appraises like [Policy.Appraise], as if the
// policy listed the machine. list is the field that lacks the machine, such as "tpm2.bareMachineIds"; empty if the policy
// already lists it, demands no list, or could not accept it with one. The error is the remaining refusal. It accepts no
// machine. It does not verify the hardware report: an unlisted machine may be any program, and may not cause that work
// (A10).
func (p *Policy) AppraiseAsListed(c Claims, locks ...Lock) (list string, err error) {
	if c.valid() && p != nil && p.acceptsTPM && c.Format() == attestv1.Format_FORMAT_TPM2 {
		if rules := p.rules.Unlisted(c.Endorsement()); rules != nil && (c.AKKind() == AKECC || !rules.OnlyECC() && !p.OnlyECC()) {
			list = rules.Unlisted(c.facts)
		}
	}
	if list == "" {
		_, err := p.appraiseMachine(c, locks)
		return "", err
	}
	if err := p.revoked.check(c.Machine(), c.Chain()); err != nil {
		return "", err
	}
	_, err = p.appraiseBoot(c, locks)
	return list, err
}

// OnlyECC reports whether attestation keys must be ECC keys (A8).
func (p *Policy) OnlyECC() bool {
	for _, r := range p.rules {
		if r.OnlyECC() {
			return true
		}
	}
	return false
}

// AppraiseServer is [Policy.Appraise] for the machine of a joinservice or kms, which the policy
// must also list as a control plane (A7). It refuses a machine that is not listed with
// SERVER_NOT_LISTED.
func (p *Policy) AppraiseServer(c Claims, locks ...Lock) (Appraisal, error) {
	a, err := p.Appraise(c, locks...)
	if err != nil {
		return Appraisal{}, err
	}
	if err := p.MayServe(c.Machine()); err != nil { // A7
		return Appraisal{}, err
	}
	return a, nil
}

// MayServe returns nil if the policy lists the machine as a control plane, otherwise a refusal with
// SERVER_NOT_LISTED (A7).
func (p *Policy) MayServe(m MachineID) error {
	if p == nil || !slices.Contains(p.servers, m) {
		return Refuse(attestv1.Reason_REASON_SERVER_NOT_LISTED, "the policy does not list machine %s in controlPlanes", m)
	}
	return nil
}

// ControlPlanes returns the machines that may serve joinservice and kms, in the policy's order.
func (p *Policy) ControlPlanes() []MachineID { return slices.Clone(p.servers) }

// For returns an Appraiser that uses [Policy.Appraise] and expects one of the lock states.
func (p *Policy) For(locks ...Lock) Appraiser { return policyAppraiser{p.Appraise, locks} }

// ForServer returns an Appraiser that uses [Policy.AppraiseServer] and expects one of the lock
// states.
func (p *Policy) ForServer(locks ...Lock) Appraiser { return policyAppraiser{p.AppraiseServer, locks} }

type policyAppraiser struct {
	appraise func(Claims, ...Lock) (Appraisal, error)
	locks    []Lock
}

func (a policyAppraiser) Appraise(_ context.Context, c Claims) (Appraisal, error) {
	return a.appraise(c, a.locks...)
}
