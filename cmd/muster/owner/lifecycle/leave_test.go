package lifecycle

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/trust/attest"
)

func plan(ctx context.Context, t *testing.T, o *ownertest.Owned, name string, to *clusterapi.Replacement) (d *Removal) {
	t.Helper()
	var err error
	if to == nil {
		d, err = PlanForget(ctx, o.Dir, name, true, false)
	} else {
		d, err = PlanReplace(ctx, o.Dir, name, *to)
	}
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func leave(ctx context.Context, t *testing.T, o *ownertest.Owned, name string, to *clusterapi.Replacement) {
	t.Helper()
	if _, err := plan(ctx, t, o, name, to).Do(ctx, func(string) {}); err != nil {
		t.Fatal(err)
	}
}

// Certificates expire by the API server's clock, so it determines how long they are retired; the owner's clock may be
// hours wrong, and then a retirement by it would end before they do.
func TestARevocationLastsByTheAPIServersClock(t *testing.T) {
	const year = 365 * 24 * time.Hour
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	kube := ownertest.Defined(t)
	const life, foreign = nodeaccess.CertificateLife, nodeaccess.ForeignLife
	for name, tt := range map[string]struct {
		ahead      time.Duration // the owner's clock
		unattested bool
		before     time.Duration // until when there is a revocation already, from now; 0: there is none
		want       time.Duration // from now, within the margin and the skew that both may have
	}{
		"the same time":                     {want: life},
		"a little behind":                   {ahead: -4 * time.Minute, want: life},
		"3 hours behind":                    {ahead: -3 * time.Hour, want: life},
		"30 days behind":                    {ahead: -30 * 24 * time.Hour, want: life},
		"3 hours ahead":                     {ahead: 3 * time.Hour, want: life},
		"a year ahead":                      {ahead: year, want: life},
		"behind, and one is there":          {ahead: -3 * time.Hour, before: 20 * time.Hour, want: life},
		"behind, and a longer one is there": {ahead: -3 * time.Hour, before: 40 * time.Hour, want: 40 * time.Hour},
		"ahead, and a longer one is there":  {ahead: 72 * time.Hour, before: 40 * time.Hour, want: 40 * time.Hour},
		"a node of before, behind":          {ahead: -2 * year, unattested: true, want: foreign},
		"a node of before, ahead":           {ahead: 2 * year, unattested: true, want: foreign},
	} {
		t.Run(name, func(t *testing.T) {
			now := time.Now()
			had := nodeaccess.Entry{Unattested: tt.unattested}
			if tt.before > 0 {
				had.Revoked = &nodeaccess.Revocation{Until: now.Add(tt.before).UTC().Truncate(time.Second), Allowed: []string{"X509SHA256=01"}}
			}
			ownertest.Access(t, map[string]nodeaccess.Entry{"w1": had, "other": {Suspended: true}})
			p, err := kube.Presence(ctx, "w1")
			if err != nil {
				t.Fatal(err)
			}
			said, err := kube.Forget(ctx, p, now.Add(tt.ahead), func(string) {})
			if err != nil {
				t.Fatal(err)
			}
			l := ownertest.Listed(t)
			e := l.Entry("w1")
			if e.Revoked == nil || e.Unattested || !e.Revoked.Until.Equal(said) || len(e.Revoked.Allowed) > 0 || !l.Entry("other").Suspended {
				t.Fatalf("the list says %+v, %+v; %s was said", e, e.Revoked, said)
			}
			if off := e.Revoked.Until.Sub(now.Add(tt.want)); off < -time.Minute || off > 25*time.Minute {
				t.Errorf("revoked until %s, which is %s off", e.Revoked.Until, off)
			}
		})
	}
}

// A pod with a finalizer stays, and the machine's certificate can read what it uses: the command fails, and finishes
// when it is repeated.
func TestAPodThatIsHeldIsNotForgotten(t *testing.T) {
	ownertest.Fresh(t)
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	kube := ownertest.Defined(t)
	ownertest.Access(t, nil)
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "held", Finalizers: []string{"example.com/keep"}},
		Spec:       corev1.PodSpec{NodeName: "held", Containers: []corev1.Container{{Name: "x", Image: "x"}}},
	}
	if err := ownertest.Shared.Client.Create(ctx, pod); err != nil {
		t.Fatal(err)
	}
	forget := func() error {
		p, err := kube.Presence(ctx, "held")
		if err != nil {
			t.Fatal(err)
		}
		_, err = kube.Forget(ctx, p, time.Now(), func(string) {})
		return err
	}
	if err := forget(); err == nil || !strings.Contains(err.Error(), "default/held with finalizers") {
		t.Errorf("error %v", err)
	}
	if err := ownertest.Shared.Client.Patch(ctx, pod, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))); err != nil {
		t.Fatal(err)
	}
	if err := forget(); err != nil {
		t.Error(err)
	}
}

