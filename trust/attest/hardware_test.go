package attest_test

import (
	"bytes"
	"context"
	"crypto/rsa"
	"crypto/x509"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/hardware"
	"github.com/muster-k8s/muster/trust/attest/hardwaretest"
	"github.com/muster-k8s/muster/trust/attest/hcl"
	"github.com/muster-k8s/muster/trust/attest/snp"
	"github.com/muster-k8s/muster/trust/attest/tdx"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
	"github.com/muster-k8s/muster/trust/internal/hwreport"
)

// report makes hardware reports of a machine.
type report func(data hardware.ReportData) (*attestv1.HardwareReport, error)

func (r report) Report(_ context.Context, data hardware.ReportData) (*attestv1.HardwareReport, error) {
	return r(data)
}

// long is a validity that contains all times of the tests.
func long(c *x509.Certificate) {
	c.NotBefore, c.NotAfter = time.Unix(0, 0), time.Unix(1<<32, 0)
}

// fleet has the vendors of the tests' processors.
type fleet struct {
	ca      *attesttest.CA
	amd     *hardwaretest.AMD
	intel   *hardwaretest.Intel
	vendors hwreport.Vendors
	listed  *attestv1.Collateral
}

func newFleet(t testing.TB) *fleet {
	f := &fleet{ca: attesttest.NewCAValid(t, time.Unix(0, 0), time.Unix(1<<32, 0)), amd: hardwaretest.NewAMD(t), intel: hardwaretest.NewIntel(t)}
	authorities := f.amd.Authorities()
	for p, a := range authorities {
		a.RevocationLists = nil // it comes with the policy
		authorities[p] = a
	}
	f.vendors = hwreport.Vendors{AMD: authorities, Intel: []*x509.Certificate{f.intel.Root.Cert}}
	c := f.intel.Collateral(t, hardwaretest.TCBInfo(), hardwaretest.QEIdentity())
	f.listed = &attestv1.Collateral{
		AmdCrls: [][]byte{f.amd.List}, TcbInfos: c.TCBInfo, TcbInfoChain: c.TCBInfoChain, QeIdentity: c.QEIdentity, QeIdentityChain: c.QEIdentityChain, IntelCrls: c.CRLs,
	}
	return f
}

// scene is a machine that attests to a verifier with a policy. The default is accepted.
type scene struct {
	*fleet
	t      testing.TB
	kind   hwreport.Kind
	tcb    snp.TCB
	td     hardwaretest.TD
	secure bool
	now    time.Time
	// data changes what the report is over, sent the report that is sent, policy the policy.
	data   func(hardware.ReportData) hardware.ReportData
	sent   func(*attestv1.HardwareReport) *attestv1.HardwareReport
	policy func(*attestv1.HardwarePolicy)
	// whole changes the rest of the policy.
	whole func(*attestv1.Policy)
	// lent has the report made for another platform key.
	lent bool
	// bare leaves the endorsement key without a certificate.
	bare bool
	// parsed is the policy of the last appraisal.
	parsed *attest.Policy
}

// chip is the ID of the tests' processors.
var chip = "0102030405060708" + strings.Repeat("00", 56)

var measured = strings.Repeat("4d", 48)

func (f *fleet) snpRules() *attestv1.SevSnpRules {
	return &attestv1.SevSnpRules{
		MinTcb: []*attestv1.SevSnpTcb{{Product: "Milan", BootLoader: new(uint32(3)), Tee: new(uint32), Snp: new(uint32(8)), Microcode: new(uint32(100))}}, Keys: []string{"vcek"}, AnyChip: true, Measurements: []string{measured},
	}
}

func (f *fleet) tdxRules() *attestv1.TdxRules {
	return &attestv1.TdxRules{Statuses: []string{"UpToDate"}, Modules: []*attestv1.TdxModule{{Major: 1, Svn: new(uint32(6))}}, Mrtds: []string{measured}, RequireAttributes: []string{"SEPT_VE_DISABLE"}}
}

func (f *fleet) scene(t testing.TB, kind hwreport.Kind) *scene {
	return &scene{fleet: f, t: t, kind: kind, tcb: snp.TCB{BootLoader: 3, SNP: 8, Microcode: 115}, secure: true, now: hardwaretest.Now}
}

