package tpmtest

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"math/big"
	"sync"
	"testing"

	gotpm "github.com/google/go-tpm/tpm2"

	"github.com/muster-k8s/muster/trust/tpm"
)

// Contract checks the behavior on which callers of a TPM rely. Every [tpm.Device] passes it: the
// simulator, swtpm, and the software TPM of attesttest, so that all of them behave like a real TPM.
// open is called once.
func Contract(t *testing.T, open func(testing.TB) tpm.Device) { contract(t, open, false) }

// BareContract is [Contract] for a TPM that stores no endorsement key certificate.
func BareContract(t *testing.T, open func(testing.TB) tpm.Device) { contract(t, open, true) }

func contract(t *testing.T, open func(testing.TB) tpm.Device, bare bool) {
	dev := open(t)
	ctx := t.Context()

	t.Run("the endorsement key is its certificate's", func(t *testing.T) {
		ek := must(dev.EndorsementKey(ctx))(t)
		if bare {
			if len(ek.Certificates) > 0 {
				t.Errorf("%d certificates of a TPM that has none", len(ek.Certificates))
			}
			if again := must(dev.EndorsementKey(ctx))(t); !bytes.Equal(again.Public, ek.Public) {
				t.Error("asked again, it is another key")
			}
			return
		}
		if len(ek.Certificates) == 0 || len(ek.Certificates) > 8 {
			t.Fatalf("%d certificates", len(ek.Certificates))
		}
		cert := must(x509.ParseCertificate(ek.Certificates[0]))(t)
		public := must(gotpm.Unmarshal[gotpm.TPMTPublic](ek.Public))(t)
		key := must(gotpm.Pub(*public))(t)
		if !cert.PublicKey.(interface{ Equal(crypto.PublicKey) bool }).Equal(key) {
			t.Error("the certificate is for another key")
		}
		again := must(dev.EndorsementKey(ctx))(t)
		if !bytes.Equal(again.Public, ek.Public) || !bytes.Equal(again.Certificates[0], ek.Certificates[0]) {
			t.Error("asked again, it is another key")
		}
	})
	t.Run("a TPM that is no NitroTPM makes no document", func(t *testing.T) {
		if _, err := dev.NitroDocument(ctx, [32]byte{1}); !errors.Is(err, tpm.ErrNoNitroTPM) {
			t.Errorf("%v, want ErrNoNitroTPM", err)
		}
	})
	t.Run("a TPM without a platform key has none", func(t *testing.T) {
		if _, err := dev.PlatformCertificates(ctx); !errors.Is(err, tpm.ErrNoPlatformKey) {
			t.Errorf("%v, want ErrNoPlatformKey", err)
		}
		if _, err := dev.Certify(ctx, [32]byte{1}); !errors.Is(err, tpm.ErrNoPlatformKey) {
			t.Errorf("%v, want ErrNoPlatformKey", err)
		}
	})
	t.Run("the attestation key has the template and stays the same", func(t *testing.T) {
		ak := must(dev.AttestationKey(ctx))(t)
		public := must(gotpm.Unmarshal[gotpm.TPMTPublic](ak))(t)
		want := tpm.AKTemplate(public.Type == gotpm.TPMAlgRSA)
		want.Unique = public.Unique
		if !bytes.Equal(gotpm.Marshal(want), ak) {
			t.Errorf("public area %x", ak)
		}
		if !bytes.Equal(must(dev.AttestationKey(ctx))(t), ak) {
			t.Error("asked again, it is another key")
		}
		if q := must(dev.Quote(ctx, [32]byte{}, tpm.SHA256))(t); !bytes.Equal(q.AKPublic, ak) {
			t.Error("the quote is by another key")
		}
	})
	t.Run("a quote is bound to its nonce and its values", func(t *testing.T) {
		for range 3 {
			var nonce [32]byte
			rand.Read(nonce[:])
			checkQuote(t, must(dev.Quote(ctx, nonce, tpm.SHA256))(t), nonce)
		}
	})
	t.Run("a measurement changes the quote for good", func(t *testing.T) {
		before := must(dev.Quote(ctx, [32]byte{1}, tpm.SHA256))(t)
		data := []byte("measured")
		if err := dev.Measure(ctx, 15, data); err != nil {
			t.Fatal(err)
		}
		digest := sha256.Sum256(data)
		want := tpm.SHA256.Extended(before.PCRs[15], digest[:])
		if got := must(dev.ReadPCR(ctx, tpm.SHA256, 15))(t); !bytes.Equal(got, want) {
			t.Errorf("PCR 15 is %x, want %x", got, want)
		}
		for range 2 {
			after := must(dev.Quote(ctx, [32]byte{2}, tpm.SHA256))(t)
			checkQuote(t, after, [32]byte{2})
			if !bytes.Equal(after.PCRs[15], want) {
				t.Errorf("quoted PCR 15 is %x, want %x", after.PCRs[15], want)
			}
			for i := range 15 {
				if !bytes.Equal(after.PCRs[i], before.PCRs[i]) {
					t.Errorf("PCR %d moved with PCR 15", i)
				}
			}
		}
	})
	t.Run("the clock continues and the counters stay", func(t *testing.T) {
		first := clock(t, must(dev.Quote(ctx, [32]byte{3}, tpm.SHA256))(t))
		second := clock(t, must(dev.Quote(ctx, [32]byte{3}, tpm.SHA256))(t))
		if second.Clock < first.Clock || second.ResetCount != first.ResetCount || second.RestartCount != first.RestartCount {
			t.Errorf("clock info went from %+v to %+v", first, second)
		}
	})
	t.Run("a credential opens for this EK and this AK only", func(t *testing.T) { contractActivation(t, dev) })
	t.Run("there is room for many, one after the other", func(t *testing.T) {
		ek, name := ekAndName(t, dev)
		for range 6 { // a TPM has as few as three slots for keys, and as many for sessions
			blob, secret := credential(t, ek, name, []byte("s"))
			must(dev.ActivateCredential(ctx, blob, secret))(t)
			must(dev.Quote(ctx, [32]byte{4}, tpm.SHA256))(t)
		}
	})
	t.Run("the counter only goes up", func(t *testing.T) {
		if _, err := dev.Counter(ctx); !errors.Is(err, tpm.ErrNoCounter) {
			t.Fatalf("before it is defined: %v, want ErrNoCounter", err)
		}
		if _, err := dev.IncrementCounter(ctx); !errors.Is(err, tpm.ErrNoCounter) {
			t.Fatalf("before it is defined: %v, want ErrNoCounter", err)
		}
		first := must(dev.DefineCounter(ctx))(t)
		if got := must(dev.Counter(ctx))(t); got != first || got == 0 {
			t.Errorf("it is %d, and was defined with %d", got, first)
		}
		for i := range uint64(3) {
			if got := must(dev.IncrementCounter(ctx))(t); got != first+i+1 {
				t.Errorf("incremented to %d, want %d", got, first+i+1)
			}
		}
		if got := must(dev.Counter(ctx))(t); got != first+3 {
			t.Errorf("it is %d, want %d", got, first+3)
		}
		if got := must(dev.DefineCounter(ctx))(t); got <= first+3 {
			t.Errorf("made anew it is %d, no more than the %d that it had", got, first+3)
		}
	})
	t.Run("many callers at once each get their own quote", func(t *testing.T) {
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				nonce := [32]byte{5, byte(i)}
				q, err := dev.Quote(ctx, nonce, tpm.SHA256)
				if err != nil {
					t.Error(err)
					return
				}
				checkQuote(t, q, nonce)
			})
		}
		wg.Wait()
	})
	t.Run("a caller that gave up gets no answer", func(t *testing.T) {
		gone, cancel := context.WithCancel(ctx)
		cancel()
		if _, err := dev.Quote(gone, [32]byte{}, tpm.SHA256); !errors.Is(err, context.Canceled) {
			t.Errorf("Quote: %v, want context canceled", err)
		}
		if err := dev.Measure(gone, 15, nil); !errors.Is(err, context.Canceled) {
			t.Errorf("Measure: %v, want context canceled", err)
		}
	})
	t.Run("what does not exist is refused", func(t *testing.T) {
		if _, err := dev.Quote(ctx, [32]byte{}, tpm.Bank(4)); err == nil {
			t.Error("a quote of the SHA-1 bank")
		}
		if _, err := dev.ReadPCR(ctx, tpm.SHA256, 24); err == nil {
			t.Error("PCR 24 was read")
		}
		if err := dev.Measure(ctx, 16, nil); err == nil {
			t.Error("something was measured into PCR 16, which can be reset")
		}
		if err := dev.Measure(ctx, -1, nil); err == nil {
			t.Error("something was measured into PCR -1")
		}
		if err := dev.Measure(ctx, 15, make([]byte, 1025)); err == nil {
			t.Error("1025 bytes were measured")
		}
	})
}

