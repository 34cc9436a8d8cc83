package kube

import (
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/policy"
	"github.com/muster-k8s/muster/services/joinservice/nodecert"
	"github.com/muster-k8s/muster/trust/attest"
)

const (
	// retryApproval is how long to wait before an approval that the API refused is tried again.
	retryApproval = 2 * time.Second
	// policyGrace is how long after a change of the policy verdicts of the one before still count.
	policyGrace = 10 * time.Minute
)

// Approver decides on the requests that kubelets file by themselves, to renew what they have. A request that fits its node's enrolment is approved. One that never can is
// denied, so that the kubelet's log says why. One that may fit later, as when the enrolment is still
// on its way or the machine has yet to attest again, waits.
type Approver struct {
	kube      *Kube
	audit     *audit.Log
	rations   *audit.Rations
	policy    *policy.Store
	maxAge    time.Duration
	grace     time.Duration
	decisions *prometheus.CounterVec
	waiting   map[string]string // by request: the reason that was logged
}

// NewApprover returns an Approver that takes verdicts of up to maxAge under the policy in force of p,
// or says what is missing. What it approves goes to log, what it denies to the node's ration.
func (k *Kube) NewApprover(log *audit.Log, rations *audit.Rations, p *policy.Store, maxAge time.Duration, r prometheus.Registerer) (*Approver, error) {
	if log == nil || rations == nil || p == nil || maxAge <= 0 || r == nil {
		return nil, errors.New("kube: audit log, rations, policy, the age of verdicts and metrics are required")
	}
	d := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "muster_node_certificate_requests_total", Help: "Requests filed by kubelets that were approved, denied, or wait for that reason, by signer and reason.",
	}, []string{"signer", "reason"})
	if err := r.Register(d); err != nil {
		return nil, fmt.Errorf("kube: %w", err)
	}
	return &Approver{kube: k, audit: log, rations: rations, policy: p, maxAge: maxAge, grace: policyGrace, decisions: d, waiting: map[string]string{}}, nil
}

// Serve decides until ctx ends. Before the informers have synced it decides nothing.
func (a *Approver) Serve(ctx context.Context) error {
	if err := a.kube.cluster.Await(ctx); err != nil {
		return err
	}
	for {
		changed := a.kube.cluster.Nodes.Changed() // before looking, so that no change is missed
		_, policed := a.policy.Latest()
		var retry <-chan time.Time
		if !a.pass(ctx) {
			retry = time.After(retryApproval/2 + rand.N(retryApproval)) //nolint:gosec // spreading load is no secret
		}
		select {
		case <-ctx.Done():
			return nil
		case <-a.kube.requests.kick:
		case <-changed:
		case <-policed:
		case <-retry:
		}
	}
}

// pass looks at every open request once. It is false if one could not be decided because something
// failed.
func (a *Approver) pass(ctx context.Context) bool {
	ok := a.vouchRenewed(ctx)
	r := a.kube.requests
	r.mu.Lock()
	open := slices.Collect(maps.Values(r.open))
	r.mu.Unlock()
	still := make(map[string]string, len(open))
	for _, o := range open {
		if ctx.Err() != nil {
			return true
		}
		node := a.kube.cluster.Nodes.ByName(filer(o))
		err := a.judge(o, node)
		if _, waits := errors.AsType[*notYet](err); !waits {
			// What is decided is decided on the enrolment as it is now: an informer may have to hear yet of
			// a ban or of a verdict that is gone (J4, J7).
			if node, err = a.enrolment(ctx, node.Name); err != nil {
				ok = false
				a.kube.log.ErrorContext(ctx, "a node's enrolment cannot be read; trying again", "node", filer(o), "err", err)
				continue
			}
			err = a.judge(o, node)
		}
		if later, is := errors.AsType[*notYet](err); is {
			still[o.Name] = later.Error()
			if a.waiting[o.Name] != later.Error() {
				a.decisions.WithLabelValues(o.Spec.SignerName, attest.ReasonName(attest.ReasonOf(later.err))).Inc()
				a.kube.log.InfoContext(ctx, "a kubelet's certificate request waits", "request", o.Name, "by", o.Spec.Username, "reason", attest.ReasonName(attest.ReasonOf(later.err)), "why", later.err)
				a.tell(ctx, o, "RenewalWaits", later.err)
			}
			continue
		}
		if err := a.decide(ctx, o, node, err); err != nil {
			ok = false
			a.kube.log.ErrorContext(ctx, "a kubelet's certificate request cannot be decided; trying again", "request", o.Name, "err", err)
		}
	}
	a.waiting = still
	return ok
}

