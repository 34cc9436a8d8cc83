package tpm

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"

	gotpm "github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"
)

// quoteAttempts is how often a quote is made again because a PCR was extended between the quote and
// the reading of the values.
const quoteAttempts = 5

const akID keyID = "attestation key"

// AttestationKey implements [Device].
func (t *TPM) AttestationKey(ctx context.Context) ([]byte, error) {
	var public []byte
	err := t.sequence(ctx, "attestation key", func(c *conn) error {
		ak, err := c.attestationKey()
		if err != nil {
			return err
		}
		public = gotpm.Marshal(ak.public)
		return nil
	})
	return public, err
}

// attestationKey loads the attestation key: ECC P-256, or RSA-2048 if the TPM does not have that
// curve. The choice depends on the TPM alone, so the key stays the same.
func (c *conn) attestationKey() (*object, error) {
	c.owner.mu.Lock()
	saved, ok := c.owner.keys[akID]
	c.owner.mu.Unlock()
	useRSA := ok && saved.public.Type == gotpm.TPMAlgRSA
	if !ok {
		curves, err := c.curves()
		if err != nil {
			return nil, err
		}
		useRSA = !slices.Contains(curves, gotpm.TPMECCNistP256)
	}
	return c.primary(akID, AKTemplate(useRSA))
}

// curves lists the elliptic curves that the TPM has.
func (c *conn) curves() ([]gotpm.TPMECCCurve, error) {
	rsp, err := gotpm.GetCapability{Capability: gotpm.TPMCapECCCurves, Property: 0, PropertyCount: 64}.Execute(c.tpm)
	if err != nil {
		return nil, fmt.Errorf("list curves: %w", err)
	}
	curves, err := rsp.CapabilityData.Data.ECCCurves()
	if err != nil {
		return nil, fmt.Errorf("list curves: %w", err)
	}
	return curves.ECCCurves, nil
}

// quotedPCRs selects PCR 0 to 15, encoded exactly as a verifier expects.
func quotedPCRs(bank Bank) gotpm.TPMLPCRSelection {
	return gotpm.TPMLPCRSelection{PCRSelections: []gotpm.TPMSPCRSelection{
		{Hash: gotpm.TPMIAlgHash(bank), PCRSelect: []byte{0xFF, 0xFF, 0x00}},
	}}
}

// Quote implements [Device]. The error wraps [ErrBankInactive] if the TPM does not keep the bank,
// and [ErrPCRsMoved] if PCRs were extended during every attempt.
func (t *TPM) Quote(ctx context.Context, extraData [32]byte, bank Bank) (Quote, error) {
	var q Quote
	err := t.sequence(ctx, "quote", func(c *conn) error {
		if bank.Size() == 0 {
			return fmt.Errorf("unknown %s", bank)
		}
		ak, err := c.attestationKey()
		if err != nil {
			return err
		}
		for range quoteAttempts {
			q, err = c.quote(ak, extraData, bank)
			if !errors.Is(err, ErrPCRsMoved) {
				return err
			}
		}
		return err
	})
	return q, err
}

func (c *conn) quote(ak *object, extraData [32]byte, bank Bank) (Quote, error) {
	rsp, err := gotpm.Quote{
		SignHandle:     gotpm.AuthHandle{Handle: ak.handle, Name: ak.name, Auth: gotpm.PasswordAuth(nil)},
		QualifyingData: gotpm.TPM2BData{Buffer: extraData[:]},
		InScheme:       gotpm.TPMTSigScheme{Scheme: gotpm.TPMAlgNull}, // the key's own
		PCRSelect:      quotedPCRs(bank),
	}.Execute(c.tpm)
	if err != nil {
		return Quote{}, err
	}
	attest, err := rsp.Quoted.Contents()
	if err != nil {
		return Quote{}, fmt.Errorf("decode: %w", err)
	}
	info, err := attest.Attested.Quote()
	if err != nil {
		return Quote{}, fmt.Errorf("decode: %w", err)
	}
	values, err := c.readPCRs(bank, 0, PCRCount)
	if err != nil {
		return Quote{}, err
	}
	// Both templates sign with SHA-256, which is then the digest's hash too (Part 3, 18.4).
	digest := sha256.Sum256(bytes.Join(values, nil))
	if !bytes.Equal(digest[:], info.PCRDigest.Buffer) {
		return Quote{}, ErrPCRsMoved
	}
	return Quote{
		Attest:    rsp.Quoted.Bytes(),
		Signature: gotpm.Marshal(rsp.Signature),
		AKPublic:  gotpm.Marshal(ak.public),
		Bank:      bank,
		PCRs:      values,
	}, nil
}

// readPCRs reads count PCRs, starting at first. A TPM returns at most eight at once, and may return
// fewer.
func (c *conn) readPCRs(bank Bank, first, count int) ([][]byte, error) {
	values := make([][]byte, 0, count)
	for len(values) < count {
		want := []byte{0, 0, 0}
		for i := first + len(values); i < first+count; i++ {
			want[i/8] |= 1 << (i % 8)
		}
		rsp, err := gotpm.PCRRead{PCRSelectionIn: gotpm.TPMLPCRSelection{
			PCRSelections: []gotpm.TPMSPCRSelection{{Hash: gotpm.TPMIAlgHash(bank), PCRSelect: want}},
		}}.Execute(c.tpm)
		if err != nil {
			return nil, fmt.Errorf("read PCRs: %w", err)
		}
		if len(rsp.PCRValues.Digests) == 0 {
			return nil, fmt.Errorf("%w: %s", ErrBankInactive, bank)
		}
		for _, d := range rsp.PCRValues.Digests {
			if len(d.Buffer) != bank.Size() {
				return nil, fmt.Errorf("read PCRs: a value of %d bytes in %s", len(d.Buffer), bank)
			}
			values = append(values, d.Buffer)
		}
	}
	if len(values) != count {
		return nil, fmt.Errorf("read PCRs: %d values, want %d", len(values), count)
	}
	return values, nil
}

