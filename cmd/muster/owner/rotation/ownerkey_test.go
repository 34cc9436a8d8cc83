package rotation

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"errors"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/cmd/muster/owner/recovery"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// keyServices are services that apply policies of the keys that they were given last.
type keyServices struct {
	mu    sync.Mutex
	keys  attest.OwnerKeys
	took  int
	fails error
}

func (s *keyServices) Check(context.Context, attest.OwnerKeys) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.fails
}

func (s *keyServices) Accept(_ context.Context, keys attest.OwnerKeys) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keys, s.took = keys, s.took+1
	return nil
}

func (s *keyServices) accepted() attest.OwnerKeys {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.keys
}

// run writes the services' report of the policy until ctx ends.
func (s *keyServices) run(ctx context.Context) {
	for range ownertest.Changes(ctx, &v1alpha1.AttestationPolicyList{}, v1alpha1.PolicyName) {
		p := &v1alpha1.AttestationPolicy{}
		if err := ownertest.Shared.Client.Get(ctx, client.ObjectKey{Name: v1alpha1.PolicyName}, p); err != nil || p.Status.ObservedGeneration == p.Generation {
			continue
		}
		signature, err := base64.StdEncoding.DecodeString(p.Spec.Signature)
		if err != nil {
			continue
		}
		opened, err := attest.OpenPolicy(s.accepted(), &attestv1.SignedPolicy{Policy: []byte(p.Spec.Policy), Signature: signature})
		p.Status.ObservedGeneration, p.Status.Accepted, p.Status.Reason = p.Generation, err == nil, attest.ReasonName(attest.ReasonOf(err))
		if err == nil {
			p.Status.Serial = int64(opened.Serial())
		}
		_ = ownertest.Shared.Client.Status().Update(ctx, p) // after a conflict, the next round tries again
	}
}

// keyChange is a cluster whose owner's key is rotated. It has the nodes n1 and n2.
type keyChange struct {
	*ownertest.Owned

	t        *testing.T
	ctx      context.Context
	services *keyServices
	old      ed25519.PublicKey
}

func newKeyChange(t *testing.T) *keyChange {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*ownertest.Patience)
	t.Cleanup(cancel)
	ownertest.Fresh(t)
	kube := ownertest.Defined(t)
	ownertest.Access(t, nil)
	ca := attesttest.NewCA(t)
	machines := []*attesttest.Machine{attesttest.NewMachine(t, ca, attesttest.Options{}), attesttest.NewMachine(t, ca, attesttest.Options{Image: "next"})}
	k := &keyChange{t: t, ctx: ctx, Owned: ownertest.Rules(ctx, t, kube, attesttest.Policy(t, ca, machines, func(p *attestv1.Policy) { p.Serial = 5 }))}
	t.Cleanup(func() {
		_ = ownertest.Shared.Client.Delete(context.WithoutCancel(t.Context()), &v1alpha1.AttestationPolicy{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.PolicyName}})
	})
	key, err := k.OwnerKey()
	if err != nil {
		t.Fatal(err)
	}
	k.old = access.PublicOf(key)
	k.services = &keyServices{keys: attest.OwnerKeys{k.old}}
	done := make(chan struct{})
	go func() { defer close(done); k.services.run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	ownertest.Runs(t, "n1", machines[0], 0)
	ownertest.Runs(t, "n2", machines[1], 0)
	return k
}

// boots has a node report the owner's keys in its image.
func (k *keyChange) boots(name string, keys ...ed25519.PublicKey) {
	k.t.Helper()
	n := ownertest.EnrollmentOf(k.t, name)
	n.Status.OwnerKeys = attest.OwnerKeys(keys).Strings()
	if err := ownertest.Shared.Client.Status().Update(k.ctx, n); err != nil {
		k.t.Fatal(err)
	}
}

