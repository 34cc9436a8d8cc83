package ekcert

import (
	"bytes"
	"crypto/x509"
	"fmt"
	"slices"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/internal/checked"
	"github.com/muster-k8s/muster/trust/internal/endorsement"
)

// anyKind is for roots that are not from a policy: see [AnyKey].
const anyKind endorsement.KeyKind = "any"

// root is a root for endorsement keys of one kind. One without a kind certifies none (A3).
type root struct {
	cert        *x509.Certificate
	kind        endorsement.KeyKind
	minFirmware uint64 // of the TPM; 0 for any
}

// rules implement [endorsement.Rules].
type rules struct {
	roots    []root
	machines map[[32]byte]bool // empty: any machine whose EK certificate chains to a root
}

// AnyKey returns rules that accept a key of any kind below the roots, for who does not care which
// machine it is.
func AnyKey(roots []*x509.Certificate) endorsement.Rules {
	r := &rules{}
	for _, c := range roots {
		r.roots = append(r.roots, root{cert: c, kind: anyKind})
	}
	return r
}

// Parse implements [endorsement.Endorsement].
func (Endorsement) Parse(p *attestv1.Policy) (endorsement.Rules, error) {
	t := p.GetTpm2()
	machines, err := endorsement.ParseMachineIDs("tpm2.machineIds", t.GetMachineIds())
	if err != nil {
		return nil, err
	}
	if len(t.GetEkRoots()) == 0 {
		if len(machines) > 0 {
			return nil, endorsement.Invalid("tpm2.machineIds lists machines, and tpm2.ekRoots is empty: list the authorities that certify their endorsement keys")
		}
		return nil, nil
	}
	r := &rules{machines: machines}
	allOperator := true
	for i, m := range t.GetEkRoots() {
		parsed, err := parseRoot(i, m)
		if err != nil {
			return nil, err
		}
		if err := r.consistent(i, parsed); err != nil {
			return nil, err
		}
		r.roots = append(r.roots, parsed)
		allOperator = allOperator && m.GetOperator()
	}
	if len(machines) == 0 && !allOperator && !p.GetInsecure().GetAnyMachine() { // A6
		return nil, endorsement.Invalid("tpm2: a TPM vendor's root also certifies an attacker's TPM (A6): list tpm2.machineIds, use roots with operator: true only, or set insecure.anyMachine")
	}
	return r, nil
}

func parseRoot(i int, m *attestv1.EkRoot) (root, error) {
	c, err := endorsement.ParseAuthority(fmt.Sprintf("tpm2.ekRoots[%d].pem", i), m.GetPem())
	if err != nil {
		return root{}, err
	}
	r := root{cert: c, kind: endorsement.KeyKind(m.GetKey())}
	if r.minFirmware, err = endorsement.ParseFirmwareVersion(m.GetMinFirmwareVersion()); err != nil {
		return root{}, endorsement.Invalid("tpm2.ekRoots[%d].minFirmwareVersion: %w", i, err)
	}
	if !slices.Contains(endorsement.KeyKinds, r.kind) {
		return root{}, endorsement.Invalid("tpm2.ekRoots[%d].key is %q: want the one kind of endorsement key that %q certifies, one of %q", i, m.GetKey(), c.Subject, endorsement.KeyKinds)
	}
	return r, nil
}

// consistent compares root i with those before it (A8).
func (r *rules) consistent(i int, c root) error {
	for j, other := range r.roots {
		if !bytes.Equal(other.cert.RawSubjectPublicKeyInfo, c.cert.RawSubjectPublicKeyInfo) {
			continue
		}
		if other.minFirmware != c.minFirmware {
			return endorsement.Invalid("tpm2.ekRoots[%d] has the public key of tpm2.ekRoots[%d], and another minFirmwareVersion: set the same value in both", i, j)
		}
		if other.kind != c.kind {
			return endorsement.Invalid("tpm2.ekRoots[%d] has the public key of tpm2.ekRoots[%d], with another kind: list an authority with one kind only, since each kind of key would make a TPM another machine", i, j)
		}
	}
	return nil
}

// Authorities implements [endorsement.Rules].
func (r *rules) Authorities() (out []endorsement.Authority) {
	for i, c := range r.roots {
		out = append(out, endorsement.Authority{Field: fmt.Sprintf("tpm2.ekRoots[%d]", i), Certificate: c.cert})
	}
	return out
}

// certifier returns the root that certifies the machine's endorsement key; -1 if there is none.
func (r *rules) certifier(f *checked.Facts) int {
	return slices.IndexFunc(r.roots, func(c root) bool {
		return endorsement.SameAuthority(c.cert, f.Root) && (c.kind == endorsement.KeyKind(f.KeyKind) || c.kind == anyKind)
	})
}

// CheckAuthority implements [endorsement.Rules].
func (r *rules) CheckAuthority(f *checked.Facts) error {
	if r.certifier(f) < 0 { // A8
		return endorsement.Refuse(endorsement.Untrusted, "the EK certificate, for a key of kind %s, leads to %s, which is no root of the policy for that kind", f.KeyKind, endorsement.RootName(f.Root))
	}
	return nil
}

// CheckMachine implements [endorsement.Rules].
func (r *rules) CheckMachine(f *checked.Facts) error {
	i := r.certifier(f)
	if i < 0 {
		return r.CheckAuthority(f)
	}
	if least := r.roots[i].minFirmware; f.FirmwareVersion < least {
		return endorsement.Refuse(attestv1.Reason_REASON_POLICY_REFUSED, "the TPM's firmware has version %s, and tpm2.ekRoots[%d].minFirmwareVersion is %s: update the firmware of the TPM", endorsement.FormatFirmwareVersion(f.FirmwareVersion), i, endorsement.FormatFirmwareVersion(least))
	}
	if !r.MayAccept(f.Machine) {
		return endorsement.Refuse(attestv1.Reason_REASON_POLICY_REFUSED, "machine %x is not listed in the policy", f.Machine)
	}
	return nil
}

// MayAccept implements [endorsement.Rules].
func (r *rules) MayAccept(machine [32]byte) bool {
	return len(r.machines) == 0 || r.machines[machine]
}

// Listed implements [endorsement.Rules].
func (r *rules) Listed(machine [32]byte) string {
	if r.machines[machine] {
		return "tpm2.machineIds"
	}
	return ""
}

// Unlisted implements [endorsement.Rules].
func (r *rules) Unlisted(f *checked.Facts) string {
	if i := r.certifier(f); i < 0 || f.FirmwareVersion < r.roots[i].minFirmware || r.MayAccept(f.Machine) {
		return ""
	}
	return "tpm2.machineIds"
}

// OnlyECC implements [endorsement.Rules].
func (r *rules) OnlyECC() bool {
	return slices.ContainsFunc(r.roots, func(c root) bool { return c.kind != endorsement.RSA2048 && c.kind != anyKind })
}
