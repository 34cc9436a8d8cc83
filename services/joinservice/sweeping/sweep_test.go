package sweeping

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/services/joinservice/enroll"
	"github.com/muster-k8s/muster/services/joinservice/nodecert"
	"github.com/muster-k8s/muster/services/joinservice/servicetest"
	"github.com/muster-k8s/muster/services/joinservice/state"
	"github.com/muster-k8s/muster/trust/attest"
)

// sweepFixture is a replica whose Sweeper runs when its test calls it.
type sweepFixture struct {
	*replica
	*Sweeper
	clock *servicetest.Clock
	audit string
}

func newSweepFixture(t *testing.T) *sweepFixture {
	t.Helper()
	servicetest.Shared.Reset(t)
	if err := servicetest.Shared.Client.DeleteAllOf(t.Context(), &corev1.Event{}, client.InNamespace(metav1.NamespaceDefault)); err != nil {
		t.Fatal(err)
	}
	b := &sweepFixture{clock: servicetest.NewClock(), audit: filepath.Join(t.TempDir(), "audit.jsonl")}
	log, err := audit.Open(b.audit)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = log.Close() })
	b.replica = newReplica(t, func(k *servicetest.Rooms) { k.State.Now, k.State.Audit = b.clock.Now, log })
	enforce(t, b.Enforcer)
	b.Sweeper = b.sweeper(t)
	return b
}

// sweeper returns a Sweeper with the rules of these tests.
func (r *replica) sweeper(t *testing.T) *Sweeper {
	t.Helper()
	s, err := NewSweeper(r.State, r.List, r.Requests, r.Enrollments, Config{VanishedAfter: time.Hour, ReleaseAfter: 25 * time.Hour, VerdictMaxAge: 15 * time.Minute, Metrics: prometheus.NewRegistry()})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// after advances the clock and sweeps, once the replica's view of w1 is the API server's.
func (b *sweepFixture) after(t *testing.T, d time.Duration) {
	t.Helper()
	b.clock.Pass(d)
	b.current(t)
	b.pass(t.Context())
	b.current(t)
}

func (b *sweepFixture) current(t *testing.T) {
	t.Helper()
	membertest.Eventually(t, func() error {
		live, view := servicetest.Shared.Node(t, "w1"), b.State.Cluster.Nodes.ByName("w1")
		same := live == nil && view == nil || live != nil && view != nil && live.ResourceVersion == view.ResourceVersion
		e, _ := b.List.Entry("w1")
		return membertest.Want(same && e.Equal(servicetest.Shared.Access(t).Entry("w1")), "the replica's view is old")
	})
}

func (b *sweepFixture) vanished(t *testing.T, how string) {
	t.Helper()
	c := meta.FindStatusCondition(servicetest.Shared.Node(t, "w1").Status.Conditions, v1alpha1.ConditionVanished)
	switch {
	case how == "" && c != nil && c.Status != metav1.ConditionFalse:
		t.Errorf("reported as vanished: %+v", c)
	case how != "" && (c == nil || c.Status != metav1.ConditionTrue || c.Reason != how || c.Message == ""):
		t.Errorf("condition %+v, want %s", c, how)
	}
	for _, each := range []string{vanishedNeverCame, vanishedNodeGone, vanishedSilent} {
		want := 0.0
		if each == how {
			want = 1
		}
		if got := testutil.ToFloat64(b.Sweeper.vanished.WithLabelValues(each)); got != want {
			t.Errorf("the metric says %v have vanished as %s, want %v", got, each, want)
		}
	}
	if how != "" {
		b.event(t, how)
	}
}

func (b *sweepFixture) event(t *testing.T, reason string) {
	t.Helper()
	l := &corev1.EventList{}
	if err := servicetest.Shared.Client.List(t.Context(), l, client.InNamespace(metav1.NamespaceDefault)); err != nil {
		t.Fatal(err)
	}
	for _, e := range l.Items {
		if e.InvolvedObject.Kind == "AttestedNode" && e.InvolvedObject.Name == "w1" && e.Reason == reason {
			return
		}
	}
	t.Errorf("no event %s", reason)
}

func (b *sweepFixture) recorded(t *testing.T, event string) bool {
	t.Helper()
	text, err := os.ReadFile(b.audit)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		var r audit.Record
		if json.Unmarshal([]byte(line), &r) == nil && r.Event == event && r.Node == "w1" && r.Machine != "" {
			return true
		}
	}
	return false
}