func (k *keyChange) config(step OwnerKeyStep) OwnerKeyConfig {
	return OwnerKeyConfig{Dir: k.Dir, Step: step, Services: k.services, Report: func(s string) { k.t.Log(s) }}
}

func (k *keyChange) does(step OwnerKeyStep) *OwnerKeyPlan {
	k.t.Helper()
	p, err := RotateOwnerKey(k.ctx, k.config(step))
	if err != nil {
		k.t.Fatalf("%v: %s", err, problem.Remedy(err))
	}
	return p
}

// refuses expects that a step changes nothing, and says why.
func (k *keyChange) refuses(step OwnerKeyStep, says string) {
	k.t.Helper()
	before, serial := k.state()
	took := k.services.took
	p, err := PlanOwnerKey(k.ctx, k.config(step))
	if err != nil || p.Err() == nil || !strings.Contains(p.Err().Error(), says) || problem.Remedy(p.Err()) == "" {
		k.t.Errorf("plan: %v, %+v, want %q", err, p, says)
	}
	if _, err := RotateOwnerKey(k.ctx, k.config(step)); err == nil || !strings.Contains(err.Error(), says) {
		k.t.Errorf("%v, want %q", err, says)
	}
	if after, now := k.state(); !after.Signs.Equal(before.Signs) || !after.Next.Equal(before.Next) || !after.Previous.Equal(before.Previous) || now != serial || k.services.took != took {
		k.t.Error("something was changed")
	}
}

// state returns the folder's keys, and the serial of the cluster's policy.
func (k *keyChange) state() (ownerdir.KeyRotation, uint64) {
	k.t.Helper()
	r, err := k.KeyRotation()
	if err != nil {
		k.t.Fatal(err)
	}
	_, p := k.policy(r.Keys())
	return r, p.Serial()
}

func (k *keyChange) policy(keys attest.OwnerKeys) (*v1alpha1.AttestationPolicy, *attest.Policy) {
	k.t.Helper()
	have := &v1alpha1.AttestationPolicy{}
	if err := ownertest.Shared.Client.Get(k.ctx, client.ObjectKey{Name: v1alpha1.PolicyName}, have); err != nil {
		k.t.Fatal(err)
	}
	p, err := policies.OpenPolicy(have, keys)
	if err != nil {
		k.t.Fatal(err)
	}
	return have, p
}

