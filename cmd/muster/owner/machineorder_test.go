package owner

import (
	"context"
	"crypto/ed25519"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/keys"
)

// A node's machine verifies what it finds in its AttestedNode as the bootstrapper does, and reports the states one after another.
func TestAnOrderIsSignedForItsMachineAndWaitedFor(t *testing.T) {
	fresh(t)
	defined(t)
	access(t, nil)
	ca := attesttest.NewCA(t)
	o := own(t, &firstMachine{addr: "192.0.2.1:9000"}, endpoint(), attesttest.Policy(t, ca, []*attesttest.Machine{attesttest.NewMachine(t, ca, attesttest.Options{})}))
	if err := o.Write(ownerdir.AdminConf, kubeconfig(t)); err != nil {
		t.Fatal(err)
	}
	cluster := keys.ClusterID{3}
	c := o.Cluster()
	c.Stage, c.ClusterID = ownerdir.StageInstalled, cluster.String()
	if err := o.Save(c); err != nil {
		t.Fatal(err)
	}
	key, err := o.OwnerKey()
	if err != nil {
		t.Fatal(err)
	}
	on := ownerorder.Addressee{Cluster: cluster, Node: "ordered", Machine: attest.MachineID{4}, Disk: "5f0c95b6-2a3d-4c7e-9f10-000000000077"}
	n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "ordered"}, Spec: v1alpha1.AttestedNodeSpec{MachineID: on.Machine.String(), Role: v1alpha1.RoleWorker}}
	if err := shared.Client.Create(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unenroll(context.WithoutCancel(t.Context()), n.Name) })
	if _, err := Order(t.Context(), o.Dir, "nobody", ownerorder.ActionDoctor, nil, func(string) {}); attest.ReasonOf(err) != attestv1.Reason_REASON_NOT_ENROLLED {
		t.Errorf("an order to an unknown node: %v", err)
	}
	if _, err := Order(t.Context(), o.Dir, n.Name, ownerorder.ActionDoctor, nil, func(string) {}); attest.ReasonOf(err) != attestv1.Reason_REASON_NOT_ENROLLED {
		t.Errorf("an order to a machine that has not joined: %v", err)
	}
	n = enrollmentOf(t, n.Name)
	n.Spec.DiskID, n.Spec.DiskMode = on.Disk, v1alpha1.DiskModePlain
	if err := shared.Client.Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	var last time.Time
	for _, tt := range []struct {
		name   string
		states []v1alpha1.OrderState
		says   string // of the error
	}{
		{"done", []v1alpha1.OrderState{v1alpha1.OrderRunning, v1alpha1.OrderDone}, ""},
		{"failed", []v1alpha1.OrderState{v1alpha1.OrderFailed}, "doctor failed: because?Reason: NONE"},
		{"refused", []v1alpha1.OrderState{v1alpha1.OrderRefused}, `refused the order "doctor": because`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			machine := make(chan time.Time, 1)
			go func() { machine <- obey(ctx, t, n.Name, on, ed25519.PublicKey(key[32:]), last, tt.states) }()
			var said []string
			r, err := Order(ctx, o.Dir, n.Name, ownerorder.ActionDoctor, nil, func(s string) { said = append(said, s) })
			if (err == nil) != (tt.says == "") || err != nil && !strings.Contains(err.Error(), tt.says) {
				t.Errorf("%v, want %q", err, tt.says)
			}
			if r == nil || r.State != tt.states[len(tt.states)-1] || !slices.Contains(said, string(r.State)) {
				t.Errorf("the report is %+v, and %q was said", r, said)
			}
			at := <-machine
			if !at.After(last) {
				t.Errorf("signed at %s after %s", at, last)
			}
			last = at
		})
	}
	unanswered := func(action ownerorder.Action) error {
		ctx := &expiring{Context: t.Context(), done: make(chan struct{})}
		_, err := Order(ctx, o.Dir, n.Name, action, nil, ctx.expire) // it reports first that the order is written
		return err
	}
	t.Run("one that its owner interrupts", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		_, err := Order(ctx, o.Dir, n.Name, ownerorder.ActionReboot, nil, func(string) { cancel() })
		if err == nil || !strings.Contains(err.Error(), "is withdrawn") || !strings.Contains(remedy(err), "may still begin") {
			t.Errorf("%v: %s", err, remedy(err))
		}
		if _, there := enrollmentOf(t, n.Name).Annotations[v1alpha1.OwnerOrder]; there {
			t.Error("the machine still gets it")
		}
	})
	t.Run("a machine that does not answer", func(t *testing.T) {
		if err := unanswered(ownerorder.ActionReboot); err == nil || !strings.Contains(remedy(err), "may still begin") {
			t.Errorf("%v: %s", err, remedy(err))
		}
		first := enrollmentOf(t, n.Name).Annotations[v1alpha1.OwnerOrder]
		// The same command waits for the order that is there: a second one would restart the machine twice.
		if err := unanswered(ownerorder.ActionReboot); err == nil || enrollmentOf(t, n.Name).Annotations[v1alpha1.OwnerOrder] != first {
			t.Errorf("the order was replaced: %v", err)
		}
		if err := unanswered(ownerorder.ActionDoctor); err == nil || !strings.Contains(err.Error(), `has the order "reboot"`) || enrollmentOf(t, n.Name).Annotations[v1alpha1.OwnerOrder] != first {
			t.Errorf("another action: %v", err)
		}
	})
	t.Run("an order that somebody else wrote", func(t *testing.T) {
		n := enrollmentOf(t, n.Name)
		forged := ownerorder.SignedMachineOrder{Text: `{"action":"reboot","signedAt":"2999-01-01T00:00:00Z","notAfter":"2999-01-01T00:00:01Z"}`, Signature: make([]byte, ed25519.SignatureSize)}.Note()
		metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.OwnerOrder, forged)
		if err := shared.Client.Update(t.Context(), n); err != nil {
			t.Fatal(err)
		}
		if err := unanswered(ownerorder.ActionDoctor); err == nil || enrollmentOf(t, n.Name).Annotations[v1alpha1.OwnerOrder] == forged {
			t.Errorf("it stays: %v", err)
		}
	})
	t.Run("a banned one", func(t *testing.T) {
		n := enrollmentOf(t, n.Name)
		n.Spec.Banned = true
		if err := shared.Client.Update(t.Context(), n); err != nil {
			t.Fatal(err)
		}
		if _, err := Order(t.Context(), o.Dir, n.Name, ownerorder.ActionReboot, nil, func(string) {}); attest.ReasonOf(err) != attestv1.Reason_REASON_BANNED {
			t.Error(err)
		}
	})
}

