package policies

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// Who forgets the machines in a policy that is made anew must not let in all others.
func TestAPolicyWhoseListBecameEmptyIsRefused(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute) // no service answers, if one is put in force
	defer cancel()
	a := newApproval(t, func(p *attestv1.Policy) { p.Tpm2.MachineIds = append(p.Tpm2.MachineIds, attest.MachineID{7}.String()) })
	model := attesttest.NewMachine(t, a.ca, attesttest.Options{})
	next := func(ids, cloud []string) []byte {
		return attesttest.Policy(t, a.ca, []*attesttest.Machine{model}, func(p *attestv1.Policy) {
			p.Serial, p.Tpm2.MachineIds = 2, ids
			p.Tpm2.PlatformRoots = []*attestv1.PlatformRoot{{Pem: a.cloud.PEM(), Provider: "gcp", Key: "ecc-p256", Projects: []string{"ours"}, MachineIds: cloud}}
		})
	}
	listed := []string{someone.String()}
	for name, tt := range map[string]struct {
		text []byte
		want []string
	}{
		"one of two machines":    {next(listed, listed), nil},
		"all machines":           {next(nil, listed), []string{machineIDs}},
		"all machines of a rule": {next(listed, nil), []string{platformIDs}},
		"all":                    {next(nil, nil), []string{machineIDs, platformIDs}},
	} {
		plan, err := PlanPolicy(ctx, a.Dir, tt.text)
		if err != nil || !slices.Equal(plan.Opened, tt.want) {
			t.Fatalf("%s: %q, %v", name, plan.Opened, err)
		}
		if tt.want == nil {
			continue
		}
		_, err = ApplyPolicy(ctx, a.Dir, tt.text, Consent{Expel: true})
		if p := problem.Explain(err); !strings.Contains(p.Message, strings.Join(tt.want, " and ")+" of the policy") || !strings.Contains(p.Remedy, "--any-machine") {
			t.Errorf("%s: %+v", name, p)
		}
		a.has(t, 1)
	}
	if err := a.Write(ownerdir.PolicyFile, next(nil, nil)); err != nil {
		t.Fatal(err)
	}
	if _, err := ApplyPolicy(ctx, a.Dir, nil, Consent{}); err == nil || !strings.Contains(problem.Explain(err).Remedy, "--any-machine") {
		t.Errorf("the folder's own policy: %v", err)
	}
	waiting, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { _, err := ApplyPolicy(waiting, a.Dir, nil, Consent{AnyMachine: true}); done <- err }()
	for {
		p, err := a.kube.Policy(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if have, err := attest.ParsePolicy([]byte(p.Spec.Policy)); err == nil && have.Serial() == 2 {
			break
		}
		select {
		case err := <-done:
			t.Fatalf("the owner wants it: %v", err)
		default:
		}
	}
	stop()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("after an interruption: %v", err)
	}
}

// Whoever writes to the API chooses nothing with which an edited policy is compared.
func TestAListThatBecameEmptyIsNoticedUnderAForeignPolicy(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	a := newApproval(t)
	key, err := a.OwnerKey()
	if err != nil {
		t.Fatal(err)
	}
	listed, err := a.Read(ownerdir.PolicyFile)
	if err != nil {
		t.Fatal(err)
	}
	a.Remembers(t, listed, key, nil)
	opened := attesttest.Policy(t, a.ca, []*attesttest.Machine{attesttest.NewMachine(t, a.ca, attesttest.Options{})}, func(p *attestv1.Policy) { p.Serial = 2 })
	if err := ownertest.PutPolicy(ctx, a.kube, attest.SignPolicy(ed25519.NewKeyFromSeed(make([]byte, ed25519.SeedSize)), opened)); err != nil {
		t.Fatal(err)
	}
	if plan, err := PlanPolicy(ctx, a.Dir, opened); err != nil || !slices.Equal(plan.Opened, []string{machineIDs}) {
		t.Errorf("%+v, %v", plan, err)
	}
}

