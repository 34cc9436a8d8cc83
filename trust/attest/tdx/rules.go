package tdx

import (
	"slices"
	"strings"
	"time"

	"github.com/muster-k8s/muster/trust/attest/hardware"
)

// Rules decide which quotes are acceptable. The zero value accepts none (A3).
type Rules struct {
	// Statuses lists Intel's statuses that each part of the TCB may have. [Revoked] is refused
	// before.
	Statuses []Status
	// MinModule has the lowest SVN of each accepted TDX module, by its major version. A module that
	// is not listed is refused.
	MinModule map[uint8]uint8
	// MRTDs lists the accepted measurements of a TD's first content. AnyMRTD accepts all: then a
	// quote shows only that some TD runs on such a processor.
	MRTDs   [][48]byte
	AnyMRTD bool
	// RequireAttributes has the attributes that must be set, AllowAttributes the others that may be.
	// All others are refused; [AttributeDebug] always.
	RequireAttributes, AllowAttributes Attributes
	// MinEvaluation is the lowest TCB evaluation data number of the collateral.
	MinEvaluation uint32
}

// Check checks that a verified quote is acceptable. Refusals: HARDWARE_TCB, HARDWARE_COLLATERAL,
// POLICY_REFUSED.
func (p Rules) Check(q *Quote) error {
	refuse := func(format string, args ...any) error { return hardware.Refuse(hardware.Policy, format, args...) }
	if q == nil || len(q.Levels) == 0 {
		return refuse("there is no TDX quote")
	}
	for _, l := range q.Levels {
		if !slices.Contains(p.Statuses, l.Status) {
			return hardware.Refuse(hardware.TCB, "the TCB of the %s is %s, of %s (%s); the policy accepts %q", l.Part, l.Status, l.Date.Format(time.DateOnly), strings.Join(l.Advisories, " "), p.Statuses)
		}
	}
	for _, v := range [][16]byte{q.ModuleSVN, q.LoadedSVN} {
		least, ok := p.MinModule[v[1]]
		if !ok {
			return refuse("the policy lists no TDX module of version %d", v[1])
		}
		if v[0] < least {
			return hardware.Refuse(hardware.TCB, "the TDX module has version %s, and the lowest accepted is %d.%d", svn(v), v[1], least)
		}
	}
	switch {
	case q.Evaluation < p.MinEvaluation:
		return hardware.Refuse(hardware.Collateral, "Intel's TCB data have the evaluation number %d, and the lowest accepted is %d", q.Evaluation, p.MinEvaluation)
	case q.Attributes&AttributeDebug != 0:
		return refuse("the TD is a debug TD: the host can read its memory")
	case p.RequireAttributes&^q.Attributes != 0:
		return refuse("the TD's attributes are %#x, and lack %#x", uint64(q.Attributes), uint64(p.RequireAttributes&^q.Attributes))
	case q.Attributes&^(p.RequireAttributes|p.AllowAttributes) != 0:
		return refuse("the TD's attributes are %#x; %#x are not accepted", uint64(q.Attributes), uint64(q.Attributes&^(p.RequireAttributes|p.AllowAttributes)))
	case !p.AnyMRTD && !slices.Contains(p.MRTDs, q.MRTD):
		return refuse("the measurement MRTD %x is not listed in the policy", q.MRTD)
	}
	return nil
}