// ReadPCR implements [Device].
func (t *TPM) ReadPCR(ctx context.Context, bank Bank, pcr int) ([]byte, error) {
	var value []byte
	err := t.sequence(ctx, "read PCR", func(c *conn) error {
		if bank.Size() == 0 || pcr < 0 || pcr >= 24 {
			return fmt.Errorf("no PCR %d in %s", pcr, bank)
		}
		values, err := c.readPCRs(bank, pcr, 1)
		if err != nil {
			return err
		}
		value = values[0]
		return nil
	})
	return value, err
}

// maxEvent is the longest data of TPM2_PCR_Event (TPM2B_EVENT, Part 2, 10.4.9), in bytes.
const maxEvent = 1024

// Measure implements [Device]: the TPM itself hashes data for each bank that it keeps
// (TPM2_PCR_Event, Part 3, 22.3), so no bank is omitted.
func (t *TPM) Measure(ctx context.Context, pcr int, data []byte) error {
	return t.sequence(ctx, "measure", func(c *conn) error {
		if pcr < 0 || pcr >= PCRCount || len(data) > maxEvent {
			return fmt.Errorf("no PCR %d, or more than %d bytes (%d)", pcr, maxEvent, len(data))
		}
		_, err := gotpm.PCREvent{
			PCRHandle: gotpm.AuthHandle{Handle: gotpm.TPMHandle(pcr), Auth: gotpm.PasswordAuth(nil)},
			EventData: gotpm.TPM2BEvent{Buffer: data},
		}.Execute(c.tpm)
		return err
	})
}

// ActivateCredential implements [Device]. The secret is returned encrypted under a session that is
// salted for the endorsement key, so an attacker who listens on the TPM's bus does not learn it.
func (t *TPM) ActivateCredential(ctx context.Context, blob, encryptedSecret []byte) ([]byte, error) {
	var secret []byte
	err := t.sequence(ctx, "activate credential", func(c *conn) error {
		known, ek, err := c.endorsementKey()
		if err != nil {
			return err
		}
		ak, err := c.attestationKey()
		if err != nil {
			return err
		}
		private := []gotpm.AuthOption{
			gotpm.Salted(ek.handle, ek.public),
			gotpm.AESEncryption(128, gotpm.EncryptOut),
		}
		// The high range also uses a policy, although its auth value is empty: use of the auth
		// value is under dictionary attack protection, and a TPM whose power is cut a few times
		// after such a use refuses for minutes or hours (TPM_RC_LOCKOUT).
		satisfy := endorsementSecret
		if known.high {
			satisfy = endorsementBranch(ek.public.NameAlg)
		}
		auth := gotpm.Policy(ek.public.NameAlg, 16, satisfy, private...)
		rsp, err := withRoom(c, func(dev transport.TPM, s ...gotpm.Session) (*gotpm.ActivateCredentialResponse, error) {
			return gotpm.ActivateCredential{
				ActivateHandle: gotpm.AuthHandle{Handle: ak.handle, Name: ak.name, Auth: gotpm.PasswordAuth(nil)},
				KeyHandle:      gotpm.AuthHandle{Handle: ek.handle, Name: ek.name, Auth: auth},
				CredentialBlob: gotpm.TPM2BIDObject{Buffer: blob},
				Secret:         gotpm.TPM2BEncryptedSecret{Buffer: encryptedSecret},
			}.Execute(dev, s...)
		})
		if err != nil {
			return err
		}
		secret = rsp.CertInfo.Buffer
		return nil
	})
	return secret, err
}

// endorsementSecret satisfies PolicyA of the EK templates of the low range.
func endorsementSecret(dev transport.TPM, session gotpm.TPMISHPolicy, nonce gotpm.TPM2BNonce) error {
	_, err := gotpm.PolicySecret{
		AuthHandle:    gotpm.AuthHandle{Handle: gotpm.TPMRHEndorsement, Auth: gotpm.PasswordAuth(nil)},
		PolicySession: session,
		NonceTPM:      nonce,
	}.Execute(dev)
	return err
}

// endorsementBranch satisfies PolicyB of the EK templates of the high range by its first branch, PolicyA.
func endorsementBranch(alg gotpm.TPMIAlgHash) gotpm.PolicyCallback {
	a, c := policyA, policyCSHA256
	if alg == gotpm.TPMAlgSHA384 {
		a, c = policyASHA384, policyCSHA384
	}
	return func(dev transport.TPM, session gotpm.TPMISHPolicy, nonce gotpm.TPM2BNonce) error {
		if err := endorsementSecret(dev, session, nonce); err != nil {
			return err
		}
		_, err := gotpm.PolicyOr{
			PolicySession: session,
			PHashList:     gotpm.TPMLDigest{Digests: []gotpm.TPM2BDigest{{Buffer: unhex(a)}, {Buffer: unhex(c)}}},
		}.Execute(dev)
		return err
	}
}
