package owner

import (
	"context"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/internal/enrolled"
	"github.com/muster-k8s/muster/internal/owner/cluster"
	"github.com/muster-k8s/muster/internal/owner/ownerdir"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// The folder says which call is made: a control plane that is there must never be initialised.
func TestAMachineOfAClusterThatIsThereIsAdopted(t *testing.T) {
	ca := attesttest.NewCA(t)
	for name, adopted := range map[string]bool{"install": true, "init": false} {
		t.Run(name, func(t *testing.T) {
			m := attesttest.NewMachine(t, ca, attesttest.Options{})
			f := serveFirst(t, m, succeed(m, kubeconfig(t), nil))
			f.adopted = adopted
			o := own(t, f, endpoint(), attesttest.Policy(t, ca, []*attesttest.Machine{m}))
			if err := o.machine(t); err != nil {
				t.Fatal(err)
			}
			if c := o.Cluster(); c.Stage != ownerdir.StageInitialised || c.Adopted != adopted {
				t.Errorf("%+v", c)
			}
		})
	}
}

func TestARefusedAdoptionSaysWhatTheMachineMustBe(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	f := serveFirst(t, m, func(*initv1.InitRequest, func(*initv1.InitResponse) error) error {
		return attest.Refuse(attestv1.Reason_REASON_INIT_NOT_ALLOWED, "it is none")
	})
	f.adopted = true
	o := own(t, f, endpoint(), attesttest.Policy(t, ca, []*attesttest.Machine{m}))
	if p := Explain(o.machine(t)); p.Reason != "INIT_NOT_ALLOWED" || !strings.Contains(p.Remedy, "must be a control plane") {
		t.Errorf("%+v", p)
	}
}

// Nodes that were there when Muster came may go on; one that turned up later without being enrolled may not.
func TestOnlyNodesOfBeforeMayGoOnUnattested(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	kube, err := cluster.Connect(kubeconfig(t))
	if err != nil {
		t.Fatal(err)
	}
	add := func(name string) {
		t.Helper()
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if err := shared.Client.Create(ctx, n); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = shared.Client.Delete(context.WithoutCancel(t.Context()), n) })
	}
	definitions, err := Definitions()
	if err != nil {
		t.Fatal(err)
	}
	if err := kube.Apply(ctx, definitions, func(string) {}); err != nil {
		t.Fatal(err)
	}
	if err := kube.EnsureNamespace(ctx); err != nil {
		t.Fatal(err)
	}
	add("before")
	names, err := kube.Unattested(ctx, true)
	if err != nil || !slices.Contains(names, "before") {
		t.Fatalf("%q %v", names, err)
	}
	if err := kube.EnsureEnrolled(ctx, map[string]string{"before": enrolled.Unattested}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = kube.EnsureEnrolled(context.WithoutCancel(t.Context()), nil) })
	add("later")
	names, err = kube.Unattested(ctx, false)
	if err != nil || !slices.Equal(names, []string{"before"}) {
		t.Errorf("%q %v", names, err)
	}
}