func (b *sweepFixture) attests(t *testing.T) {
	t.Helper()
	b.current(t)
	v := v1alpha1.AttestedNodeStatus{LastVerdict: &v1alpha1.Verdict{Accepted: true, Reason: "ACCEPTED", Time: metav1.NewTime(b.clock.Now())}}
	// A verdict of the future is written by hand: the clock is the test's.
	n := servicetest.Shared.Node(t, "w1")
	n.Status.LastVerdict = v.LastVerdict
	if err := servicetest.Shared.Client.Status().Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
}

func (b *sweepFixture) object(t *testing.T, there bool) {
	t.Helper()
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}
	var err error
	if there {
		err = servicetest.Shared.Client.Create(t.Context(), n)
	} else {
		err = servicetest.Shared.Client.Delete(t.Context(), n)
	}
	if err != nil {
		t.Fatal(err)
	}
	membertest.Eventually(t, func() error {
		return membertest.Want(b.State.HasNode("w1") == there, "the replica does not see the Node's change")
	})
}

func TestAWorkerWhoseNodeIsGoneIsReportedThenDeleted(t *testing.T) {
	b := newSweepFixture(t)
	servicetest.Enroll(t, b.Rooms, servicetest.Claim(1), "a")
	servicetest.Shared.GiveDisk(t, servicetest.DiskOne, servicetest.Claim(1).Machine)
	b.object(t, true)
	b.after(t, 5*time.Minute)
	b.attests(t)
	b.after(t, 30*time.Minute)
	b.vanished(t, "")
	b.object(t, false)
	b.after(t, 0)
	b.after(t, 59*time.Minute)
	b.vanished(t, "")
	b.after(t, 2*time.Minute)
	b.vanished(t, vanishedNodeGone)
	other := servicetest.Claim(2)
	b.after(t, 24*time.Hour)
	if n := servicetest.Shared.Node(t, "w1"); n == nil || n.Status.Ticket == nil || b.recorded(t, "deletion decided") {
		t.Fatalf("deleted too early: %+v", n)
	}
	if err := b.Check(t.Context(), other); err == nil {
		t.Error("another machine could have the name while certificates of the one before may live")
	}
	b.after(t, 2*time.Hour)
	servicetest.Gone(t)
	if !b.recorded(t, "deletion decided") {
		t.Error("no record")
	}
	b.event(t, "Deleted")
	if err := b.Check(t.Context(), other); attest.ReasonOf(err) != attestv1.Reason_REASON_DISK_MISMATCH { // J2
		t.Errorf("another machine's disk: %v", err)
	}
	other.Disk = servicetest.DiskTwo
	if err := b.Check(t.Context(), other); err != nil {
		t.Errorf("another machine cannot have the name: %v", err)
	}
}

func TestAVanishedNodeThatComesBackIsNotReleased(t *testing.T) {
	for name, back := range map[string]func(t *testing.T, b *sweepFixture){
		"as a Node":      func(t *testing.T, b *sweepFixture) { b.object(t, true); b.attests(t); b.after(t, 0); b.vanished(t, "") },
		"with a verdict": func(t *testing.T, b *sweepFixture) { b.attests(t) },
		"with another ticket": func(t *testing.T, b *sweepFixture) {
			b.status(t, func(s *v1alpha1.AttestedNodeStatus) { s.Ticket.IssuedAt = metav1.NewTime(b.clock.Now()) })
		},
		"banned, which stays a ban": func(t *testing.T, _ *sweepFixture) { servicetest.Ban(t, true) },
	} {
		t.Run(name, func(t *testing.T) {
			b := newSweepFixture(t)
			servicetest.Enroll(t, b.Rooms, servicetest.Claim(1), "a")
			b.after(t, 61*time.Minute)
			b.vanished(t, vanishedNeverCame)
			b.clock.Pass(24 * time.Hour)
			back(t, b)
			b.after(t, 2*time.Hour)
			if n := servicetest.Shared.Node(t, "w1"); n == nil || n.Status.ReleasedAt != nil || n.Status.Ticket == nil {
				t.Errorf("enrollment %+v", n)
			}
		})
	}
}

func (b *sweepFixture) status(t *testing.T, change func(*v1alpha1.AttestedNodeStatus)) {
	t.Helper()
	n := servicetest.Shared.Node(t, "w1")
	change(&n.Status)
	if err := servicetest.Shared.Client.Status().Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
}

