package hwreport

import (
	"crypto/x509"
	"fmt"
	"maps"
	"slices"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest/hardware"
	"github.com/muster-k8s/muster/trust/attest/snp"
	"github.com/muster-k8s/muster/trust/attest/tdx"
)

// Collateral is what both vendors have published, in the form of packages snp and tdx.
type Collateral struct {
	AMD   snp.Authorities
	Intel tdx.Collateral
	lists [][]byte // all of AMD
}

// CollateralOf returns the policy's collateral, with each list once, and each of AMD's assigned to the products
// whose root has issued it.
func CollateralOf(m *attestv1.Collateral, v Vendors) Collateral {
	c := Collateral{AMD: maps.Clone(v.AMD), lists: distinct(m.GetAmdCrls()), Intel: tdx.Collateral{
		TCBInfo: m.GetTcbInfos(), TCBInfoChain: m.GetTcbInfoChain(), QEIdentity: m.GetQeIdentity(), QEIdentityChain: m.GetQeIdentityChain(), CRLs: distinct(m.GetIntelCrls()),
	}}
	for product, a := range c.AMD {
		a.RevocationLists = hardware.ListsOf(a.Root, c.lists)
		c.AMD[product] = a
	}
	return c
}

// distinct returns each revocation list once. What is signed is compared: the parser ignores bytes behind a list.
func distinct(lists [][]byte) (out [][]byte) {
	seen := map[string]bool{}
	for _, der := range lists {
		signed := der
		if l, err := x509.ParseRevocationList(der); err == nil {
			signed = l.RawTBSRevocationList
		}
		if !seen[string(signed)] {
			seen[string(signed)] = true
			out = append(out, der)
		}
	}
	return out
}

// Ends returns when each part ends; of several revocation lists of one issuer, the first end. The error
// names a part that cannot be read.
func (c Collateral) Ends() (out []hardware.End, err error) {
	all, err := c.parts()
	for _, p := range all {
		switch at := slices.IndexFunc(out, func(e hardware.End) bool { return e.Name == p.Name }); {
		case at < 0:
			out = append(out, p)
		case p.Time.Before(out[at].Time):
			out[at] = p
		}
	}
	return out, err
}

// parts returns when each part was issued and ends.
func (c Collateral) parts() ([]hardware.End, error) {
	out, err := hardware.CRLEnds(c.lists)
	if err != nil {
		return nil, fmt.Errorf("from AMD: %w", err)
	}
	intel, err := c.Intel.Ends()
	if err != nil {
		return nil, fmt.Errorf("from Intel: %w", err)
	}
	return append(out, intel...), nil
}

// CheckCollateral checks that each part is its vendor's and valid at now, and returns when each ends.
// Refusals: POLICY_INVALID for what no policy may have, HARDWARE_COLLATERAL.
func CheckCollateral(m *attestv1.Collateral, v Vendors, now time.Time) ([]hardware.End, error) {
	var r Rules
	if err := r.parseCollateral(m, v); err != nil {
		return nil, err
	}
	c := CollateralOf(m, v)
	for i, der := range c.lists {
		one, of := [][]byte{der}, snp.Authority{}
		for _, a := range c.AMD {
			if len(hardware.ListsOf(a.Root, one)) > 0 {
				of = a
			}
		}
		if of.Root == nil {
			return nil, hardware.Refuse(hardware.Collateral, "the list %d of AMD is of none of its roots", i)
		}
		if err := hardware.CheckRevoked(one, of.Root, now); err != nil {
			return nil, err
		}
	}
	if len(m.GetTcbInfos())+len(m.GetQeIdentity())+len(m.GetIntelCrls()) > 0 {
		if err := c.Intel.Check(v.Intel, v.IntelPCK, now); err != nil {
			return nil, err
		}
	}
	if len(r.ends) == 0 {
		return nil, hardware.Refuse(hardware.Collateral, "there is no list and no TCB data of any vendor")
	}
	return r.ends, nil
}
