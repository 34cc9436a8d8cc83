package hcl_test

import (
	"bytes"
	"crypto"
	"crypto/sha256"
	"crypto/x509"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"slices"
	"testing"

	gotpm "github.com/google/go-tpm/tpm2"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/hcl"
	"github.com/muster-k8s/muster/trust/internal/wire"
)

// quote is the TPM quote of a captured machine: RSASSA signature, signed structure, and the values of its PCRs.
type quote struct {
	signature, message []byte
	pcrs               [][]byte
}

// bincode reads a quote as crates of Azure's tools write it.
func bincode(t testing.TB, name string) (q quote) {
	b := file(t, name)
	take := func() []byte {
		n := binary.LittleEndian.Uint64(b)
		out := b[8 : 8+n]
		b = b[8+n:]
		return out
	}
	q.signature, q.message = take(), take()
	for b = b[8:]; len(b) > 0; b = b[32:] {
		q.pcrs = append(q.pcrs, b[:32])
	}
	return q
}

// bytesIn reads an array of numbers, or hexadecimal digits.
func bytesIn(t testing.TB, raw json.RawMessage) []byte {
	t.Helper()
	var s string
	if json.Unmarshal(raw, &s) != nil {
		return bytesOf(t, raw)
	}
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// quoteIn reads the quote in a JSON file.
func quoteIn(t testing.TB, name string) quote {
	t.Helper()
	all := map[string]json.RawMessage{}
	for b := json.RawMessage(file(t, name)); b != nil; {
		clear(all)
		if err := json.Unmarshal(b, &all); err != nil {
			t.Fatal(err)
		}
		b = nil
		for _, inner := range []string{"evidence", "tpm_quote", "quote"} {
			if all[inner] != nil {
				b = slices.Clone(all[inner])
				break
			}
		}
	}
	q := quote{bytesIn(t, all["signature"]), bytesIn(t, all["message"]), nil}
	var pcrs []json.RawMessage
	if err := json.Unmarshal(all["pcrs"], &pcrs); err != nil {
		t.Fatal(err)
	}
	for _, v := range pcrs {
		q.pcrs = append(q.pcrs, bytesIn(t, v))
	}
	return q
}

// akOf returns the key that an HCL report binds.
func akOf(t testing.TB, report []byte) crypto.PublicKey {
	t.Helper()
	_, _, runtime, err := hcl.Split(report)
	if err != nil {
		t.Fatal(err)
	}
	r, err := hcl.Parse(runtime)
	if err != nil {
		t.Fatal(err)
	}
	return r.AK
}

// The key that a captured report binds has signed the quote that was captured with it, and no other machine's has.
func TestCapturedQuotesAreSignedByTheAKOfTheirReport(t *testing.T) {
	reported := func(dir string) crypto.PublicKey { report, _ := captured(t, dir); return akOf(t, report) }
	fixture := []byte("attestation-test-fixture")
	block, _ := pem.Decode(file(t, "azure/older-samples/akpub.pem"))
	older, err := x509.ParsePKIXPublicKey(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	certificate, err := x509.ParseCertificate(file(t, "azure/tdx-2026-full/ak-cert.der"))
	if err != nil {
		t.Fatal(err)
	}
	full := quote{file(t, "azure/tdx-2026-full/tpm-quote.sig")[6:], file(t, "azure/tdx-2026-full/tpm-quote.msg"), nil} // a TPMT_SIGNATURE; its values were not captured
	// In the text of a machine with user data, these are the nonce.
	report, _ := captured(t, "snp-milan-rv3-userdata")
	_, _, runtime, err := hcl.Split(report)
	if err != nil {
		t.Fatal(err)
	}
	var text struct {
		UserData string `json:"user-data"`
	}
	if err := json.Unmarshal(runtime, &text); err != nil {
		t.Fatal(err)
	}
	data, err := hex.DecodeString(text.UserData)
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		ak    crypto.PublicKey
		quote quote
		nonce []byte // nil: any
	}{
		"SEV-SNP, Milan, report of version 2": {reported("snp-milan-rv2"), bincode(t, "azure/snp-milan-rv2/quote.bincode"), []byte("challenge")},
		"SEV-SNP, Milan":                      {reported("snp-milan-rv3-live"), quoteIn(t, "azure/snp-milan-rv3-live/evidence.json"), fixture},
		"SEV-SNP, Milan, without a nonce":     {reported("snp-milan-rv3-nononce"), quoteIn(t, "azure/snp-milan-rv3-nononce/evidence.json"), []byte{}},
		"SEV-SNP, Milan, with user data":      {reported("snp-milan-rv3-userdata"), quoteIn(t, "azure/snp-milan-rv3-userdata/evidence.json"), bytes.TrimRight(data, "\x00")},
		"SEV-SNP, Genoa":                      {reported("snp-genoa-rv3"), quoteIn(t, "azure/snp-genoa-rv3/evidence.json"), nil},
		"TDX, 2024":                           {akOf(t, file(t, "azure/tdx-2024/hcl-report.bin")), quoteIn(t, "azure/tdx-2024/tpm-quote.json"), []byte("challenge")},
		"TDX":                                 {reported("tdx-live"), quoteIn(t, "azure/tdx-live/evidence.json"), fixture},
		"TDX, by the certificate's key":       {certificate.PublicKey, full, make([]byte, 32)},
		"an older sample":                     {older, bincode(t, "azure/older-samples/quote.bincode"), nil},
	} {
		t.Run(name, func(t *testing.T) {
			signature := append([]byte{0x00, 0x14, 0x00, 0x0B, 0x01, 0x00}, tt.quote.signature...)
			if err := wire.VerifySignature(tt.ak, tt.quote.message, signature); err != nil {
				t.Fatal(err)
			}
			if err := wire.VerifySignature(reported(map[bool]string{true: "snp-milan-rv2", false: "tdx-live"}[name == "TDX"]), tt.quote.message, signature); attest.ReasonOf(err) != attestv1.Reason_REASON_SIGNATURE_INVALID {
				t.Errorf("by another machine's key: %v", err)
			}
			a, err := gotpm.Unmarshal[gotpm.TPMSAttest](tt.quote.message)
			if err != nil {
				t.Fatal(err)
			}
			info, err := a.Attested.Quote()
			if err != nil || tt.nonce != nil && !bytes.Equal(a.ExtraData.Buffer, tt.nonce) {
				t.Fatalf("nonce %q, %v", a.ExtraData.Buffer, err)
			}
			if sum := sha256.Sum256(bytes.Join(tt.quote.pcrs, nil)); tt.quote.pcrs != nil && !bytes.Equal(sum[:], info.PCRDigest.Buffer) {
				t.Errorf("its values lead to %x, signed is %x", sum, info.PCRDigest.Buffer)
			}
		})
	}
}