// Enrollments of the owner, and control planes, are reported and never removed.
func TestWhatTheOwnerEnrolledIsReportedOnly(t *testing.T) {
	for name, role := range map[string]v1alpha1.Role{"a worker": v1alpha1.RoleWorker, "a control plane": v1alpha1.RoleControlPlane} {
		t.Run(name, func(t *testing.T) {
			b := newSweepFixture(t)
			c := servicetest.Claim(1)
			c.Role = role
			servicetest.Shared.Enroll(t, "w1", v1alpha1.AttestedNodeSpec{MachineID: c.Machine.String(), Role: role})
			if role == v1alpha1.RoleControlPlane { // not even one that is marked as created by a ticket
				n := servicetest.Shared.Node(t, "w1")
				n.Annotations = map[string]string{v1alpha1.EnrolledByTicket: "true"}
				n.Status.LastVerdict = nil
				if err := servicetest.Shared.Client.Update(t.Context(), n); err != nil {
					t.Fatal(err)
				}
				b.object(t, true) // otherwise it counts as begun
			}
			b.after(t, 100*time.Hour) // it is enrolled beforehand, and may appear at any time
			b.vanished(t, "")
			if role == v1alpha1.RoleControlPlane { // J11: the watch of its Node's Lease is over
				hash := c.Boot.Secret.Hash()
				b.status(t, func(s *v1alpha1.AttestedNodeStatus) {
					s.Boot = &v1alpha1.Boot{SecretHash: hex.EncodeToString(hash[:]), Since: metav1.NowMicro(), EarlierEnded: true}
				})
				servicetest.Seen(t, b.Rooms, func(n *v1alpha1.AttestedNode) bool { return n.Status.Boot != nil })
			}
			servicetest.Enroll(t, b.Rooms, c, "a")
			if role == v1alpha1.RoleControlPlane {
				b.object(t, false)
			}
			b.status(t, func(s *v1alpha1.AttestedNodeStatus) { s.Ticket.IssuedAt = metav1.NewTime(b.clock.Now()) })
			b.after(t, 61*time.Minute)
			b.vanished(t, vanishedNeverCame)
			b.after(t, 1000*time.Hour)
			if n := servicetest.Shared.Node(t, "w1"); n == nil || n.Status.ReleasedAt != nil || n.Status.Ticket == nil {
				t.Errorf("enrollment %+v", n)
			}
		})
	}
}

func TestANodeWhoseMachineAttestsNoMoreIsReportedUntilItDoes(t *testing.T) {
	b := newSweepFixture(t)
	servicetest.Enroll(t, b.Rooms, servicetest.Claim(1), "a")
	b.object(t, true)
	b.attests(t)
	b.after(t, 61*time.Minute)
	b.vanished(t, vanishedSilent)
	b.after(t, 1000*time.Hour) // its Node exists: no rule removes it
	b.vanished(t, vanishedSilent)
	if n := servicetest.Shared.Node(t, "w1"); n.Status.ReleasedAt != nil {
		t.Errorf("released: %+v", n.Status)
	}
	b.attests(t)
	b.after(t, 0)
	b.vanished(t, "")
	b.event(t, "Present")
}

// A replica that stopped between its two writes leaves an enrollment without a ticket. Certificates may have been signed
// for it.
func TestAnEnrollmentWithoutATicketIsDeleted(t *testing.T) {
	b := newSweepFixture(t)
	servicetest.Half(t, b.Rooms, servicetest.Claim(1))
	b.after(t, state.DefaultCertificateLife)
	if servicetest.Shared.Node(t, "w1") == nil {
		t.Fatal("deleted while a certificate may be valid")
	}
	b.after(t, enroll.HoldMargin+time.Minute)
	servicetest.Gone(t)
}

// A backup has no status. The restored enrollment of a node is still that node's.
func TestANodesEnrollmentWithoutStatusStays(t *testing.T) {
	b := newSweepFixture(t)
	servicetest.Enroll(t, b.Rooms, servicetest.Claim(1), "a")
	b.object(t, true)
	b.status(t, func(s *v1alpha1.AttestedNodeStatus) { *s = v1alpha1.AttestedNodeStatus{} })
	b.after(t, 24*time.Hour)
	b.after(t, time.Minute)
	if servicetest.Shared.Node(t, "w1") == nil || servicetest.Suspended(t, "w1") {
		t.Error("it is gone")
	}
	if _, _, err := b.Reattest(t.Context(), servicetest.Claim(1).Machine, servicetest.Claim(1).Boot, servicetest.Ticket("")); err != nil {
		t.Errorf("its machine cannot attest: %v", err)
	}
}

// If the enrollment of a name was removed by hand, with the finalizer, the name stays shut out until its certificates have
// expired (J4).
func TestASuspensionWithoutAnEnrollmentBecomesARevocation(t *testing.T) {
	b := newSweepFixture(t)
	servicetest.Suspend(t, "w1", true)
	membertest.Eventually(t, func() error {
		e := servicetest.Shared.Access(t).Entry("w1")
		return membertest.Want(!e.Suspended && e.Revoked != nil && len(e.Revoked.Allowed) == 0, "the list says %+v", e)
	})
	b.after(t, state.DefaultCertificateLife+time.Hour)
	if e := servicetest.Shared.Access(t).Entry("w1"); !e.Equal(nodeaccess.Entry{}) {
		t.Errorf("once they have, the list says %+v", e)
	}
}

