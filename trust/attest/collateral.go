package attest

import (
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest/hardware"
	"github.com/muster-k8s/muster/trust/internal/hwreport"
)

// CollateralEnd is when a part of what a vendor of processors has published ends.
type CollateralEnd = hardware.End

// CollateralEnds returns when each part of the policy's collateral ends. After that, hardware reports
// that need it are refused with HARDWARE_COLLATERAL.
func (p *Policy) CollateralEnds() []CollateralEnd { return p.hardware.Ends() }

// CheckCollateral checks that each part of the collateral is AMD's or Intel's and valid at now, before a
// policy gets it, and returns when each ends. The refusal is HARDWARE_COLLATERAL, or POLICY_INVALID if
// no policy may have it.
func CheckCollateral(c *attestv1.Collateral, now time.Time) ([]CollateralEnd, error) {
	return hwreport.CheckCollateral(c, hwreport.RealVendors(), now)
}

// CollateralLacks returns what the rules of a policy need and its collateral does not have, in words for
// the owner. Without it all reports of a kind are refused.
func CollateralLacks(h *attestv1.HardwarePolicy) []string {
	return hwreport.Lacks(h, h.GetCollateral(), hwreport.RealVendors())
}

// WorseCollateral returns why next must not take the place of the collateral of a policy, in words for the
// owner: it lacks what the rules need, or the vendor issued a part of it before what the policy has. The
// error names a part that cannot be read.
func WorseCollateral(h *attestv1.HardwarePolicy, next *attestv1.Collateral) ([]string, error) {
	return hwreport.Worse(h, next, hwreport.RealVendors())
}

// CheckFetchedCollateral checks, beside [CheckCollateral], that nothing is missing of what was requested:
// both revocation lists of each of AMD's products, and the TCB info of each FMSPC. The refusal is
// HARDWARE_COLLATERAL.
func CheckFetchedCollateral(c *attestv1.Collateral, products, models []string, now time.Time) ([]CollateralEnd, error) {
	// First, so that an answer for another model is named as that, not as two TCB infos of one.
	if err := hwreport.Covers(c, products, models, hwreport.RealVendors()); err != nil {
		return nil, err
	}
	return CheckCollateral(c, now)
}
