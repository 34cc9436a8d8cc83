package ownerorder

import (
	"crypto/ed25519"
	"crypto/sha256"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	recoverv1 "github.com/muster-k8s/muster/gen/muster/recover/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

const (
	recoveryDomain = "muster recovery v2\x00"
	// softwareDomain is of a recovery with [Software].
	softwareDomain = "muster recovery v3\x00"
)

// MaxList bounds each list of [Software], in bytes: as large as one in an order to upgrade.
const MaxList = MaxMachineOrder

// Recovery is the owner's signed request to a machine that waits for its disk's key: a disk with this ID that this key
// opens belongs to this cluster. The nonce makes it valid for one boot of one machine: whoever reads a request in a
// machine's memory cannot have another machine open a disk that he has written to with its key (B1).
type Recovery struct {
	Cluster keys.ClusterID
	Disk    keys.DiskID
	Key     keys.Disk
	Nonce   Nonce
	// Software is what the disk is compared with; nil if it is not compared.
	Software *Software
}

// Software is what the machine may run (B8). The fields are as in the request; the machine parses them.
type Software struct {
	// List and Other are texts that versions.Parse reads; Other is empty unless Kubernetes is being upgraded.
	List, Other string
	// Endpoint is HOST:PORT of the API servers.
	Endpoint string
	// Adopted means that the cluster existed before Muster.
	Adopted bool
	// Replace means that List and Other are the newest, also if the disk lists other software as installed.
	Replace bool
}

func (r Recovery) input() []byte {
	digest := sha256.Sum256(r.Key.Expose()) // of 256 random bits: the digest reveals none of them
	domain, list := recoveryDomain, [][]byte{r.Cluster[:], []byte(r.Disk.String()), digest[:], r.Nonce[:]}
	if s := r.Software; s != nil {
		flags := []byte{0, 0}
		for i, is := range []bool{s.Adopted, s.Replace} {
			if is {
				flags[i] = 1
			}
		}
		domain, list = softwareDomain, append(list, []byte(s.List), []byte(s.Other), []byte(s.Endpoint), flags)
	}
	return parts(domain, list...)
}

// Wire returns the signed request.
func (r Recovery) Wire(owner ed25519.PrivateKey) *recoverv1.RecoverRequest {
	w := &recoverv1.RecoverRequest{DiskKey: r.Key.Expose(), ClusterId: r.Cluster[:], Signature: ed25519.Sign(owner, r.input())}
	if s := r.Software; s != nil {
		w.Software = &recoverv1.Software{List: s.List, Other: s.Other, Endpoint: s.Endpoint, Adopted: s.Adopted, Replace: s.Replace}
	}
	return w
}

// ParseRecovery reads a request for a disk and wipes the key in it (K3). It refuses with REQUEST_INVALID, and with
// OWNER_SIGNATURE if the owner has not signed it for this disk and nonce (B1). It does not parse the lists of Software. A nil
// owner verifies nothing: it is only for images with insecure.noOwnerKey.
func ParseRecovery(w *recoverv1.RecoverRequest, disk keys.DiskID, nonce Nonce, owner attest.OwnerKeys) (Recovery, error) {
	key, err := keys.ParseDisk(w.GetDiskKey())
	clear(w.GetDiskKey())
	w.DiskKey = nil
	r := Recovery{Disk: disk, Key: key, Nonce: nonce}
	if s := w.GetSoftware(); s != nil {
		r.Software = &Software{List: s.GetList(), Other: s.GetOther(), Endpoint: s.GetEndpoint(), Adopted: s.GetAdopted(), Replace: s.GetReplace()}
	}
	switch n := copy(r.Cluster[:], w.GetClusterId()); {
	case err != nil:
		return Recovery{}, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "disk_key: %w", err)
	case n != len(w.GetClusterId()) || n != len(r.Cluster):
		return Recovery{}, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "cluster_id: %d bytes, want %d", len(w.GetClusterId()), len(r.Cluster))
	case len(w.GetSignature()) != ed25519.SignatureSize:
		return Recovery{}, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "signature: %d bytes, want %d", len(w.GetSignature()), ed25519.SignatureSize)
	case len(w.GetSoftware().GetList()) > MaxList || len(w.GetSoftware().GetOther()) > MaxList:
		return Recovery{}, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "software: a list has more than %d bytes", MaxList)
	case owner == nil:
		return r, nil
	case !owner.Verify(r.input(), w.GetSignature()):
		return Recovery{}, attest.Refuse(attestv1.Reason_REASON_OWNER_SIGNATURE, "the request is not signed with a key of the owner for disk %s and this boot of the machine", disk)
	}
	return r, nil
}
