package certificates

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"
	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/internal/service/policy"
	"github.com/muster-k8s/muster/services/joinservice/access"
	"github.com/muster-k8s/muster/services/joinservice/nodecert"
	"github.com/muster-k8s/muster/services/joinservice/state"
	"github.com/muster-k8s/muster/trust/attest"
)

// A kubelet can file requests that are denied without limit. Each approval is recorded.
func TestDenialsOfOneNodeAreRationedAndApprovalsAreNot(t *testing.T) {
	var out bytes.Buffer
	log, registry := audit.NewStream(&out), prometheus.NewRegistry()
	s, list, k := parts(&counting{}, time.Now)
	s.Audit = log
	unattested, err := audit.NewUnattestedRefusals("joinservice", log, slog.New(slog.DiscardHandler), registry)
	if err != nil {
		t.Fatal(err)
	}
	limits, err := audit.NewRefusalLimits(unattested)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := k.NewApprover(list, nil, &policy.Store{}, time.Minute, registry); err == nil {
		t.Error("an approver without limits was made")
	}
	a := &Approver{state: s, list: list, requests: k, limits: limits, decisions: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "x"}, []string{"signer", "reason"}), events: map[string]*rate.Limiter{}}
	decide := func(n int, node string, refusal error) {
		t.Helper()
		for i := range n { // their requests are deleted by the time that the API server gets the decision
			o := &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("csr-", i)}}
			o.Spec.Username = "system:node:" + node
			if err := a.decide(t.Context(), o, &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: node}}, refusal); err != nil {
				t.Fatal(err)
			}
		}
	}
	refusal := attest.Refuse(attestv1.Reason_REASON_ADDRESS_REFUSED, "not its own")
	began := time.Now()
	decide(70, "w1", refusal)
	bucket := 50 + int(time.Since(began)/(10*time.Second)) + 1
	decide(60, "w1", nil)
	decide(1, "w2", refusal)
	if n := strings.Count(out.String(), "certificate denied") - 1; n < 50 || n > bucket {
		t.Errorf("%d denials of w1 are recorded, want 50 to %d", n, bucket)
	}
	if !strings.Contains(out.String(), `"node":"w2"`) {
		t.Error("w1's denials keep w2's out")
	}
	if n := strings.Count(out.String(), "certificate approved"); n != 60 {
		t.Errorf("%d of 60 approvals are recorded", n)
	}
}

// counting is an API server that accepts deletions and has nothing to read.
type counting struct {
	client.Client
	reads   int
	deleted []string
}

func (c *counting) Get(_ context.Context, key client.ObjectKey, _ client.Object, _ ...client.GetOption) error {
	c.reads++
	return apierrors.NewNotFound(schema.GroupResource{}, key.Name)
}

func (c *counting) Delete(_ context.Context, o client.Object, _ ...client.DeleteOption) error {
	c.deleted = append(c.deleted, o.GetName())
	return nil
}

func (c *counting) SubResource(string) client.SubResourceClient { return gone{} }

// gone answers that there is no such object.
type gone struct{ client.SubResourceClient }

func (gone) Update(_ context.Context, o client.Object, _ ...client.SubResourceUpdateOption) error {
	return apierrors.NewNotFound(schema.GroupResource{}, o.GetName())
}

// parts returns what an Approver needs, with informers that have seen nothing.
func parts(api client.Client, now func() time.Time) (*state.State, *access.List, *Requests) {
	c := &clusterview.Cluster{Client: api, Nodes: &clusterview.Nodes{}}
	s := &state.State{Cluster: c, Log: slog.New(slog.DiscardHandler), Now: now}
	return s, &access.List{}, &Requests{state: s, byNode: map[string]map[string]*Filed{}, tickets: map[string]ticketRequest{}, waiting: map[string]chan *certificatesv1.CertificateSigningRequest{}}
}

