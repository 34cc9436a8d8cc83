package ownerorder

import (
	"crypto/ed25519"
	"crypto/rand"
	"encoding/binary"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	recoverv1 "github.com/muster-k8s/muster/gen/muster/recover/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

const epochDomain = "muster epoch v1\x00"

// Nonce is a machine's nonce for one boot in which it waits for a [Recovery] or an [Epoch].
type Nonce [32]byte

// NewNonce returns random bytes.
func NewNonce() (n Nonce) {
	_, _ = rand.Read(n[:]) // never fails
	return n
}

// ParseNonce reads a machine's nonce. It refuses another length with REQUEST_INVALID.
func ParseNonce(b []byte) (n Nonce, err error) {
	if copy(n[:], b) != len(n) || len(b) != len(n) {
		return Nonce{}, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "the machine's nonce has %d bytes, want %d", len(b), len(n))
	}
	return n, nil
}

// Epoch is the owner's acceptance that a machine whose disk is an older copy continues with this epoch of the cluster. The
// nonce makes an order valid for one boot: a TPM that was cleared has no counter for that (B7).
type Epoch struct {
	Cluster                 keys.ClusterID
	Machine                 attest.MachineID
	Epoch                   uint64
	DiskCounter, TPMCounter uint64
	Nonce                   Nonce
}

func (e Epoch) input() []byte {
	number := func(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }
	numbers := append(append(number(e.Epoch), number(e.DiskCounter)...), number(e.TPMCounter)...)
	return parts(epochDomain, e.Cluster[:], e.Machine[:], numbers, e.Nonce[:])
}

// Wire returns the signed request.
func (e Epoch) Wire(owner ed25519.PrivateKey) *recoverv1.AcceptEpochRequest {
	return &recoverv1.AcceptEpochRequest{Epoch: e.Epoch, Signature: ed25519.Sign(owner, e.input())}
}

// Verify refuses a request that the owner has not signed for exactly this epoch: REQUEST_INVALID, OWNER_SIGNATURE. A nil
// owner has signed nothing.
func (e Epoch) Verify(w *recoverv1.AcceptEpochRequest, owner attest.OwnerKeys) error {
	if len(w.GetSignature()) != ed25519.SignatureSize {
		return attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "signature: %d bytes, want %d", len(w.GetSignature()), ed25519.SignatureSize)
	}
	if w.GetEpoch() != e.Epoch || !owner.Verify(e.input(), w.GetSignature()) {
		return attest.Refuse(attestv1.Reason_REASON_OWNER_SIGNATURE, "the order is not signed with a key of the owner for epoch %d of this machine as it is now", e.Epoch)
	}
	return nil
}
