package tdx_test

import (
	"bytes"
	"crypto/x509"
	"testing"

	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/hardware"
	"github.com/muster-k8s/muster/trust/attest/hardwaretest"
	"github.com/muster-k8s/muster/trust/attest/tdx"
)

var refusals = map[reason]bool{hardware.Malformed: true, hardware.Untrusted: true, hardware.Signature: true, hardware.Collateral: true, hardware.TCB: true}

// FuzzQuote passes changed quotes. No change of what is signed is genuine.
func FuzzQuote(f *testing.F) {
	c, now := march(f), day("2026-03-20")
	for _, name := range []string{"tdx/v5-td15-google", "azure/tdx-live", "tdx/v4-debug", "tdx/gcp-cos113", "tdx/v4-spr-2023"} {
		f.Add(quote(f, name))
	}
	google, azure, debug := quote(f, "tdx/v5-td15-google")[:702], quote(f, "azure/tdx-live")[:632], quote(f, "tdx/v4-debug")[:632]
	f.Fuzz(func(t *testing.T, b []byte) {
		_, err := tdx.Genuine(b, c, tdx.Intel(), now)
		if err != nil {
			if !refusals[attest.ReasonOf(err)] {
				t.Fatal(err)
			}
			return
		}
		if !bytes.HasPrefix(b, google) && !bytes.HasPrefix(b, azure) && !bytes.HasPrefix(b, debug) {
			t.Fatalf("genuine: %x", b)
		}
	})
}

// FuzzCollateral passes TCB data that are signed, so that what comes after the signature is reached.
func FuzzCollateral(f *testing.F) {
	v := hardwaretest.NewIntel(f)
	q := v.Quote(f, hardwaretest.TD{}, hardware.ReportData{1})
	good := v.Collateral(f, hardwaretest.TCBInfo(), hardwaretest.QEIdentity())
	inner := func(answer []byte, name string) []byte {
		b := bytes.TrimPrefix(answer, []byte(`{"`+name+`":`))
		return b[:bytes.LastIndex(b, []byte(`,"signature"`))]
	}
	f.Add(inner(good.TCBInfo[0], "tcbInfo"), inner(good.QEIdentity, "enclaveIdentity"))
	f.Add(inner(file(f, "tdx/collateral-2026-03/tcb_info_90c06f000000.json"), "tcbInfo"), inner(file(f, "tdx/collateral-2026-03/td_qe_identity.json"), "enclaveIdentity"))
	f.Add([]byte("{}"), []byte("null"))
	f.Fuzz(func(t *testing.T, info, identity []byte) {
		c := good
		c.TCBInfo, c.QEIdentity = [][]byte{v.Signing.Answer(t, "tcbInfo", info)}, v.Signing.Answer(t, "enclaveIdentity", identity)
		if _, err := tdx.Genuine(q, c, []*x509.Certificate{v.Root.Cert}, hardwaretest.Now); err != nil && !refusals[attest.ReasonOf(err)] {
			t.Fatal(err)
		}
	})
}

// FuzzPCK passes extensions of certificates that the vendor has signed.
func FuzzPCK(f *testing.F) {
	v := hardwaretest.NewIntel(f)
	c := v.Collateral(f, hardwaretest.TCBInfo(), hardwaretest.QEIdentity())
	f.Add(hardwaretest.PCKExtension(hardwaretest.FMSPC, "0000", 5, 13))
	f.Add([]byte{0x30, 0x84, 0xFF, 0xFF, 0xFF, 0xFF})
	f.Fuzz(func(t *testing.T, extension []byte) {
		pck := v.NewPCK(t, func(c *x509.Certificate) { c.ExtraExtensions[0].Value = extension })
		if err := tdx.Chain(v.Quote(t, hardwaretest.TD{PCK: pck}, hardware.ReportData{1}), c, []*x509.Certificate{v.Root.Cert}, hardwaretest.Now); err != nil && !refusals[attest.ReasonOf(err)] {
			t.Fatal(err)
		}
	})
}
