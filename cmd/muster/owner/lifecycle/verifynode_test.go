package lifecycle

import (
	"context"
	"encoding/base64"
	"encoding/hex"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/appraisal"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	machineorders "github.com/muster-k8s/muster/services/bootstrapper/orders"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
)

// runner is a cluster with one node, whose machine takes orders as the bootstrapper does. Its kubelet serves the machine's logs.
type runner struct {
	*ownertest.Lifecycle

	ca     *attesttest.CA
	m      *attesttest.Machine
	policy *attest.Policy
	on     ownerorder.Addressee
	image  *metadata.Image
	root   string
	// relay replaces what the kubelet serves; nil: nothing does.
	relay func(w http.ResponseWriter) bool
}

const runningNode = "w1"

func newRunner(t *testing.T) *runner {
	t.Helper()
	r := &runner{Lifecycle: ownertest.NewLifecycle(t), ca: attesttest.NewCA(t), root: t.TempDir()}
	r.image = &metadata.Image{OwnerKeys: attest.OwnerKeys{r.Public}}
	r.m = attesttest.NewMachine(t, r.ca, attesttest.Options{SecureBoot: true})
	r.policy = attesttest.ParsedPolicy(t, r.ca, []*attesttest.Machine{r.m})
	r.m.LockTo(r.ID)
	r.on = ownerorder.Addressee{Cluster: r.ID, Node: runningNode, Machine: r.m.ID(), Disk: "5f0c95b6-2a3d-4c7e-9f10-000000000071"}
	n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: runningNode}, Spec: v1alpha1.AttestedNodeSpec{MachineID: r.on.Machine.String(), Role: v1alpha1.RoleWorker, DiskID: r.on.Disk, DiskMode: v1alpha1.DiskModeLUKS}}
	if err := ownertest.Shared.Client.Create(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ownertest.Unenroll(context.WithoutCancel(t.Context()), n.Name) })
	r.record(t, r.m)
	logs := http.FileServer(http.Dir(filepath.Join(r.root, "var", "log")))
	kubelet := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if r.relay == nil || !r.relay(w) {
			logs.ServeHTTP(w, req)
		}
	}))
	t.Cleanup(kubelet.Close)
	to, err := url.Parse(kubelet.URL)
	if err != nil {
		t.Fatal(err)
	}
	r.Through(t, func(req *http.Request) {
		if path, found := strings.CutPrefix(req.URL.Path, "/api/v1/nodes/"+runningNode+"/proxy/logs"); found {
			req.URL.Scheme, req.URL.Host, req.URL.Path = to.Scheme, to.Host, path
		}
	})
	return r
}

// record has joinservice record the keys of a machine for the node.
func (r *runner) record(t *testing.T, m *attesttest.Machine) {
	t.Helper()
	c := claimsFor(t, r.ca, m)
	n := ownertest.EnrollmentOf(t, runningNode)
	n.Status.EKPublic, n.Status.AKName = base64.StdEncoding.EncodeToString(c.EKPublic()), hex.EncodeToString(c.AKName())
	n.Status.LastVerdict, n.Status.PolicySerial = &v1alpha1.Verdict{Accepted: true, Reason: "ACCEPTED", Time: metav1.Now()}, 7
	if err := ownertest.Shared.Client.Status().Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
}