func contractActivation(t *testing.T, dev tpm.Device) {
	ctx := t.Context()
	ek, name := ekAndName(t, dev)
	secret := bytes.Repeat([]byte{7}, 32)
	blob, encrypted := credential(t, ek, name, secret)
	if got := must(dev.ActivateCredential(ctx, blob, encrypted))(t); !bytes.Equal(got, secret) {
		t.Errorf("opened to %x, want %x", got, secret)
	}

	other := bytes.Clone(name)
	other[len(other)-1] ^= 1
	badBlob, badSecret := credential(t, ek, other, secret)
	if _, err := dev.ActivateCredential(ctx, badBlob, badSecret); err == nil {
		t.Error("a credential for another AK was opened")
	}
	for i, at := range []int{3, len(blob) - 1} {
		b := bytes.Clone(blob)
		b[at] ^= 1
		if _, err := dev.ActivateCredential(ctx, b, encrypted); err == nil {
			t.Errorf("a changed credential was opened (%d)", i)
		}
	}
	for _, b := range [][]byte{nil, {0}, make([]byte, 16)} {
		if _, err := dev.ActivateCredential(ctx, b, encrypted); err == nil {
			t.Errorf("%x was opened as a credential", b)
		}
		if _, err := dev.ActivateCredential(ctx, blob, b); err == nil {
			t.Errorf("%x was taken for an encrypted seed", b)
		}
	}
	if got := must(dev.ActivateCredential(ctx, blob, encrypted))(t); !bytes.Equal(got, secret) {
		t.Error("after refusals the good one opens no more")
	}
}

