package ownerorder

import (
	"crypto/ed25519"
	"crypto/sha256"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

const initDomain = "muster init v1\x00"

// Init is what the owner signs for the machine that is to start or to restore a cluster, or is adopted into one (B10). The cluster's ID
// follows from the root secret in the request, so the signature is of no use for another client's request.
type Init struct {
	Cluster keys.ClusterID
	Machine attest.MachineID
	Adopt   bool
	// Backup is the SHA-256 of the backup from which the cluster is restored; zero if none is.
	Backup [sha256.Size]byte
}

func (i Init) input() []byte {
	kind := "init"
	if i.Adopt {
		kind = "adopt"
	}
	if i.Backup != ([sha256.Size]byte{}) {
		return parts(initDomain, []byte("restore"), i.Cluster[:], i.Machine[:], i.Backup[:])
	}
	return parts(initDomain, []byte(kind), i.Cluster[:], i.Machine[:])
}

// Sign returns the owner's signature.
func (i Init) Sign(owner ed25519.PrivateKey) []byte { return ed25519.Sign(owner, i.input()) }

// Verify refuses a signature that the owner has not made for this machine and cluster: REQUEST_INVALID, OWNER_SIGNATURE. A
// nil owner has signed nothing.
func (i Init) Verify(signature []byte, owner attest.OwnerKeys) error {
	if len(signature) != ed25519.SignatureSize {
		return attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "owner_signature: %d bytes, want %d: this image wants the signature of its owner, which an earlier version of muster does not send", len(signature), ed25519.SignatureSize)
	}
	if !owner.Verify(i.input(), signature) {
		return attest.Refuse(attestv1.Reason_REASON_OWNER_SIGNATURE, "the request is not signed with an owner's key of this image for machine %s and cluster %s", i.Machine, i.Cluster)
	}
	return nil
}
