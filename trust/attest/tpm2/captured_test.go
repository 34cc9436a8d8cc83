package tpm2_test

import (
	"bytes"
	"crypto"
	"crypto/rsa"
	_ "crypto/sha1" // older vendors' signatures, which are refused
	"crypto/x509"
	"encoding/asn1"
	"encoding/pem"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/hardwaretest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
	"github.com/muster-k8s/muster/trust/internal/endorsement"
	"github.com/muster-k8s/muster/trust/internal/endorsement/ekcert"
	"github.com/muster-k8s/muster/trust/internal/endorsement/platformak"
)

// captured is the folder of certificates and quotes of real machines. Its README.md has their sources, and what becomes of each.
const captured = "testdata/captured"

// Times at which captured certificates were valid.
var y2016, y2026 = time.Date(2016, 6, 1, 0, 0, 0, 0, time.UTC), time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)

func file(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(captured, name))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// ders returns the certificates of a file, in PEM or in DER, as they are.
func ders(t testing.TB, name string) (out [][]byte) {
	t.Helper()
	b := file(t, name)
	if !bytes.Contains(b, []byte("-----BEGIN")) {
		return [][]byte{b}
	}
	for block, rest := pem.Decode(b); block != nil; block, rest = pem.Decode(rest) {
		out = append(out, block.Bytes)
	}
	return out
}

// cutDER returns the first DER element at an offset, without what is behind it.
func cutDER(t testing.TB, b []byte, offset int) []byte {
	t.Helper()
	var raw asn1.RawValue
	if _, err := asn1.Unmarshal(b[offset:], &raw); err != nil {
		t.Fatal(err)
	}
	return raw.FullBytes
}

// parsed returns the certificates of files; AMD's have a newline behind them, which is cut.
func parsed(t testing.TB, names ...string) (out []*x509.Certificate) {
	t.Helper()
	for _, name := range names {
		for _, der := range ders(t, name) {
			c, err := x509.ParseCertificate(cutDER(t, der, 0))
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			out = append(out, c)
		}
	}
	return out
}

// signedBySHA1 checks a signature as [x509.Certificate.CheckSignatureFrom] does, and accepts SHA-1.
func signedBySHA1(c, issuer *x509.Certificate) error {
	if c.SignatureAlgorithm != x509.SHA1WithRSA {
		return c.CheckSignatureFrom(issuer)
	}
	key, ok := issuer.PublicKey.(*rsa.PublicKey)
	if !ok {
		return errors.New("no RSA key")
	}
	h := crypto.SHA1.New()
	h.Write(c.RawTBSCertificate)
	return rsa.VerifyPKCS1v15(key, crypto.SHA1, h.Sum(nil), c.Signature)
}