// appraise passes evidence through attester, verifier and policy.
func (s *scene) appraise() (attest.Appraisal, attest.Claims, error) {
	opts := attesttest.Options{Bare: s.bare, Tamper: attesttest.Tamper{Certificate: long}}
	var m *attesttest.Machine
	if s.kind != "" {
		opts.Hardware = report(func(data hardware.ReportData) (*attestv1.HardwareReport, error) { return s.make(m, data), nil })
	}
	azure := s.kind == hwreport.AzureSevSnp || s.kind == hwreport.AzureTDX
	if azure {
		opts.Platform = &attesttest.Platform{Azure: true, Certificate: long}
	}
	m = attesttest.NewMachine(s.t, s.ca, opts)
	rules := &attestv1.HardwarePolicy{
		Require: []string{"sev-snp", "tdx", "azure-sev-snp", "azure-tdx"}, SevSnp: s.snpRules(), Tdx: s.tdxRules(), AzureSevSnp: s.snpRules(), AzureTdx: s.tdxRules(), Collateral: s.listed,
	}
	if s.policy != nil {
		s.policy(rules)
	}
	text := attesttest.Policy(s.t, s.ca, []*attesttest.Machine{m}, func(p *attestv1.Policy) {
		p.Hardware = rules
		if azure {
			p.Tpm2.EkRoots, p.Tpm2.PlatformRoots = nil, []*attestv1.PlatformRoot{{Pem: s.ca.PEM(), Provider: "azure", Key: "rsa-2048", MachineIds: []string{m.ID().String()}}}
		}
		if s.whole != nil {
			s.whole(p)
		}
	})
	policy, err := attest.ParsePolicyWithVendors(text, s.vendors)
	if err != nil {
		return attest.Appraisal{}, attest.Claims{}, err
	}
	s.parsed = policy
	v, err := tpm2.NewVerifier(tpm2.VerifierConfig{Roots: policy.Roots, Now: func() time.Time { return s.now }})
	if err != nil {
		s.t.Fatal(err)
	}
	c, err := attesttest.Claims(s.t.Context(), m.Attester(attest.PurposeMachine), v, attest.PurposeMachine, attest.Binding{1})
	if err != nil {
		return attest.Appraisal{}, c, err
	}
	a, err := policy.Appraise(c, attest.Unlocked())
	return a, c, err
}

func (s *scene) make(m *attesttest.Machine, data hardware.ReportData) *attestv1.HardwareReport {
	var runtime []byte
	if s.kind == hwreport.AzureSevSnp || s.kind == hwreport.AzureTDX {
		ak := &hardwaretest.NewRSA(s.t).PublicKey
		if !s.lent {
			chain, err := m.PlatformCertificates(s.t.Context())
			if err != nil {
				s.t.Fatal(err)
			}
			leaf, err := x509.ParseCertificate(chain[0])
			if err != nil {
				s.t.Fatal(err)
			}
			ak = leaf.PublicKey.(*rsa.PublicKey)
		}
		runtime, data = hardwaretest.Runtime(ak, s.secure)
	}
	if s.data != nil {
		data = s.data(data)
	}
	r := &attestv1.HardwareReport{}
	chip := hardwaretest.Chip{Product: snp.Milan, TCB: s.tcb}
	switch s.kind {
	case hwreport.SevSnp:
		e := s.amd.Report(s.t, chip, data)
		r.Report = &attestv1.HardwareReport_SevSnp{SevSnp: &attestv1.SevSnpReport{Report: e.Report, Certificate: e.Certificate}}
	case hwreport.TDX:
		r.Report = &attestv1.HardwareReport_Tdx{Tdx: &attestv1.TdxQuote{Quote: s.intel.Quote(s.t, s.td, data)}}
	case hwreport.AzureSevSnp:
		e := s.amd.Report(s.t, chip, data)
		r.Report = &attestv1.HardwareReport_Azure{Azure: &attestv1.AzureReport{HclReport: hardwaretest.HCL(hcl.SNP, e.Report, runtime), Certificate: e.Certificate}}
	case hwreport.AzureTDX:
		r.Report = &attestv1.HardwareReport_Azure{Azure: &attestv1.AzureReport{HclReport: hardwaretest.HCL(hcl.TDX, make([]byte, 1184), runtime), Quote: s.intel.Quote(s.t, s.td, data)}}
	}
	if s.sent != nil {
		r = s.sent(r)
	}
	return r
}

