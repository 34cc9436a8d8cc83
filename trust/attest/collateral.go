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
