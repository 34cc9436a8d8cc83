package tdx_test

import (
	"crypto/x509"
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
	if err := march(t).Check(tdx.Intel(), day("2026-03-20")); err != nil {
		t.Error(err)
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
		}, 0, "PCK Platform CA ended"},
		"list that is none": {func(c *tdx.Collateral) { c.CRLs = append(c.CRLs, []byte{1}) }, 0, "revocation list 2"},
		"two days later":    {func(*tdx.Collateral) {}, 48 * time.Hour, "valid from"},
	} {
		c := good()
		tt.change(&c)
		err := c.Check([]*x509.Certificate{v.Root.Cert}, hardwaretest.Now.Add(tt.at))
		if tt.want == "" && err != nil || tt.want != "" && (attest.ReasonOf(err) != hardware.Collateral || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%s: %v, want an error about %q", name, err, tt.want)
		}
	}
}
