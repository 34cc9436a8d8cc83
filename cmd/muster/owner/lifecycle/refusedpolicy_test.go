package lifecycle

import (
	"context"
	"errors"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/cmd/muster/owner/recovery"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// B7: the version before has accepted a policy that this one refuses. Its serial counts, and the owner replaces it by the next one.
func TestAPolicyThatOnlyAnotherVersionAcceptsIsReplaced(t *testing.T) {
	e := newEdited(t)
	twice := &attestv1.Policy{}
	if err := protojson.Unmarshal(e.before, twice); err != nil {
		t.Fatal(err)
	}
	with := func(serial uint64, more ...string) []byte {
		twice.Serial, twice.ControlPlanes = serial, append(twice.ControlPlanes[:2:2], more...)
		json, err := protojson.Marshal(twice)
		if err != nil {
			t.Error(err)
		}
		return json
	}
	e.signs(t, with(6, twice.ControlPlanes[0]))
	p := &v1alpha1.AttestationPolicy{}
	ownertest.Change(e.ctx, t, true, client.ObjectKey{Name: v1alpha1.PolicyName}, p, func() { p.Status.Serial = 6 })
	if err := recovery.RecordState(e.ctx, e.Dir, e.kube); err != nil {
		t.Errorf("its state is not recorded: %v: %s", err, problem.Remedy(err))
	}
	if known, err := e.Known(); err != nil || known.Policy.JSON != p.Spec.Policy {
		t.Errorf("%+v, %v", known, err)
	}
	e.refuses(t, "POLICY_INVALID", "twice", "increase serial, and run muster policy apply")

	apply := func(ctx context.Context, serial uint64) error {
		err := e.Write(ownerdir.PolicyFile, with(serial))
		if err == nil {
			_, err = policies.ApplyPolicy(ctx, e.Dir, nil, policies.Consent{})
		}
		return err
	}
	if err := apply(e.ctx, 6); err == nil || !strings.Contains(problem.Remedy(err), "Set serial to 7") {
		t.Errorf("another one of its serial: %v: %s", err, problem.Remedy(err))
	}
	waiting, stop := context.WithCancel(e.ctx) // no service answers
	defer stop()
	done := make(chan error, 1)
	go func() { done <- apply(waiting, 7) }()
	for range ownertest.Changes(e.ctx, &v1alpha1.AttestationPolicyList{}, v1alpha1.PolicyName) {
		have, err := e.kube.Policy(e.ctx)
		if err != nil {
			t.Fatal(err)
		}
		if now, err := attest.ParsePolicy([]byte(have.Spec.Policy)); err == nil && now.Serial() == 7 {
			break
		}
		select {
		case err := <-done:
			t.Fatalf("the complete one: %v: %s", err, problem.Remedy(err))
		default:
		}
	}
	stop()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if err := recovery.RecordState(e.ctx, e.Dir, e.kube); err != nil {
		t.Error(err)
	}
	if _, err := PlanForget(e.ctx, e.Dir, "cp2", true, false); err != nil {
		t.Error(err, problem.Remedy(err))
	}
}
