package tpm2_test

import (
	"crypto/sha256"
	"encoding/hex"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// A policy can revoke every key and certificate of a chain that the verifier returns, whichever
// authority the policy lists as the root (A8).
func TestARevokedAuthorityVouchesForNobody(t *testing.T) {
	root := attesttest.NewCA(t)
	upper := root.Intermediate(t, nil)
	lower := upper.Intermediate(t, nil)
	m := attesttest.NewMachine(t, lower, attesttest.Options{})
	claims, err := attesttest.Claims(t.Context(), m.Attester(attest.PurposeMachine), attesttest.Verifier(t, root), attest.PurposeMachine, attest.Binding{1})
	if err != nil {
		t.Fatal(err)
	}
	chain := claims.Chain()
	if len(chain) != 4 || chain[0].Key != claims.Machine() || chain[3].Key != sha256.Sum256(root.Root().RawSubjectPublicKeyInfo) {
		t.Fatalf("chain %+v", chain)
	}
	check := func(r *attestv1.Revoked, version string) error {
		p, err := attest.ParsePolicy(attesttest.Policy(t, root, []*attesttest.Machine{m}, func(p *attestv1.Policy) {
			p.Tpm2.Revoked, p.Tpm2.EkRoots[0].MinFirmwareVersion = r, version
		}))
		if err != nil {
			t.Fatal(err)
		}
		_, err = p.Appraise(claims, attest.Unlocked())
		return err
	}
	if err := check(nil, attest.FormatFirmwareVersion(claims.FirmwareVersion())); err != nil {
		t.Fatal(err)
	}
	if err := check(nil, attest.FormatFirmwareVersion(claims.FirmwareVersion()+1)); attest.ReasonOf(err) != attestv1.Reason_REASON_POLICY_REFUSED {
		t.Errorf("firmware that is too old: %v", err)
	}
	for i, c := range chain {
		if err := check(&attestv1.Revoked{Keys: []string{hex.EncodeToString(c.Key[:])}}, ""); attest.ReasonOf(err) != badEK {
			t.Errorf("key %d of the chain is revoked: %v", i, err)
		}
		if i+1 == len(chain) {
			break // the root has no issuer
		}
		issuer := hex.EncodeToString(chain[i+1].Key[:])
		if err := check(&attestv1.Revoked{Certificates: []*attestv1.RevokedCertificate{{IssuerKey: issuer, Serial: c.Serial}}}, ""); attest.ReasonOf(err) != badEK {
			t.Errorf("certificate %d of the chain is revoked: %v", i, err)
		}
		if err := check(&attestv1.Revoked{Certificates: []*attestv1.RevokedCertificate{{IssuerKey: issuer, Serial: c.Serial + "0"}}}, ""); err != nil {
			t.Errorf("another certificate of issuer %d is revoked: %v", i+1, err)
		}
	}
}