// tell says beside the enrolment what a kubelet can't: why its certificate is not renewed.
func (a *Approver) tell(ctx context.Context, o *certificatesv1.CertificateSigningRequest, what string, why error) {
	if n := a.kube.cluster.Nodes.ByName(filer(o)); n != nil {
		a.kube.tell(ctx, n, eventWarning, what, fmt.Sprintf("%s: %v", o.Name, why))
	}
}

// notYet is for requests that may be all right later.
type notYet struct{ err error }

func (n *notYet) Error() string { return n.err.Error() }

// filer is the name of the node that filed a request.
func filer(o *certificatesv1.CertificateSigningRequest) string {
	return strings.TrimPrefix(o.Spec.Username, nodecert.UserPrefix)
}

// enrolment reads a node's enrolment past the informers; nil: it has none.
func (a *Approver) enrolment(ctx context.Context, name string) (*v1alpha1.AttestedNode, error) {
	n := &v1alpha1.AttestedNode{}
	err := a.kube.cluster.Client.Get(ctx, client.ObjectKey{Name: name}, n)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return n, nil
}

// judge compares a request with its node's enrolment; nil: it has none.
func (a *Approver) judge(o *certificatesv1.CertificateSigningRequest, node *v1alpha1.AttestedNode) error {
	name := filer(o)
	if node == nil {
		return &notYet{attest.Refuse(attestv1.Reason_REASON_NOT_ENROLLED, "node %q has no AttestedNode", name)}
	}
	if node.Spec.Banned {
		return attest.Refuse(attestv1.Reason_REASON_BANNED, "node %q is banned", name)
	}
	if node.Status.ReleasedAt != nil { // J4: nothing that outlives what is held for its machine
		return &notYet{attest.Refuse(attestv1.Reason_REASON_NOT_ENROLLED, "the enrolment of node %q is released", name)}
	}
	if err := a.checkCredential(name, o); err != nil { // J4
		return err
	}
	if err := a.checkVerdict(node); err != nil {
		return err
	}
	kind := nodecert.Client
	if o.Spec.SignerName == signerOf[nodecert.Serving] {
		kind = nodecert.Serving
	}
	if err := checkUsages(kind, o.Spec.Usages); err != nil {
		return err
	}
	block, rest := pem.Decode(o.Spec.Request)
	if block == nil || len(strings.TrimSpace(string(rest))) > 0 {
		return attest.Refuse(attestv1.Reason_REASON_CSR_INVALID, "want one PEM block")
	}
	r, err := nodecert.Parse(kind, block.Bytes)
	if err != nil {
		return err
	}
	if r.Node != name {
		return attest.Refuse(attestv1.Reason_REASON_CSR_INVALID, "node %q asks for a certificate of node %q", name, r.Node)
	}
	for _, ip := range r.Addresses {
		if !slices.Contains(node.Spec.Addresses, ip.String()) {
			return attest.Refuse(attestv1.Reason_REASON_ADDRESS_REFUSED, "address %s is not in the enrolment of node %q, which has %s", ip, name, strings.Join(node.Spec.Addresses, ", "))
		}
	}
	return nil
}

