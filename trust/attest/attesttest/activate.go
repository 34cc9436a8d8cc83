package attesttest

import (
	"context"
	"crypto"
	"crypto/aes"
	"crypto/ecdh"
	"crypto/hmac"
	"crypto/rsa"
	"crypto/sha256"
	"errors"
	"fmt"

	gotpm "github.com/google/go-tpm/tpm2"
)

// ActivateCredential implements [tpm.Device] as described in Part 1, section 24 and annex C.6.1:
// ECDH agrees on the seed, which protects a credential for one name.
func (m *Machine) ActivateCredential(ctx context.Context, blob, encryptedSecret []byte) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	seed, err := m.seed(encryptedSecret)
	if err != nil {
		return nil, fmt.Errorf("encrypted secret: %w", err)
	}
	mac, err := gotpm.Unmarshal[gotpm.TPM2BDigest](blob)
	if err != nil || len(mac.Buffer) != sha256.Size {
		return nil, errors.New("credential: no integrity value")
	}
	identity := blob[2+len(mac.Buffer):]
	name := m.akName()
	if m.opts.Tamper.Name != nil {
		name = m.opts.Tamper.Name
	}
	h := hmac.New(sha256.New, gotpm.KDFa(crypto.SHA256, seed, "INTEGRITY", nil, nil, 256))
	h.Write(identity)
	h.Write(name)
	if !hmac.Equal(h.Sum(nil), mac.Buffer) {
		return nil, errors.New("credential: made for another key or another name")
	}
	plain, err := decryptCFB(gotpm.KDFa(crypto.SHA256, seed, "STORAGE", name, nil, 128), identity)
	if err != nil {
		return nil, err
	}
	secret, err := gotpm.Unmarshal[gotpm.TPM2BDigest](plain)
	if err != nil {
		return nil, fmt.Errorf("credential: %w", err)
	}
	return secret.Buffer, nil
}

func (m *Machine) seed(encryptedSecret []byte) ([]byte, error) {
	if m.rsaEK != nil { // Part 1, annex B.10.3
		return rsa.DecryptOAEP(sha256.New(), nil, m.rsaEK, encryptedSecret, []byte("IDENTITY\x00"))
	}
	p, err := gotpm.Unmarshal[gotpm.TPMSECCPoint](encryptedSecret)
	if err != nil {
		return nil, err
	}
	if len(p.X.Buffer) != 32 || len(p.Y.Buffer) != 32 {
		return nil, errors.New("no point of P-256")
	}
	ephemeral, err := ecdh.P256().NewPublicKey(append(append([]byte{4}, p.X.Buffer...), p.Y.Buffer...))
	if err != nil {
		return nil, err
	}
	private, err := m.ek.ECDH()
	if err != nil {
		return nil, err
	}
	z, err := private.ECDH(ephemeral)
	if err != nil {
		return nil, err
	}
	return gotpm.KDFe(crypto.SHA256, z, "IDENTITY", p.X.Buffer, private.PublicKey().Bytes()[1:33], 256), nil
}

// decryptCFB is CFB with a whole block of feedback and a zero IV (Part 1, 24.4).
func decryptCFB(key, data []byte) ([]byte, error) {
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	out := make([]byte, 0, len(data))
	feedback := make([]byte, aes.BlockSize)
	for len(data) > 0 {
		stream := make([]byte, aes.BlockSize)
		block.Encrypt(stream, feedback)
		n := min(aes.BlockSize, len(data))
		for i := range n {
			out = append(out, data[i]^stream[i])
		}
		copy(feedback, data[:n])
		data = data[n:]
	}
	return out, nil
}
