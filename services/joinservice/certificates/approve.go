package certificates

import (
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/util/workqueue"
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

const (
	// retryApproval is the pause before a failed API call is repeated. It doubles each time, up to maxRetryApproval.
	retryApproval, maxRetryApproval = time.Second, 30 * time.Second
	// policyGrace is how long after a policy change verdicts under the previous policy are still accepted.
	policyGrace = 10 * time.Minute
	// filedBefore is how much older than its enrollment a request may be: the kubelet of the first machine files one before
	// its machine is enrolled. An older one belongs to a previous machine of the name.
	filedBefore = time.Hour
	// approvers is the number of nodes whose requests are checked at the same time.
	approvers = 2
	// MaxRequests bounds the requests of one node: those approved in the last keepApproved plus the open ones; and
	// separately those denied in the last keepDenied. An honest kubelet has one or two at a time, and a few more when it
	// restarts repeatedly.
	MaxRequests = 8
	// maxFiled is the number of requests of a node above which admission refuses new ones for a minute: the node files them
	// faster than they can be deleted.
	maxFiled = 64
	// maxWrites is the number of a node's requests that are decided or deleted before the next node's slot.
	maxWrites = 4
	// keepApproved is how long a kubelet can fetch a signed certificate, keepDenied how long it can read a denial.
	// Kubernetes would keep both for an hour.
	keepApproved, keepDenied = 5 * time.Minute, time.Minute
)

// Approver decides on the requests that kubelets file themselves to renew their certificates. A request that fits its
// node's enrollment is approved. One that can never fit is denied, so that the kubelet logs the reason. One that may fit
// later waits, for example while the enrollment is still being written or the machine must attest again.
//
// Nodes are served in turn, in short slots, however many requests a node has filed. Requests above the bound are deleted,
// the oldest first. Decided requests are deleted after the kubelet has had the time to read them.
type Approver struct {
	state     *state.State
	list      *access.List
	requests  *Requests
	limits    *audit.RefusalLimits
	policy    *policy.Store
	maxAge    time.Duration
	grace     time.Duration
	decisions *prometheus.CounterVec
	tooMany   rate.Sometimes

	mu     sync.Mutex
	events map[string]*rate.Limiter // by node
}

// NewApprover returns an Approver that accepts verdicts up to maxAge old under the policy in force in p, or an error that
// names what is missing. Denials are recorded within the node's limit.
func (r *Requests) NewApprover(l *access.List, limits *audit.RefusalLimits, p *policy.Store, maxAge time.Duration, metrics prometheus.Registerer) (*Approver, error) {
	if l == nil || limits == nil || p == nil || maxAge <= 0 || metrics == nil {
		return nil, errors.New("certificates: list, limits of refusals, policy, the age of verdicts and metrics are required")
	}
	d := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "muster_node_certificate_requests_total", Help: "Requests filed by kubelets that were approved, denied, or wait for that reason, by signer and reason.",
	}, []string{"signer", "reason"})
	if err := metrics.Register(d); err != nil {
		return nil, fmt.Errorf("certificates: %w", err)
	}
	a := &Approver{state: r.state, list: l, requests: r, limits: limits, policy: p, maxAge: maxAge, grace: policyGrace, decisions: d, tooMany: rate.Sometimes{Interval: time.Minute}, events: map[string]*rate.Limiter{}}
	return a, clusterview.Watch(r.state.Cluster, func(n *v1alpha1.AttestedNode) { r.wakeOne(n.Name) }, func(*v1alpha1.AttestedNode) {})
}

// Serve decides on requests until ctx ends. It decides nothing before the informers have synced.
func (a *Approver) Serve(ctx context.Context) error {
	if err := a.state.Cluster.Await(ctx); err != nil {
		return err
	}
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.NewTypedItemExponentialFailureRateLimiter[string](retryApproval, maxRetryApproval))
	var workers sync.WaitGroup
	for range approvers {
		workers.Go(func() {
			for a.next(ctx, queue) {
			}
		})
	}
	defer workers.Wait()
	defer queue.ShutDown()
	defer a.requests.look(nil)
	for {
		_, policed := a.policy.Latest() // read before the requests, so that no change is missed
		a.requests.look(queue.Add)
		select {
		case <-ctx.Done():
			return nil
		case <-policed:
		}
	}
}