// ekAndName returns the key to make credentials for, from the certificate if there is one, and the
// attestation key's name.
func ekAndName(t testing.TB, dev tpm.Device) (gotpm.LabeledEncapsulationKey, []byte) {
	t.Helper()
	ek := must(dev.EndorsementKey(t.Context()))(t)
	spki := must(ek.SPKI())(t)
	if len(ek.Certificates) > 0 {
		spki = must(x509.ParseCertificate(ek.Certificates[0]))(t).RawSubjectPublicKeyInfo
	}
	key := must(tpm.EncapsulationKey(must(x509.ParsePKIXPublicKey(spki))(t)))(t)
	public := must(gotpm.Unmarshal[gotpm.TPMTPublic](must(dev.AttestationKey(t.Context()))(t)))(t)
	name := must(gotpm.ObjectName(public))(t)
	return key, name.Buffer
}

func credential(t testing.TB, ek gotpm.LabeledEncapsulationKey, name, secret []byte) (blob, encrypted []byte) {
	t.Helper()
	blob, encrypted, err := gotpm.CreateCredential(rand.Reader, ek, name, secret)
	if err != nil {
		t.Fatal(err)
	}
	return blob, encrypted
}

// checkQuote follows the specification and uses none of the verifier's code.
func checkQuote(t testing.TB, q tpm.Quote, nonce [32]byte) {
	t.Helper()
	attest, err := gotpm.Unmarshal[gotpm.TPMSAttest](q.Attest)
	if err != nil {
		t.Errorf("attest: %v", err)
		return
	}
	if attest.Magic != gotpm.TPMGeneratedValue || attest.Type != gotpm.TPMSTAttestQuote {
		t.Errorf("magic %x, type %x", attest.Magic, attest.Type)
		return
	}
	if !bytes.Equal(attest.ExtraData.Buffer, nonce[:]) {
		t.Errorf("extraData %x, want %x", attest.ExtraData.Buffer, nonce)
	}
	info, err := attest.Attested.Quote()
	if err != nil {
		t.Error(err)
		return
	}
	if s := info.PCRSelect.PCRSelections; len(s) != 1 || tpm.Bank(s[0].Hash) != q.Bank || !bytes.Equal(s[0].PCRSelect, []byte{0xFF, 0xFF, 0}) {
		t.Errorf("selection %+v", s)
	}
	if digest := sha256.Sum256(bytes.Join(q.PCRs, nil)); len(q.PCRs) != 16 || !bytes.Equal(digest[:], info.PCRDigest.Buffer) {
		t.Error("the PCR values are not those quoted")
	}
	public, err := gotpm.Unmarshal[gotpm.TPMTPublic](q.AKPublic)
	if err != nil {
		t.Error(err)
		return
	}
	key, err := gotpm.Pub(*public)
	if err != nil {
		t.Error(err)
		return
	}
	sig, err := gotpm.Unmarshal[gotpm.TPMTSignature](q.Signature)
	if err != nil {
		t.Error(err)
		return
	}
	digest := sha256.Sum256(q.Attest)
	switch k := key.(type) {
	case *ecdsa.PublicKey:
		s, err := sig.Signature.ECDSA()
		if err != nil || !ecdsa.Verify(k, digest[:], new(big.Int).SetBytes(s.SignatureR.Buffer), new(big.Int).SetBytes(s.SignatureS.Buffer)) {
			t.Errorf("signature: %v", err)
		}
	case *rsa.PublicKey:
		s, err := sig.Signature.RSASSA()
		if err != nil || rsa.VerifyPKCS1v15(k, crypto.SHA256, digest[:], s.Sig.Buffer) != nil {
			t.Errorf("signature: %v", err)
		}
	}
}

func clock(t testing.TB, q tpm.Quote) gotpm.TPMSClockInfo {
	t.Helper()
	return must(gotpm.Unmarshal[gotpm.TPMSAttest](q.Attest))(t).ClockInfo
}

// must unwraps a result in a test: must(f())(t).
func must[V any](v V, err error) func(testing.TB) V {
	return func(t testing.TB) V {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}
