package hwreport

import (
	"bytes"
	"crypto/x509"
	"fmt"
	"maps"
	"math/big"
	"slices"
	"strings"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest/hardware"
	"github.com/muster-k8s/muster/trust/attest/snp"
)

// Lacks returns what rules need and collateral does not have, in words with what to fetch. Without it all
// reports of a kind are refused.
func Lacks(h *attestv1.HardwarePolicy, m *attestv1.Collateral, v Vendors) (out []string) {
	c := CollateralOf(m, v)
	products := map[string]bool{}
	for _, r := range []*attestv1.SevSnpRules{h.GetSevSnp(), h.GetAzureSevSnp()} {
		for _, t := range r.GetMinTcb() {
			products[t.GetProduct()] = true
		}
	}
	for _, p := range slices.Sorted(maps.Keys(products)) {
		switch len(c.AMD[snp.Product(p)].RevocationLists) {
		case 0:
			out = append(out, fmt.Sprintf("there are rules for processors of the line %s, and no revocation list of AMD: fetch with --product %s", p, p))
		case 1: // AMD's roots have two
			out = append(out, fmt.Sprintf("there is only one of AMD's two revocation lists for processors of the line %s: fetch with --product %s", p, p))
		}
	}
	if hasTDX(h) && (len(m.GetTcbInfos()) == 0 || len(m.GetQeIdentity()) == 0 || len(m.GetIntelCrls()) == 0) {
		out = append(out, "there are rules for TDX, and no TCB data of Intel: fetch with --fmspc and the models of the processors")
	}
	return out
}

// Covers checks that collateral has what was requested: for each product two different revocation lists of
// its root, which have no mark for which keys they are, and for each model, an FMSPC, its TCB info. The
// refusal is HARDWARE_COLLATERAL.
func Covers(m *attestv1.Collateral, products, models []string, v Vendors) error {
	c := CollateralOf(m, v)
	for _, p := range products {
		if n := len(c.AMD[snp.Product(p)].RevocationLists); n < 2 {
			return hardware.Refuse(hardware.Collateral, "of the two different revocation lists of AMD for %s, %d are of its root", p, n)
		}
	}
	for _, f := range models {
		if !slices.Contains(c.Intel.Models(), strings.ToLower(f)) {
			return hardware.Refuse(hardware.Collateral, "the TCB info for the model %s is that of another model", f)
		}
	}
	return nil
}

func hasTDX(h *attestv1.HardwarePolicy) bool { return h.GetTdx() != nil || h.GetAzureTdx() != nil }

// Worse returns why next must not take the place of the collateral of a policy, in words: what its rules
// need and next lacks, and what in next the vendor issued before what the policy has. A mirror can repeat
// older documents that are signed and still valid. The error names a part that cannot be read.
func Worse(h *attestv1.HardwarePolicy, next *attestv1.Collateral, v Vendors) ([]string, error) {
	out := Lacks(h, next, v)
	old, after := CollateralOf(h.GetCollateral(), v), CollateralOf(next, v)
	if hasTDX(h) && len(next.GetTcbInfos()) > 0 {
		for _, f := range old.Intel.Models() {
			if !slices.Contains(after.Intel.Models(), f) {
				out = append(out, fmt.Sprintf("the policy has the TCB info of the model %s, and the new collateral does not: fetch with --fmspc %s too", f, f))
			}
		}
	}
	if m := after.Intel.Repeated(); m != "" { // only the newer one is compared below, and either may be used
		out = append(out, fmt.Sprintf("the new collateral has two TCB infos of the model %s", m))
	}
	had, err := byName(old)
	if err != nil {
		return nil, fmt.Errorf("the policy's collateral: %w", err)
	}
	have, err := byName(after)
	if err != nil {
		return nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(had)) {
		// AMD's roots have two lists each. Lacks reports that there is none, if rules need one.
		if n := len(have[name]); n > 0 && n < len(had[name]) {
			out = append(out, fmt.Sprintf("the policy has %d different documents named %q, and the new collateral has %d", len(had[name]), name, n))
			continue
		}
		// Both are sorted by the time of issue: nth newest by nth newest, so that of two lists of one root none is older.
		for i, p := range had[name] {
			if i < len(have[name]) && (have[name][i].Issued.Before(p.Issued) || have[name][i].Evaluation < p.Evaluation) {
				out = append(out, fmt.Sprintf("the %s is of %s, and that of the policy of %s", name, of(have[name][i]), of(p)))
			}
		}
	}
	return append(out, forgotten(old.lists, after.lists)...), nil
}

// of describes the age of a part.
func of(p hardware.End) string {
	if p.Evaluation > 0 {
		return fmt.Sprintf("%s, evaluation %d", p.Issued.UTC().Format(time.DateTime), p.Evaluation)
	}
	return p.Issued.UTC().Format(time.DateTime)
}

// byName returns the parts with each name, the newest first.
func byName(c Collateral) (map[string][]hardware.End, error) {
	all, err := c.parts()
	slices.SortStableFunc(all, func(a, b hardware.End) int { return b.Issued.Compare(a.Issued) })
	out := map[string][]hardware.End{}
	for _, p := range all {
		out[p.Name] = append(out[p.Name], p)
	}
	return out, err
}

// forgotten returns revocations by AMD that lists have and others lack. AMD's roots revoke issuers, which
// do not leave a list before they end: after 25 years.
func forgotten(lists, others [][]byte) (out []string) {
	for _, der := range lists {
		l, err := x509.ParseRevocationList(der)
		if err != nil || !slices.ContainsFunc(others, func(der []byte) bool { return revokes(der, l.RawIssuer, nil) }) {
			continue // of a policy that does not parse; Lacks reports a line without a list
		}
		for _, e := range l.RevokedCertificateEntries {
			if !slices.ContainsFunc(others, func(der []byte) bool { return revokes(der, l.RawIssuer, e.SerialNumber) }) {
				out = append(out, fmt.Sprintf("the policy has the certificate %x as revoked by %q, and the new collateral does not", e.SerialNumber, l.Issuer))
			}
		}
	}
	return slices.Compact(out)
}

// revokes reports whether a list is issuer's and has the serial number; nil: whether it is issuer's.
func revokes(der, issuer []byte, serial *big.Int) bool {
	l, err := x509.ParseRevocationList(der)
	return err == nil && bytes.Equal(l.RawIssuer, issuer) &&
		(serial == nil || slices.ContainsFunc(l.RevokedCertificateEntries, func(e x509.RevocationListEntry) bool { return e.SerialNumber.Cmp(serial) == 0 }))
}
