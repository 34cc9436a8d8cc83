package recovery

import (
	"strings"
	"testing"

	recoverv1 "github.com/muster-k8s/muster/gen/muster/recover/v1"
	"github.com/muster-k8s/muster/gen/muster/recover/v1/recoverv1connect"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/trust/keys"
)

// B8: the machine compares its disk with the lists that the owner has signed. An older owner's program sends none.
func TestTheListsOfTheOwnerComeWithTheKey(t *testing.T) {
	w := newFixture(t)
	all := signedWith(&ownerorder.Software{List: listOf("kubelet"), Other: listOf("kubelet", "kubeadm"), Endpoint: "192.168.77.1:6443", Adopted: true, Replace: true})
	for name, tt := range map[string]struct {
		req  *recoverv1.RecoverRequest
		want func(d component.Desired) bool
	}{
		"one list": {request(), func(d component.Desired) bool {
			return d.Recovered && d.Uncompared == "" && len(d.List.Components) == 1 && d.Other == nil && !d.Adopted && !d.Replace && d.Endpoint == "192.168.77.1:6443"
		}},
		"all": {all, func(d component.Desired) bool {
			return d.Recovered && d.Uncompared == "" && len(d.List.Components) == 1 && d.Other != nil && len(d.Other.Components) == 2 && d.Adopted && d.Replace
		}},
		"none": {unlisted(), func(d component.Desired) bool {
			return d.Uncompared == component.UncomparedRecovery && !d.Recovered && len(d.List.Components) == 0
		}},
	} {
		if _, err := w.recover(t.Context(), w.from("127.0.0.1"), tt.req, nil); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		w.lock.mu.Lock()
		if !tt.want(w.lock.with) {
			t.Errorf("%s: %+v", name, w.lock.with)
		}
		w.lock.mu.Unlock()
	}
}

// The longest lists fit a session that has already asked for the description.
func TestTheLongestListsAreTaken(t *testing.T) {
	w := newFixture(t)
	long := listOf("kubelet")
	long += strings.Repeat(" ", ownerorder.MaxList-len(long))
	c := w.from("127.0.0.1")
	if _, err := recoverv1connect.NewRecoverServiceClient(c, "https://"+w.addr, rpc.ClientOptions()...).Describe(t.Context(), &recoverv1.DescribeRequest{}); err != nil {
		t.Fatal(err)
	}
	req := signedWith(&ownerorder.Software{List: long, Other: long, Endpoint: strings.Repeat("a", 63) + ":65535"})
	if _, err := w.recover(t.Context(), c, req, nil); err != nil {
		t.Error(err)
	}
}

// signedWith returns the owner's request with this software.
func signedWith(s *ownerorder.Software) *recoverv1.RecoverRequest {
	key, err := keys.ParseDisk(rightKey)
	if err != nil {
		panic(err)
	}
	id, err := keys.ParseDiskID(diskID)
	if err != nil {
		panic(err)
	}
	return ownerorder.Recovery{Cluster: cluster, Disk: id, Key: key, Nonce: bootNonce, Software: s}.Wire(ownerKey)
}

// signs returns a change of a request to one that the owner has signed with other software.
func signs(change func(*ownerorder.Software)) func(*recoverv1.RecoverRequest) {
	return func(r *recoverv1.RecoverRequest) {
		s := software()
		change(s)
		signed := signedWith(s)
		r.Software, r.Signature = signed.GetSoftware(), signed.GetSignature()
	}
}

// unlisted returns the request of an owner's program that knows no lists.
func unlisted() *recoverv1.RecoverRequest { return signedWith(nil) }