// Of two administrators, the second one does not replace a policy that it has not seen, and a policy is signed into the folder before it is sent.
func TestAPolicyThatSomebodyElseChangedMeanwhileIsNotReplaced(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	a := newApproval(t)
	key, err := a.OwnerKey()
	if err != nil {
		t.Fatal(err)
	}
	text, err := a.Read(ownerdir.PolicyFile)
	if err != nil {
		t.Fatal(err)
	}
	next := func(serial uint64) []byte {
		out, err := policyfile.ListControlPlanes(text, serial, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	sign := func(text []byte) *attestv1.SignedPolicy {
		_, json, err := policyfile.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		return attest.SignPolicy(key, json)
	}
	ours, err := PlanPolicy(ctx, a.Dir, next(2))
	if err != nil {
		t.Fatal(err)
	}
	if err := ownertest.PutPolicy(ctx, a.kube, sign(next(3))); err != nil {
		t.Fatal(err)
	}
	err = Put(ctx, a.Dir, a.kube, ours.have, ours.signed)
	if !errors.Is(err, clusterapi.ErrPolicyChanged) || !strings.Contains(problem.Explain(err).Remedy, "muster policy diff") {
		t.Errorf("%v", err)
	}
	if have, err := a.kube.Policy(ctx); err != nil || have.Spec.Policy != string(sign(next(3)).GetPolicy()) {
		t.Errorf("the cluster has %+v, %v", have, err)
	}
	if _, err := a.kube.PolicyInForce(ctx, string(ours.signed.GetPolicy())); !errors.Is(err, clusterapi.ErrPolicyChanged) {
		t.Errorf("the other one is taken for ours: %v", err)
	}
	if last, err := a.Signed(); err != nil || last.JSON != string(ours.signed.GetPolicy()) {
		t.Errorf("%+v, %v", last, err)
	}
	// It was signed and not put in force, so no other command puts it in force, which would not compare it with the nodes.
	if err := a.Write(ownerdir.PolicyFile, next(4)); err != nil {
		t.Fatal(err)
	}
	if err := a.SetSigned(sign(next(4))); err != nil {
		t.Fatal(err)
	}
	_, err = Enroll(ctx, a.Dir, "cp9", v1alpha1.AttestedNodeSpec{MachineID: attest.MachineID{9}.String(), Role: v1alpha1.RoleControlPlane}, func(string) {})
	if p := problem.Explain(err); !strings.Contains(p.Message, "differs from the cluster's policy") || !strings.Contains(p.Remedy, "Run muster policy apply first") {
		t.Errorf("a change of a policy that was not sent: %+v", p)
	}
	// Nor does an earlier one replace its record.
	if _, err := PlanPolicy(ctx, a.Dir, next(3)); err == nil || !strings.Contains(problem.Explain(err).Remedy, "Set serial to 5") {
		t.Errorf("the cluster's own, after a later one was signed: %v", err)
	}
	if err := errors.Join(a.Write(ownerdir.PolicyFile, text), a.SetSigned(ours.signed)); err != nil {
		t.Fatal(err)
	}
	// It was signed here, and perhaps sent: the same one can be sent again, another one needs a higher serial, even if the cluster lost its policy.
	if err := ownertest.Shared.Client.Delete(ctx, &v1alpha1.AttestationPolicy{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.PolicyName}}); err != nil {
		t.Fatal(err)
	}
	if _, err := PlanPolicy(ctx, a.Dir, next(2)); err != nil {
		t.Errorf("the same again: %v", err)
	}
	if _, err := PlanPolicy(ctx, a.Dir, bytes.Replace(next(2), []byte(someone.String()), []byte(attest.MachineID{9}.String()), 1)); err == nil || !strings.Contains(problem.Explain(err).Remedy, "Set serial to 3") {
		t.Errorf("another one of this serial: %v", err)
	}
}