func TestTheOwnersKeyIsReplaced(t *testing.T) {
	k := newKeyChange(t)
	k.refuses(OwnerKeyCommit, "no key is prepared")
	p := k.does(OwnerKeyPrepare)
	r, _ := k.state()
	next := r.Next
	if want := (attest.OwnerKeys{k.old, next}).Strings(); !slices.Equal(p.ImageKeys(), want) || !slices.Equal(k.does(OwnerKeyPrepare).ImageKeys(), want) || !r.Signs.Equal(k.old) {
		t.Errorf("image v2 has %q, want %q", p.ImageKeys(), want)
	}
	k.refuses(OwnerKeyFinish, "does not sign yet")

	k.refuses(OwnerKeyCommit, "n1 has not reported the owner's keys")
	k.boots("n1", k.old)
	k.refuses(OwnerKeyCommit, "the image of n1 does not have the new key")
	k.boots("n1", k.old, next)
	k.refuses(OwnerKeyCommit, "n2 has not reported")
	k.boots("n2", k.old, next)

	k.services.fails = problem.WithRemedy(errors.New("other chart"), "Run muster upgrade first.")
	k.refuses(OwnerKeyCommit, "other chart. Run muster upgrade first.")
	k.services.fails = nil
	text, err := k.Read(ownerdir.PolicyFile)
	if err != nil {
		t.Fatal(err)
	}
	edited, err := policyfile.ListControlPlanes(text, 6, []policyfile.ControlPlane{{Machine: attest.MachineID{9}}}, nil)
	if err == nil {
		err = k.Write(ownerdir.PolicyFile, edited)
	}
	if err != nil {
		t.Fatal(err)
	}
	k.refuses(OwnerKeyCommit, "differs from the cluster's policy")
	if err := k.Write(ownerdir.PolicyFile, text); err != nil {
		t.Fatal(err)
	}

	for range 2 { // a repetition changes nothing
		p = k.does(OwnerKeyCommit)
		if want := (attest.OwnerKeys{next}).Strings(); !slices.Equal(p.ImageKeys(), want) {
			t.Errorf("image v3 has %q, want %q", p.ImageKeys(), want)
		}
		r, serial := k.state()
		if _, signed := k.policy(attest.OwnerKeys{next}); serial != 6 || !signed.Signer().Equal(next) || !r.Signs.Equal(next) || !r.Previous.Equal(k.old) || r.Next != nil {
			t.Errorf("serial %d, %+v", serial, r)
		}
		if got := k.services.accepted(); len(got) != 2 || !got.Has(k.old) || !got.Has(next) {
			t.Errorf("the services accept %q", got.Strings())
		}
	}
	if known, err := k.Known(); err != nil {
		t.Error(err)
	} else if last, err := known.Policy.Serial(attest.OwnerKeys{next}); err != nil || last != 6 {
		t.Errorf("known.json has no policy of the new key: %v", err)
	}
	k.refuses(OwnerKeyPrepare, "the last rotation is not finished")

	k.boots("n2", k.old) // an old machine came back
	k.refuses(OwnerKeyFinish, "the image of n2 does not have the new key")
	k.boots("n2", k.old, next)
	k.boots("n1", next)
	plan, err := PlanOwnerKey(k.ctx, k.config(OwnerKeyFinish))
	if err != nil || plan.Err() != nil || !strings.Contains(strings.Join(plan.Notes, ""), "n2 has an image that still accepts the old key") || strings.Contains(strings.Join(plan.Notes, ""), "n1") {
		t.Errorf("%v, %+v", err, plan)
	}
	for range 2 {
		k.does(OwnerKeyFinish)
		r, serial := k.state()
		if got := k.services.accepted(); len(got) != 1 || !got.Has(next) || r.Previous != nil || serial != 6 {
			t.Errorf("the services accept %q, serial %d, %+v", got.Strings(), serial, r)
		}
	}
	if reading, err := k.ReadingKeys(); err != nil || len(reading) != 2 || !bytes.Equal(access.PublicOf(reading[1]), k.old) {
		t.Errorf("%d keys read backups: %v", len(reading), err)
	}
}

// A node that was off does not hold up the rotation, and is named.
func TestANodeThatIsOffIsNamed(t *testing.T) {
	k := newKeyChange(t)
	k.does(OwnerKeyPrepare)
	r, _ := k.state()
	k.boots("n1", k.old, r.Next)
	n := ownertest.EnrollmentOf(t, "n2")
	n.Status.LastVerdict.Time.Time = time.Now().Add(-time.Hour)
	if err := ownertest.Shared.Client.Status().Update(k.ctx, n); err != nil {
		t.Fatal(err)
	}
	p, err := PlanOwnerKey(k.ctx, k.config(OwnerKeyCommit))
	if err != nil || p.Err() != nil || len(p.Notes) != 1 || !strings.Contains(p.Notes[0], "n2 has not attested lately") {
		t.Errorf("%v, %+v", err, p)
	}
	n = ownertest.EnrollmentOf(t, "n2")
	n.Status.LastVerdict.Time.Time = time.Now()
	if err := ownertest.Shared.Client.Status().Update(k.ctx, n); err != nil {
		t.Fatal(err)
	}
	k.refuses(OwnerKeyCommit, "n2 has not reported")
}

