package lifecycle

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// After a clone, a banned control plane is revoked before it is forgotten: one edit of the policy removes it from
// controlPlanes and revokes its TPM's key. If the ban were removed first, the copy could join again for as long as
// its key is accepted (A7).
func TestABannedControlPlaneIsRevokedBeforeItIsForgotten(t *testing.T) {
	ownertest.Fresh(t)
	ownertest.Defined(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*ownertest.Patience)
	defer cancel()
	clean := func() {
		ctx := context.WithoutCancel(t.Context())
		var nodes v1alpha1.AttestedNodeList
		if err := ownertest.Shared.Client.List(ctx, &nodes); err != nil {
			t.Error(err)
		}
		for _, n := range nodes.Items {
			ownertest.Unenroll(ctx, n.Name)
		}
		_ = ownertest.Shared.Client.Delete(ctx, &v1alpha1.AttestationPolicy{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.PolicyName}})
	}
	clean() // another test's policy is not the folder's, and its control planes are not listed
	t.Cleanup(clean)
	ownertest.Access(t, nil)
	ca := attesttest.NewCA(t)
	cloned := attesttest.NewMachine(t, ca, attesttest.Options{})
	o := ownertest.Own(t, &ownertest.FirstMachine{Addr: "192.0.2.1:9000"}, ownertest.Endpoint(), attesttest.Policy(t, ca, []*attesttest.Machine{cloned}))
	if err := o.Write(ownerdir.AdminConf, ownertest.Kubeconfig(t)); err != nil {
		t.Fatal(err)
	}
	seen, err := attesttest.Claims(ctx, cloned.Attester(attest.PurposeMachine), attesttest.Verifier(t, ca), attest.PurposeMachine, attest.Binding{1})
	if err != nil {
		t.Fatal(err)
	}
	one, other := seen.Machine(), attest.MachineID{2}
	for name, id := range map[string]attest.MachineID{"cp5": one, "cp6": other} {
		if _, err := policies.Enroll(ctx, o.Dir, name, v1alpha1.AttestedNodeSpec{MachineID: id.String(), Role: v1alpha1.RoleControlPlane}, func(string) {}); err != nil {
			t.Fatal(err)
		}
	}
	// revoke edits policy.yaml as an owner does, and applies it, where no service reports that it is in force.
	revoke := func(serial uint64, remove bool) error {
		t.Helper()
		text, err := o.Read(ownerdir.PolicyFile)
		if err != nil {
			t.Fatal(err)
		}
		before := text
		if remove {
			if text, err = policyfile.ListControlPlanes(text, serial, nil, []attest.MachineID{one}); err != nil {
				t.Fatal(err)
			}
		}
		var fields map[string]any
		if err := yaml.Unmarshal(text, &fields); err != nil {
			t.Fatal(err)
		}
		fields["serial"] = serial
		fields["tpm2"].(map[string]any)["revoked"] = map[string]any{"keys": []string{one.String()}}
		if text, err = yaml.Marshal(fields); err == nil {
			err = o.Write(ownerdir.PolicyFile, text)
		}
		if err != nil {
			t.Fatal(err)
		}
		_, wanted, _ := policyfile.Parse(text) // nil: ApplyPolicy returns the error
		waiting, cancel := context.WithCancel(ctx)
		defer cancel()
		put, done := false, make(chan struct{})
		go func() {
			defer close(done)
			for !put && retry.Wait(waiting, 50*time.Millisecond) == nil {
				var have v1alpha1.AttestationPolicy
				err := ownertest.Shared.Client.Get(waiting, client.ObjectKey{Name: v1alpha1.PolicyName}, &have)
				put = err == nil && have.Spec.Policy == string(wanted)
			}
			cancel()
		}()
		_, err = policies.ApplyPolicy(waiting, o.Dir, nil, policies.Consent{})
		cancel()
		<-done
		if put && errors.Is(err, context.Canceled) {
			return nil
		}
		if err := o.Write(ownerdir.PolicyFile, before); err != nil {
			t.Fatal(err)
		}
		return err
	}
	if p := problem.Explain(revoke(4, false)); p.Reason != "POLICY_INVALID" || !strings.Contains(p.Message, "in the same edit") {
		t.Errorf("revoked and listed: %+v", p)
	}
	if p := problem.Explain(revoke(4, true)); p.Reason != "SERVER_NOT_LISTED" {
		t.Errorf("without a ban: %+v", p)
	}
	n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "cp5"}}
	if err := ownertest.Shared.Client.Patch(ctx, n, client.RawPatch(types.MergePatchType, []byte(`{"spec":{"banned":true}}`))); err != nil {
		t.Fatal(err)
	}
	if err := revoke(4, true); err != nil {
		t.Fatal(err)
	}
	listed(t, o, 4, other)
	_, p, _, err := policies.FolderPolicy(o.Dir)
	if err != nil {
		t.Fatal(err)
	}
	leave(ctx, t, o, "cp5", nil)
	listed(t, o, 4, other) // forgetting it changes no policy any more
	if err := ownertest.Shared.Client.Get(ctx, client.ObjectKey{Name: "cp5"}, n); !apierrors.IsNotFound(err) {
		t.Errorf("the enrollment: %v", err)
	}
	// A machine with the key of its TPM gets nothing, with or without an enrollment.
	if _, err := p.Appraise(seen, attest.Unlocked()); attest.ReasonOf(err) != attestv1.Reason_REASON_EK_UNTRUSTED {
		t.Errorf("the copy: %v, want EK_UNTRUSTED", err)
	}
}
