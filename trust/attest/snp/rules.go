package snp

import (
	"bytes"
	"slices"

	"github.com/muster-k8s/muster/trust/attest/hardware"
)

// Rules decide which reports are acceptable. The zero value accepts none (A3).
type Rules struct {
	// MinTCB has the lowest TCB of each accepted product. A product that is not listed is refused.
	MinTCB map[Product]TCB
	// Keys lists the accepted kinds of keys.
	Keys []Key
	// Providers lists the cloud providers whose VLEK is accepted, as in CSP_ID:
	// "CN=cc-us-east-2.amazonaws.com".
	Providers []string
	// Chips lists the accepted chips, for VCEKs. AnyChip accepts all, also those that an attacker
	// has bought.
	Chips   [][]byte
	AnyChip bool
	// Measurements lists the accepted launch digests, IDKeys the digests of the keys that may have
	// signed the guest's ID block: the firmware launches a guest with such a block only with the
	// measurement in it. AnyMeasurement accepts all: then a report shows only that some guest runs on
	// such a processor.
	Measurements, IDKeys [][48]byte
	AnyMeasurement       bool
	// MaxVMPL is the least privileged level, 0 to 3, that may have asked for the report.
	MaxVMPL uint32
	// MinGuestSVN is the lowest GUEST_SVN.
	MinGuestSVN uint32
	// AllowPolicy has the bits of a guest policy that may be set although they allow the host more:
	// PolicySMT, PolicyMigrationAgent, PolicyCXL. PolicyDebug is always refused. RequirePolicy has
	// those of the other bits that must be set.
	AllowPolicy, RequirePolicy GuestPolicy
	// RequirePlatform has the bits of PLATFORM_INFO that must be set.
	RequirePlatform uint64
}

// Check checks that a verified report is acceptable. Refusals: HARDWARE_TCB, POLICY_REFUSED.
func (p Rules) Check(r *Report) error {
	refuse := func(format string, args ...any) error { return hardware.Refuse(hardware.Policy, format, args...) }
	if r == nil {
		return refuse("there is no SEV-SNP report")
	}
	least, ok := p.MinTCB[r.Product]
	if !ok {
		return refuse("the policy lists no minimum TCB for %q, so it accepts no such processor", r.Product)
	}
	for i, tcb := range []TCB{r.Reported, r.Committed, r.Current, r.Launch} {
		if !tcb.AtLeast(least) {
			name := []string{"reported", "committed", "current", "launch"}[i]
			return hardware.Refuse(hardware.TCB, "the %s TCB is %s; the policy's minimum for %s is %s", name, tcb, r.Product, least)
		}
	}
	switch {
	case !slices.Contains(p.Keys, r.Key):
		return refuse("the report is signed by a %s; the policy accepts %q", r.Key, p.Keys)
	case r.Key == VLEK && !slices.Contains(p.Providers, r.Provider):
		return refuse("the VLEK is that of %q; the policy lists %q", r.Provider, p.Providers)
	case r.Key == VCEK && !p.AnyChip && !slices.ContainsFunc(p.Chips, func(c []byte) bool { return bytes.Equal(c, r.ChipID) }):
		return refuse("chip %x is not listed in the policy", r.ChipID)
	case r.Policy&PolicyDebug != 0:
		return refuse("the guest's policy allows debugging: the host can read its memory")
	case r.Policy&policyWeak&^p.AllowPolicy != 0:
		return refuse("the guest's policy allows %s, the rules allow %s", r.Policy&policyWeak, p.AllowPolicy&policyWeak)
	case p.RequirePolicy&^r.Policy != 0:
		return refuse("the guest's policy lacks %s", p.RequirePolicy&^r.Policy)
	case r.VMPL > p.MaxVMPL:
		return refuse("the report was asked for at VMPL %d, and the highest accepted is %d", r.VMPL, p.MaxVMPL)
	case r.GuestSVN < p.MinGuestSVN:
		return refuse("the guest has SVN %d, and the lowest accepted is %d", r.GuestSVN, p.MinGuestSVN)
	case p.RequirePlatform&^r.Platform != 0:
		return refuse("PLATFORM_INFO is %#x, and lacks the bits %#x", r.Platform, p.RequirePlatform&^r.Platform)
	case p.AnyMeasurement || slices.Contains(p.Measurements, r.Measurement):
		return nil
	case r.IDKeyDigest != [48]byte{} && slices.Contains(p.IDKeys, r.IDKeyDigest):
		return nil
	}
	return refuse("neither the launch measurement %x nor the ID key %x is listed in the policy", r.Measurement, r.IDKeyDigest)
}