// capturedEKs are the oddities of captured endorsement key certificates, and of certificates that are none.
func capturedEKs(testing.TB) (all []hardwaretest.Vector) {
	add := func(name string, want attestv1.Reason, wrong, right func(testing.TB) error) {
		all = append(all, hardwaretest.Vector{Name: "captured " + name, Want: want, Wrong: wrong, Right: right})
	}
	verify := func(at time.Time, roots []*x509.Certificate, certs ...[]byte) error {
		_, err := tpm2.CountSignatureChecks(certs, roots, at)
		return err
	}
	// genuine is the certificate of the same vendor that lacks the oddity, at a time at which it is valid.
	genuine := func(at time.Time) func(testing.TB) error {
		return func(t testing.TB) error {
			return verify(at, parsed(t, "tpm-ek/ca/stm-ek-int05.der"), cutDER(t, file(t, "tpm-ek/leaf/stm-rsa-ffpadded.bin"), 0))
		}
	}
	int02 := func(t testing.TB) []*x509.Certificate { return parsed(t, "tpm-ek/ca/stm-ek-int02.der") }
	add("stm-rsa-ffpadded: the padding of its NV index behind it", malformed, func(t testing.TB) error {
		return verify(y2026, parsed(t, "tpm-ek/ca/stm-ek-int05.der"), file(t, "tpm-ek/leaf/stm-rsa-ffpadded.bin"))
	}, genuine(y2026))
	add("stm-rsa-ffpadded after its end", badEK, genuine(y2026.AddDate(3, 0, 0)), genuine(y2026))
	add("stm-rsa-ffpadded before its beginning", badEK, genuine(y2016), genuine(y2026))
	for _, odd := range []struct {
		name string
		at   int // offset of the certificate
		of   string
	}{
		{"stm-nuc-nvheader", 7, "the header of its NV index before it"},
		{"ifx-nvheader-padded", 7, "the header and the padding of its NV index"},
		{"nuvoton-padded", 0, "the padding of its NV index, 0x11, behind it"},
	} {
		path := "tpm-ek/leaf/" + odd.name + ".bin"
		add(odd.name+": "+odd.of, malformed,
			func(t testing.TB) error { return verify(y2016, int02(t), file(t, path)) },
			func(t testing.TB) error {
				_, err := x509.ParseCertificate(cutDER(t, file(t, path), odd.at))
				return err
			})
	}
	// The certificates of TPM 1.2 and of early TPM 2.0. crypto/x509 reads no key of theirs: its type is RSAES-OAEP.
	leaf := func(t testing.TB, name string) []byte {
		switch filepath.Base(name) {
		case "ifx-nvheader-padded.bin":
			return cutDER(t, file(t, name), 7)
		case "nuvoton-padded.bin":
			return cutDER(t, file(t, name), 0)
		}
		return ders(t, name)[0]
	}
	for _, name := range []string{"stm-ab21ccf2.pem", "stm-nuc1.pem", "stm-nuc2.pem", "stm-nuc-noheader.der", "ifx-nvheader-padded.bin", "nuvoton-padded.bin"} {
		short, path, issuer := strings.TrimSuffix(name, filepath.Ext(name)), "tpm-ek/leaf/"+name, "tpm-ek/ca/stm-ek-int02.der"
		add(short+": a key of the type RSAES-OAEP", badEK, func(t testing.TB) error { return verify(y2016, int02(t), leaf(t, path)) }, genuine(y2026))
		switch name {
		case "nuvoton-padded.bin":
			continue // its issuer was not captured
		case "ifx-nvheader-padded.bin":
			issuer = "tpm-ek/ca/ifx-ek-int08.der"
		}
		// Without the check of the key, what is left to refuse is SHA-1, and the end of its time.
		chained := func(at time.Time, signed func(c, issuer *x509.Certificate) error, root string, issuers ...string) func(testing.TB) error {
			return func(t testing.TB) error {
				c, err := x509.ParseCertificate(leaf(t, path))
				if err != nil {
					t.Fatal(err)
				}
				if err := endorsement.HandleSAN(c); err != nil {
					return endorsement.Refuse(badEK, "%w", err)
				}
				_, err = endorsement.Chain{What: "EK certificate", Usages: []asn1.ObjectIdentifier{ekcert.OIDEKCertificate}, Signed: signed}.Path(append([]*x509.Certificate{c}, parsed(t, issuers...)...), parsed(t, root), at)
				return err
			}
		}
		add(short+": signed with SHA-1", badEK, chained(y2016, nil, issuer), chained(y2016, signedBySHA1, issuer))
		add(short+" after its end", badEK, chained(y2026, signedBySHA1, issuer), chained(y2016, signedBySHA1, issuer))
		if issuer == "tpm-ek/ca/stm-ek-int02.der" {
			// It has the key of the genuine one, too.
			const fake, root = "tpm-ek/leaf/fake-int02-same-name.pem", "tpm-ek/ca/stm-ek-root.der"
			add(short+" below fake-int02-same-name: an issuer of the same name, certified by another root", badEK, chained(y2016, signedBySHA1, root, fake), chained(y2016, signedBySHA1, root, issuer))
		}
	}
	add("fake-int02-same-name: the certificate of an authority", badEK, func(t testing.TB) error {
		return verify(y2016, int02(t), leaf(t, "tpm-ek/leaf/fake-int02-same-name.pem"))
	}, genuine(y2026))
	add("tcg-profile-example: no root of the policy", badEK, func(t testing.TB) error {
		return verify(y2016, int02(t), leaf(t, "tpm-ek/leaf/tcg-profile-example.pem"))
	}, genuine(y2026))
	idevid := func(t testing.TB, name string) error {
		return verify(y2026, parsed(t, "tpm-ek/idevid/chain.pem"), append([][]byte{file(t, "tpm-ek/idevid/"+name)}, ders(t, "tpm-ek/idevid/chain.pem")...)...)
	}
	add("iak: the certificate of a server maker's attestation key", badEK, func(t testing.TB) error { return idevid(t, "iak.der") }, genuine(y2026))
	add("idevid: the certificate of a device, with a key of the type RSA-PSS", badEK, func(t testing.TB) error { return idevid(t, "idevid.der") }, genuine(y2026))
	google := func(file string, roots ...string) func(testing.TB) error {
		return func(t testing.TB) error { return verify(y2026, parsed(t, roots...), ders(t, file)...) }
	}
	enc := google("gcp/ek-ak-certs/uca_tpm_rsa_enc_cert.pem", "gcp/roots/tpm_ek_intermediate_3.crt")
	add("pca_tpm_rsa_enc: without the extended key usage", badEK, google("gcp/ek-ak-certs/pca_tpm_rsa_enc_cert.pem", "gcp/roots/gcp_ek_ak_ca_intermediate_v3.crt"), enc)
	add("uca_tpm_rsa_sign: a key that only signs, although it has the extended key usage", badEK, google("gcp/ek-ak-certs/uca_tpm_rsa_sign_cert.pem", "gcp/roots/tpm_ek_intermediate_3.crt"), enc)
	add("uca_tpm_rsa_enc below an earlier authority of Google", badEK, google("gcp/ek-ak-certs/uca_tpm_rsa_enc_cert.pem", "gcp/roots/tpm_ek_intermediate_2.crt"), enc)
	for _, kind := range []string{"ecc", "rsa"} {
		name := "amd-ftpm-" + kind + "-ica-phx"
		read := func(b []byte) error { _, err := endorsement.Chain{}.Parse([][]byte{b}); return err }
		add(name+": a newline behind an issuer's certificate", malformed,
			func(t testing.TB) error { return read(file(t, "tpm-ek/ca/"+name+".der")) },
			func(t testing.TB) error { return read(cutDER(t, file(t, "tpm-ek/ca/"+name+".der"), 0)) })
	}
	return all
}

