package sweeping

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/services/joinservice/certificates"
	"github.com/muster-k8s/muster/services/joinservice/servicetest"
	"github.com/muster-k8s/muster/trust/attest"
)

// If a released enrollment is deleted, its name becomes free, but not its disk.
func TestADeletedEnrollmentLeavesItsDiskToItsMachine(t *testing.T) {
	b := newSweepFixture(t)
	servicetest.Shared.Enroll(t, "w1", servicetest.Claim(1).Spec())
	servicetest.Shared.GiveDisk(t, servicetest.DiskOne, servicetest.Claim(1).Machine)
	n := servicetest.Shared.Node(t, "w1")
	metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.EnrolledByTicket, "true")
	if err := servicetest.Shared.Client.Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	released := b.clock.Now().Add(-25 * time.Hour)
	n.Status.ReleasedAt = &metav1.Time{Time: released}
	if err := servicetest.Shared.Client.Status().Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	for range 3 { // conditions are written meanwhile
		b.after(t, 0)
	}
	servicetest.Gone(t)
	membertest.Eventually(t, func() error { // once the replica has seen its own claim
		err := b.Check(t.Context(), servicetest.Claim(2))
		return membertest.Want(attest.ReasonOf(err) == attestv1.Reason_REASON_DISK_MISMATCH, "%v, want DISK_MISMATCH", err)
	})
	if err := b.Check(t.Context(), servicetest.Claim(1)); err != nil {
		t.Errorf("its own machine: %v", err)
	}
}

// A node that booted something else is counted here, by the services that saw its evidence: any network attacker may have
// caused what the node counts itself.
func TestNodesWhoseEvidenceIsRefusedAreCounted(t *testing.T) {
	s := &Sweeper{refused: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "refused"}, []string{"reason"}), cloned: prometheus.NewGauge(prometheus.GaugeOpts{Name: "cloned"})}
	node := func(accepted bool, reason string, banned bool) *v1alpha1.AttestedNode {
		return &v1alpha1.AttestedNode{
			Spec:   v1alpha1.AttestedNodeSpec{Banned: banned},
			Status: v1alpha1.AttestedNodeStatus{LastVerdict: &v1alpha1.Verdict{Accepted: accepted, Reason: reason}},
		}
	}
	count := func(want float64, nodes ...*v1alpha1.AttestedNode) {
		t.Helper()
		s.countRefused(append(nodes, node(true, "ACCEPTED", false), node(false, "BANNED", true), &v1alpha1.AttestedNode{}))
		if got := testutil.ToFloat64(s.refused.WithLabelValues("POLICY_REFUSED")); got != want {
			t.Errorf("%v nodes are refused, want %v", got, want)
		}
		if got := testutil.CollectAndCount(s.refused); got != 7 {
			t.Errorf("%d reasons, want those of appraisals, also while they are 0", got)
		}
	}
	count(2, node(false, "POLICY_REFUSED", false), node(false, "POLICY_REFUSED", false))
	count(0)

	copied := node(true, "ACCEPTED", false)
	copied.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionCloned, Status: metav1.ConditionTrue}}
	over := node(true, "ACCEPTED", false)
	over.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionCloned, Status: metav1.ConditionFalse}}
	count(0, copied, over)
	if got := testutil.ToFloat64(s.cloned); got != 1 {
		t.Errorf("%v nodes were copied, want 1", got)
	}
	count(0, over)
	if got := testutil.ToFloat64(s.cloned); got != 0 {
		t.Errorf("%v nodes were copied, want none", got)
	}
}

// A node whose requests were refused by admission may file again when few of them are left.
func TestANodeFilesAgainOnceItsRequestsAreDeleted(t *testing.T) {
	b := newSweepFixture(t)
	kubelet, _ := kubelet(t)
	var filed []*certificatesv1.CertificateSigningRequest
	for i := range 3 * certificates.MaxRequests {
		filed = append(filed, file(t, kubelet, fmt.Sprint("csr-", i)))
	}
	if err := b.List.PauseRequests(t.Context(), "w1"); err != nil {
		t.Fatal(err)
	}
	left := func(want int) {
		t.Helper()
		membertest.Eventually(t, func() error {
			e, _ := b.List.Entry("w1")
			return membertest.Want(e.Paused && len(b.Requests.FiledBy("w1")) == want, "the replica's view is old")
		})
	}
	left(len(filed))
	b.after(t, time.Minute)
	if !servicetest.Shared.Access(t).Entry("w1").Paused {
		t.Fatal("its requests are there still")
	}
	for _, o := range filed[2*certificates.MaxRequests:] {
		if err := servicetest.Shared.Client.Delete(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	left(2 * certificates.MaxRequests)
	b.after(t, time.Minute)
	if servicetest.Shared.Access(t).Entry("w1").Paused {
		t.Error("it files none for ever")
	}
}

func TestRequestsThatTicketsLeftAreDeleted(t *testing.T) {
	b := newSweepFixture(t)
	kubelet, _ := kubelet(t)
	ours := &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{Name: "muster-w1-client-0011223344556677"},
		Spec:       certificatesv1.CertificateSigningRequestSpec{Request: request(t), SignerName: certificatesv1.KubeAPIServerClientKubeletSignerName, Usages: clientUsages},
	}
	others := ours.DeepCopy()
	others.Name, others.Spec.SignerName = "muster-of-another-signer", "example.com/signer"
	ours.Labels = map[string]string{clusterview.TicketWindow: "2026-11-25T10.00"}
	if err := b.State.Cluster.Client.Create(t.Context(), ours); err != nil {
		t.Fatal(err)
	}
	second := ours.DeepCopy()
	second.Name, second.ResourceVersion, second.UID = "muster-w2-client-0011223344556677", "", ""
	if err := b.State.Cluster.Client.Create(t.Context(), second); err != nil {
		t.Fatal(err)
	}
	if err := servicetest.Shared.Client.Create(t.Context(), others); err != nil {
		t.Fatal(err)
	}
	last := file(t, kubelet, "csr-last") // when the replica sees this one, it has seen those before
	membertest.Eventually(t, func() error {
		return membertest.Want(len(b.Requests.FiledBy("w1")) == 1, "the request was not seen yet")
	})
	b.clock.Pass(certificates.UsedAfter - time.Second)
	b.Requests.Discard(t.Context())
	if got := servicetest.Shared.CSRs(t); len(got) != 4 {
		t.Errorf("deleted too early: left are %v", got)
	}
	b.clock.Pass(2 * time.Second)
	b.Requests.Discard(t.Context())
	if got := servicetest.Shared.CSRs(t); len(got) != 2 || !slices.Contains(got, others.Name) || !slices.Contains(got, last.Name) {
		t.Errorf("left are %v", got)
	}
}
