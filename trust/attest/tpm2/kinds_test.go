package tpm2_test

import (
	"crypto"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// TestOneTPMIsOneMachine presents one TPM by each of its endorsement keys and each kind of
// attestation key to a policy that lists it by one of them (A8).
func TestOneTPMIsOneMachine(t *testing.T) {
	ca, otherCA := attesttest.NewCA(t), attesttest.NewCA(t)
	known := attesttest.NewMachine(t, ca, attesttest.Options{})
	rsaRoot := func(p *attestv1.Policy) {
		p.Tpm2.EkRoots = append(p.Tpm2.EkRoots, &attestv1.EkRoot{Pem: otherCA.PEM(), Operator: true, Key: "rsa-2048"})
	}
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	withRSA := rsaAK(&key.PublicKey, func(m []byte) []byte {
		sum := sha256.Sum256(m)
		sig, err := rsa.SignPKCS1v15(rand.Reader, key, crypto.SHA256, sum[:])
		if err != nil {
			t.Error(err)
		}
		return rsaSignature(0x0014, 0x000B, sig)
	})
	const accepted, refused = attestv1.Reason_REASON_ACCEPTED, attestv1.Reason_REASON_EK_UNTRUSTED
	for name, tt := range map[string]struct {
		ca     *attesttest.CA
		opts   attesttest.Options
		change []func(*attestv1.Policy)
		want   attestv1.Reason
	}{
		"the key that the root is for":                     {ca, attesttest.Options{TPM: known}, nil, accepted},
		"its RSA endorsement key":                          {ca, attesttest.Options{TPM: known, EK: attest.EKRSA2048}, nil, refused},
		"its RSA attestation key":                          {ca, attesttest.Options{Tamper: withRSA}, nil, refused},
		"its RSA endorsement key below the root for those": {otherCA, attesttest.Options{TPM: known, EK: attest.EKRSA2048}, []func(*attestv1.Policy){rsaRoot}, accepted},
		"its ECC endorsement key below the root for RSA":   {otherCA, attesttest.Options{TPM: known}, []func(*attestv1.Policy){rsaRoot}, refused},
		"both of its RSA keys, beside a root for ECC":      {otherCA, attesttest.Options{EK: attest.EKRSA2048, Tamper: withRSA}, []func(*attestv1.Policy){rsaRoot}, refused},
	} {
		t.Run(name, func(t *testing.T) {
			policy := attesttest.ParsedPolicy(t, ca, []*attesttest.Machine{known}, tt.change...)
			m := attesttest.NewMachine(t, tt.ca, tt.opts)
			c, err := attesttest.Claims(t.Context(), m.Attester(attest.PurposeMachine), attesttest.Verifier(t, tt.ca), attest.PurposeMachine, attest.Binding{1})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := policy.Appraise(c, attest.Unlocked()); attest.ReasonOf(err) != tt.want {
				t.Errorf("%v, want %s", err, attest.ReasonName(tt.want))
			}
		})
	}
}