// next processes one node's slot. It returns false when the queue is shut down.
func (a *Approver) next(ctx context.Context, queue workqueue.TypedRateLimitingInterface[string]) bool {
	node, end := queue.Get()
	if end {
		return false
	}
	defer queue.Done(node)
	if ctx.Err() != nil {
		return true
	}
	again, err := a.slot(ctx, node)
	if err != nil {
		if ctx.Err() == nil {
			a.state.Log.ErrorContext(ctx, "a node's certificate requests cannot be dealt with; trying again", "node", node, "err", err)
		}
		queue.AddRateLimited(node)
		return true
	}
	queue.Forget(node)
	if again > 0 {
		queue.AddAfter(node, again)
	}
	return true
}

// atOnce is the pause for a node that waits only for the other nodes' slots.
const atOnce = time.Nanosecond

// slot processes the requests of a node. It returns the pause until there is more to do; 0 if that needs a change first.
func (a *Approver) slot(ctx context.Context, node string) (again time.Duration, err error) {
	open, superfluous, again, ok := a.sort(ctx, node)
	if !ok {
		err = errors.New("a renewed certificate is to be allowed")
	}
	if len(open)+len(superfluous) > maxFiled {
		err = errors.Join(err, a.list.PauseRequests(ctx, node))
	}
	writes := 0
	for _, o := range superfluous {
		if writes++; writes > maxWrites {
			return atOnce, err
		}
		if failed := a.drop(ctx, o); failed != nil {
			return again, errors.Join(err, failed)
		}
	}
	for _, o := range open {
		if writes > maxWrites {
			return atOnce, err
		}
		done, failed := a.look(ctx, o)
		if done {
			writes++
		}
		err = errors.Join(err, failed)
	}
	return again, err
}

// sort returns the requests of a node that are to be decided, those to be deleted, and the pause until others are due. ok
// is false if a certificate could not be allowed in the list.
func (a *Approver) sort(ctx context.Context, node string) (open, superfluous []Filed, again time.Duration, ok bool) {
	approved, denied := 0, 0
	ok = true
	for _, o := range a.requests.FiledBy(node) {
		keep := keepApproved - a.state.Now().Sub(o.decided)
		switch {
		case o.decided.IsZero():
			open = append(open, o)
			continue
		case refused(o.CertificateSigningRequest):
			denied++
			keep += keepDenied - keepApproved
			if denied > MaxRequests {
				keep = 0
			}
		case !a.allowRenewed(ctx, o):
			ok = false
			continue
		case keep > 0:
			approved++
		case !concluded(o.CertificateSigningRequest):
			continue // its signer is working on it
		}
		if keep <= 0 {
			superfluous = append(superfluous, o)
		} else if again == 0 || keep < again {
			again = keep
		}
	}
	if room := max(0, MaxRequests-approved); len(open) > room {
		a.tooMany.Do(func() {
			a.state.Log.WarnContext(ctx, "a node files too many certificate requests; the oldest are deleted", "node", node, "open", len(open), "bound", MaxRequests)
		})
		superfluous = append(superfluous, open[room:]...) // keep the newest: the kubelet waits for no other
		open = open[:room]
	}
	return open, superfluous, again, ok
}

// drop deletes a request that is decided or above its node's bound.
func (a *Approver) drop(ctx context.Context, o Filed) error {
	err := a.state.Cluster.Client.Delete(ctx, o.DeepCopy(), client.Preconditions{UID: &o.UID})
	if client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) {
		return clusterview.Unavailable("delete CertificateSigningRequest "+o.Name, err)
	}
	if o.decided.IsZero() && err == nil {
		reason := attest.ReasonName(attestv1.Reason_REASON_BUSY)
		a.decisions.WithLabelValues(o.Spec.SignerName, reason).Inc()
		node := filer(o.CertificateSigningRequest)
		if err := a.limits.Write(node, audit.Record{Service: "joinservice", Event: "certificate request deleted", Reason: reason, Request: o.Name, Node: node}); err != nil {
			a.state.Log.ErrorContext(ctx, "the audit record of a deleted certificate request cannot be written", "request", o.Name, "err", err)
		}
	}
	a.requests.remove(o.CertificateSigningRequest) // the informer will report it too
	return nil
}

