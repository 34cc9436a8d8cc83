package ownerorder_test

import (
	"bytes"
	"crypto/ed25519"
	"testing"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// While the owner's key is replaced, an image has two: what either signs is the owner's, and what anybody else signs is not (B10).
func TestEachKeyOfTheImageSignsForTheOwner(t *testing.T) {
	key := func(b byte) ed25519.PrivateKey {
		return ed25519.NewKeyFromSeed(bytes.Repeat([]byte{b}, ed25519.SeedSize))
	}
	public := func(k ed25519.PrivateKey) ed25519.PublicKey { return ed25519.PublicKey(k[32:]) }
	before, after, stranger := key(1), key(2), key(3)
	old, both, latest := attest.OwnerKeys{public(before)}, attest.OwnerKeys{public(before), public(after)}, attest.OwnerKeys{public(after)}
	now := time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)
	cluster, machine, nonce := keys.ClusterID{1}, attest.MachineID{2}, ownerorder.Nonce{3}
	disk, err := keys.ParseDiskID("3f1c9d2a-5b7e-4c1d-8a6f-0123456789ab")
	if err != nil {
		t.Fatal(err)
	}
	diskKey, err := keys.ParseDisk(bytes.Repeat([]byte{4}, 32))
	if err != nil {
		t.Fatal(err)
	}
	kinds := map[string]func(by ed25519.PrivateKey, owner attest.OwnerKeys) error{
		"an init": func(by ed25519.PrivateKey, owner attest.OwnerKeys) error {
			i := ownerorder.Init{Cluster: cluster, Machine: machine}
			return i.Verify(i.Sign(by), owner)
		},
		"an administrator's certificate": func(by ed25519.PrivateKey, owner attest.OwnerKeys) error {
			return ownerorder.Order{Cluster: cluster, Request: []byte("request"), At: now}.Sign(by).Verify(owner, cluster, now)
		},
		"an order to a machine": func(by ed25519.PrivateKey, owner attest.OwnerKeys) error {
			o := ownerorder.MachineOrder{Cluster: cluster.String(), Machine: machine, Action: ownerorder.ActionDoctor, SignedAt: now, NotAfter: now.Add(time.Minute)}
			s, err := o.Sign(by)
			if err != nil {
				return err
			}
			_, err = s.Genuine(owner, ownerorder.Addressee{Cluster: cluster, Machine: machine})
			return err
		},
		"a recovery": func(by ed25519.PrivateKey, owner attest.OwnerKeys) error {
			w := ownerorder.Recovery{Cluster: cluster, Disk: disk, Key: diskKey, Nonce: nonce}.Wire(by)
			w.DiskKey = bytes.Clone(w.GetDiskKey()) // it is wiped
			_, err := ownerorder.ParseRecovery(w, disk, nonce, owner)
			return err
		},
		"a recovery with lists": func(by ed25519.PrivateKey, owner attest.OwnerKeys) error {
			r := ownerorder.Recovery{Cluster: cluster, Disk: disk, Key: diskKey, Nonce: nonce, Software: &ownerorder.Software{List: "list", Other: "other", Endpoint: "192.0.2.1:6443", Adopted: true, Replace: true}}
			w := r.Wire(by)
			w.DiskKey = bytes.Clone(w.GetDiskKey())
			got, err := ownerorder.ParseRecovery(w, disk, nonce, owner)
			if err == nil && *got.Software != *r.Software {
				t.Errorf("%+v", got.Software)
			}
			return err
		},
		"an accepted epoch": func(by ed25519.PrivateKey, owner attest.OwnerKeys) error {
			e := ownerorder.Epoch{Cluster: cluster, Machine: machine, Epoch: 5, Nonce: nonce}
			return e.Verify(e.Wire(by), owner)
		},
	}
	for kind, verify := range kinds {
		for name, tt := range map[string]struct {
			by    ed25519.PrivateKey
			image attest.OwnerKeys
			want  bool
		}{
			"the old key, for an old image":                 {before, old, true},
			"the old key, for an image with both":           {before, both, true},
			"the new key, for an image with both":           {after, both, true},
			"the new key, for a new image":                  {after, latest, true},
			"the new key, for an old image":                 {after, old, false},
			"the old key, for an image that has dropped it": {before, latest, false},
			"a stranger's key, for an image with both":      {stranger, both, false},
			"an image with an empty list":                   {before, attest.OwnerKeys{}, false},
			"an image with half a key":                      {before, attest.OwnerKeys{public(before)[:16]}, false},
		} {
			err := verify(tt.by, tt.image)
			if want := attestv1.Reason_REASON_OWNER_SIGNATURE; tt.want && err != nil || !tt.want && attest.ReasonOf(err) != want {
				t.Errorf("%s: %s: %v", kind, name, err)
			}
		}
	}
}
