package doctor

import (
	"os"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
)

// describes returns a harm that changes the upgrade in the cluster's description.
func (p *patient) describes(how func(*clusterinfo.Info)) func(*testing.T) func(*testing.T) {
	return func(t *testing.T) func(*testing.T) {
		t.Helper()
		try(t, p.kube.Describe(t.Context(), func(i *clusterinfo.Info) error { how(i); return nil }))
		return func(t *testing.T) {
			t.Helper()
			try(t, p.kube.Describe(t.Context(), func(i *clusterinfo.Info) error { i.Next, i.Previous = nil, nil; return nil }))
		}
	}
}

// inForce are faults that only the status of objects shows.
func (p *patient) inForce() []harm {
	release := ownertest.ListOf(ownertest.After, "3.6.6-0", "2")
	next := &clusterinfo.Release{KubernetesVersion: ownertest.After, Components: release.Components, Images: release.Images}
	return []harm{
		{CheckUpgrade, checkup.Warn, "the control planes are being upgraded from", "", p.describes(func(i *clusterinfo.Info) { i.Next = next })},
		{CheckUpgrade, checkup.Warn, "the workers are being upgraded from " + ownertest.After, "", p.describes(func(i *clusterinfo.Info) { i.Previous = next })},
		{CheckPolicy, checkup.Warn, "insecure.anyMachine is on in the policy in force", "", func(t *testing.T) func(*testing.T) {
			t.Helper()
			change(t, &v1alpha1.AttestationPolicy{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.PolicyName}}, true, func(a *v1alpha1.AttestationPolicy) {
				a.Status.Insecure = []string{"anyMachine"}
			})
			return p.healthy
		}},
		{CheckPolicy, checkup.Fail, "the cluster's policy: POLICY_INVALID: policy: controlPlanes lists machine", "", func(t *testing.T) func(*testing.T) {
			t.Helper()
			text, err := p.dir.Read(ownerdir.PolicyFile)
			try(t, err)
			key, err := p.dir.OwnerKey()
			try(t, err)
			json, err := policyfile.ToJSON(text)
			try(t, err)
			policy := &attestv1.Policy{}
			try(t, protojson.Unmarshal(json, policy))
			policy.Serial, policy.ControlPlanes = 2, append(policy.ControlPlanes, policy.ControlPlanes...)
			twice, err := protojson.Marshal(policy)
			try(t, err, p.kube.PutPolicy(t.Context(), attest.SignPolicy(key, twice)))
			r := p.examine(t)
			if !found(r, CheckKnown, checkup.OK, "") || !found(r, CheckOwnerKey, checkup.OK, "") {
				t.Errorf("its state is not recorded: %+v", r.Findings)
			}
			return func(t *testing.T) {
				t.Helper()
				try(t, p.kube.PutPolicy(t.Context(), attest.SignPolicy(key, json)), os.Remove(p.dir.File(ownerdir.KnownFile)))
				p.healthy(t)
			}
		}},
		{CheckNodes, checkup.Warn, "its kubelet has not renewed that for 1h", "", func(t *testing.T) func(*testing.T) {
			t.Helper()
			change(t, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1"}}, true, func(n *corev1.Node) {
				n.Status.Conditions[0].LastHeartbeatTime = metav1.NewTime(time.Now().Add(-time.Hour))
			})
			return func(t *testing.T) {
				t.Helper()
				lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: corev1.NamespaceNodeLease, Name: "node1"}, Spec: coordinationv1.LeaseSpec{RenewTime: new(metav1.NowMicro())}}
				gone := leased(lease)(t)
				if r := p.examine(t); !r.Clean(CheckNodes) {
					t.Errorf("its Lease is renewed: %+v", r.Findings)
				}
				gone(t)
				p.healthy(t)
			}
		}},
	}
}
