package tpm_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"errors"
	"os"
	"path/filepath"
	"testing"

	gotpm "github.com/google/go-tpm/tpm2"

	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
	"github.com/muster-k8s/muster/trust/tpm"
	"github.com/muster-k8s/muster/trust/tpm/tpmtest"
)

func TestEveryKindOfEndorsementKey(t *testing.T) {
	ca := attesttest.NewCA(t).Intermediate(t, nil).Intermediate(t, nil)
	nonce := bytes.Repeat([]byte{0xA5}, 20)
	for i, slot := range tpm.Slots() {
		t.Run(slot.Name, func(t *testing.T) {
			e := tpmtest.SWTPM(t, tpmtest.Bare())
			tpmtest.Provision(t, raw(t, e), ca, slot.Index, slot.Template)
			checkEK(t, e.Open(), ca)
		})
		if slot.Nonce == 0 {
			continue
		}
		t.Run(slot.Name+" with a nonce", func(t *testing.T) {
			e := tpmtest.SWTPM(t, tpmtest.Bare())
			tpmtest.Provision(t, raw(t, e), ca, slot.Index, tpm.NonceTemplate(i, nonce))
			tpmtest.WriteNV(t, raw(t, e), slot.Nonce, nonce)
			checkEK(t, e.Open(), ca)
		})
	}
}

