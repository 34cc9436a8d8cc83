package tpm2_test

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"encoding/binary"
	"math/big"
	"testing"

	gotpm "github.com/google/go-tpm/tpm2"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/tpm"
)

// rsaAK gives a machine an RSA attestation key, like a TPM without P-256. sign makes its
// signatures.
func rsaAK(public *rsa.PublicKey, sign func(message []byte) []byte) attesttest.Tamper {
	return attesttest.Tamper{
		AK: func(p *gotpm.TPMTPublic) {
			*p = tpm.AKTemplate(true)
			p.Unique = gotpm.NewTPMUPublicID(gotpm.TPMAlgRSA, &gotpm.TPM2BPublicKeyRSA{Buffer: public.N.FillBytes(make([]byte, public.Size()))})
		},
		Signature: sign,
	}
}

// rsaSignature marshals a TPMT_SIGNATURE by hand, because go-tpm cannot marshal some of the
// signatures that tests need.
func rsaSignature(scheme, hash uint16, sig []byte) []byte {
	var b []byte
	for _, v := range []uint16{scheme, hash, uint16(len(sig))} {
		b = binary.BigEndian.AppendUint16(b, v)
	}
	return append(b, sig...)
}

func even(k *rsa.PrivateKey) *big.Int { return new(big.Int).SetBit(k.N, 0, 0) }

func ecKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func TestRSAQuotes(t *testing.T) {
	const algRSASSA, algRSAPSS, algSHA1, algSHA256, algSHA384 = 0x0014, 0x0016, 0x0004, 0x000B, 0x000C
	generate := func(bits int) *rsa.PrivateKey {
		k, err := rsa.GenerateKey(rand.Reader, bits)
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	key, other, long := generate(2048), generate(2048), generate(3072)
	pkcs1 := func(k *rsa.PrivateKey, message []byte) []byte {
		sum := sha256.Sum256(message)
		sig, err := rsa.SignPKCS1v15(rand.Reader, k, crypto.SHA256, sum[:])
		if err != nil {
			t.Fatal(err)
		}
		return sig
	}
	pss := func(message []byte) []byte {
		sum := sha256.Sum256(message)
		sig, err := rsa.SignPSS(rand.Reader, key, crypto.SHA256, sum[:], nil)
		if err != nil {
			t.Fatal(err)
		}
		return sig
	}
	by := func(k *rsa.PrivateKey) func([]byte) []byte {
		return func(m []byte) []byte { return rsaSignature(algRSASSA, algSHA256, pkcs1(k, m)) }
	}
	flipped := func(m []byte) []byte {
		sig := pkcs1(key, m)
		sig[0] ^= 1
		return rsaSignature(algRSASSA, algSHA256, sig)
	}
	ca := attesttest.NewCA(t)
	for name, tt := range map[string]struct {
		key  *rsa.PublicKey
		sign func([]byte) []byte
		want attestv1.Reason
	}{
		"of the AK":                     {&key.PublicKey, by(key), attestv1.Reason_REASON_ACCEPTED},
		"signed by another key":         {&key.PublicKey, by(other), badSig},
		"with a changed signature":      {&key.PublicKey, flipped, badSig},
		"with an empty signature":       {&key.PublicKey, func([]byte) []byte { return rsaSignature(algRSASSA, algSHA256, nil) }, badSig},
		"over another message":          {&key.PublicKey, func(m []byte) []byte { return by(key)(append(m, 0)) }, badSig},
		"signed with PSS":               {&key.PublicKey, func(m []byte) []byte { return rsaSignature(algRSAPSS, algSHA256, pss(m)) }, badSig},
		"signed with PSS, said RSASSA":  {&key.PublicKey, func(m []byte) []byte { return rsaSignature(algRSASSA, algSHA256, pss(m)) }, badSig},
		"of another scheme by its name": {&key.PublicKey, func(m []byte) []byte { return rsaSignature(algRSAPSS, algSHA256, pkcs1(key, m)) }, badSig},
		"with SHA-1 by its name":        {&key.PublicKey, func(m []byte) []byte { return rsaSignature(algRSASSA, algSHA1, pkcs1(key, m)) }, badSig},
		"with SHA-384 by its name":      {&key.PublicKey, func(m []byte) []byte { return rsaSignature(algRSASSA, algSHA384, pkcs1(key, m)) }, badSig},
		"with bytes behind it":          {&key.PublicKey, func(m []byte) []byte { return append(by(key)(m), 0) }, malformed},
		"cut short":                     {&key.PublicKey, func(m []byte) []byte { return by(key)(m)[:100] }, malformed},
		"of a key with 3072 bits":       {&long.PublicKey, by(long), malformed},
		"of a key with an even modulus": {&rsa.PublicKey{N: even(key)}, by(key), malformed},
		"signed with ECDSA by a P-256 AK": {&key.PublicKey, func(m []byte) []byte {
			sig, err := attesttest.Sign(ecKey(t), m)
			if err != nil {
				t.Fatal(err)
			}
			return sig
		}, badSig},
	} {
		t.Run(name, func(t *testing.T) {
			m := attesttest.NewMachine(t, ca, attesttest.Options{Tamper: rsaAK(tt.key, tt.sign)})
			c, err := attesttest.Claims(t.Context(), m.Attester(attest.PurposeMachine), attesttest.Verifier(t, ca), attest.PurposeMachine, attest.Binding{1})
			if attest.ReasonOf(err) != tt.want {
				t.Fatalf("%v, want %s", err, attest.ReasonName(tt.want))
			}
			if err == nil && c.Machine() != m.ID() {
				t.Errorf("claims of %s, want %s", c.Machine(), m.ID())
			}
		})
	}
}