// At each place where the command may be killed, the same command continues.
func TestARotationOfTheOwnersKeyContinues(t *testing.T) {
	for name, cut := range map[string]func(k *keyChange, next ed25519.PublicKey) error{
		"after the services": func(k *keyChange, next ed25519.PublicKey) error {
			return k.services.Accept(k.ctx, attest.OwnerKeys{k.old, next})
		},
		"after the switch": func(k *keyChange, next ed25519.PublicKey) error {
			return errors.Join(k.services.Accept(k.ctx, attest.OwnerKeys{k.old, next}), k.SwitchKey())
		},
		"in the middle of the switch": func(k *keyChange, _ ed25519.PublicKey) error {
			text, err := k.Read("owner.key")
			return errors.Join(err, k.Write("owner-previous.key", text))
		},
		"before the policy is sent": func(k *keyChange, next ed25519.PublicKey) error {
			text, err := k.Read(ownerdir.PolicyFile)
			if err == nil {
				text, err = policyfile.SetSerial(text, 6)
			}
			return errors.Join(err, k.services.Accept(k.ctx, attest.OwnerKeys{k.old, next}), k.SwitchKey(), k.Write(ownerdir.PolicyFile, text))
		},
	} {
		t.Run(name, func(t *testing.T) {
			k := newKeyChange(t)
			k.does(OwnerKeyPrepare)
			r, _ := k.state()
			next := r.Next
			k.boots("n1", k.old, next)
			k.boots("n2", k.old, next)
			if err := cut(k, next); err != nil {
				t.Fatal(err)
			}
			k.does(OwnerKeyCommit)
			r, serial := k.state()
			if _, signed := k.policy(attest.OwnerKeys{next}); serial != 6 || !signed.Signer().Equal(next) || !r.Signs.Equal(next) || !r.Previous.Equal(k.old) || k.Cluster().OwnerID != ownerdir.OwnerID(next) {
				t.Errorf("serial %d, %+v", serial, r)
			}
			// The end, cut off after the services have dropped the old key.
			if err := k.services.Accept(k.ctx, attest.OwnerKeys{next}); err != nil {
				t.Fatal(err)
			}
			k.does(OwnerKeyFinish)
			if _, err := os.Stat(k.File("owner-previous.key")); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the old key is left: %v", err)
			}
		})
	}
}

// B7: who has the old key can't bring back a policy that the new key has replaced, not even into the folder.
func TestTheOldKeyBringsNothingBack(t *testing.T) {
	k := newKeyChange(t)
	old, err := k.OwnerKey()
	if err != nil {
		t.Fatal(err)
	}
	before, _ := k.policy(attest.OwnerKeys{k.old})
	k.does(OwnerKeyPrepare)
	r, _ := k.state()
	k.boots("n1", k.old, r.Next)
	k.boots("n2", k.old, r.Next)
	k.does(OwnerKeyCommit)
	kube, err := access.Connect(k.Dir)
	if err != nil {
		t.Fatal(err)
	}
	put := func(text string, by ed25519.PrivateKey) {
		t.Helper()
		if err := ownertest.PutPolicy(k.ctx, kube, attest.SignPolicy(by, []byte(text))); err != nil {
			t.Fatal(err)
		}
	}
	put(before.Spec.Policy, old)
	if err := recovery.RecordState(k.ctx, k.Dir, kube); !errors.Is(err, recovery.ErrRolledBack) || !strings.Contains(err.Error(), "serial 5, but had 6") {
		t.Errorf("the policy of before: %v", err)
	}
	k.refuses(OwnerKeyFinish, "not signed with the new key")
	k.does(OwnerKeyCommit) // repaired
	if _, serial := k.state(); serial <= 6 {
		t.Errorf("serial %d", serial)
	}
	k.does(OwnerKeyFinish)
	put(before.Spec.Policy, old) // the old key is a stranger's now
	if _, err := PlanOwnerKey(k.ctx, k.config(OwnerKeyFinish)); attest.ReasonOf(err) != attestv1.Reason_REASON_POLICY_SIGNATURE {
		t.Errorf("the old key after the rotation: %v", err)
	}
}
