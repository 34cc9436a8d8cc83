package doctor

import (
	"encoding/base64"
	"encoding/json"
	"log/slog"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
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

// hidden puts a policy with a switch in force that the status does not have: whoever can write the status has removed it.
func (p *patient) hidden(t *testing.T) func(*testing.T) {
	t.Helper()
	recorded := p.file(ownerdir.KnownFile, func(string, []byte) error { return nil })(t) // the doctor records the policy
	key, err := p.dir.OwnerKey()
	try(t, err)
	_, signed, err := policies.SignedPolicy(p.dir)
	try(t, err)
	var m attestv1.Policy
	try(t, protojson.Unmarshal(signed.GetPolicy(), &m))
	m.Serial, m.Tpm2.Classes, m.Insecure = 2, nil, &attestv1.InsecureSwitches{AnyFirmware: true}
	document, err := protojson.Marshal(&m)
	try(t, err)
	put := func(t *testing.T, s *attestv1.SignedPolicy) {
		t.Helper()
		change(t, &v1alpha1.AttestationPolicy{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.PolicyName}}, false, func(a *v1alpha1.AttestationPolicy) {
			a.Spec.Policy, a.Spec.Signature = string(s.GetPolicy()), base64.StdEncoding.EncodeToString(s.GetSignature())
		})
		p.healthy(t)
	}
	put(t, attest.SignPolicy(key, document))
	if s, err := p.kube.Status(t.Context(), slog.New(slog.DiscardHandler)); err != nil || !slices.Equal(s.Policy.Insecure, []string{"anyFirmware"}) {
		t.Errorf("muster status shows %+v, %v", s, err)
	}
	return func(t *testing.T) {
		t.Helper()
		put(t, signed)
		recorded(t)
	}
}

// unsent signs a policy of serial 3 in the folder, as a command does that is interrupted before it sends it.
func (p *patient) unsent(t *testing.T) func(*testing.T) {
	t.Helper()
	key, err := p.dir.OwnerKey()
	try(t, err)
	text, err := p.dir.Read(ownerdir.PolicyFile)
	try(t, err)
	policy, err := policyfile.ToJSON(text)
	try(t, err)
	signed := attest.SignPolicy(key, []byte(strings.Replace(string(policy), `"serial":"1"`, `"serial":"3"`, 1)))
	content, err := json.Marshal(ownerdir.KnownPolicy{JSON: string(signed.GetPolicy()), Signature: signed.GetSignature()})
	try(t, err, os.WriteFile(p.dir.File(ownerdir.SignedFile), content, 0o600))
	return p.withoutSigned
}

// damaged writes a file that is not a signed policy.
func (p *patient) damaged(t *testing.T) func(*testing.T) {
	t.Helper()
	try(t, os.WriteFile(p.dir.File(ownerdir.SignedFile), []byte("{"), 0o600))
	return p.withoutSigned
}

func (p *patient) withoutSigned(t *testing.T) {
	t.Helper()
	try(t, os.Remove(p.dir.File(ownerdir.SignedFile)))
	p.healthy(t)
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
		{CheckPolicy, checkup.Warn, "signed a policy of serial 3, and the cluster has one of serial 1", "", p.unsent},
		{CheckPolicy, checkup.Fail, ownerdir.SignedFile, "", p.damaged},
		{CheckPolicy, checkup.Warn, "insecure.anyFirmware is on in the policy in force", "", p.hidden},
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
			try(t, err, ownertest.PutPolicy(t.Context(), p.kube, attest.SignPolicy(key, twice)))
			r := p.examine(t)
			if !found(r, CheckKnown, checkup.OK, "") || !found(r, CheckOwnerKey, checkup.OK, "") {
				t.Errorf("its state is not recorded: %+v", r.Findings)
			}
			return func(t *testing.T) {
				t.Helper()
				try(t, ownertest.PutPolicy(t.Context(), p.kube, attest.SignPolicy(key, json)), os.Remove(p.dir.File(ownerdir.KnownFile)))
				p.healthy(t)
			}
		}},
		{CheckNodes, checkup.Warn, "its kubelet has not renewed its Lease for 1h", "", func(t *testing.T) func(*testing.T) {
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
