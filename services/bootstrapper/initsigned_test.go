package bootstrapper_test

import (
	"bytes"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// sign signs a request for this machine with the key of the image's owner.
func (w *fixture) sign(req *initv1.InitRequest, adopt bool) {
	root, err := keys.ParseRoot(keys.FirstVersion, req.GetRootSecret(), req.GetSalt())
	if err != nil {
		w.t.Fatal(err)
	}
	req.OwnerSignature = ownerorder.Init{Cluster: root.ClusterID([32]byte(req.GetMeasurementSalt())), Machine: w.tpm.ID(), Adopt: adopt}.Sign(w.signer)
}

// A writer of a machine's metadata knows its init secret, but only the owner of its image can begin a cluster on it (B10).
func TestOnlyTheOwnerOfTheImageBeginsACluster(t *testing.T) {
	w := first(t)
	r := w.boot()
	defer r.kill(t)
	_, other := ownerKey(t)
	right := w.signer
	for name, tt := range map[string]struct {
		change func(*initv1.InitRequest)
		want   attestv1.Reason
	}{
		"no signature": {func(q *initv1.InitRequest) { q.OwnerSignature = nil }, attestv1.Reason_REASON_REQUEST_INVALID},
		"a long one":   {func(q *initv1.InitRequest) { q.OwnerSignature = append(q.OwnerSignature, 0) }, attestv1.Reason_REASON_REQUEST_INVALID},
		"of another owner": {func(q *initv1.InitRequest) {
			w.signer = other
			w.sign(q, false)
			w.signer = right
		}, attestv1.Reason_REASON_OWNER_SIGNATURE},
		"for another root secret": {func(q *initv1.InitRequest) { q.RootSecret = bytes.Repeat([]byte{0xAC}, 32) }, attestv1.Reason_REASON_OWNER_SIGNATURE},
		"for an adoption":         {func(q *initv1.InitRequest) { w.sign(q, true) }, attestv1.Reason_REASON_OWNER_SIGNATURE},
		"for another machine": {func(q *initv1.InitRequest) {
			root, err := keys.ParseRoot(keys.FirstVersion, q.GetRootSecret(), q.GetSalt())
			if err != nil {
				t.Fatal(err)
			}
			q.OwnerSignature = ownerorder.Init{Cluster: root.ClusterID([32]byte(q.GetMeasurementSalt())), Machine: attest.MachineID{1}}.Sign(right)
		}, attestv1.Reason_REASON_OWNER_SIGNATURE},
	} {
		q := w.request()
		tt.change(q)
		_ = w.refused(t, r, q, tt.want)
		if w.record().Locked() {
			t.Fatalf("%s: the machine is locked", name)
		}
	}
	if out := w.init(t.Context(), r, w.request()); out.err != nil {
		t.Errorf("its owner: %v", out.err)
	}
}
