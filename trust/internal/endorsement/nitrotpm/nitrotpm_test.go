package nitrotpm

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/internal/refusal"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func read(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func rootG1(t testing.TB) []*x509.Certificate {
	t.Helper()
	block, _ := pem.Decode(read(t, "root-g1.pem"))
	c, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return []*x509.Certificate{c}
}

// captured is what the machine of nitrotpm.cbor quoted.
type captured struct {
	Nonce, AK string
	PCRs      []string
}

func quoted(t testing.TB) (nonce, ak []byte, pcrs [][]byte) {
	t.Helper()
	var c captured
	if err := json.Unmarshal(read(t, "nitrotpm.json"), &c); err != nil {
		t.Fatal(err)
	}
	unhex := func(s string) []byte {
		b, err := hex.DecodeString(s)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	for _, s := range c.PCRs {
		pcrs = append(pcrs, unhex(s))
	}
	return unhex(c.Nonce), unhex(c.AK), pcrs
}

var (
	madeAt       = time.Date(2026, 2, 3, 10, 12, 2, 0, time.UTC)
	enclaveAt    = time.Date(2025, 12, 25, 13, 15, 37, 0, time.UTC)
	debugAt      = time.Date(2025, 12, 25, 8, 20, 46, 0, time.UTC)
	untrusted    = attestv1.Reason_REASON_EK_UNTRUSTED
	badSig       = attestv1.Reason_REASON_SIGNATURE_INVALID
	instanceSeen = "i-01cfb383223e42522"
)

func TestACapturedDocumentIsAuthentic(t *testing.T) {
	nonce, ak, pcrs := quoted(t)
	s, d, err := parse(read(t, "nitrotpm.cbor"))
	if err != nil {
		t.Fatal(err)
	}
	path, err := authenticate(s, d, rootG1(t), madeAt)
	if err != nil || len(path) != 5 {
		t.Fatalf("%d certificates, %v", len(path), err)
	}
	if d.Module != instanceSeen+"-tpm0000000000000000" || string(d.Nonce) != string(nonce) || string(d.PublicKey) != string(ak) || d.UserData != "" || d.Digest != "SHA384" || len(d.PCRs) != 24 {
		t.Errorf("%+v", d)
	}
	if err := d.samePCRs(pcrs); err != nil {
		t.Error(err)
	}
	for i := range pcrs {
		pcrs[i][47] ^= 1
		if err := d.samePCRs(pcrs); err == nil {
			t.Errorf("another PCR %d is the same", i)
		}
		pcrs[i][47] ^= 1
	}
	if err := d.samePCRs(pcrs[:15]); err == nil {
		t.Error("15 PCRs are enough")
	}
	module, err := Module(read(t, "nitrotpm.cbor"))
	if err != nil || module != d.Module {
		t.Errorf("%q, %v", module, err)
	}
}

func TestCapturedDocumentsAreRefusedAtOtherTimesAndBelowOtherRoots(t *testing.T) {
	root := rootG1(t)
	for name, tt := range map[string]struct {
		file  string
		roots []*x509.Certificate
		now   time.Time
		want  string // part of the error; empty: authentic
	}{
		"in time":                {"nitrotpm.cbor", root, madeAt, ""},
		"with a clock behind":    {"nitrotpm.cbor", root, madeAt.Add(-4 * time.Minute), ""},
		"with a clock ahead":     {"nitrotpm.cbor", root, madeAt.Add(4 * time.Minute), ""},
		"too early":              {"nitrotpm.cbor", root, madeAt.Add(-6 * time.Minute), "may differ"},
		"too late":               {"nitrotpm.cbor", root, madeAt.Add(6 * time.Minute), "may differ"},
		"today":                  {"nitrotpm.cbor", root, time.Date(2026, 11, 27, 0, 0, 0, 0, time.UTC), "may differ"},
		"without a root":         {"nitrotpm.cbor", nil, madeAt, "names a root"},
		"an enclave's":           {"enclave.cbor", root, enclaveAt, ""},
		"a debugged enclave's":   {"enclave-debug.cbor", root, debugAt, ""},
		"an enclave's, too late": {"enclave.cbor", root, enclaveAt.Add(time.Hour), "may differ"},
	} {
		s, d, err := parse(read(t, tt.file))
		if err != nil {
			t.Fatal(err)
		}
		_, err = authenticate(s, d, tt.roots, tt.now)
		if tt.want == "" && err != nil || tt.want != "" && (refusal.ReasonOf(err) != untrusted || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%s: %v, want an error about %q", name, err, tt.want)
		}
	}
}

// posing returns an authority with the name of AWS's root and another key.
func posing(t testing.TB) *x509.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	aws := rootG1(t)[0]
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), RawSubject: aws.RawSubject, NotBefore: aws.NotBefore, NotAfter: aws.NotAfter,
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	c, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// What a peer without certificates of a listed authority makes a verifier check (docs/limits.md).
func TestSignaturesThatADocumentCosts(t *testing.T) {
	checks := 0
	before := chain
	chain.Signed = func(c, issuer *x509.Certificate) error {
		checks++
		return c.CheckSignatureFrom(issuer)
	}
	defer func() { chain = before }()
	s, d, err := parse(read(t, "nitrotpm.cbor"))
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		roots  []*x509.Certificate
		now    time.Time
		checks int
		ok     bool
	}{
		"an authority of the policy":        {rootG1(t), madeAt, 4, true},
		"none of that name":                 {nil, madeAt, 0, false},
		"another one of that name":          {[]*x509.Certificate{posing(t)}, madeAt, 1, false},
		"two others of that name":           {[]*x509.Certificate{posing(t), posing(t)}, madeAt, 2, false},
		"one of the policy, and another":    {[]*x509.Certificate{posing(t), rootG1(t)[0]}, madeAt, 5, true},
		"a document that was made long ago": {rootG1(t), madeAt.Add(time.Hour), 0, false},
	} {
		checks = 0
		if _, err := authenticate(s, d, tt.roots, tt.now); checks != tt.checks || (err == nil) != tt.ok {
			t.Errorf("%s: %d signatures, %v; want %d", name, checks, err, tt.checks)
		}
	}
}

