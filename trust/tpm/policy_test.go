package tpm

import (
	"bytes"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/hex"
	"testing"

	gotpm "github.com/google/go-tpm/tpm2"
)

// TestEKPoliciesAreTheProfiles computes the authPolicy values of the EK templates from
// the policy commands that the TCG EK Credential Profile names (B.6).
func TestEKPoliciesAreTheProfiles(t *testing.T) {
	sum256 := func(b []byte) []byte { d := sha256.Sum256(b); return d[:] }
	sum384 := func(b []byte) []byte { d := sha512.Sum384(b); return d[:] }
	for name, tt := range map[string]struct {
		alg   gotpm.TPMIAlgHash
		sum   func([]byte) []byte
		index uint32
		want  string
	}{
		"SHA-256": {gotpm.TPMAlgSHA256, sum256, 0x01C07F01, policyBSHA256},
		"SHA-384": {gotpm.TPMAlgSHA384, sum384, 0x01C07F02, policyBSHA384},
	} {
		t.Run(name, func(t *testing.T) {
			zero := make([]byte, len(tt.sum(nil)))
			hash := func(parts ...[]byte) []byte { return tt.sum(bytes.Join(parts, nil)) }
			secret := []byte{0x00, 0x00, 0x01, 0x51} // TPM_CC_PolicySecret
			authNV := []byte{0x00, 0x00, 0x01, 0x92} // TPM_CC_PolicyAuthorizeNV
			or := []byte{0x00, 0x00, 0x01, 0x71}     // TPM_CC_PolicyOR
			a := hash(hash(zero, secret, []byte{0x40, 0x00, 0x00, 0x0B}))
			if tt.alg == gotpm.TPMAlgSHA256 && hex.EncodeToString(a) != policyA {
				t.Errorf("PolicyA is %x, the template has %s", a, policyA)
			}
			nv := gotpm.TPMSNVPublic{
				NVIndex: gotpm.TPMHandle(tt.index),
				NameAlg: tt.alg,
				Attributes: gotpm.TPMANV{
					PolicyWrite: true, WriteAll: true, PPRead: true, OwnerRead: true, AuthRead: true,
					PolicyRead: true, NoDA: true, Written: true,
				},
				AuthPolicy: gotpm.TPM2BDigest{Buffer: a},
				DataSize:   uint16(2 + len(a)),
			}
			index, err := gotpm.NVName(&nv)
			if err != nil {
				t.Fatal(err)
			}
			b := hash(zero, or, a, hash(zero, authNV, index.Buffer))
			if hex.EncodeToString(b) != tt.want {
				t.Errorf("PolicyB is %x, the template has %s", b, tt.want)
			}
		})
	}
}