// expiring is a context whose deadline comes when it is told.
type expiring struct {
	context.Context

	once sync.Once
	done chan struct{}
}

func (e *expiring) expire(string) { e.once.Do(func() { close(e.done) }) }

func (e *expiring) Done() <-chan struct{} { return e.done }

func (e *expiring) Err() error {
	select {
	case <-e.done:
		return context.DeadlineExceeded
	default:
		return nil
	}
}

// B11: the API, which says what machine and disk a node has, can't have an order signed for another node than the owner has typed.
func TestAnOrderIsForTheNodeThatItsOwnerTyped(t *testing.T) {
	l := newLifecycle(t)
	l.node(t, "typed", 61, v1alpha1.RoleWorker)
	other := l.node(t, "other", 62, v1alpha1.RoleWorker)
	l.through(t, func(r *http.Request) {
		r.URL.Path = strings.Replace(r.URL.Path, "/attestednodes/typed", "/attestednodes/other", 1)
	})
	says := func(err error) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), "answers with the enrollment of other in place of that of typed") {
			t.Error(err)
		}
	}
	_, err := Order(t.Context(), l.Dir, "typed", ownerorder.ActionReset, nil, func(string) {})
	says(err)
	_, err = PlanReset(t.Context(), l.Dir, "typed")
	says(err)
	says(Ban(t.Context(), l.Dir, "typed", func(string) {}))
	if n := enrollmentOf(t, other.Node); n.Annotations[v1alpha1.OwnerOrder] != "" || n.Spec.Banned {
		t.Errorf("the other node has %q, banned: %v", n.Annotations, n.Spec.Banned)
	}
}

func enrollmentOf(t *testing.T, name string) *v1alpha1.AttestedNode {
	t.Helper()
	n := &v1alpha1.AttestedNode{}
	if err := shared.Client.Get(t.Context(), types.NamespacedName{Name: name}, n); err != nil {
		t.Fatal(err)
	}
	return n
}

// obey waits for an order that was signed later, reports the states, and returns when it was signed.
func obey(ctx context.Context, t *testing.T, name string, on ownerorder.Addressee, owner ed25519.PublicKey, after time.Time, states []v1alpha1.OrderState) time.Time {
	for ctx.Err() == nil {
		n := &v1alpha1.AttestedNode{}
		if err := shared.Client.Get(ctx, types.NamespacedName{Name: name}, n); err != nil || n.Annotations[v1alpha1.OwnerOrder] == "" {
			continue
		}
		signed, err := ownerorder.ParseMachineNote(n.Annotations[v1alpha1.OwnerOrder])
		if err != nil {
			t.Error(err)
			return time.Time{}
		}
		o, err := signed.Genuine(attest.OwnerKeys{owner}, on)
		if err == nil {
			err = o.Timely(time.Now())
		}
		if err != nil {
			t.Errorf("%s: %v", signed.Text, err)
			return time.Time{}
		}
		if !o.SignedAt.After(after) {
			continue // the one before
		}
		for _, s := range states {
			n.Status.Order = &v1alpha1.OrderReport{Digest: signed.Digest(), Action: string(o.Action), State: s, Message: "because\nReason: NONE"}
			if err := shared.Client.Status().Update(ctx, n); err != nil {
				t.Error(err)
			}
		}
		return o.SignedAt
	}
	return time.Time{}
}

// Root on a machine writes what it wants into its report.
func TestWhatAMachineFindsIsShownWithoutItsControlCharacters(t *testing.T) {
	r, err := Findings(`{"findings":[{"check":"clock\u001b]52;c;x\u0007","level":"warn","detail":"a\tb\nCHECK ok","remedy":"c\u009b2J"}]}`)
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range r.Rows() {
		if strings.ContainsFunc(strings.Join(row, ""), unicode.IsControl) {
			t.Errorf("a row has control characters: %q", row)
		}
	}
	for _, bad := range []string{"", "{}", `{"findings":[]}`, `{"findings":[{"check":"x","level":"great"}]}`, `{"findings":[{"level":"ok"`} {
		if r, err := Findings(bad); err == nil {
			t.Errorf("%s is read as %+v", bad, r)
		}
	}
}
