package install

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/cmd/muster/owner/progress"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// The folder determines the call: an existing control plane must never be initialized.
func TestAMachineOfAClusterThatIsThereIsAdopted(t *testing.T) {
	ownertest.Fresh(t)
	ca := attesttest.NewCA(t)
	for name, adopted := range map[string]bool{"install": true, "init": false} {
		t.Run(name, func(t *testing.T) {
			m := attesttest.NewMachine(t, ca, attesttest.Options{})
			f := ownertest.ServeFirst(t, m, ownertest.Succeed(m, ownertest.Kubeconfig(t), nil))
			f.Adopted = adopted
			o := ownertest.Own(t, f, ownertest.Endpoint(), attesttest.Policy(t, ca, []*attesttest.Machine{m}))
			if err := machine(t, o); err != nil {
				t.Fatal(err)
			}
			if c := o.Cluster(); c.Stage != ownerdir.StageInitialized || c.Adopted != adopted {
				t.Errorf("%+v", c)
			}
		})
	}
}

func TestARefusedAdoptionSaysWhatTheMachineMustBe(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	f := ownertest.ServeFirst(t, m, func(*initv1.InitRequest, func(*initv1.InitResponse) error) error {
		return attest.Refuse(attestv1.Reason_REASON_INIT_NOT_ALLOWED, "it is none")
	})
	f.Adopted = true
	o := ownertest.Own(t, f, ownertest.Endpoint(), attesttest.Policy(t, ca, []*attesttest.Machine{m}))
	if p := problem.Explain(machine(t, o)); p.Reason != "INIT_NOT_ALLOWED" || !strings.Contains(p.Remedy, "must be a control plane") {
		t.Errorf("%+v", p)
	}
}

// add creates a Node, until the test ends.
func add(t *testing.T, name string, addresses ...string) {
	t.Helper()
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	for _, a := range addresses {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
	}
	if err := ownertest.Shared.Client.Create(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ownertest.Shared.Client.Delete(context.WithoutCancel(t.Context()), n) })
}

func enroll(t *testing.T, name string) {
	t.Helper()
	n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1alpha1.AttestedNodeSpec{MachineID: strings.Repeat("ab", 32), Role: v1alpha1.RoleWorker}}
	if err := ownertest.Shared.Client.Create(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ownertest.Shared.Client.Delete(context.WithoutCancel(t.Context()), n) })
}

// Nodes that existed before Muster may go on writing, unless they have left since or are attested; a later one may
// not.
func TestOnlyNodesOfBeforeMayGoOnUnattested(t *testing.T) {
	ownertest.Fresh(t)
	kube := ownertest.Defined(t)
	ownertest.Access(t, map[string]nodeaccess.Entry{"listed": {Unattested: true}, "forgotten": nodeaccess.Entry{}.Revoke(time.Now())})
	for _, name := range []string{"listed", "before", "forgotten", "enrolled", "later"} {
		add(t, name)
	}
	enroll(t, "enrolled")
	for want, before := range map[string][]string{"listed": nil, "before listed": {"listed", "before", "forgotten", "enrolled", "gone"}} {
		names, err := kube.Unattested(t.Context(), before)
		if err != nil || strings.Join(names, " ") != want {
			t.Errorf("of %q, %q may go on, want %s; %v", before, names, want, err)
		}
	}
}

// cut interrupts a run where one of its steps begins.
type cut struct {
	progress.Reporter
	at     string
	cancel func()
}

func (c cut) Begin(step string) {
	if c.Reporter.Begin(step); step == c.at {
		c.cancel()
	}
}

// A resumed run does not count a node that came in between among those from before Muster.
func TestANodeThatComesBetweenTwoRunsIsNobodysFriend(t *testing.T) {
	bare(t)
	ca := attesttest.NewCA(t)
	for _, first := range []string{"define Muster's objects", "enroll the first machine", "set the policy"} {
		t.Run("stopped at "+first, func(t *testing.T) {
			m := attesttest.NewMachine(t, ca, attesttest.Options{})
			f := ownertest.ServeFirst(t, m, ownertest.Succeed(m, ownertest.Kubeconfig(t), nil))
			f.Adopted = true
			o := ownertest.Own(t, f, ownertest.Endpoint(), attesttest.Policy(t, ca, []*attesttest.Machine{m}))
			ownertest.Defined(t)
			ownertest.Access(t, nil)
			t.Cleanup(func() {
				ownertest.Unenroll(context.WithoutCancel(t.Context()), "node1")
				_ = ownertest.Shared.Client.DeleteAllOf(context.WithoutCancel(t.Context()), &v1alpha1.AttestedDisk{}) // the next machine has the same
			})
			add(t, "node1", "192.168.77.11")
			add(t, "before")
			run := func(until string) {
				t.Helper()
				ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
				defer cancel()
				cfg := config(o)
				cfg.Report = cut{cfg.Report, until, cancel}
				if err := Init(ctx, cfg); !errors.Is(err, context.Canceled) {
					t.Fatalf("it was not stopped at %q: %v\n%s", until, err, o.Out)
				}
			}
			run(first)
			add(t, "between")
			run("set the policy")
			l := ownertest.Listed(t)
			if !l.MembersOnly || !slices.Equal(l.Nodes(), []string{"before", "node1"}) || !l.Entry("before").Equal(nodeaccess.Entry{Unattested: true, Member: true}) ||
				!l.Entry("node1").Equal(nodeaccess.Entry{ControlPlane: true, Member: true}) {
				t.Errorf("members only: %t, before %+v, node1 %+v, of %v", l.MembersOnly, l.Entry("before"), l.Entry("node1"), l.Nodes())
			}
			if c := o.Cluster(); !slices.Equal(c.NodesBefore, []string{"before"}) {
				t.Errorf("%q are said to have been there before", c.NodesBefore)
			}
		})
	}
}

// The folder also records that there was no other node, and the cluster is not asked again.
func TestAnAdoptedClusterOfOneMachineStaysOne(t *testing.T) {
	ownertest.Fresh(t)
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	f := ownertest.ServeFirst(t, m, ownertest.Succeed(m, ownertest.Kubeconfig(t), nil))
	f.Adopted = true
	o := ownertest.Own(t, f, ownertest.Endpoint(), attesttest.Policy(t, ca, []*attesttest.Machine{m}))
	if err := machine(t, o); err != nil {
		t.Fatal(err)
	}
	kube, i := ownertest.Defined(t), &initializer{InitConfig: config(o)}
	for _, name := range []string{"node1", "between"} {
		add(t, name)
		if _, err := i.noteNodes(t.Context(), kube); err != nil {
			t.Fatal(err)
		}
		if c := o.Cluster(); c.NodesBefore == nil || len(c.NodesBefore) > 0 {
			t.Errorf("%q are said to have been there before", c.NodesBefore)
		}
	}
}