// Each authority of the captured ones can be listed in a policy, and each below another one of them chains to it.
func TestCapturedAuthoritiesAreRead(t *testing.T) {
	names, err := filepath.Glob(filepath.Join(captured, "tpm-ek/ca/*"))
	if err != nil {
		t.Fatal(err)
	}
	names = append(names, filepath.Join(captured, "tpm-ek/roots-bundle.pem"), filepath.Join(captured, "tpm-ek/idevid/chain.pem"))
	google, err := filepath.Glob(filepath.Join(captured, "gcp/roots/*"))
	if err != nil {
		t.Fatal(err)
	}
	var all []*x509.Certificate
	for _, name := range append(names, google...) {
		relative, err := filepath.Rel(captured, name)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range parsed(t, relative) {
			if _, err := endorsement.ParseAuthority(relative, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw}))); err != nil {
				t.Errorf("%s: %v", relative, err)
			}
			all = append(all, c)
		}
	}
	chained, refused := 0, []string(nil)
	for _, c := range all {
		issuers := slices.DeleteFunc(slices.Clone(all), func(i *x509.Certificate) bool { return !bytes.Equal(i.RawSubject, c.RawIssuer) })
		if len(issuers) == 0 {
			refused = append(refused, c.Subject.CommonName+": no issuer")
			continue
		}
		if _, err := (endorsement.Chain{What: "authority"}).Path([]*x509.Certificate{c}, issuers, y2026); err != nil {
			refused = append(refused, c.Subject.CommonName+": "+attest.ReasonName(attest.ReasonOf(err)))
			continue
		}
		chained++
	}
	want := []string{
		"IFX TPM EK Intermediate CA 08: EK_UNTRUSTED", // SHA-1
		"IFX TPM EK Root CA: no issuer", "AMD Pluton Global Factory ICA: no issuer",
	}
	if !slices.Equal(refused, want) || chained != len(all)-len(want) {
		t.Errorf("%d of %d chain; not these: %q", chained, len(all), refused)
	}
}

// The certificates of Google's attestation keys of 2021 and 2022, below its older authority.
func TestOlderPlatformCertificatesAreVerified(t *testing.T) {
	for name, issuer := range map[string]string{"gcp/shielded-cos85/ak-cert.der": "gcp/roots/tpm_ek_intermediate_2.crt", "gcp/ek-ak-certs/uca_tpm_rsa_sign_cert.pem": "gcp/roots/tpm_ek_intermediate_3.crt"} {
		leaf := parsed(t, name)[0]
		instance, err := platformak.Identify(leaf)
		if err != nil || instance.Provider != platformak.GCP {
			t.Errorf("%s: %+v, %v", name, instance, err)
		}
		if err := endorsement.HandleSAN(leaf); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		chain := endorsement.Chain{What: "platform key certificate", Usages: []asn1.ObjectIdentifier{ekcert.OIDEKCertificate}}
		if path, err := chain.Path(append([]*x509.Certificate{leaf}, parsed(t, issuer)...), parsed(t, "gcp/roots/tpm_ek_root_1.cer"), y2026); err != nil || len(path) != 3 {
			t.Errorf("%s: %d certificates, %v", name, len(path), err)
		}
		if _, err := chain.Path([]*x509.Certificate{leaf}, parsed(t, "gcp/roots/gcp_ek_ak_ca_intermediate_v3.crt"), y2026); attest.ReasonOf(err) != badEK {
			t.Errorf("%s, below Google's other authority: %v", name, err)
		}
	}
}

// A file without a row is evidence that no one has judged.
func TestEveryCapturedFileIsInTheTable(t *testing.T) {
	page := string(file(t, "README.md"))
	var rows []string
	for line := range strings.Lines(page) {
		if cells := strings.Split(line, "|"); len(cells) == 6 && strings.HasPrefix(cells[1], " `") {
			rows = append(rows, strings.Trim(cells[1], " `"))
		}
	}
	var files []string
	if err := filepath.WalkDir(captured, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Base(path) == "README.md" {
			return err
		}
		name, err := filepath.Rel(captured, path)
		files = append(files, name)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	slices.Sort(rows)
	if !slices.Equal(rows, files) {
		t.Errorf("the table has %q, the folder %q", rows, files)
	}
}