func TestOneChangedBitIsNoLongerSigned(t *testing.T) {
	raw := read(t, "nitrotpm.cbor")
	payload := bytes.Index(raw, []byte("nonce")) + 10
	for name, at := range map[string]int{"the signature": len(raw) - 1, "its first half": len(raw) - 96, "the payload": payload} {
		changed := bytes.Clone(raw)
		changed[at] ^= 1
		s, d, err := parse(changed)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := authenticate(s, d, rootG1(t), madeAt); refusal.ReasonOf(err) != badSig {
			t.Errorf("%s: %v", name, err)
		}
		changed[at] ^= 1
		if s, d, err = parse(changed); err != nil {
			t.Fatal(err)
		}
		if _, err := authenticate(s, d, rootG1(t), madeAt); err != nil {
			t.Errorf("%s, changed back: %v", name, err)
		}
	}
}

func TestMachineIDsDependOnTheModuleAlone(t *testing.T) {
	a, b := MachineID("i-0123456789abcdef0-tpm0000000000000000"), MachineID("i-0123456789abcdef0-tpm0000000000000001")
	if a == b || a == ([32]byte{}) {
		t.Errorf("%x, %x", a, b)
	}
	// printf 'muster nitro tpm\0i-0123456789abcdef0-tpm0000000000000000' | sha256sum
	if got := hex.EncodeToString(a[:]); got != "2e79078786980a1af7860c898f5fd6e5b9a2fb7b5d82b92dfe583ef798781499" {
		t.Error(got)
	}
	for name, want := range map[string]string{
		"i-0123456789abcdef0-tpm0000000000000000":               "i-0123456789abcdef0",
		"i-0123456789abcdef0-enc019b55a68bd2ed4b":               "",
		"i-0123456789abcdef0":                                   "",
		"i-0123456789abcdef0-tpm000000000000000":                "",
		"i-0123456789ABCDEF0-tpm0000000000000000":               "",
		"\x20i-0123456789abcdef0-tpm0000000000000000":           "",
		"i-0123456789abcdef0-tpm0000000000000000\n":             "",
		"i-" + strings.Repeat("a", 33) + "-tpm0000000000000000": "",
	} {
		if got, err := instanceOf(name); got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v", name, got, err)
		}
	}
}