func flip(d hardware.ReportData) hardware.ReportData {
	d[0] ^= 1
	return d
}

func TestReportsOfEachKindAreAcceptedAndDescribed(t *testing.T) {
	f := newFleet(t)
	for kind, want := range map[hwreport.Kind]string{
		hwreport.SevSnp: "SEV-SNP on Milan, key vcek, TCB boot loader 3, TEE 0, SNP 8, microcode 115, VMPL 0, measurement " + measured + ", chip " + chip,
		hwreport.TDX:    "TDX on model 90c06f000000, platform UpToDate, TDX module UpToDate, quoting enclave UpToDate, module 1.6, MRTD " + measured,
		hwreport.AzureSevSnp: "Azure, Secure Boot true, SEV-SNP on Milan, key vcek, TCB boot loader 3, TEE 0, SNP 8, microcode 115, VMPL 0, measurement " +
			measured + ", chip " + chip,
		hwreport.AzureTDX: "Azure, Secure Boot true, TDX on model 90c06f000000, platform UpToDate, TDX module UpToDate, quoting enclave UpToDate, module 1.6, MRTD " + measured,
	} {
		a, c, err := f.scene(t, kind).appraise()
		if err != nil || a.Hardware != want || c.HardwareKind() != string(kind) {
			t.Errorf("%s: %q, %q, %v", kind, a.Hardware, c.HardwareKind(), err)
		}
		// The owner sees the values of a genuine one before the policy lists them, and nothing of another.
		for _, genuine := range []bool{true, false} {
			s := f.scene(t, kind)
			s.policy = func(p *attestv1.HardwarePolicy) {
				none := []string{strings.Repeat("00", 48)}
				p.SevSnp.Measurements, p.AzureSevSnp.Measurements, p.Tdx.Mrtds, p.AzureTdx.Mrtds = none, none, none, none
			}
			described := want
			if !genuine {
				s.data, described = flip, ""
			}
			_, _, err := s.appraise()
			if refused, ok := errors.AsType[*attest.HardwareError](err); !ok || refused.Report != described {
				t.Errorf("%s, refused, genuine %t: %+v, want %q", kind, genuine, err, described)
			}
		}
	}
}

