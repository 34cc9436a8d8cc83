package nitrotpm

import (
	"crypto/x509"
	"fmt"
	"slices"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/internal/checked"
	"github.com/muster-k8s/muster/trust/internal/endorsement"
)

// maxRoots is the limit of a policy's rules.
const maxRoots = 32

// root is an authority for documents, and the machines that it may endorse.
type root struct {
	cert     *x509.Certificate
	machines map[[32]byte]bool // empty: any
}

// rules implement [endorsement.Rules].
type rules struct{ roots []root }

// Parse implements [endorsement.Endorsement].
func (Endorsement) Parse(p *attestv1.Policy) (endorsement.Rules, error) {
	list := p.GetTpm2().GetNitroRoots()
	if len(list) == 0 {
		return nil, nil
	}
	if len(list) > maxRoots {
		return nil, endorsement.Invalid("tpm2.nitroRoots lists %d authorities, more than %d", len(list), maxRoots)
	}
	r := &rules{}
	for i, m := range list {
		field := fmt.Sprintf("tpm2.nitroRoots[%d]", i)
		c, err := endorsement.ParseAuthority(field+".pem", m.GetPem())
		if err != nil {
			return nil, err
		}
		machines, err := endorsement.ParseMachineIDs(field+".machineIds", m.GetMachineIds())
		if err != nil {
			return nil, err
		}
		if len(machines) == 0 && !p.GetInsecure().GetAnyMachine() { // A6
			return nil, endorsement.Invalid("%s: any customer can rent a machine of AWS, and documents name no account (A6): list machineIds, or set insecure.anyMachine", field)
		}
		r.roots = append(r.roots, root{c, machines})
	}
	return r, nil
}

// Authorities implements [endorsement.Rules].
func (r *rules) Authorities() (out []endorsement.Authority) {
	for i, c := range r.roots {
		out = append(out, endorsement.Authority{Field: fmt.Sprintf("tpm2.nitroRoots[%d]", i), Certificate: c.cert})
	}
	return out
}

func (c root) accepts(machine [32]byte) bool { return len(c.machines) == 0 || c.machines[machine] }

// CheckAuthority implements [endorsement.Rules].
func (r *rules) CheckAuthority(f *checked.Facts) error {
	if !slices.ContainsFunc(r.roots, func(c root) bool { return endorsement.SameAuthority(c.cert, f.Root) }) { // A6
		return endorsement.Refuse(endorsement.Untrusted, "the NitroTPM document is of %s, and leads to %s: no rule of tpm2.nitroRoots allows that", f.Instance, endorsement.RootName(f.Root))
	}
	return nil
}

// CheckMachine implements [endorsement.Rules].
func (r *rules) CheckMachine(f *checked.Facts) error {
	if !slices.ContainsFunc(r.roots, func(c root) bool { return endorsement.SameAuthority(c.cert, f.Root) && c.accepts(f.Machine) }) {
		return endorsement.Refuse(attestv1.Reason_REASON_POLICY_REFUSED, "machine %x, %s, is not listed in machineIds of tpm2.nitroRoots", f.Machine, f.Instance)
	}
	return nil
}

// MayAccept implements [endorsement.Rules].
func (r *rules) MayAccept(machine [32]byte) bool {
	return slices.ContainsFunc(r.roots, func(c root) bool { return c.accepts(machine) })
}

// Listed implements [endorsement.Rules].
func (r *rules) Listed(machine [32]byte) string {
	if i := slices.IndexFunc(r.roots, func(c root) bool { return c.machines[machine] }); i >= 0 {
		return fmt.Sprintf("tpm2.nitroRoots[%d].machineIds", i)
	}
	return ""
}

// Unlisted implements [endorsement.Rules].
func (r *rules) Unlisted(f *checked.Facts) string {
	i := slices.IndexFunc(r.roots, func(c root) bool { return endorsement.SameAuthority(c.cert, f.Root) })
	if i < 0 || r.CheckMachine(f) == nil {
		return ""
	}
	return fmt.Sprintf("tpm2.nitroRoots[%d].machineIds", i)
}

// OnlyECC implements [endorsement.Rules]: NitroTPM has P-256, so its machines have an ECC attestation
// key, by which joinservice knows their TPM beside a bare endorsement key (A8).
func (r *rules) OnlyECC() bool { return true }