// A mistyped UUID would shut out a machine that runs, and the right one does not let it in again at once: with its old disk it does not join anew, and its
// certificates stay revoked. Status says so.
func TestARunningNodeGetsNoDiskThatTheClusterHasNeverSeen(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	l := ownertest.NewLifecycle(t)
	on := l.Node(t, "w7", 7, v1alpha1.RoleWorker)
	l.Node(t, "w8", 8, v1alpha1.RoleWorker)
	other := clusterapi.Replacement{DiskID: "5f0c95b6-2a3d-4c7e-9f10-000000000099"}
	_, err := PlanReplace(ctx, l.Dir, "w7", other)
	if attest.ReasonOf(err) != attestv1.Reason_REASON_DISK_MISMATCH || !strings.Contains(err.Error(), "runs with the disk "+on.Disk) || !strings.Contains(problem.Remedy(err), "When the Node is NotReady") {
		t.Fatalf("%v: %s", err, problem.Remedy(err))
	}
	if n := ownertest.EnrollmentOf(t, "w7"); n.Spec.Banned || n.Spec.DiskID != on.Disk {
		t.Errorf("it was changed: %+v", n.Spec)
	}
	if _, err := PlanReplace(ctx, l.Dir, "w8", clusterapi.Replacement{MachineID: attest.MachineID{9}.String(), DiskID: other.DiskID}); err != nil {
		t.Errorf("another machine, with its disk: %v", err)
	}
	ready := func(is corev1.ConditionStatus) {
		t.Helper()
		n := &corev1.Node{}
		ownertest.Change(ctx, t, true, types.NamespacedName{Name: "w7"}, n, func() {
			n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: is}}
		})
	}
	ready(corev1.ConditionFalse)
	leave(ctx, t, l.Owned, "w7", &other)
	back := clusterapi.Replacement{DiskID: on.Disk}
	d := plan(ctx, t, l.Owned, "w7", &back)
	if !slices.ContainsFunc(d.Warnings, func(s string) bool { return strings.Contains(s, "it does not join as new") }) {
		t.Errorf("%q", d.Warnings)
	}
	if _, err := d.Do(ctx, func(string) {}); err != nil {
		t.Fatal(err)
	}
	attention := func() (out []clusterapi.Attention) {
		t.Helper()
		s, err := d.kube.Status(ctx, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range s.Attention {
			if a.About == "node w7" && strings.Contains(a.Problem, "revoked") {
				out = append(out, a)
			}
		}
		return out
	}
	if got := attention(); len(got) != 0 {
		t.Errorf("before its machine attests, another one may join: %+v", got)
	}
	n := &v1alpha1.AttestedNode{}
	ownertest.Change(ctx, t, true, types.NamespacedName{Name: "w7"}, n, func() {
		n.Status.LastVerdict = &v1alpha1.Verdict{Accepted: true, Reason: "ACCEPTED", Time: metav1.Now()}
	})
	if got := attention(); len(got) != 1 || !strings.Contains(got[0].Problem, "all its kubelet's writes are refused") || !strings.Contains(got[0].Remedy, "muster reset w7") {
		t.Errorf("%+v", got)
	}
	ownertest.Access(t, map[string]nodeaccess.Entry{"w7": nodeaccess.Entry{}.Revoke(time.Now()).Allow("X509SHA256=01")})
	if got := attention(); len(got) != 0 {
		t.Errorf("its machine has got a certificate since: %+v", got)
	}
}

func TestThePlanOfADrainSaysSo(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	l := ownertest.NewLifecycle(t)
	l.Node(t, "drained", 10, v1alpha1.RoleWorker)
	ownertest.Pod(t, "drained", "on-drained", nil)
	deleted := func(s string) bool { return strings.Contains(s, "1 pod that a drain would move") }
	d := plan(ctx, t, l.Owned, "drained", nil)
	if !slices.ContainsFunc(d.Warnings, deleted) {
		t.Errorf("without a drain: %q", d.Warnings)
	}
	n := len(d.Plan)
	if d.Drains(); len(d.Plan) != n+1 || !strings.HasPrefix(d.Plan[0], "drain it: no new pods, and 1 pod evicted") || slices.ContainsFunc(d.Warnings, deleted) {
		t.Errorf("%q, %q", d.Plan, d.Warnings)
	}
	for what, err := range map[string]error{
		"ban": MayBan(ctx, l.Dir, "nosuch"),
		"drain": func() error {
			_, err := Drain(ctx, l.Dir, "nosuch", clusterapi.DrainOptions{}, func(string) {})
			return err
		}(),
	} {
		if attest.ReasonOf(err) != attestv1.Reason_REASON_NOT_ENROLLED || strings.Contains(problem.Remedy(err), "uncordon") || !strings.Contains(problem.Remedy(err), "muster status shows") {
			t.Errorf("%s of a node that is not there: %v: %s", what, err, problem.Remedy(err))
		}
	}
}