// A node's slot is short however much it has filed, and its newest requests stay.
func TestANodesTurnIsShortAndItsRequestsAreBounded(t *testing.T) {
	now := time.Now()
	requestOf := func(name string, age time.Duration, conditions ...certificatesv1.RequestConditionType) *certificatesv1.CertificateSigningRequest {
		o := &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name), CreationTimestamp: metav1.NewTime(now.Add(-age))}}
		o.Spec.SignerName, o.Spec.Username, o.Spec.Groups = signerOf[nodecert.Serving], "system:node:w1", []string{nodecert.Organization}
		for _, c := range conditions {
			o.Status.Conditions = append(o.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{Type: c})
			if c == certificatesv1.CertificateApproved {
				o.Status.Certificate = []byte("x")
			}
		}
		return o
	}
	for name, tt := range map[string]struct {
		open, approved, denied int
		after                  time.Duration
		stay                   int // of all, in the end
	}{
		"1500 at once":                      {open: 1500, stay: MaxRequests},
		"a few":                             {open: 3, stay: 3},
		"beside those of the last minutes":  {open: 5, approved: MaxRequests - 2, stay: MaxRequests},
		"approved without end":              {open: 5, approved: 3 * MaxRequests, stay: 3 * MaxRequests},
		"denied without end":                {open: 2, denied: 300, stay: 2 + MaxRequests},
		"approved that were fetched or not": {open: 2, approved: MaxRequests, after: keepApproved, stay: 2},
		"denied that were read or not":      {open: 2, denied: 3, after: keepDenied, stay: 2},
		"approved that may yet be fetched":  {open: 2, approved: 3, after: keepApproved - time.Second, stay: 5},
	} {
		t.Run(name, func(t *testing.T) {
			api, out := &counting{}, &bytes.Buffer{}
			unattested, err := audit.NewUnattestedRefusals("joinservice", audit.NewStream(out), slog.New(slog.DiscardHandler), prometheus.NewRegistry())
			if err != nil {
				t.Fatal(err)
			}
			limits, err := audit.NewRefusalLimits(unattested)
			if err != nil {
				t.Fatal(err)
			}
			st, list, k := parts(api, func() time.Time { return now })
			a := &Approver{state: st, list: list, requests: k, limits: limits, decisions: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "x"}, []string{"signer", "reason"})}
			total := 0
			file := func(n int, conditions ...certificatesv1.RequestConditionType) {
				for range n {
					total++
					k.set(requestOf(fmt.Sprintf("csr-%04d", total), time.Duration(total)*time.Second, conditions...))
				}
			}
			file(tt.open)
			file(tt.approved, certificatesv1.CertificateApproved)
			file(tt.denied, certificatesv1.CertificateDenied)
			now = now.Add(tt.after)
			slots := 0
			for again := atOnce; again == atOnce; slots++ {
				reads, deletions := api.reads, len(api.deleted)
				if again, err = a.slot(t.Context(), "w1"); err != nil {
					t.Fatal(err)
				}
				if r, d := api.reads-reads, len(api.deleted)-deletions; r > MaxRequests || d > maxWrites {
					t.Fatalf("a slot took %d reads and %d deletions", r, d)
				}
			}
			if left := total - len(api.deleted); left != tt.stay {
				t.Errorf("%d of %d are left after %d slots, want %d", left, total, slots, tt.stay)
			}
			if recorded := strings.Contains(out.String(), `"certificate request deleted"`); recorded != (tt.open > MaxRequests-tt.approved && tt.after == 0) {
				t.Errorf("that requests were deleted undecided is on record: %t", recorded)
			}
			if tt.approved < MaxRequests && slices.Contains(api.deleted, "csr-0001") {
				t.Error("the newest request was deleted")
			}
		})
	}
}

// A request that no replica has seen is older than the enrollment of the next machine of the name.
func TestARequestOfBeforeTheEnrollmentIsDenied(t *testing.T) {
	now := time.Now()
	o := &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{CreationTimestamp: metav1.NewTime(now.Add(-2 * time.Hour))}}
	o.Spec.Username = nodecert.UserPrefix + "w1"
	n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "w1", CreationTimestamp: metav1.NewTime(now)}}
	if err := (&Approver{}).check(o, n); attest.ReasonOf(err) != attestv1.Reason_REASON_CERTIFICATE_RETIRED {
		t.Errorf("%v, want CERTIFICATE_RETIRED", err)
	}
}

// J4: a kubelet gets no certificate while its enrollment is being deleted.
func TestAnEnrollmentThatIsBeingDeletedRenewsNothing(t *testing.T) {
	o := &certificatesv1.CertificateSigningRequest{Spec: certificatesv1.CertificateSigningRequestSpec{Username: nodecert.UserPrefix + "w1"}}
	n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "w1", DeletionTimestamp: new(metav1.Now())}}
	if err := (&Approver{}).check(o, n); attest.ReasonOf(err) != attestv1.Reason_REASON_BANNED {
		t.Errorf("%v, want BANNED", err)
	}
}