func TestASweepersTimesFitTogether(t *testing.T) {
	k := newReplica(t)
	for name, cfg := range map[string]Config{
		"no age of verdicts":                {VanishedAfter: time.Hour, Metrics: prometheus.NewRegistry()},
		"no metrics":                        {VanishedAfter: time.Hour, VerdictMaxAge: time.Hour},
		"vanished while its ticket is made": {VanishedAfter: time.Minute, VerdictMaxAge: time.Hour, Metrics: prometheus.NewRegistry()},
		"released while certificates live":  {VanishedAfter: time.Hour, ReleaseAfter: 24 * time.Hour, VerdictMaxAge: time.Hour, Metrics: prometheus.NewRegistry()},
	} {
		if _, err := NewSweeper(k.State, k.List, k.Requests, k.Enrollments, cfg); err == nil {
			t.Errorf("%s: was taken", name)
		}
	}
	if _, err := NewSweeper(k.State, k.List, k.Requests, k.Enrollments, Config{VanishedAfter: time.Hour, VerdictMaxAge: time.Hour, Metrics: prometheus.NewRegistry()}); err != nil {
		t.Error(err)
	}
	if _, err := state.New(k.State.Cluster, k.State.Audit, k.State.Log, time.Minute); err == nil {
		t.Error("certificates of a minute were taken")
	}
}

// If two replicas sweep at the same time, one of them acts.
func TestOneOfTwoSweepersActs(t *testing.T) {
	b := newSweepFixture(t)
	other := *b
	other.replica = newReplica(t, func(k *servicetest.Rooms) { k.State.Now, k.State.Audit = b.clock.Now, b.State.Audit })
	other.Sweeper = other.sweeper(t)
	servicetest.Enroll(t, b.Rooms, servicetest.Claim(1), "a")
	for range 60 {
		b.clock.Pass(time.Hour)
		b.current(t)
		other.current(t)
		var both sync.WaitGroup
		both.Go(func() { b.pass(context.WithoutCancel(t.Context())) })
		both.Go(func() { other.pass(context.WithoutCancel(t.Context())) })
		both.Wait()
	}
	servicetest.Gone(t)
	l := &corev1.EventList{}
	if err := servicetest.Shared.Client.List(t.Context(), l, client.InNamespace(metav1.NamespaceDefault)); err != nil {
		t.Fatal(err)
	}
	events := map[string]int{}
	for _, e := range l.Items {
		if e.InvolvedObject.Name == "w1" {
			events[e.Reason]++
		}
	}
	if events[vanishedNeverCame] != 1 || events["Deleted"] != 1 {
		t.Errorf("events %v", events)
	}
}

func request(t *testing.T) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: nodecert.UserPrefix + "w1", Organization: []string{nodecert.Organization}}}, key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
}

// A machine that attests although its Node was deleted may have renewed a certificate: nothing ends before that expires.
func TestNoEnrollmentEndsWhileACertificateCanLive(t *testing.T) {
	b := newSweepFixture(t)
	b.cfg.ReleaseAfter = time.Minute // as if the owner had set the certificate life to less, and then to more
	servicetest.Enroll(t, b.Rooms, servicetest.Claim(1), "a")
	b.object(t, true)
	b.after(t, 5*time.Minute)
	b.attests(t)
	b.object(t, false)
	b.after(t, 0)
	b.after(t, 61*time.Minute)
	b.vanished(t, vanishedNodeGone)
	last := 61 * time.Minute // since the last verdict
	for _, until := range []time.Duration{state.DefaultCertificateLife, state.DefaultCertificateLife + 15*time.Minute, state.DefaultCertificateLife + 15*time.Minute + enroll.HoldMargin - time.Minute} {
		b.after(t, until-last)
		last = until
		if servicetest.Shared.Node(t, "w1") == nil {
			t.Fatalf("deleted %s after the last verdict", until)
		}
	}
	b.after(t, 3*time.Minute)
	servicetest.Gone(t)
}

// An entry that shuts out expired certificates is removed.
func TestARevocationThatHasLapsedGoes(t *testing.T) {
	b := newSweepFixture(t)
	servicetest.Shared.SetAccess(t, "w1", servicetest.Revoked)
	b.after(t, 24*time.Hour)
	if servicetest.Shared.Access(t).Entry("w1").Revoked == nil {
		t.Fatal("it went while certificates may be valid")
	}
	b.after(t, 30*time.Minute)
	if r := servicetest.Shared.Access(t).Entry("w1").Revoked; r != nil {
		t.Errorf("%+v is left", r)
	}
}
