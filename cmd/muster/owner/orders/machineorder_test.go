package orders

import (
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/keys"
)

// A node's machine verifies what it finds in its AttestedNode as the bootstrapper does, and reports the states one after another.
func TestAnOrderIsSignedForItsMachineAndWaitedFor(t *testing.T) {
	ownertest.Fresh(t)
	ownertest.Defined(t)
	ownertest.Access(t, nil)
	ca := attesttest.NewCA(t)
	o := ownertest.Own(t, &ownertest.FirstMachine{Addr: "192.0.2.1:9000"}, ownertest.Endpoint(), attesttest.Policy(t, ca, []*attesttest.Machine{attesttest.NewMachine(t, ca, attesttest.Options{})}))
	if err := o.Write(ownerdir.AdminConf, ownertest.Kubeconfig(t)); err != nil {
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
	if err := ownertest.Shared.Client.Create(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ownertest.Unenroll(context.WithoutCancel(t.Context()), n.Name) })
	if _, err := Execute(t.Context(), o.Dir, "nobody", ownerorder.ActionDoctor, nil, func(string) {}); attest.ReasonOf(err) != attestv1.Reason_REASON_NOT_ENROLLED || !strings.Contains(problem.Remedy(err), "muster status shows the nodes") {
		t.Errorf("an order to an unknown node: %v: %s", err, problem.Remedy(err))
	}
	if _, err := Execute(t.Context(), o.Dir, n.Name, ownerorder.ActionDoctor, nil, func(string) {}); attest.ReasonOf(err) != attestv1.Reason_REASON_NOT_ENROLLED {
		t.Errorf("an order to a machine that has not joined: %v", err)
	}
	n = ownertest.EnrollmentOf(t, n.Name)
	n.Spec.DiskID, n.Spec.DiskMode = on.Disk, v1alpha1.DiskModePlain
	if err := ownertest.Shared.Client.Update(t.Context(), n); err != nil {
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
			ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
			defer cancel()
			machine := make(chan time.Time, 1)
			go func() { machine <- ownertest.Obey(ctx, t, n.Name, on, ed25519.PublicKey(key[32:]), last, tt.states) }()
			var said []string
			r, err := Execute(ctx, o.Dir, n.Name, ownerorder.ActionDoctor, nil, func(s string) { said = append(said, s) })
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
		ctx := &ownertest.Expiring{Context: t.Context(), Over: make(chan struct{})}
		_, err := Execute(ctx, o.Dir, n.Name, action, nil, ctx.Expire) // it reports first that the order is written
		return err
	}
	t.Run("one that its owner interrupts", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		_, err := Execute(ctx, o.Dir, n.Name, ownerorder.ActionReboot, nil, func(string) { cancel() })
		if err == nil || !strings.Contains(err.Error(), "is withdrawn") || !strings.Contains(problem.Remedy(err), "may still start it") {
			t.Errorf("%v: %s", err, problem.Remedy(err))
		}
		if _, there := ownertest.EnrollmentOf(t, n.Name).Annotations[v1alpha1.OwnerOrder]; there {
			t.Error("the machine still gets it")
		}
	})
	t.Run("a machine that does not answer", func(t *testing.T) {
		if err := unanswered(ownerorder.ActionReboot); err == nil || !strings.Contains(err.Error(), "is withdrawn") || !strings.Contains(problem.Remedy(err), "may still start it") || !strings.Contains(problem.Remedy(err), "muster-orders.service") {
			t.Errorf("%v: %s", err, problem.Remedy(err))
		}
		n := ownertest.EnrollmentOf(t, n.Name)
		if _, there := n.Annotations[v1alpha1.OwnerOrder]; there {
			t.Error("the machine still gets it, when nobody waits")
		}
		// The same command waits for the order of another run: a second one would restart the machine twice.
		reboot, err := Sign(o.Dir, n, ownerorder.ActionReboot, nil, time.Now(), key)
		if err != nil {
			t.Fatal(err)
		}
		first := reboot.Note()
		metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.OwnerOrder, first)
		if err := ownertest.Shared.Client.Update(t.Context(), n); err != nil {
			t.Fatal(err)
		}
		if err := unanswered(ownerorder.ActionReboot); err == nil || ownertest.EnrollmentOf(t, n.Name).Annotations[v1alpha1.OwnerOrder] != first {
			t.Errorf("the order was replaced: %v", err)
		}
		if err := unanswered(ownerorder.ActionDoctor); err == nil || !strings.Contains(err.Error(), `has an unfinished order "reboot"`) || ownertest.EnrollmentOf(t, n.Name).Annotations[v1alpha1.OwnerOrder] != first {
			t.Errorf("another action: %v", err)
		}
	})
	t.Run("an order that somebody else wrote", func(t *testing.T) {
		n := ownertest.EnrollmentOf(t, n.Name)
		forged := ownerorder.SignedMachineOrder{Text: `{"action":"reboot","signedAt":"2999-01-01T00:00:00Z","notAfter":"2999-01-01T00:00:01Z"}`, Signature: make([]byte, ed25519.SignatureSize)}.Note()
		metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.OwnerOrder, forged)
		if err := ownertest.Shared.Client.Update(t.Context(), n); err != nil {
			t.Fatal(err)
		}
		if err := unanswered(ownerorder.ActionDoctor); err == nil || ownertest.EnrollmentOf(t, n.Name).Annotations[v1alpha1.OwnerOrder] != "" {
			t.Errorf("it stays: %v", err)
		}
	})
	t.Run("a folder whose key the machine does not know", func(t *testing.T) {
		n := ownertest.EnrollmentOf(t, n.Name)
		theirs := ownerorder.SignedMachineOrder{Text: `{"action":"reboot"}`, Signature: make([]byte, ed25519.SignatureSize)}.Note() // of the cluster's folder: this one can't verify it
		metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.OwnerOrder, theirs)
		if err := ownertest.Shared.Client.Update(t.Context(), n); err != nil {
			t.Fatal(err)
		}
		knows := func(keys ...string) {
			t.Helper()
			n := ownertest.EnrollmentOf(t, n.Name)
			n.Status.OwnerKeys = keys
			if err := ownertest.Shared.Client.Status().Update(t.Context(), n); err != nil {
				t.Fatal(err)
			}
		}
		other := base64.StdEncoding.EncodeToString(make([]byte, ed25519.PublicKeySize))
		knows(other)
		if err := unanswered(ownerorder.ActionDoctor); attest.ReasonOf(err) != attestv1.Reason_REASON_POLICY_SIGNATURE || ownertest.EnrollmentOf(t, n.Name).Annotations[v1alpha1.OwnerOrder] != theirs {
			t.Errorf("it replaced the order that the machine takes: %v", err)
		}
		knows(other, base64.StdEncoding.EncodeToString(key[32:]))
		if err := unanswered(ownerorder.ActionDoctor); err == nil || attest.ReasonOf(err) == attestv1.Reason_REASON_POLICY_SIGNATURE || ownertest.EnrollmentOf(t, n.Name).Annotations[v1alpha1.OwnerOrder] != "" {
			t.Errorf("a machine that knows it: %v", err)
		}
	})
	t.Run("a banned one", func(t *testing.T) {
		n := ownertest.EnrollmentOf(t, n.Name)
		n.Spec.Banned = true
		if err := ownertest.Shared.Client.Update(t.Context(), n); err != nil {
			t.Fatal(err)
		}
		if _, err := Execute(t.Context(), o.Dir, n.Name, ownerorder.ActionReboot, nil, func(string) {}); attest.ReasonOf(err) != attestv1.Reason_REASON_BANNED {
			t.Error(err)
		}
	})
}

