package ownerorder

import (
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

const evidenceDomain = "muster machine order evidence v1\x00"

const (
	// EvidenceFolder has the evidence of [ActionVerify], below /var/log of a machine, where the kubelet serves files to administrators.
	EvidenceFolder = "muster-verify"
	// MaxEvidence bounds that evidence, in bytes: four certificates of 8 KiB, an event log of 256 KiB, and a quote.
	MaxEvidence = 384 << 10
)

// Arguments of [ActionVerify]: credential_blob and encrypted_secret of a challenge ([attestv1.Challenge]), in base64.
const (
	ArgCredential = "credential"
	ArgSecret     = "secret"
)

// ChallengeArgs returns a challenge as the arguments of [ActionVerify].
func ChallengeArgs(c *attestv1.Challenge) map[string]string {
	text := base64.StdEncoding.EncodeToString
	return map[string]string{ArgCredential: text(c.GetCredentialBlob()), ArgSecret: text(c.GetEncryptedSecret())}
}

// ParseChallenge reads the arguments of [ActionVerify].
func ParseChallenge(args map[string]string) (*attestv1.Challenge, error) {
	blob, err := base64.StdEncoding.DecodeString(args[ArgCredential])
	secret, serr := base64.StdEncoding.DecodeString(args[ArgSecret])
	if err = errors.Join(err, serr); err != nil {
		return nil, fmt.Errorf("the order's challenge: %w", err)
	}
	return &attestv1.Challenge{CredentialBlob: blob, EncryptedSecret: secret}, nil
}

// EvidenceFile is the name of the file in [EvidenceFolder] with the evidence for this order, an encoded [attestv1.Evidence].
func (s SignedMachineOrder) EvidenceFile() string { return s.Digest() }

// Binding is what the evidence for this order is bound to (A1), in place of a TLS session:
//
//	SHA-256("muster machine order evidence v1" || 0x00 || SHA-256(text || signature))
//
// Each order to verify has a new challenge, so its hash is as unpredictable as a nonce. It also covers the node's name, the machine and the times.
func (s SignedMachineOrder) Binding() attest.Binding {
	order := s.sum()
	return sha256.Sum256(slices.Concat([]byte(evidenceDomain), order[:]))
}