func TestAPolicyThatRequiresNothingAcceptsMachinesWithAndWithout(t *testing.T) {
	f := newFleet(t)
	for name, tt := range map[string]struct {
		kind      hwreport.Kind
		rules     bool
		described bool
	}{
		"no report, no rules":              {},
		"no report, rules":                 {rules: true},
		"a report without rules is unread": {kind: hwreport.SevSnp},
		"a report with rules is verified":  {kind: hwreport.SevSnp, rules: true, described: true},
	} {
		s := f.scene(t, tt.kind)
		s.policy = func(p *attestv1.HardwarePolicy) { p.Require = nil }
		if !tt.rules {
			s.whole = func(p *attestv1.Policy) { p.Hardware = nil }
		}
		a, c, err := s.appraise()
		if err != nil || tt.described != (a.Hardware != "") || c.HardwareKind() != string(tt.kind) {
			t.Errorf("%s: %q, %q, %v", name, a.Hardware, c.HardwareKind(), err)
		}
		if tt.described {
			s.data = flip
			if _, _, err := s.appraise(); attest.ReasonOf(err) != hardware.Binding {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

// TestEvidenceWithHardwareReportsThatIsRefused passes each input through attester, verifier and policy (A10).
func TestEvidenceWithHardwareReportsThatIsRefused(t *testing.T) {
	f := newFleet(t)
	var all []hardwaretest.Vector
	add := func(name string, want attestv1.Reason, kind hwreport.Kind, wrong func(*scene)) {
		run := func(change func(*scene)) func(testing.TB) error {
			return func(t testing.TB) error {
				s := f.scene(t, kind)
				change(s)
				_, _, err := s.appraise()
				return err
			}
		}
		all = append(all, hardwaretest.Vector{Name: name, Want: want, Wrong: run(wrong), Right: run(func(*scene) {})})
	}
	rule := func(change func(*attestv1.HardwarePolicy)) func(*scene) {
		return func(s *scene) { s.policy = change }
	}
	sent := func(change func(*attestv1.HardwareReport)) func(*scene) {
		return func(s *scene) {
			s.sent = func(r *attestv1.HardwareReport) *attestv1.HardwareReport { change(r); return r }
		}
	}
	data := func(s *scene) { s.data = flip }
	zeros := func(s *scene) {
		s.data = func(hardware.ReportData) hardware.ReportData { return hardware.ReportData{} }
	}
	collateral := func(change func(*attestv1.Collateral)) func(*scene) {
		return func(s *scene) {
			c := &attestv1.Collateral{
				AmdCrls: f.listed.GetAmdCrls(), TcbInfos: f.listed.GetTcbInfos(), TcbInfoChain: f.listed.GetTcbInfoChain(),
				QeIdentity: f.listed.GetQeIdentity(), QeIdentityChain: f.listed.GetQeIdentityChain(), IntelCrls: f.listed.GetIntelCrls(),
			}
			change(c)
			s.policy = func(p *attestv1.HardwarePolicy) { p.Collateral = c }
		}
	}
	none := func(s *scene) { s.sent = func(*attestv1.HardwareReport) *attestv1.HardwareReport { return nil } }
	later := func(s *scene) { s.now = hardwaretest.Now.Add(25 * time.Hour) }

	add("no report, and one is required", hardware.Policy, hwreport.SevSnp, none)
	add("report of a kind that is not required", hardware.Policy, hwreport.TDX, rule(func(p *attestv1.HardwarePolicy) { p.Require = []string{"sev-snp"} }))
	add("Azure's report where the guest's own is required", hardware.Policy, hwreport.AzureSevSnp, rule(func(p *attestv1.HardwarePolicy) { p.Require = []string{"sev-snp"} }))
	add("report of no kind", hardware.Malformed, hwreport.SevSnp, sent(func(r *attestv1.HardwareReport) { r.Report = nil }))
	add("SEV-SNP report without a certificate", hardware.Untrusted, hwreport.SevSnp, sent(func(r *attestv1.HardwareReport) { r.GetSevSnp().Certificate = nil }))
	add("certificate of more than 4 KiB", hardware.Malformed, hwreport.SevSnp, sent(func(r *attestv1.HardwareReport) { r.GetSevSnp().Certificate = make([]byte, 4097) }))
	add("SEV-SNP report of 1185 bytes", hardware.Malformed, hwreport.SevSnp, sent(func(r *attestv1.HardwareReport) { r.GetSevSnp().Report = make([]byte, 1185) }))
	add("empty TDX quote", hardware.Malformed, hwreport.TDX, sent(func(r *attestv1.HardwareReport) { r.GetTdx().Quote = nil }))
	add("TDX quote of more than 16 KiB", hardware.Malformed, hwreport.TDX, sent(func(r *attestv1.HardwareReport) { r.GetTdx().Quote = make([]byte, 16<<10+1) }))
	add("HCL report of more than 8 KiB", hardware.Malformed, hwreport.AzureTDX, sent(func(r *attestv1.HardwareReport) { r.GetAzure().HclReport = make([]byte, 8<<10+1) }))
	add("Azure's report without certificate and quote", hardware.Malformed, hwreport.AzureTDX, sent(func(r *attestv1.HardwareReport) { r.GetAzure().Quote = nil }))
	add("Azure's report with certificate and quote", hardware.Malformed, hwreport.AzureTDX, sent(func(r *attestv1.HardwareReport) { r.GetAzure().Certificate = []byte{1} }))
	add("Azure's quote of more than 16 KiB", hardware.Malformed, hwreport.AzureTDX, sent(func(r *attestv1.HardwareReport) { r.GetAzure().Quote = make([]byte, 16<<10+1) }))
	add("Azure's TDREPORT with the certificate of an SEV-SNP report", hardware.Malformed, hwreport.AzureTDX, sent(func(r *attestv1.HardwareReport) {
		r.GetAzure().Quote, r.GetAzure().Certificate = nil, []byte{1}
	}))
	add("Azure's quote beside an HCL report that says SEV-SNP", hardware.Malformed, hwreport.AzureTDX, sent(func(r *attestv1.HardwareReport) {
		clear(r.GetAzure().GetHclReport()[0x4C0+8:][:4])
		r.GetAzure().HclReport[0x4C0+8] = byte(hcl.SNP)
	}))
	add("SEV-SNP report over another session", hardware.Binding, hwreport.SevSnp, data)
	add("SEV-SNP report over zeros", hardware.Binding, hwreport.SevSnp, zeros)
	add("TDX quote over another session", hardware.Binding, hwreport.TDX, data)
	add("TDX quote over zeros", hardware.Binding, hwreport.TDX, zeros)
	add("Azure's report for another platform key", hardware.Binding, hwreport.AzureSevSnp, func(s *scene) { s.lent = true })
	add("Azure's TDX quote for another platform key", hardware.Binding, hwreport.AzureTDX, func(s *scene) { s.lent = true })
	add("Azure's report over another JSON text", hardware.Binding, hwreport.AzureSevSnp, data)
	add("changed SEV-SNP report", hardware.Signature, hwreport.SevSnp, sent(func(r *attestv1.HardwareReport) { r.GetSevSnp().Report[0x90] ^= 1 }))
	add("changed TDX quote", hardware.Signature, hwreport.TDX, sent(func(r *attestv1.HardwareReport) { r.GetTdx().Quote[48+6+0x90] ^= 1 }))
	add("no list of AMD in the policy", hardware.Collateral, hwreport.SevSnp, collateral(func(c *attestv1.Collateral) { c.AmdCrls = nil }))
	add("list of AMD that has ended", hardware.Collateral, hwreport.SevSnp, collateral(func(c *attestv1.Collateral) {
		c.AmdCrls = [][]byte{f.amd.Root.CRL(t, func(l *x509.RevocationList) { l.NextUpdate = hardwaretest.Now.Add(-time.Minute) })}
	}))
	add("no collateral in the policy", hardware.Collateral, hwreport.TDX, rule(func(p *attestv1.HardwarePolicy) { p.Collateral = nil }))
	add("no TCB info in the policy", hardware.Collateral, hwreport.TDX, collateral(func(c *attestv1.Collateral) { c.TcbInfos = nil }))
	add("no certificates of the TCB info in the policy", hardware.Collateral, hwreport.TDX, collateral(func(c *attestv1.Collateral) { c.TcbInfoChain = nil }))
	add("no identity of the quoting enclave in the policy", hardware.Collateral, hwreport.TDX, collateral(func(c *attestv1.Collateral) { c.QeIdentity = nil }))
	add("no certificates of the identity in the policy", hardware.Collateral, hwreport.TDX, collateral(func(c *attestv1.Collateral) { c.QeIdentityChain = nil }))
	add("no lists of Intel in the policy", hardware.Collateral, hwreport.TDX, collateral(func(c *attestv1.Collateral) { c.IntelCrls = nil }))
	add("lists of AMD in place of Intel's", hardware.Collateral, hwreport.AzureTDX, collateral(func(c *attestv1.Collateral) { c.IntelCrls = c.AmdCrls }))
	add("data of Intel that are too old for the policy", hardware.Collateral, hwreport.TDX, rule(func(p *attestv1.HardwarePolicy) { p.Tdx.MinEvaluationNumber = 19 }))
	add("verifier whose clock is after the end of the processor's certificate", hardware.Untrusted, hwreport.TDX, later)
	revoked := f.amd.Root.CRL(t, nil, f.amd.VCEK.Cert)
	add("issuer on AMD's list", hardware.Untrusted, hwreport.SevSnp, collateral(func(c *attestv1.Collateral) { c.AmdCrls = [][]byte{revoked} }))
	add("issuer on the first of AMD's lists of one root", hardware.Untrusted, hwreport.SevSnp, collateral(func(c *attestv1.Collateral) { c.AmdCrls = [][]byte{revoked, f.amd.List} }))
	add("issuer on the last of AMD's lists of one root", hardware.Untrusted, hwreport.SevSnp, collateral(func(c *attestv1.Collateral) { c.AmdCrls = [][]byte{f.amd.List, revoked} }))
	tcb := func(change func(*attestv1.SevSnpTcb)) func(*scene) {
		return rule(func(p *attestv1.HardwarePolicy) { change(p.GetSevSnp().GetMinTcb()[0]) })
	}
	add("boot loader below the policy's", hardware.TCB, hwreport.SevSnp, tcb(func(m *attestv1.SevSnpTcb) { m.BootLoader = new(uint32(4)) }))
	add("TEE below the policy's", hardware.TCB, hwreport.SevSnp, tcb(func(m *attestv1.SevSnpTcb) { m.Tee = new(uint32(1)) }))
	add("SNP firmware below the policy's", hardware.TCB, hwreport.SevSnp, tcb(func(m *attestv1.SevSnpTcb) { m.Snp = new(uint32(9)) }))
	add("microcode below the policy's", hardware.TCB, hwreport.SevSnp, tcb(func(m *attestv1.SevSnpTcb) { m.Microcode = new(uint32(116)) }))
	add("microcode below the policy's, on Azure", hardware.TCB, hwreport.AzureSevSnp, rule(func(p *attestv1.HardwarePolicy) { p.GetAzureSevSnp().GetMinTcb()[0].Microcode = new(uint32(116)) }))
	add("status that the policy does not list", hardware.TCB, hwreport.TDX, rule(func(p *attestv1.HardwarePolicy) { p.Tdx.Statuses = []string{"OutOfDate"} }))
	add("TDX module below the policy's", hardware.TCB, hwreport.TDX, rule(func(p *attestv1.HardwarePolicy) { p.GetTdx().GetModules()[0].Svn = new(uint32(7)) }))
	add("TDX module below the policy's, on Azure", hardware.TCB, hwreport.AzureTDX, rule(func(p *attestv1.HardwarePolicy) { p.GetAzureTdx().GetModules()[0].Svn = new(uint32(7)) }))

	snpRule := func(change func(*attestv1.SevSnpRules)) func(*scene) {
		return rule(func(p *attestv1.HardwarePolicy) { change(p.GetSevSnp()) })
	}
	tdxRule := func(change func(*attestv1.TdxRules)) func(*scene) {
		return rule(func(p *attestv1.HardwarePolicy) { change(p.GetTdx()) })
	}
	refused := func(name string, kind hwreport.Kind, wrong func(*scene)) { add(name, hardware.Policy, kind, wrong) }
	refused("processors of another line", hwreport.SevSnp, snpRule(func(r *attestv1.SevSnpRules) { r.MinTcb[0].Product = "Genoa" }))
	refused("VCEK where the policy lists VLEKs", hwreport.SevSnp, snpRule(func(r *attestv1.SevSnpRules) {
		r.Keys, r.AnyChip, r.Providers = []string{"vlek"}, false, []string{"CN=cc.test"}
	}))
	refused("chip that the policy does not list", hwreport.SevSnp, snpRule(func(r *attestv1.SevSnpRules) { r.AnyChip, r.Chips = false, []string{strings.Repeat("ab", 64)} }))
	refused("measurement that the policy does not list", hwreport.SevSnp, snpRule(func(r *attestv1.SevSnpRules) { r.Measurements = []string{strings.Repeat("4e", 48)} }))
	refused("ID key in place of a measurement", hwreport.SevSnp, snpRule(func(r *attestv1.SevSnpRules) { r.Measurements, r.IdKeys = nil, []string{measured} }))
	refused("guest SVN below the policy's", hwreport.SevSnp, snpRule(func(r *attestv1.SevSnpRules) { r.MinGuestSvn = 1 }))
	refused("guest policy without what is required", hwreport.SevSnp, snpRule(func(r *attestv1.SevSnpRules) { r.RequireGuestPolicy = []string{"SINGLE_SOCKET"} }))
	refused("PLATFORM_INFO without what is required", hwreport.SevSnp, snpRule(func(r *attestv1.SevSnpRules) { r.RequirePlatformInfo = 32 }))
	refused("TDX module of another version", hwreport.TDX, tdxRule(func(r *attestv1.TdxRules) { r.Modules[0].Major = 2 }))
	refused("MRTD that the policy does not list", hwreport.TDX, tdxRule(func(r *attestv1.TdxRules) { r.Mrtds = []string{strings.Repeat("4e", 48)} }))
	refused("TD without a required attribute", hwreport.TDX, tdxRule(func(r *attestv1.TdxRules) { r.RequireAttributes = []string{"PKS", "SEPT_VE_DISABLE"} }))
	refused("TD with an attribute that the policy does not list", hwreport.TDX, tdxRule(func(r *attestv1.TdxRules) { r.RequireAttributes = nil }))
	refused("measurement that the policy does not list, on Azure", hwreport.AzureSevSnp, rule(func(p *attestv1.HardwarePolicy) { p.AzureSevSnp.Measurements[0] = strings.Repeat("4e", 48) }))
	refused("MRTD that the policy does not list, on Azure", hwreport.AzureTDX, rule(func(p *attestv1.HardwarePolicy) { p.AzureTdx.Mrtds[0] = strings.Repeat("4e", 48) }))
	refused("Azure's machine without Secure Boot", hwreport.AzureTDX, func(s *scene) { s.secure = false })
	refused("Azure's machine without Secure Boot, SEV-SNP", hwreport.AzureSevSnp, func(s *scene) { s.secure = false })
	hardwaretest.Refused(t, "Evidence", all)
}

// TestRulesThatAllowMoreAreApplied has for each rule that widens what is accepted a machine that only
// this rule accepts.
func TestRulesThatAllowMoreAreApplied(t *testing.T) {
	f := newFleet(t)
	for name, tt := range map[string]struct {
		kind  hwreport.Kind
		setup func(*scene)
		allow func(*attestv1.HardwarePolicy)
	}{
		"Secure Boot off": {hwreport.AzureTDX, func(s *scene) { s.secure = false }, func(p *attestv1.HardwarePolicy) { p.AzureAllowNoSecureBoot = true }},
		"SMT": {hwreport.SevSnp, func(s *scene) { s.sent = f.resign(t, func(b []byte) { b[0x0A] |= 1 }) },
			func(p *attestv1.HardwarePolicy) { p.SevSnp.AllowGuestPolicy = []string{"SMT"} }},
		"migration agent": {hwreport.SevSnp, func(s *scene) { s.sent = f.resign(t, func(b []byte) { b[0x0A] |= 1 << 2 }) },
			func(p *attestv1.HardwarePolicy) { p.SevSnp.AllowGuestPolicy = []string{"MIGRATE_MA"} }},
		"CXL": {hwreport.SevSnp, func(s *scene) { s.sent = f.resign(t, func(b []byte) { b[0x0A] |= 1 << 5 }) },
			func(p *attestv1.HardwarePolicy) { p.SevSnp.AllowGuestPolicy = []string{"CXL"} }},
		"VMPL 2": {hwreport.SevSnp, func(s *scene) { s.sent = f.resign(t, func(b []byte) { b[0x30] = 2 }) }, func(p *attestv1.HardwarePolicy) { p.SevSnp.MaxVmpl = 2 }},
		"any measurement": {hwreport.SevSnp, func(s *scene) { s.sent = f.resign(t, func(b []byte) { b[0x90] = 0 }) },
			func(p *attestv1.HardwarePolicy) { p.SevSnp.Measurements, p.SevSnp.AnyMeasurement = nil, true }},
		"ID key": {hwreport.SevSnp, func(s *scene) {
			s.sent = f.resign(t, func(b []byte) { b[0x90] = 0; copy(b[0xE0:], bytes.Repeat([]byte{0x11}, 48)) })
		}, func(p *attestv1.HardwarePolicy) { p.SevSnp.IdKeys = []string{strings.Repeat("11", 48)} }},
		"any MRTD": {hwreport.TDX, func(s *scene) { s.td.Body = func(b []byte) { b[0x88] = 0 } }, func(p *attestv1.HardwarePolicy) { p.Tdx.Mrtds, p.Tdx.AnyMrtd = nil, true }},
		"PKS": {hwreport.TDX, func(s *scene) { s.td.Body = func(b []byte) { b[0x78+3] |= 1 << 6 } },
			func(p *attestv1.HardwarePolicy) { p.Tdx.AllowAttributes = []string{"PKS"} }},
	} {
		s := f.scene(t, tt.kind)
		tt.setup(s)
		if _, _, err := s.appraise(); attest.ReasonOf(err) != hardware.Policy {
			t.Errorf("%s: without the rule: %v", name, err)
		}
		s.policy = tt.allow
		if _, _, err := s.appraise(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	s := f.scene(t, hwreport.AzureSevSnp)
	s.secure = false
	if _, _, err := s.appraise(); err == nil || !strings.Contains(err.Error(), "azureAllowNoSecureBoot") {
		t.Errorf("the refusal does not name the rule that would allow it: %v", err)
	}
	// Debugging is refused by whatever rules.
	s = f.scene(t, hwreport.SevSnp)
	s.sent = f.resign(t, func(b []byte) { b[0x0A] |= 1 << 3 })
	s.policy = func(p *attestv1.HardwarePolicy) { p.SevSnp.AllowGuestPolicy = []string{"SMT", "MIGRATE_MA", "CXL"} }
	if _, _, err := s.appraise(); attest.ReasonOf(err) != hardware.Policy {
		t.Errorf("a guest that allows debugging: %v", err)
	}
}

// resign changes an SEV-SNP report before a chip signs it.
func (f *fleet) resign(t testing.TB, change func([]byte)) func(*attestv1.HardwareReport) *attestv1.HardwareReport {
	return func(r *attestv1.HardwareReport) *attestv1.HardwareReport {
		b := r.GetSevSnp().GetReport()
		data := hardware.ReportData(b[0x50:0x90])
		e := f.amd.Report(t, hardwaretest.Chip{Product: snp.Milan, TCB: snp.TCB{BootLoader: 3, SNP: 8, Microcode: 115}, Report: change}, data)
		return &attestv1.HardwareReport{Report: &attestv1.HardwareReport_SevSnp{SevSnp: &attestv1.SevSnpReport{Report: e.Report, Certificate: e.Certificate}}}
	}
}

// TestACandidateJudgesByItsOwnCollateral is what `muster collateral apply --dry-run` relies on: the same
// claims, appraised by policies with other data of the vendor.
func TestACandidateJudgesByItsOwnCollateral(t *testing.T) {
	f := newFleet(t)
	s := f.scene(t, hwreport.TDX)
	_, c, err := s.appraise()
	if err != nil {
		t.Fatal(err)
	}
	info := hardwaretest.TCBInfo()
	info["tcbLevels"] = []hardwaretest.Object{hardwaretest.Level(6, 13, 3, tdx.UpToDate), hardwaretest.Level(5, 13, 3, tdx.OutOfDate)} // raised
	raised := f.intel.Collateral(t, info, hardwaretest.QEIdentity())
	rules := &attestv1.HardwarePolicy{Tdx: f.tdxRules(), Collateral: &attestv1.Collateral{
		TcbInfos: raised.TCBInfo, TcbInfoChain: raised.TCBInfoChain, QeIdentity: raised.QEIdentity, QeIdentityChain: raised.QEIdentityChain, IntelCrls: raised.CRLs,
	}}
	text := attesttest.Policy(t, f.ca, []*attesttest.Machine{attesttest.NewMachine(t, f.ca, attesttest.Options{})}, func(p *attestv1.Policy) { p.Hardware = rules })
	p, err := attest.ParsePolicyWithVendors(text, f.vendors)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Appraise(c, attest.Unlocked()); attest.ReasonOf(err) != hardware.TCB {
		t.Errorf("by the raised TCB: %v", err)
	}
}

func TestThePolicyKnowsTheEndsOfItsCollateral(t *testing.T) {
	f := newFleet(t)
	text := attesttest.Policy(t, f.ca, []*attesttest.Machine{attesttest.NewMachine(t, f.ca, attesttest.Options{})}, func(p *attestv1.Policy) {
		p.Hardware = &attestv1.HardwarePolicy{Collateral: f.listed}
	})
	p, err := attest.ParsePolicy(text)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range p.CollateralEnds() {
		names = append(names, e.Name)
		if !e.Time.Equal(hardwaretest.Now.Add(24 * time.Hour)) {
			t.Errorf("%s ends on %s", e.Name, e.Time)
		}
	}
	want := []string{"revocation list of ARK test", "revocation list of Intel SGX Root CA", "revocation list of Intel SGX PCK Platform CA", "revocation list of Intel SGX PCK Processor CA", "TCB info of 90c06f000000", "identity of the quoting enclave"}
	if !slices.Equal(names, want) {
		t.Errorf("%q", names)
	}
}
