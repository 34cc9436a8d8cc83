package hwreport_test

import (
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/hardware"
	"github.com/muster-k8s/muster/trust/attest/hardwaretest"
	"github.com/muster-k8s/muster/trust/internal/hwreport"
)

func TestListsOfAMDGoToTheLinesThatTheyAreOf(t *testing.T) {
	v := hwreport.RealVendors()
	c := hwreport.CollateralOf(&attestv1.Collateral{AmdCrls: collateral(t).GetIntelCrls()}, v)
	for p, a := range c.AMD {
		if a.RevocationLists != nil {
			t.Errorf("%s got a list of Intel", p)
		}
	}
	if len(v.AMD) != 3 || len(c.AMD) != 3 {
		t.Errorf("%d and %d lines", len(v.AMD), len(c.AMD))
	}
}

// complete2025 is all that Intel had published for one model in June 2025.
func complete2025(t testing.TB) *attestv1.Collateral {
	var all map[string]string
	if err := json.Unmarshal(file(t, "tdx/v4-uptodate-2025/collateral.json"), &all); err != nil {
		t.Fatal(err)
	}
	der := func(name string) []byte {
		b, err := hex.DecodeString(all[name])
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	answer := func(name, as string) []byte {
		return fmt.Appendf(nil, `{"%s":%s,"signature":"%s"}`, as, all[name], all[name+"_signature"])
	}
	return &attestv1.Collateral{
		TcbInfos: [][]byte{answer("tcb_info", "tcbInfo")}, QeIdentity: answer("qe_identity", "enclaveIdentity"),
		TcbInfoChain: []byte(all["tcb_info_issuer_chain"]), QeIdentityChain: []byte(all["qe_identity_issuer_chain"]),
		IntelCrls: [][]byte{der("root_ca_crl"), der("pck_crl"), file(t, "tdx/v4-uptodate-2025/pck_crl_processor.der")},
	}
}

func TestCapturedCollateralIsIntels(t *testing.T) {
	june := time.Date(2025, 6, 20, 0, 0, 0, 0, time.UTC)
	ends, err := hwreport.CheckCollateral(complete2025(t), hwreport.RealVendors(), june)
	if err != nil || len(ends) != 5 {
		t.Errorf("%v, %v", ends, err)
	}
	if _, err := hwreport.CheckCollateral(collateral(t), hwreport.RealVendors(), march); attest.ReasonOf(err) != hardware.Collateral || !strings.Contains(err.Error(), "Processor CA") {
		t.Errorf("without the list of the processors' authority: %v", err)
	}
	if _, err := hwreport.CheckCollateral(complete2025(t), hwreport.RealVendors(), june.Add(60*24*time.Hour)); attest.ReasonOf(err) != hardware.Collateral {
		t.Errorf("two months later: %v", err)
	}
}

// TestCollateralThatNoVendorPublishedIsRefused changes one part of collateral that is accepted.
func TestCollateralThatNoVendorPublishedIsRefused(t *testing.T) {
	a, i := hardwaretest.NewAMD(t), hardwaretest.NewIntel(t)
	other := hardwaretest.NewAMD(t)
	v := hwreport.Vendors{AMD: a.Authorities(), Intel: []*x509.Certificate{i.Root.Cert}, IntelPCK: i.PCKAuthorities()}
	for name, tt := range map[string]struct {
		change func(*attestv1.Collateral)
		want   attestv1.Reason
		about  string
	}{
		"nothing changed":                        {func(*attestv1.Collateral) {}, 0, ""},
		"AMD alone":                              {func(c *attestv1.Collateral) { *c = attestv1.Collateral{AmdCrls: c.GetAmdCrls()} }, 0, ""},
		"Intel alone":                            {func(c *attestv1.Collateral) { c.AmdCrls = nil }, 0, ""},
		"nothing":                                {func(c *attestv1.Collateral) { *c = attestv1.Collateral{} }, hardware.Collateral, "of any vendor"},
		"AMD's list signed by another root":      {func(c *attestv1.Collateral) { c.AmdCrls = [][]byte{other.List} }, hardware.Collateral, "not signed"},
		"Intel's list as AMD's":                  {func(c *attestv1.Collateral) { c.AmdCrls = c.GetIntelCrls()[:1] }, hardware.Collateral, "none of its roots"},
		"two lists of one root":                  {func(c *attestv1.Collateral) { c.AmdCrls = append(c.AmdCrls, a.Root.CRL(t, nil)) }, 0, ""},
		"a second list that another root signed": {func(c *attestv1.Collateral) { c.AmdCrls = append(c.AmdCrls, other.List) }, hardware.Collateral, "not signed"},
		"AMD's list that has ended": {func(c *attestv1.Collateral) {
			c.AmdCrls = [][]byte{a.Root.CRL(t, func(l *x509.RevocationList) { l.NextUpdate = hardwaretest.Now.Add(-time.Minute) })}
		}, hardware.Collateral, "valid from"},
		"a list that is none": {func(c *attestv1.Collateral) { c.AmdCrls = [][]byte{{1}} }, attestv1.Reason_REASON_POLICY_INVALID, "AMD"},
		"no TCB info":         {func(c *attestv1.Collateral) { c.TcbInfos = nil }, hardware.Collateral, "no tcbInfo"},
		"TCB info of another key": {func(c *attestv1.Collateral) {
			c.TcbInfos = [][]byte{hardwaretest.NewIntel(t).Signing.Answer(t, "tcbInfo", hardwaretest.TCBInfo())}
		}, hardware.Collateral, "not signed"},
		"two TCB infos of one model, the older first": {func(c *attestv1.Collateral) {
			older := hardwaretest.TCBInfo()
			older["issueDate"], older["tcbEvaluationDataNumber"], older["fmspc"] = hardwaretest.Now.Add(-time.Hour), 17, strings.ToUpper(hardwaretest.FMSPC)
			c.TcbInfos = append([][]byte{i.Signing.Answer(t, "tcbInfo", older)}, c.GetTcbInfos()...)
		}, attestv1.Reason_REASON_POLICY_INVALID, "two TCB infos of the model " + hardwaretest.FMSPC},
	} {
		intel := i.Collateral(t, hardwaretest.TCBInfo(), hardwaretest.QEIdentity())
		c := &attestv1.Collateral{AmdCrls: [][]byte{a.List}, TcbInfos: intel.TCBInfo, TcbInfoChain: intel.TCBInfoChain, QeIdentity: intel.QEIdentity, QeIdentityChain: intel.QEIdentityChain, IntelCrls: intel.CRLs}
		tt.change(c)
		_, err := hwreport.CheckCollateral(c, v, hardwaretest.Now)
		if tt.about == "" && err != nil || tt.about != "" && (attest.ReasonOf(err) != tt.want || !strings.Contains(err.Error(), tt.about)) {
			t.Errorf("%s: %v, want an error about %q", name, err, tt.about)
		}
	}
}