func checkEK(t *testing.T, dev *tpm.TPM, ca *attesttest.CA) {
	t.Helper()
	ek, err := dev.EndorsementKey(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(ek.Certificates) != 3 {
		t.Errorf("%d certificates, want that of the key and of two issuers", len(ek.Certificates))
	}
	c, err := exchange(t, dev, ca)
	if err != nil {
		t.Fatal(err)
	}
	if c.Clock().ResetCount == 0 && c.Clock().Clock == 0 {
		t.Error("the clock is scrambled")
	}
}

func TestAnECCKeyComesBeforeAnRSAOne(t *testing.T) {
	ca := attesttest.NewCA(t)
	e := tpmtest.SWTPM(t, tpmtest.Bare())
	slots := tpm.Slots()
	dev := e.Open()
	bare, err := dev.EndorsementKey(t.Context())
	if err != nil || len(bare.Certificates) > 0 {
		t.Errorf("%d certificates, %v", len(bare.Certificates), err)
	}
	for _, i := range []int{3, 2, 0} { // RSA, P-384, P-256
		tpmtest.Provision(t, raw(t, e), ca, slots[i].Index, slots[i].Template)
		dev.Forget()
		ek, err := dev.EndorsementKey(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		public, err := gotpm.Unmarshal[gotpm.TPMTPublic](ek.Public)
		if err != nil {
			t.Fatal(err)
		}
		want := slots[i].Template
		want.Unique = public.Unique
		if !bytes.Equal(gotpm.Marshal(want), ek.Public) {
			t.Errorf("with a certificate for %s the key is another one", slots[i].Name)
		}
		// A certificate for the key that the TPM shows without one does not make it another machine (A8).
		if same := bytes.Equal(ek.Public, bare.Public); same != (i == 0) {
			t.Errorf("with a certificate for %s the key is that without certificates: %t", slots[i].Name, same)
		}
	}
}

func TestACertificateForAnotherKeyIsRefused(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	e := tpmtest.SWTPM(t, tpmtest.Bare())
	tpmtest.WriteNV(t, raw(t, e), 0x01C0000A, attesttest.NewCA(t).Issue(t, key.Public(), nil)[0])
	if _, err := e.Open().EndorsementKey(t.Context()); !errors.Is(err, tpm.ErrCertificateMismatch) {
		t.Errorf("%v, want ErrCertificateMismatch", err)
	}
}

func TestNVThatIsNoCertificateIsRefused(t *testing.T) {
	for name, data := range map[string][]byte{
		"zeros":         make([]byte, 100),
		"cut short":     {0x30, 0x82, 0x01, 0x00, 0x01},
		"no structure":  []byte("certificate"),
		"an empty list": {0x30, 0x00},
	} {
		e := tpmtest.SWTPM(t, tpmtest.Bare())
		tpmtest.WriteNV(t, raw(t, e), 0x01C0000A, data)
		if _, err := e.Open().EndorsementKey(t.Context()); err == nil {
			t.Errorf("%s: a key was returned", name)
		}
	}
}

func TestAnRSAAttestationKeyPassesTheVerifier(t *testing.T) {
	// swtpm has ECC, so the test makes the key by hand as a TPM without ECC would make it.
	e := tpmtest.SWTPM(t)
	dev := raw(t, e)
	key, err := gotpm.CreatePrimary{
		PrimaryHandle: gotpm.AuthHandle{Handle: gotpm.TPMRHEndorsement, Auth: gotpm.PasswordAuth(nil)},
		InPublic:      gotpm.New2B(tpm.AKTemplate(true)),
	}.Execute(dev)
	if err != nil {
		t.Fatal(err)
	}
	public, err := key.OutPublic.Contents()
	if err != nil {
		t.Fatal(err)
	}
	ak, err := tpm2.ParseAttestationKey(gotpm.Marshal(public))
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := ak.Key.(*rsa.PublicKey); !ok || !bytes.Equal(ak.Name, key.Name.Buffer) {
		t.Errorf("key %T with name %x, want %x", ak.Key, ak.Name, key.Name.Buffer)
	}
}

func TestEncapsulationKeyKnowsItsKinds(t *testing.T) {
	p521, err := ecdsa.GenerateKey(elliptic.P521(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	short, err := rsa.GenerateKey(rand.Reader, 1024)
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range []any{p521.Public(), short.Public(), nil, "x"} {
		if _, err := tpm.EncapsulationKey(k); !errors.Is(err, tpm.ErrEKKind) {
			t.Errorf("%T: %v, want ErrEKKind", k, err)
		}
	}
}

// What vendors have put into the NV index of a certificate, before and behind it.
func TestCapturedContentsOfNVIndices(t *testing.T) {
	for name, tt := range map[string]struct {
		certificates int
		refused      bool
		key          bool // crypto/x509 knows its kind
	}{
		"stm-rsa-ffpadded.bin":    {certificates: 1, key: true},
		"nuvoton-padded.bin":      {certificates: 1}, // padding of 0x11, a key of the type RSAES-OAEP
		"stm-nuc-noheader.der":    {certificates: 1},
		"stm-nuc-nvheader.bin":    {refused: true}, // the header of TPM 1.2
		"ifx-nvheader-padded.bin": {refused: true},
	} {
		data, err := os.ReadFile(filepath.Join("..", "attest", "tpm2", "testdata", "captured", "tpm-ek", "leaf", name))
		if err != nil {
			t.Fatal(err)
		}
		certs, err := tpm.SplitCertificates(data)
		if len(certs) != tt.certificates || (err != nil) != tt.refused || len(certs) > 0 && (certs[0].PublicKey != nil) != tt.key {
			t.Errorf("%s: %d certificates, %v", name, len(certs), err)
		}
	}
}

func FuzzSplitCertificates(f *testing.F) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		f.Fatal(err)
	}
	chain := attesttest.NewCA(f).Intermediate(f, nil).Issue(f, key.Public(), nil)
	f.Add(bytes.Join(chain, nil))
	f.Add(append(bytes.Clone(chain[0]), 0xFF, 0xFF))
	f.Fuzz(func(t *testing.T, data []byte) {
		certs, _ := tpm.SplitCertificates(data)
		if len(certs) > 8 {
			t.Fatalf("%d certificates", len(certs))
		}
		for _, c := range certs {
			if _, err := x509.ParseCertificate(c.Raw); err != nil {
				t.Fatal(err)
			}
		}
	})
}