// look decides on an open request, unless it must wait. It reads the enrollment and the request from the API server: an
// informer may not have seen a ban or a removed verdict yet (J4, J7), and stores only who filed a request. done is false if
// the request waits, and true also if it was decided elsewhere.
func (a *Approver) look(ctx context.Context, open Filed) (done bool, err error) {
	o := &certificatesv1.CertificateSigningRequest{}
	if err := a.state.Cluster.Client.Get(ctx, client.ObjectKey{Name: open.Name}, o); apierrors.IsNotFound(err) || err == nil && (o.UID != open.UID || decided(o)) {
		return false, nil // the informer will report it
	} else if err != nil {
		return false, clusterview.Unavailable("read CertificateSigningRequest "+open.Name, err)
	}
	node, err := a.enrollment(ctx, filer(o))
	if err != nil {
		return false, clusterview.Unavailable("read AttestedNode "+filer(o), err)
	}
	err = a.check(o, node)
	later, waits := errors.AsType[*notYet](err)
	if !waits {
		return true, a.decide(ctx, o, node, err)
	}
	if open.waits != later.Error() {
		a.requests.note(open, func(k *Filed) { k.waits = later.Error() })
		a.decisions.WithLabelValues(o.Spec.SignerName, attest.ReasonName(attest.ReasonOf(later.err))).Inc()
		a.state.Log.InfoContext(ctx, "a kubelet's certificate request waits", "request", o.Name, "by", o.Spec.Username, "reason", attest.ReasonName(attest.ReasonOf(later.err)), "why", later.err)
		a.emit(ctx, o, "RenewalWaits", later.err)
	}
	return false, nil
}

// emit creates an event on the enrollment that explains why a certificate is not renewed; the kubelet cannot. A node that
// files without end gets no more events than others: the log has the rest.
func (a *Approver) emit(ctx context.Context, o *certificatesv1.CertificateSigningRequest, what string, why error) {
	n := a.state.Cluster.Nodes.ByName(filer(o))
	if n == nil {
		return
	}
	a.mu.Lock()
	events := a.events[n.Name]
	if events == nil { // one for each enrollment that ever existed
		events = rate.NewLimiter(rate.Every(time.Minute), 2*MaxRequests)
		a.events[n.Name] = events
	}
	a.mu.Unlock()
	if events.Allow() {
		a.state.Emit(ctx, n, state.Warning, what, fmt.Sprintf("%s: %v", o.Name, why))
	}
}

// notYet is a refusal of a request that may be accepted later.
type notYet struct{ err error }

func (n *notYet) Error() string { return n.err.Error() }

// enrollment reads a node's enrollment from the API server, not from the informers; nil if it has none.
func (a *Approver) enrollment(ctx context.Context, name string) (*v1alpha1.AttestedNode, error) {
	n := &v1alpha1.AttestedNode{}
	err := a.state.Cluster.Client.Get(ctx, client.ObjectKey{Name: name}, n)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return n, nil
}

// check compares a request with its node's enrollment, which is nil if it has none.
func (a *Approver) check(o *certificatesv1.CertificateSigningRequest, node *v1alpha1.AttestedNode) error {
	name := filer(o)
	if node == nil {
		return &notYet{attest.Refuse(attestv1.Reason_REASON_NOT_ENROLLED, "node %q has no AttestedNode", name)}
	}
	if err := access.CheckShutOut(node); err != nil {
		return err
	}
	if node.Status.ReleasedAt != nil { // J4: nothing that is valid longer than the name is held for its machine
		return &notYet{attest.Refuse(attestv1.Reason_REASON_NOT_ENROLLED, "the enrollment of node %q is released", name)}
	}
	if node.CreationTimestamp.Sub(o.CreationTimestamp.Time) > filedBefore { // J4: both by API servers' clocks
		return attest.Refuse(attestv1.Reason_REASON_CERTIFICATE_RETIRED, "it was filed at %s, and the node's machine was enrolled at %s", state.UTC(o.CreationTimestamp.Time), state.UTC(node.CreationTimestamp.Time))
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
			return attest.Refuse(attestv1.Reason_REASON_ADDRESS_REFUSED, "address %s is not in the enrollment of node %q, which has %s", ip, name, strings.Join(node.Spec.Addresses, ", "))
		}
	}
	return nil
}

// checkVerdict requires a recent accepted verdict under the policy in force (J7): otherwise a node's key, copied from its
// machine, could renew certificates for long. A verdict of the owner's program has no generation, so it never counts as one
// under the policy in force.
func (a *Approver) checkVerdict(node *v1alpha1.AttestedNode) error {
	later := func(format string, args ...any) error {
		return &notYet{attest.Refuse(attestv1.Reason_REASON_VERDICT_OLD, format, args...)}
	}
	v := node.Status.LastVerdict
	switch {
	case v == nil:
		return later("no evidence of node %q was appraised yet", node.Name)
	case !v.Accepted:
		return attest.Refuse(attestv1.Reason_REASON_POLICY_REFUSED, "the last verdict on node %q was %s", node.Name, v.Reason)
	case time.Since(v.Time.Time).Abs() > a.maxAge: // one from the future does not count
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
		return nil // its machine has not had the time to attest again
	}
	return later("the last verdict on node %q was made under generation %d of the policy, and %d is in force", node.Name, seen.PolicyGeneration, p.Generation)
}

