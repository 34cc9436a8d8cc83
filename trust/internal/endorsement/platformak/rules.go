package platformak

import (
	"bytes"
	"crypto/x509"
	"fmt"
	"slices"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/internal/checked"
	"github.com/muster-k8s/muster/trust/internal/endorsement"
)

// Limits of a policy's rules.
const (
	maxRoots = 32
	maxNames = 256 // projects or zones of one root
)

// root is a root for platform keys of one kind. One without a kind certifies none (A3).
type root struct {
	cert            *x509.Certificate
	provider        string
	kind            endorsement.KeyKind
	projects, zones []string
	machines        map[[32]byte]bool // empty: any
}

// rules implement [endorsement.Rules].
type rules struct{ roots []root }

// Parse implements [endorsement.Endorsement].
func (Endorsement) Parse(p *attestv1.Policy) (endorsement.Rules, error) {
	list := p.GetTpm2().GetPlatformRoots()
	if len(list) == 0 {
		return nil, nil
	}
	if len(list) > maxRoots {
		return nil, endorsement.Invalid("tpm2.platformRoots lists %d authorities, more than %d", len(list), maxRoots)
	}
	r := &rules{}
	for i, m := range list {
		field := fmt.Sprintf("tpm2.platformRoots[%d]", i)
		c, err := parseRoot(field, m)
		if err != nil {
			return nil, err
		}
		if len(c.projects)+len(c.machines) == 0 && !p.GetInsecure().GetAnyMachine() { // A6
			return nil, endorsement.Invalid("%s: any customer can rent a machine of a cloud (A6): list projects (gcp) or machineIds, or set insecure.anyMachine", field)
		}
		for j, other := range r.roots {
			if bytes.Equal(other.cert.RawSubjectPublicKeyInfo, c.cert.RawSubjectPublicKeyInfo) && (other.kind != c.kind || other.provider != c.provider) { // A8
				return nil, endorsement.Invalid("%s has the public key of tpm2.platformRoots[%d], with another key or provider: each kind of key would make a machine another one", field, j)
			}
		}
		r.roots = append(r.roots, c)
	}
	return r, nil
}

func parseRoot(field string, m *attestv1.PlatformRoot) (root, error) {
	c, err := endorsement.ParseAuthority(field+".pem", m.GetPem())
	if err != nil {
		return root{}, err
	}
	kinds := map[string][]endorsement.KeyKind{GCP: {endorsement.P256, endorsement.RSA2048}, Azure: {endorsement.RSA2048}}[m.GetProvider()]
	if kinds == nil {
		return root{}, endorsement.Invalid("%s.provider is %q: want gcp or azure", field, m.GetProvider())
	}
	r := root{cert: c, provider: m.GetProvider(), kind: endorsement.KeyKind(m.GetKey()), projects: m.GetProjects(), zones: m.GetZones()}
	if !slices.Contains(kinds, r.kind) {
		return root{}, endorsement.Invalid("%s.key is %q: want the one kind of platform key, of %q", field, m.GetKey(), kinds)
	}
	for name, list := range map[string][]string{"projects": r.projects, "zones": r.zones} {
		if r.provider != GCP && len(list) > 0 {
			return root{}, endorsement.Invalid("%s.%s: certificates of %s name none, so the rule could not be checked", field, name, r.provider)
		}
		if len(list) > maxNames || slices.ContainsFunc(list, func(s string) bool { return !printable(s) }) {
			return root{}, endorsement.Invalid("%s.%s: want at most %d names of 1 to %d printable characters", field, name, maxNames, maxName)
		}
	}
	r.machines, err = endorsement.ParseMachineIDs(field+".machineIds", m.GetMachineIds())
	return r, err
}

// Authorities implements [endorsement.Rules].
func (r *rules) Authorities() (out []endorsement.Authority) {
	for i, c := range r.roots {
		out = append(out, endorsement.Authority{Field: fmt.Sprintf("tpm2.platformRoots[%d]", i), Certificate: c.cert})
	}
	return out
}

// covers reports whether the root certifies the machine's key, for an instance that it allows.
func (c root) covers(f *checked.Facts) bool {
	in := f.Instance
	return endorsement.SameAuthority(c.cert, f.Root) && c.kind == endorsement.KeyKind(f.KeyKind) && c.provider == in.Provider &&
		(len(c.projects) == 0 || slices.Contains(c.projects, in.Project)) &&
		(len(c.zones) == 0 || slices.Contains(c.zones, in.Zone))
}

// CheckAuthority implements [endorsement.Rules].
func (r *rules) CheckAuthority(f *checked.Facts) error {
	if !slices.ContainsFunc(r.roots, func(c root) bool { return c.covers(f) }) { // A6, A8
		return endorsement.Refuse(endorsement.Untrusted, "the platform key, of kind %s, is of %s, and leads to %s: no rule of tpm2.platformRoots allows that", f.KeyKind, f.Instance, endorsement.RootName(f.Root))
	}
	return nil
}

// CheckMachine implements [endorsement.Rules].
func (r *rules) CheckMachine(f *checked.Facts) error {
	if !slices.ContainsFunc(r.roots, func(c root) bool { return c.covers(f) && c.accepts(f.Machine) }) {
		return endorsement.Refuse(attestv1.Reason_REASON_POLICY_REFUSED, "machine %x, %s, is not listed in machineIds of tpm2.platformRoots", f.Machine, f.Instance)
	}
	return nil
}

func (c root) accepts(machine [32]byte) bool { return len(c.machines) == 0 || c.machines[machine] }

// MayAccept implements [endorsement.Rules].
func (r *rules) MayAccept(machine [32]byte) bool {
	return slices.ContainsFunc(r.roots, func(c root) bool { return c.accepts(machine) })
}

// Listed implements [endorsement.Rules].
func (r *rules) Listed(machine [32]byte) string {
	if i := slices.IndexFunc(r.roots, func(c root) bool { return c.machines[machine] }); i >= 0 {
		return fmt.Sprintf("tpm2.platformRoots[%d].machineIds", i)
	}
	return ""
}

// Unlisted implements [endorsement.Rules].
func (r *rules) Unlisted(f *checked.Facts) string {
	i := slices.IndexFunc(r.roots, func(c root) bool { return c.covers(f) })
	if i < 0 || r.CheckMachine(f) == nil {
		return ""
	}
	return fmt.Sprintf("tpm2.platformRoots[%d].machineIds", i)
}

// OnlyECC implements [endorsement.Rules]: the virtual TPMs of these clouds have P-256, so their machines
// have an ECC attestation key (A8).
func (r *rules) OnlyECC() bool { return true }
