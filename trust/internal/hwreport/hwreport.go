// Package hwreport appraises the hardware report of evidence by the rules of a policy
// (docs/hardware-reports.md).
//
// Whether a report is genuine depends on the vendors' published data, which are in the policy. So,
// unlike the rest of the evidence, a report is verified when a policy appraises it. Package attest does
// this last, so that an unverified peer cannot cause the check of a report's signatures. Until then the
// report's bytes are not interpreted (A2). A report adds nothing to the machine's ID.
package hwreport

import (
	"crypto/sha256"
	"crypto/x509"
	"fmt"
	"slices"
	"strings"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest/hardware"
	"github.com/muster-k8s/muster/trust/attest/hcl"
	"github.com/muster-k8s/muster/trust/attest/snp"
	"github.com/muster-k8s/muster/trust/attest/tdx"
)

// Kind is a kind of report, as policies name it. It is empty without a report.
type Kind string

// The kinds.
const (
	SevSnp      Kind = "sev-snp"
	TDX         Kind = "tdx"
	AzureSevSnp Kind = "azure-sev-snp"
	AzureTDX    Kind = "azure-tdx"
)

// Kinds lists them.
var Kinds = []Kind{SevSnp, TDX, AzureSevSnp, AzureTDX}

// KindOf enforces the limits of attest.proto and returns the kind of the report; empty if r is nil. It
// parses nothing. It refuses with EVIDENCE_MALFORMED.
func KindOf(r *attestv1.HardwareReport) (Kind, error) {
	var err error
	limit := func(name string, b []byte, least, most int) {
		if (len(b) < least || len(b) > most) && err == nil {
			err = hardware.Refuse(hardware.Malformed, "%s of the hardware report has %d bytes, want %d to %d", name, len(b), least, most)
		}
	}
	switch m := r.GetReport().(type) {
	case *attestv1.HardwareReport_SevSnp:
		limit("report", m.SevSnp.GetReport(), snp.ReportSize, snp.ReportSize)
		limit("certificate", m.SevSnp.GetCertificate(), 0, snp.MaxCertificate)
		return SevSnp, err
	case *attestv1.HardwareReport_Tdx:
		limit("quote", m.Tdx.GetQuote(), 1, tdx.MaxQuote)
		return TDX, err
	case *attestv1.HardwareReport_Azure:
		limit("hcl_report", m.Azure.GetHclReport(), 1, hcl.MaxReport)
		if len(m.Azure.GetQuote()) > 0 {
			limit("certificate beside a quote", m.Azure.GetCertificate(), 0, 0)
			limit("quote", m.Azure.GetQuote(), 1, tdx.MaxQuote)
			return AzureTDX, err
		}
		limit("certificate", m.Azure.GetCertificate(), 1, snp.MaxCertificate)
		return AzureSevSnp, err
	}
	if r != nil {
		return "", hardware.Refuse(hardware.Malformed, "the hardware report is of no known kind")
	}
	return "", nil
}

// Evidence is a report with the value to which it must be bound. All of it but the report is proven.
type Evidence struct {
	// Report has passed [KindOf]; nil: the machine sent none.
	Report *attestv1.HardwareReport
	// Want is the report data that follow from this session's statement (A1).
	Want hardware.ReportData
	// PlatformKey is SHA-256 of the SubjectPublicKeyInfo of the platform key that has certified the
	// attestation key; zero if another endorsement has.
	PlatformKey [sha256.Size]byte
	// Now is the time for certificates and lists.
	Now time.Time
}

// Rules are the rules of a policy. The zero value, of a policy without such rules, requires no report
// and verifies none.
type Rules struct {
	require    []Kind
	snp        *snp.Rules
	tdx        *tdx.Rules
	azureSNP   *hcl.Rules
	azureTDX   *hcl.Rules
	amd        snp.Authorities
	intel      []*x509.Certificate
	collateral tdx.Collateral
	ends       []hardware.End
}

// Ends returns when each part of the collateral ends.
func (r Rules) Ends() []hardware.End { return slices.Clone(r.ends) }

// has reports whether there are rules for a kind of reports.
func (r Rules) has(k Kind) bool {
	return k == SevSnp && r.snp != nil || k == TDX && r.tdx != nil || k == AzureSevSnp && r.azureSNP != nil || k == AzureTDX && r.azureTDX != nil
}