func claimsFor(t *testing.T, ca *attesttest.CA, m *attesttest.Machine) attest.Claims {
	t.Helper()
	c, err := attesttest.Claims(t.Context(), m.Attester(attest.PurposeMachine), attesttest.Verifier(t, ca), attest.PurposeMachine, attest.Binding{9})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// obeys has the machine take orders until the returned function is called. change changes what it reports.
func (r *runner) obeys(t *testing.T, change func(*v1alpha1.OrderReport)) (stop func()) {
	t.Helper()
	e, err := machineorders.New(machineorders.Config{
		Root: r.root, Image: r.image, Poll: 20 * time.Millisecond, ActionTime: time.Minute, Now: time.Now, Log: slog.New(slog.DiscardHandler),
		Journal: func() (journal.Record, error) {
			return journal.Record{Step: journal.StepDone, Kind: journal.KindJoin, NodeName: runningNode, ClusterID: r.ID[:], MachineID: r.on.Machine.String(), DiskID: r.on.Disk}, nil
		},
		Actions: map[ownerorder.Action]machineorders.Action{ownerorder.ActionVerify: machineorders.Verify(r.root, r.m.Attester(attest.PurposeOrder))},
		Boot:    func() (string, error) { return "boot", nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{}, 2)
	go func() {
		defer func() { ended <- struct{}{} }()
		if err := e.Run(ctx); err != nil {
			t.Error(err)
		}
	}()
	go func() {
		defer func() { ended <- struct{}{} }()
		for retry.Wait(ctx, 50*time.Millisecond) == nil {
			r.attest(ctx, t, change)
		}
	}()
	return func() { cancel(); <-ended; <-ended }
}

var reportStates = map[joinv1.OrderState]v1alpha1.OrderState{
	joinv1.OrderState_ORDER_STATE_RUNNING: v1alpha1.OrderRunning, joinv1.OrderState_ORDER_STATE_DONE: v1alpha1.OrderDone,
	joinv1.OrderState_ORDER_STATE_FAILED: v1alpha1.OrderFailed, joinv1.OrderState_ORDER_STATE_REFUSED: v1alpha1.OrderRefused,
}

// attest passes an order to the machine and its report to the cluster, as joinservice does.
func (r *runner) attest(ctx context.Context, t *testing.T, change func(*v1alpha1.OrderReport)) {
	n := &v1alpha1.AttestedNode{}
	if err := ownertest.Shared.Client.Get(ctx, types.NamespacedName{Name: runningNode}, n); err != nil {
		return
	}
	if s, err := ownerorder.ParseMachineNote(n.Annotations[v1alpha1.OwnerOrder]); err == nil {
		if err := machineorders.Deliver(r.root, &joinv1.OwnerOrder{Text: s.Text, Signature: s.Signature}); err != nil {
			t.Error(err)
		}
	}
	rep, err := machineorders.Report(r.root)
	if err != nil {
		t.Error(err)
	}
	if rep == nil || n.Status.Order != nil && n.Status.Order.Digest == hex.EncodeToString(rep.GetDigest()) && n.Status.Order.State == reportStates[rep.GetState()] {
		return
	}
	n.Status.Order = &v1alpha1.OrderReport{Digest: hex.EncodeToString(rep.GetDigest()), Action: rep.GetAction(), State: reportStates[rep.GetState()], Message: rep.GetMessage(), Output: rep.GetOutput()}
	if change != nil {
		change(n.Status.Order)
	}
	_ = ownertest.Shared.Client.Status().Update(ctx, n) // a conflict: at the next attestation
}

func (r *runner) verify(t *testing.T) *appraisal.Report {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	s, err := VerifyNode(ctx, r.Dir, runningNode, r.policy, func(string) {})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// accepted verifies that nothing but what a test changed was refused.
func (r *runner) accepted(t *testing.T) *appraisal.Report {
	t.Helper()
	s := r.verify(t)
	if !s.Accepted || s.Err != nil || s.Problem != nil || s.Record != nil || s.Machine != r.on.Machine.String() || s.Disk != r.on.Disk {
		t.Errorf("%+v", s)
	}
	return s
}

func refusedAs(t *testing.T, s *appraisal.Report, want attestv1.Reason) {
	t.Helper()
	if s.Accepted || attest.ReasonOf(s.Err) != want || s.Problem == nil || s.Problem.Reason != attest.ReasonName(want) {
		t.Errorf("%v, want %s", s.Err, attest.ReasonName(want))
	}
}

func TestARunningNodeIsVerified(t *testing.T) {
	r := newRunner(t)
	t.Cleanup(r.obeys(t, nil))
	s := r.accepted(t)
	served, err := os.ReadDir(filepath.Join(r.root, machineorders.EvidenceFolder))
	if err != nil || len(served) != 1 {
		t.Fatalf("%v, %v", served, err)
	}
	if s.Node != runningNode || s.Lock != "locked to this cluster" || s.Image != "image-0" || s.Class != "class-0" || s.SecureBoot != "on" || len(s.Events) == 0 || len(s.PCRs) != 16 || s.PolicySerial != 1 ||
		s.EvidenceDigest == hex.EncodeToString(make([]byte, 32)) || len(s.Chain) != 2 {
		t.Errorf("%+v", s)
	}
	policy := attesttest.Policy(t, r.ca, []*attesttest.Machine{r.m})
	explained := func(t *testing.T, s *appraisal.Report) *appraisal.Explanation {
		t.Helper()
		seen, err := appraisal.SeenBy(s, r.policy)
		if err != nil {
			t.Fatal(err)
		}
		e, err := appraisal.ExplainBoot(seen, policy, nil)
		if err != nil || !e.Verified || !strings.Contains(e.From, s.Machine) {
			t.Fatalf("%+v, %v", e, err)
		}
		return e
	}
	if e := explained(t, s); e.Refusal != nil || len(e.Fits) != 2 || len(e.Fits[0].PCRs)+len(e.Fits[1].PCRs) != 0 {
		t.Errorf("muster explain says of an accepted node: %+v", e)
	}
	t.Run("evidence of before is refused", func(t *testing.T) {
		old, err := os.ReadFile(filepath.Join(r.root, machineorders.EvidenceFolder, served[0].Name()))
		if err != nil {
			t.Fatal(err)
		}
		r.relay = func(w http.ResponseWriter) bool { _, _ = w.Write(old); return true }
		s := r.verify(t)
		refusedAs(t, s, attestv1.Reason_REASON_BINDING_MISMATCH)
		if s.Machine != "" || s.Record != nil {
			t.Errorf("something of it is shown: %+v", s)
		}
		if _, err := appraisal.SeenBy(s, r.policy); attest.ReasonOf(err) != attestv1.Reason_REASON_BINDING_MISMATCH {
			t.Errorf("it is explained: %v", err)
		}
		r.relay = nil
		r.accepted(t)
	})
	t.Run("a kubelet that gives nothing is unreachable", func(t *testing.T) {
		r.relay = func(w http.ResponseWriter) bool { w.WriteHeader(http.StatusNotFound); return true }
		s := r.verify(t)
		refusedAs(t, s, attestv1.Reason_REASON_API_UNAVAILABLE)
		if !problem.Unreachable(s.Err) || !strings.Contains(problem.Remedy(s.Err), "kubelet of "+runningNode) || s.Record == nil || s.Record.Reason != "ACCEPTED" || s.Record.PolicySerial != 7 || s.Record.Machine != r.on.Machine.String() || s.Disk != r.on.Disk {
			t.Errorf("%v: %+v", s.Err, s.Record)
		}
		r.relay = nil
	})
	t.Run("a kubelet that gives without end is not read to the end", func(t *testing.T) {
		r.relay = func(w http.ResponseWriter) bool {
			for b := make([]byte, 1<<10); ; {
				if _, err := w.Write(b); err != nil {
					return true
				}
			}
		}
		refusedAs(t, r.verify(t), attestv1.Reason_REASON_EVIDENCE_MALFORMED)
		r.relay = nil
	})
	t.Run("another image is refused, with its register", func(t *testing.T) {
		r.m.BootImage("changed")
		r.m.LockTo(r.ID)
		s := r.verify(t)
		refusedAs(t, s, attestv1.Reason_REASON_POLICY_REFUSED)
		if s.Machine != r.on.Machine.String() || s.PCRs[4].Match == nil || *s.PCRs[4].Match || s.Record != nil {
			t.Errorf("%+v", s)
		}
		if e := explained(t, s); e.Refusal == nil || e.Refusal.Reason != "POLICY_REFUSED" || len(e.Fits[0].PCRs) == 0 || len(e.Log) == 0 {
			t.Errorf("muster explain says: %+v", e)
		}
		r.m.BootImage("image")
	})
	t.Run("a machine that is not locked to this cluster is refused", func(t *testing.T) {
		refusedAs(t, r.verify(t), attestv1.Reason_REASON_LOCK_FOREIGN)
		r.m.LockTo(r.ID)
		r.accepted(t)
	})
	t.Run("a node that is not enrolled is an error", func(t *testing.T) {
		if s, err := VerifyNode(t.Context(), r.Dir, "w9", r.policy, func(string) {}); attest.ReasonOf(err) != attestv1.Reason_REASON_NOT_ENROLLED {
			t.Errorf("%+v, %v", s, err)
		}
	})
}

// An administrator of the API, with root on another machine that the policy accepts, has that machine answer.
func TestAnotherMachineDoesNotAnswerForANode(t *testing.T) {
	r := newRunner(t)
	other := attesttest.NewMachine(t, r.ca, attesttest.Options{SecureBoot: true})
	other.LockTo(r.ID)
	r.record(t, other)
	s := r.verify(t)
	refusedAs(t, s, attestv1.Reason_REASON_EK_UNTRUSTED)
	if note := ownertest.EnrollmentOf(t, runningNode).Annotations[v1alpha1.OwnerOrder]; note != "" {
		t.Errorf("an order was signed: %s", note)
	}
	if s.Record == nil || !strings.Contains(problem.Remedy(s.Err), "muster replace") {
		t.Errorf("%+v", s)
	}
	r.record(t, r.m)
	t.Cleanup(r.obeys(t, nil))
	r.accepted(t)
}

// Virtual machines of clouds have no endorsement key that could be challenged.
func TestANodeWithoutAnEndorsementKeyIsNotVerified(t *testing.T) {
	r := newRunner(t)
	n := ownertest.EnrollmentOf(t, runningNode)
	n.Status.EKPublic = ""
	if err := ownertest.Shared.Client.Status().Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	s := r.verify(t)
	refusedAs(t, s, attestv1.Reason_REASON_NOT_READY)
	if s.Record == nil || !strings.Contains(problem.Remedy(s.Err), "platform key of its cloud or AWS's NitroTPM") {
		t.Errorf("%s: %+v", problem.Remedy(s.Err), s)
	}
	if note := ownertest.EnrollmentOf(t, runningNode).Annotations[v1alpha1.OwnerOrder]; note != "" {
		t.Errorf("an order was signed: %s", note)
	}
	r.record(t, r.m)
	t.Cleanup(r.obeys(t, nil))
	r.accepted(t)
}

func TestANodeWithoutAnOwnerIsNotVerified(t *testing.T) {
	r := newRunner(t)
	r.image = &metadata.Image{NoOwnerKey: true}
	stop := r.obeys(t, nil)
	s := r.verify(t)
	stop()
	refusedAs(t, s, attestv1.Reason_REASON_OWNER_SIGNATURE)
	if s.Record == nil || s.Machine != "" || !strings.Contains(problem.Remedy(s.Err), "ownerKey") {
		t.Errorf("%+v", s)
	}
	r.image = &metadata.Image{OwnerKeys: attest.OwnerKeys{r.Public}}
	t.Cleanup(r.obeys(t, nil))
	r.accepted(t)
}

func TestWithoutAnAnswerTheClustersRecordIsShown(t *testing.T) {
	r := newRunner(t)
	unanswered := func() *appraisal.Report {
		t.Helper()
		ctx := &ownertest.Expiring{Context: t.Context(), Over: make(chan struct{})}
		s, err := VerifyNode(ctx, r.Dir, runningNode, r.policy, ctx.Expire)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	s := unanswered()
	if s.Accepted || !problem.Unreachable(s.Err) || s.Record == nil || s.Record.Time == nil || strings.Contains(problem.Remedy(s.Err), "refuses this one") {
		t.Errorf("%+v", s)
	}
	// A machine that joinservice refuses gets no orders.
	n := ownertest.EnrollmentOf(t, runningNode)
	n.Status.LastVerdict = &v1alpha1.Verdict{Reason: "POLICY_REFUSED", Time: metav1.Now(), Message: "POLICY_REFUSED: PCR 11\x1b[2J"}
	if err := ownertest.Shared.Client.Status().Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	if s := unanswered(); !strings.Contains(problem.Remedy(s.Err), "refuses this one") || s.Record.Message != "POLICY_REFUSED: PCR 11?[2J" {
		t.Errorf("%s: %+v", problem.Remedy(s.Err), s.Record)
	}
	// A verification that waits has a challenge that nobody knows any more. The next one replaces it.
	c, err := challengeTo(ownertest.EnrollmentOf(t, runningNode))
	if err != nil {
		t.Fatal(err)
	}
	first := r.pending(t, ownerorder.ActionVerify, ownerorder.ChallengeArgs(c.Challenge()))
	if unanswered(); ownertest.EnrollmentOf(t, runningNode).Annotations[v1alpha1.OwnerOrder] == first {
		t.Error("the order of before is waited for")
	}
	// An order to do something else is not replaced.
	reboot := r.pending(t, ownerorder.ActionReboot, nil)
	if s := r.verify(t); s.Accepted || s.Err == nil || !strings.Contains(s.Err.Error(), `has an unfinished order "reboot"`) || ownertest.EnrollmentOf(t, runningNode).Annotations[v1alpha1.OwnerOrder] != reboot {
		t.Errorf("%v", s.Err)
	}
	n = ownertest.EnrollmentOf(t, runningNode)
	delete(n.Annotations, v1alpha1.OwnerOrder)
	if err := ownertest.Shared.Client.Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	// A joinservice of an earlier version has recorded no key.
	n = ownertest.EnrollmentOf(t, runningNode)
	n.Status.EKPublic = ""
	if err := ownertest.Shared.Client.Status().Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	if s := r.verify(t); s.Accepted || !problem.Unreachable(s.Err) || s.Record == nil || !strings.Contains(problem.Remedy(s.Err), "muster upgrade") {
		t.Errorf("%+v", s)
	}
	r.record(t, r.m)
	t.Cleanup(r.obeys(t, nil))
	r.accepted(t)
}

// What passes through the cluster is trusted with nothing: each part of an answer that is another one's is refused.
func TestAnAnswerIsForItsOrderAndMachine(t *testing.T) {
	ca := attesttest.NewCA(t)
	m, other := attesttest.NewMachine(t, ca, attesttest.Options{}), attesttest.NewMachine(t, ca, attesttest.Options{})
	vendor := attesttest.NewCA(t)
	bought := attesttest.NewMachine(t, vendor, attesttest.Options{})
	cloud := attesttest.NewCA(t)
	rented := attesttest.NewMachine(t, ca, attesttest.Options{Platform: &attesttest.Platform{CA: cloud, Project: "ours", Zone: "a"}})
	policy := attesttest.ParsedPolicy(t, ca, []*attesttest.Machine{m}, func(p *attestv1.Policy) {
		p.Tpm2.PlatformRoots = []*attestv1.PlatformRoot{{Pem: cloud.PEM(), Provider: "gcp", Key: "ecc-p256", Projects: []string{"ours"}}}
	})
	order := func(second int64) ownerorder.SignedMachineOrder {
		return ownerorder.SignedMachineOrder{Text: time.Unix(second, 0).String(), Signature: make([]byte, 64)}
	}
	type answer struct {
		challenge *tpm2.Activation
		mac       string
		evidence  []byte
	}
	evidence := func(by *attesttest.Machine, p attest.Purpose, s ownerorder.SignedMachineOrder) []byte {
		ev, err := by.Attester(p).Attest(t.Context(), attestv1.Format_FORMAT_TPM2, s.Binding())
		if err != nil {
			t.Fatal(err)
		}
		b, err := proto.Marshal(ev)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	respond := func(by *attesttest.Machine, c *tpm2.Activation, s ownerorder.SignedMachineOrder) string {
		mac, err := by.Attester(attest.PurposeOrder).Respond(t.Context(), c.Challenge(), s.Binding())
		if err != nil {
			t.Fatal(err)
		}
		return hex.EncodeToString(mac)
	}
	challengeOf := func(ca *attesttest.CA, m *attesttest.Machine) *tpm2.Activation {
		c := claimsFor(t, ca, m)
		a, err := tpm2.NewActivation(c.EKPublic(), c.AKName())
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	s := order(1)
	for name, tt := range map[string]struct {
		change func(*answer)
		want   attestv1.Reason
	}{
		"another order's evidence":          {func(a *answer) { a.evidence = evidence(m, attest.PurposeOrder, order(2)) }, attestv1.Reason_REASON_BINDING_MISMATCH},
		"public evidence":                   {func(a *answer) { a.evidence = evidence(m, attest.PurposePublic, s) }, attestv1.Reason_REASON_BINDING_MISMATCH},
		"evidence of a session":             {func(a *answer) { a.evidence = evidence(m, attest.PurposeMachine, s) }, attestv1.Reason_REASON_BINDING_MISMATCH},
		"another machine's evidence":        {func(a *answer) { a.evidence = evidence(other, attest.PurposeOrder, s) }, attestv1.Reason_REASON_ACTIVATION_FAILED},
		"a rented machine's evidence":       {func(a *answer) { a.evidence = evidence(rented, attest.PurposeOrder, s) }, attestv1.Reason_REASON_BINDING_MISMATCH},
		"another order's answer":            {func(a *answer) { a.mac = respond(m, a.challenge, order(2)) }, attestv1.Reason_REASON_ACTIVATION_FAILED},
		"an answer to another challenge":    {func(a *answer) { a.mac = respond(m, challengeOf(ca, m), s) }, attestv1.Reason_REASON_ACTIVATION_FAILED},
		"no answer":                         {func(a *answer) { a.mac = "" }, attestv1.Reason_REASON_ACTIVATION_FAILED},
		"an answer that is none":            {func(a *answer) { a.mac += "x" }, attestv1.Reason_REASON_ACTIVATION_FAILED},
		"no evidence":                       {func(a *answer) { a.evidence = nil }, attestv1.Reason_REASON_EVIDENCE_MALFORMED},
		"evidence that is none":             {func(a *answer) { a.evidence = []byte("evidence") }, attestv1.Reason_REASON_EVIDENCE_MALFORMED},
		"evidence with something behind it": {func(a *answer) { a.evidence = append(a.evidence, make([]byte, ownerorder.MaxEvidence)...) }, attestv1.Reason_REASON_EVIDENCE_MALFORMED},
		"a machine that no root certifies": {func(a *answer) {
			a.challenge = challengeOf(vendor, bought)
			a.mac, a.evidence = respond(bought, a.challenge, s), evidence(bought, attest.PurposeOrder, s)
		}, attestv1.Reason_REASON_EK_UNTRUSTED},
	} {
		t.Run(name, func(t *testing.T) {
			for _, changed := range []bool{true, false} { // the same, with nothing changed, passes
				a := answer{challenge: challengeOf(ca, m)}
				a.mac, a.evidence = respond(m, a.challenge, s), evidence(m, attest.PurposeOrder, s)
				want := attestv1.Reason_REASON_ACCEPTED
				if changed {
					tt.change(&a)
					want = tt.want
				}
				c, err := verifyEvidence(t.Context(), policy, a.challenge, s, a.mac, a.evidence)
				if attest.ReasonOf(err) != want || err == nil && c.Machine() != m.ID() {
					t.Errorf("%v, want %s", err, attest.ReasonName(want))
				}
			}
		})
	}
	t.Run("a machine without a certificate", func(t *testing.T) {
		bare := attesttest.NewMachine(t, ca, attesttest.Options{Bare: true})
		c := challengeOf(ca, bare)
		if claims, err := verifyEvidence(t.Context(), policy, c, s, respond(bare, c, s), evidence(bare, attest.PurposeOrder, s)); err != nil || claims.Machine() != bare.ID() {
			t.Error(err)
		}
	})
}