// checkUsages allows what kubelets request: with an RSA key they add key encipherment, which an ECDSA key does not use.
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

// decide writes the record, then the decision (J3). Denials above the node's limit are recorded as a number only. n is the
// enrollment on which the decision is based.
func (a *Approver) decide(ctx context.Context, o *certificatesv1.CertificateSigningRequest, n *v1alpha1.AttestedNode, refusal error) error {
	reason := attest.ReasonName(attest.ReasonOf(refusal))
	record := audit.Record{
		Service: "joinservice", Event: "certificate approved", Reason: reason, Request: o.Name, Node: n.Name,
		Machine: n.Spec.MachineID, Evidence: n.Status.EvidenceDigest, PolicyGeneration: n.Status.PolicyGeneration, PolicySerial: uint64(n.Status.PolicySerial),
	}
	condition := certificatesv1.CertificateSigningRequestCondition{
		Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: approvedReason, Message: "it fits the node's enrollment",
	}
	write := a.state.Audit.Write
	if refusal != nil {
		write = func(r audit.Record) error { return a.limits.Write(r.Node, r) }
		record.Event, record.Detail = "certificate denied", refusal.Error()
		condition.Type, condition.Reason, condition.Message = certificatesv1.CertificateDenied, reason, refusal.Error()
	}
	if err := write(record); err != nil {
		return attest.Refuse(attestv1.Reason_REASON_AUDIT_UNAVAILABLE, "%w", err)
	}
	next := o.DeepCopy()
	next.Status.Conditions = append(next.Status.Conditions, condition)
	err := a.state.Cluster.Client.SubResource("approval").Update(ctx, next)
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil // another replica was first, or it was deleted: the informer will report it
	}
	if err != nil {
		return clusterview.Unavailable("decide on CertificateSigningRequest "+o.Name, err)
	}
	a.decisions.WithLabelValues(o.Spec.SignerName, reason).Inc()
	if refusal != nil {
		a.emit(ctx, o, "RenewalDenied", refusal)
	}
	a.state.Log.InfoContext(ctx, "a kubelet's certificate request is decided", "event", record.Event, "request", o.Name, "node", record.Node, "signer", o.Spec.SignerName, "reason", reason, "detail", record.Detail)
	return nil
}

// MostApproved returns the maximum number of certificate requests of one node that are approved in that time: an approved
// one counts until it is deleted.
func MostApproved(in time.Duration) int { return MaxRequests * (1 + int(in/keepApproved)) }

// checkCredential makes a request wait if it was filed with a revoked certificate: otherwise the next machine of the name
// would have it approved (J4). The certificate may be one that is about to be allowed.
func (a *Approver) checkCredential(node string, o *certificatesv1.CertificateSigningRequest) error {
	e, _ := a.list.Entry(node)
	if e.Revoked == nil || e.Revoked.Allows(access.Credentials(o)...) {
		return nil
	}
	return &notYet{attest.Refuse(attestv1.Reason_REASON_CERTIFICATE_RETIRED, "it was filed with a certificate of a machine that had the name %q before", node)}
}

// allowRenewed allows the certificate that a kubelet got by means of an allowed one. It returns false if that failed.
func (a *Approver) allowRenewed(ctx context.Context, o Filed) bool {
	if o.listed || o.Spec.SignerName != signerOf[nodecert.Client] || len(o.Status.Certificate) == 0 {
		return true
	}
	node := filer(o.CertificateSigningRequest)
	if e, _ := a.list.Entry(node); e.Revoked == nil || !e.Revoked.Allows(access.Credentials(o.CertificateSigningRequest)...) {
		return true
	}
	if err := a.list.AllowSigned(ctx, node, o.CertificateSigningRequest); err != nil {
		a.state.Log.ErrorContext(ctx, "a renewed certificate cannot be allowed, so its node cannot write with it; trying again", "request", o.Name, "node", node, "err", err)
		return false
	}
	a.requests.note(o, func(k *Filed) { k.listed = true })
	return true
}
