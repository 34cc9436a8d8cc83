package tdx_test

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/hardware"
	"github.com/muster-k8s/muster/trust/attest/hardwaretest"
	"github.com/muster-k8s/muster/trust/attest/tdx"
)

func TestCapturedCollateralHasItsEnds(t *testing.T) {
	ends, err := march(t).Ends()
	if err != nil || len(ends) != 5 {
		t.Fatalf("%+v, %v", ends, err)
	}
	for _, e := range ends {
		if e.Time.Before(day("2026-03-20")) || e.Time.After(day("2027-06-01")) {
			t.Errorf("%s ends on %s", e.Name, e.Time)
		}
	}
	if ends, err := (tdx.Collateral{}).Ends(); err != nil || len(ends) != 0 {
		t.Errorf("of nothing: %v, %v", ends, err)
	}
	june := phala(t, "tdx/v4-uptodate-2025")
	if err := june.Check(tdx.Intel(), tdx.PCKAuthorities(), day("2025-06-20")); attest.ReasonOf(err) != hardware.Collateral || !strings.Contains(err.Error(), "Processor CA") {
		t.Errorf("without the list of the processors' authority: %v", err)
	}
	june.CRLs = append(june.CRLs, file(t, "tdx/v4-uptodate-2025/pck_crl_processor.der"))
	if err := june.Check(tdx.Intel(), tdx.PCKAuthorities(), day("2025-06-20")); err != nil {
		t.Error(err)
	}
	if m := june.Models(); len(m) != 1 || m[0] != "b0c06f000000" {
		t.Errorf("models %q", m)
	}
}

// TestIntelsAuthoritiesForPCKsAreBelowItsRoot also compares one with a captured quote's.
func TestIntelsAuthoritiesForPCKsAreBelowItsRoot(t *testing.T) {
	all, now := tdx.PCKAuthorities(), day("2026-03-20")
	if len(all) != 2 || all[0].Subject.CommonName != "Intel SGX PCK Platform CA" || all[1].Subject.CommonName != "Intel SGX PCK Processor CA" {
		t.Fatalf("%d authorities", len(all))
	}
	for _, c := range all {
		if err := hardware.CheckIssued(c, tdx.Intel()[0], now); err != nil {
			t.Error(err)
		}
	}
	if p, _ := pem.Decode([]byte(field(t, "tdx/v4-uptodate-2025/collateral.json", "pck_crl_issuer_chain"))); p == nil || !bytes.Equal(p.Bytes, all[0].Raw) {
		t.Error("the platforms' authority is not that of captured collateral")
	}
}

func TestCollateralThatIsNotIntelsOrHasEndedIsRefused(t *testing.T) {
	v := hardwaretest.NewIntel(t)
	good := func() tdx.Collateral { return v.Collateral(t, hardwaretest.TCBInfo(), hardwaretest.QEIdentity()) }
	other := hardwaretest.NewIntel(t)
	for name, tt := range map[string]struct {
		change func(*tdx.Collateral)
		at     time.Duration
		want   string // part of the error; empty: accepted
	}{
		"nothing changed": {func(*tdx.Collateral) {}, 0, ""},
		"no TCB info":     {func(c *tdx.Collateral) { c.TCBInfo = nil }, 0, "no tcbInfo"},
		"TCB info of another vendor": {func(c *tdx.Collateral) {
			c.TCBInfo = [][]byte{other.Signing.Answer(t, "tcbInfo", hardwaretest.TCBInfo())}
		}, 0, "not signed"},
		"TCB info that has ended": {func(c *tdx.Collateral) {
			i := hardwaretest.TCBInfo()
			i["nextUpdate"] = hardwaretest.Now.Add(-time.Minute)
			c.TCBInfo = [][]byte{v.Signing.Answer(t, "tcbInfo", i)}
		}, 0, "tcbInfo is valid"},
		"no identity": {func(c *tdx.Collateral) { c.QEIdentity = nil }, 0, "is missing"},
		"identity of another vendor": {func(c *tdx.Collateral) {
			c.QEIdentity = other.Signing.Answer(t, "enclaveIdentity", hardwaretest.QEIdentity())
		}, 0, "not signed"},
		"no list of the root": {func(c *tdx.Collateral) { c.CRLs = c.CRLs[1:] }, 0, "missing"},
		"list of the platform authority that has ended": {func(c *tdx.Collateral) {
			c.CRLs[1] = v.Platform.CRL(t, func(l *x509.RevocationList) { l.NextUpdate = hardwaretest.Now.Add(-time.Minute) })
		}, 0, "PCK Platform CA\" is valid"},
		"no list of the platform authority":            {func(c *tdx.Collateral) { c.CRLs = slices.Delete(c.CRLs, 1, 2) }, 0, "PCK Platform CA\" is missing"},
		"no list of the processor authority":           {func(c *tdx.Collateral) { c.CRLs = c.CRLs[:2] }, 0, "PCK Processor CA\" is missing"},
		"platform list in place of the processor list": {func(c *tdx.Collateral) { c.CRLs[2] = c.CRLs[1] }, 0, "PCK Processor CA\" is missing"},
		"list by another with the authority's name, until 2099": {func(c *tdx.Collateral) {
			c.CRLs[1] = other.Platform.CRL(t, func(l *x509.RevocationList) { l.NextUpdate = time.Date(2099, 1, 1, 0, 0, 0, 0, time.UTC) })
		}, 0, "not signed"},
		"second list by another with the authority's name": {func(c *tdx.Collateral) { c.CRLs = append(c.CRLs, other.Processor.CRL(t, nil)) }, 0, "not signed"},
		"list of an authority that is not Intel's":         {func(c *tdx.Collateral) { c.CRLs = append(c.CRLs, hardwaretest.NewAMD(t).List) }, 0, "1 of Intel's 4"},
		"list that is none":                                {func(c *tdx.Collateral) { c.CRLs = append(c.CRLs, []byte{1}) }, 0, "1 of Intel's 4"},
		"TCB info of SGX": {func(c *tdx.Collateral) {
			i := hardwaretest.TCBInfo()
			i["id"] = "SGX"
			c.TCBInfo = append(c.TCBInfo, v.Signing.Answer(t, "tcbInfo", i))
		}, 0, "want TDX"},
		"TCB infos of two models": {func(c *tdx.Collateral) {
			i := hardwaretest.TCBInfo()
			i["fmspc"] = "50806f000000"
			c.TCBInfo = append(c.TCBInfo, v.Signing.Answer(t, "tcbInfo", i))
		}, 0, ""},
		"TCB info of a model twice, in other letters": {func(c *tdx.Collateral) {
			i := hardwaretest.TCBInfo()
			i["fmspc"] = strings.ToUpper(hardwaretest.FMSPC)
			c.TCBInfo = append(c.TCBInfo, v.Signing.Answer(t, "tcbInfo", i))
		}, 0, "two tcbInfos of the FMSPC " + hardwaretest.FMSPC},
		"two days later": {func(*tdx.Collateral) {}, 48 * time.Hour, "valid from"},
	} {
		c := good()
		tt.change(&c)
		err := c.Check([]*x509.Certificate{v.Root.Cert}, v.PCKAuthorities(), hardwaretest.Now.Add(tt.at))
		if tt.want == "" && err != nil || tt.want != "" && (attest.ReasonOf(err) != hardware.Collateral || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%s: %v, want an error about %q", name, err, tt.want)
		}
	}
}