// Check verifies the report and compares it with the rules. It returns a description of a report that
// is genuine and bound to the session, also with the refusal by the rules, so that an owner can list its
// values; empty if the rules ignore it. Refusals: POLICY_REFUSED if a required report is not there, and
// those of packages snp, tdx and hcl.
func (r Rules) Check(e Evidence) (string, error) {
	kind, err := KindOf(e.Report)
	if err != nil {
		return "", err
	}
	if len(r.require) > 0 && !slices.Contains(r.require, kind) {
		return "", hardware.Refuse(hardware.Policy, "the policy requires a hardware report of the kind %s, and the machine sent %s", Or(r.require), orNone(kind))
	}
	if !r.has(kind) {
		return "", nil
	}
	switch kind {
	case SevSnp:
		m := e.Report.GetSevSnp()
		if len(m.GetCertificate()) == 0 {
			return "", hardware.Refuse(hardware.Untrusted, "the machine's host gives its guests no certificate of the key that signs SEV-SNP reports: configure it to pass that of the VCEK or VLEK (extended guest requests)")
		}
		got, err := snp.Verify(snp.Evidence{Report: m.GetReport(), Certificate: m.GetCertificate()}, e.Want, r.amd, e.Now)
		if err == nil {
			err = r.snp.Check(got)
		}
		return describeSNP(got), err
	case TDX:
		got, err := tdx.Verify(e.Report.GetTdx().GetQuote(), e.Want, r.collateral, r.intel, e.Now)
		if err == nil {
			err = r.tdx.Check(got)
		}
		return describeTDX(got), err
	case AzureSevSnp, AzureTDX:
	}
	return r.checkAzure(e, kind)
}

func (r Rules) checkAzure(e Evidence, kind Kind) (string, error) {
	m := e.Report.GetAzure()
	inner, report, runtime, err := hcl.Split(m.GetHclReport())
	if err != nil {
		return "", err
	}
	if (inner == hcl.SNP) != (kind == AzureSevSnp) {
		return "", hardware.Refuse(hardware.Malformed, "the HCL report has a hardware report of kind %d, and beside it is what belongs to another kind", inner)
	}
	var got *hcl.Report
	rules := r.azureSNP
	if kind == AzureSevSnp {
		got, err = hcl.VerifySNP(snp.Evidence{Report: report, Certificate: m.GetCertificate()}, runtime, r.amd, e.Now)
	} else {
		rules = r.azureTDX
		got, err = hcl.VerifyTDX(m.GetQuote(), runtime, r.collateral, r.intel, e.Now)
	}
	if err != nil {
		return "", err
	}
	// A10: the quote of this session is by the attestation key, which this key has certified for it.
	spki, err := x509.MarshalPKIXPublicKey(got.AK)
	if err != nil || sha256.Sum256(spki) != e.PlatformKey {
		return "", hardware.Refuse(hardware.Binding, "the hardware report is bound to another key than the platform key that certifies the machine's attestation key")
	}
	words := describeSNP(got.SNP)
	if got.TDX != nil {
		words = describeTDX(got.TDX)
	}
	return fmt.Sprintf("Azure, Secure Boot %t, %s", got.SecureBoot, words), rules.Check(got)
}

// Or joins kinds for texts.
func Or(all []Kind) string {
	var names []string
	for _, k := range all {
		names = append(names, string(k))
	}
	return strings.Join(names, " or ")
}

func orNone(k Kind) string {
	if k == "" {
		return "none"
	}
	return "one of the kind " + string(k)
}

func describeSNP(r *snp.Report) string {
	if r == nil {
		return ""
	}
	out := fmt.Sprintf("SEV-SNP on %s, key %s, TCB %s, VMPL %d, measurement %x", r.Product, r.Key, r.Reported, r.VMPL, r.Measurement)
	if r.IDKeyDigest != [48]byte{} {
		out += fmt.Sprintf(", ID key %x, guest SVN %d", r.IDKeyDigest, r.GuestSVN)
	}
	if len(r.ChipID) > 0 {
		out += fmt.Sprintf(", chip %x", r.ChipID)
	}
	if r.Provider != "" {
		out += fmt.Sprintf(", provider %q", r.Provider)
	}
	if on := r.Policy.String(); on != "" {
		out += ", guest policy " + on
	}
	return out
}

func describeTDX(q *tdx.Quote) string {
	if q == nil {
		return ""
	}
	var parts []string
	for _, l := range q.Levels {
		parts = append(parts, fmt.Sprintf("%s %s", l.Part, l.Status))
	}
	return fmt.Sprintf("TDX on model %s, %s, module %d.%d, MRTD %x", q.FMSPC, strings.Join(parts, ", "), q.ModuleSVN[1], q.ModuleSVN[0], q.MRTD)
}