// Root on a machine writes what it wants into its report.
func TestWhatAMachineFindsIsShownWithoutItsControlCharacters(t *testing.T) {
	r, err := ParseReport(`{"findings":[{"check":"clock\u001b]52;c;x\u0007","level":"warn","detail":"a\tb\nCHECK ok","remedy":"c\u009b2J"}]}`)
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range r.Rows() {
		if strings.ContainsFunc(strings.Join(row, ""), unicode.IsControl) {
			t.Errorf("a row has control characters: %q", row)
		}
	}
	for _, bad := range []string{"", "{}", `{"findings":[]}`, `{"findings":[{"check":"x","level":"great"}]}`, `{"findings":[{"level":"ok"`} {
		if r, err := ParseReport(bad); err == nil {
			t.Errorf("%s is read as %+v", bad, r)
		}
	}
}

func TestAMachineThatCannotEraseItsDiskIsNotToldToHaveTheRightKey(t *testing.T) {
	for message, says := range map[string]string{"STATE_DISK: it has the mode plain": "muster forget w1", "OWNER_SIGNATURE: no": "ownerKeys"} {
		err := outcome("w1", ownerorder.ActionReset, &v1alpha1.OrderReport{State: v1alpha1.OrderRefused, Message: message})
		if got := problem.Remedy(err); !strings.Contains(got, says) {
			t.Errorf("%s: %s", message, got)
		}
	}
}

func TestAMachinesRefusalKeepsItsReason(t *testing.T) {
	for message, want := range map[string]attestv1.Reason{
		"CLOCK_SKEW: the order was valid until yesterday": attestv1.Reason_REASON_CLOCK_SKEW,
		"this version can't":                              attestv1.Reason_REASON_INTERNAL, "NO_SUCH_REASON: x": attestv1.Reason_REASON_INTERNAL, "": attestv1.Reason_REASON_INTERNAL,
	} {
		if err := refusalOf(message); attest.ReasonOf(err) != want || err.Error() != message {
			t.Errorf("%q: %v", message, err)
		}
	}
}