// checkVerdict wants an accepted verdict that is recent and was made under the policy in force (J7):
// a node's key alone, off its machine, renews nothing for long. The verdict of the owner's program,
// which knows no generation, is that of no policy in force here.
func (a *Approver) checkVerdict(node *v1alpha1.AttestedNode) error {
	later := func(format string, args ...any) error {
		return &notYet{attest.Refuse(attestv1.Reason_REASON_VERDICT_OLD, format, args...)}
	}
	v := node.Status.LastVerdict
	switch {
	case v == nil:
		return later("node %q was never judged", node.Name)
	case !v.Accepted:
		return attest.Refuse(attestv1.Reason_REASON_POLICY_REFUSED, "the last verdict on node %q was %s", node.Name, v.Reason)
	case time.Since(v.Time.Time).Abs() > a.maxAge: // one from the future is as good as none
		return later("the last verdict on node %q is of %s", node.Name, v.Time.UTC().Format(time.RFC3339))
	}
	p, err := a.policy.Current()
	if err != nil {
		return &notYet{err}
	}
	seen := node.Status
	if seen.PolicyGeneration == p.Generation && uint64(seen.PolicySerial) == p.Policy.Serial() {
		return nil
	}
	if seen.PolicyGeneration > 0 && time.Since(p.Since) < a.grace {
		return nil // its machine has not had the time to come again
	}
	return later("the last verdict on node %q was made under generation %d of the policy, and %d is in force", node.Name, seen.PolicyGeneration, p.Generation)
}

// checkUsages allows what kubelets ask for: with an RSA key they add key encipherment, which an ECDSA
// key has no use for.
func checkUsages(kind nodecert.Kind, usages []certificatesv1.KeyUsage) error {
	want := usagesOf[kind]
	for _, u := range usages {
		if !slices.Contains(want, u) {
			return attest.Refuse(attestv1.Reason_REASON_CSR_INVALID, "usage %q is not one of a node's %s certificate", u, kind)
		}
	}
	if !slices.Contains(usages, want[1]) {
		return attest.Refuse(attestv1.Reason_REASON_CSR_INVALID, "usage %q is missing", want[1])
	}
	return nil
}

// decide writes the record, then the decision (J3). A node that is denied again and again is recorded
// by a number above its ration. n is the enrolment that it was decided on.
func (a *Approver) decide(ctx context.Context, o *certificatesv1.CertificateSigningRequest, n *v1alpha1.AttestedNode, refusal error) error {
	reason := attest.ReasonName(attest.ReasonOf(refusal))
	record := audit.Record{
		Service: "joinservice", Event: "certificate approved", Reason: reason, Request: o.Name, Node: n.Name,
		Machine: n.Spec.MachineID, Evidence: n.Status.EvidenceDigest, PolicyGeneration: n.Status.PolicyGeneration, PolicySerial: uint64(n.Status.PolicySerial),
	}
	condition := certificatesv1.CertificateSigningRequestCondition{
		Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: approvedReason, Message: "it fits the node's enrolment",
	}
	write := a.audit.Write
	if refusal != nil {
		write = func(r audit.Record) error { return a.rations.Write(r.Node, r) }
		record.Event, record.Detail = "certificate denied", refusal.Error()
		condition.Type, condition.Reason, condition.Message = certificatesv1.CertificateDenied, reason, refusal.Error()
	}
	if err := write(record); err != nil {
		return attest.Refuse(attestv1.Reason_REASON_AUDIT_UNAVAILABLE, "%w", err)
	}
	next := o.DeepCopy()
	next.Status.Conditions = append(next.Status.Conditions, condition)
	err := a.kube.cluster.Client.SubResource("approval").Update(ctx, next)
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil // another replica was faster, or it is gone: the informer will tell
	}
	if err != nil {
		return unavailable("decide on CertificateSigningRequest "+o.Name, err)
	}
	// The informer will say so too; until then it would be decided again with each kick.
	a.kube.requests.remove(o)
	a.decisions.WithLabelValues(o.Spec.SignerName, reason).Inc()
	if refusal != nil {
		a.tell(ctx, o, "RenewalDenied", refusal)
	}
	a.kube.log.InfoContext(ctx, "a kubelet's certificate request is decided", "event", record.Event, "request", o.Name, "node", record.Node, "signer", o.Spec.SignerName, "reason", reason, "detail", record.Detail)
	return nil
}
