package sweeping

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/enrollment"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/services/joinservice/access"
	"github.com/muster-k8s/muster/services/joinservice/certificates"
	"github.com/muster-k8s/muster/services/joinservice/enroll"
	"github.com/muster-k8s/muster/services/joinservice/state"
	"github.com/muster-k8s/muster/trust/attest"
)

const (
	// lookEvery is the pause between two passes over all enrollments.
	lookEvery = time.Minute
	// retryWait is the mean pause before a failed step is repeated.
	retryWait = time.Second
	// ticketTime is longer than any ticket takes: an older one is no longer in progress.
	ticketTime = 5 * time.Minute
)

// How a node can vanish: reasons of the condition, and of the metric's series.
const (
	vanishedNeverCame = "NeverCame" // a ticket was issued, or its issuance has started, but no Node appeared
	vanishedNodeGone  = "NodeGone"  // the Node was deleted
	vanishedSilent    = "Silent"    // the Node exists, but its machine no longer attests
)

// Config defines when nodes count as vanished.
type Config struct {
	// VanishedAfter is how long a node may show no activity before it is reported.
	VanishedAfter time.Duration
	// ReleaseAfter is how much later the enrollment of a worker whose Node was deleted is deleted, unless the owner created
	// it; longer than certificates are valid, or 0 for never.
	ReleaseAfter time.Duration
	// VerdictMaxAge is the maximum age of the verdict on which a certificate is renewed.
	VerdictMaxAge time.Duration
	// Metrics takes muster_nodes_vanished, muster_nodes_refused and muster_nodes_cloned.
	Metrics prometheus.Registerer
}

// Sweeper reports nodes that vanished, and removes what is no longer used:
//
//   - an enrollment that a ticket created, of a worker that vanished without a Node long ago, is deleted when the last
//     certificate of its machine must have expired. Enrollments of the owner, control planes and bans are only reported;
//   - an enrollment that was released, because its machine returned the ticket, and one whose ticket failed, are deleted
//     when every certificate that may have been issued for them has expired;
//   - an enrollment of the owner or of an earlier version gets the finalizer, so that its removal revokes its certificates;
//   - the list of nodes that may not write is updated from the enrollments, without expired entries.
//
// Every replica does this. Each change is a compare-and-swap, so one of them makes and reports it.
type Sweeper struct {
	// Every is the mean pause between two passes over all enrollments.
	Every time.Duration

	state       *state.State
	list        *access.List
	requests    *certificates.Requests
	enrollments *enroll.Enrollments
	cfg         Config
	vanished    *prometheus.GaugeVec
	refused     *prometheus.GaugeVec
	cloned      prometheus.Gauge
	// missing is since when a node has no Node, as far as this process has seen.
	missing map[string]time.Time
}

// NewSweeper returns a Sweeper, or an error that describes what is wrong with cfg.
func NewSweeper(st *state.State, l *access.List, r *certificates.Requests, e *enroll.Enrollments, cfg Config) (*Sweeper, error) {
	switch {
	case cfg.Metrics == nil:
		return nil, errors.New("sweeping: metrics are required")
	case cfg.VanishedAfter < ticketTime:
		return nil, fmt.Errorf("sweeping: a node that shows no sign of life for %s has not vanished: wait %s at least", cfg.VanishedAfter, ticketTime)
	case cfg.VerdictMaxAge <= 0:
		return nil, errors.New("sweeping: the age of verdicts is required")
	case cfg.ReleaseAfter != 0 && cfg.ReleaseAfter <= st.CertificateLife:
		return nil, fmt.Errorf("sweeping: enrollments released after %s: certificates live %s, so wait for longer, or 0 for ever", cfg.ReleaseAfter, st.CertificateLife)
	}
	s := &Sweeper{
		Every: lookEvery, state: st, list: l, requests: r, enrollments: e, cfg: cfg, missing: map[string]time.Time{},
		vanished: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "muster_nodes_vanished", Help: "Enrolled nodes that show no sign of life, by how they vanished."}, []string{"how"}),
		refused:  prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "muster_nodes_refused", Help: "Enrolled nodes, not banned, whose machine's last genuine evidence was refused, by reason."}, []string{"reason"}),
		cloned:   prometheus.NewGauge(prometheus.GaugeOpts{Name: "muster_nodes_cloned", Help: "Enrolled nodes whose TPM a second machine has shown, until the owner has decided which is genuine."}),
	}
	if err := errors.Join(cfg.Metrics.Register(s.vanished), cfg.Metrics.Register(s.refused), cfg.Metrics.Register(s.cloned)); err != nil {
		return nil, fmt.Errorf("sweeping: %w", err)
	}
	return s, nil
}

// Serve sweeps until ctx ends. Before the informers have synced it does nothing.
func (s *Sweeper) Serve(ctx context.Context) error {
	if err := s.state.Cluster.Await(ctx); err != nil {
		return err
	}
	for {
		s.pass(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(s.Every*3/4 + rand.N(s.Every/2)): //nolint:gosec // spreading load is no secret
		}
	}
}

// pass checks all enrollments once. The next pass repeats what fails.
func (s *Sweeper) pass(ctx context.Context) {
	counts := map[string]float64{vanishedNeverCame: 0, vanishedNodeGone: 0, vanishedSilent: 0}
	nodes := s.state.Cluster.Nodes.All()
	s.countRefused(nodes)
	s.list.LookAtClocks(ctx)
	known := map[string]bool{}
	for _, n := range nodes {
		if ctx.Err() != nil {
			return
		}
		known[n.Name] = true
		if n.Leaving() {
			continue // the Enforcer works on it
		}
		n = n.DeepCopy()
		err := s.mark(ctx, n)
		how := ""
		if err == nil {
			how, err = s.look(ctx, n)
		}
		if how != "" {
			counts[how]++
		}
		// A lost compare-and-swap means that another writer has acted, or that the node is alive.
		if err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
			s.state.Log.ErrorContext(ctx, "a vanished node cannot be dealt with; trying again", "node", n.Name, "err", err)
		}
		if e, seen := s.list.Entry(n.Name); seen {
			s.list.ShowConditions(ctx, n.DeepCopy(), e)
		}
	}
	for how, count := range counts {
		s.vanished.WithLabelValues(how).Set(count)
	}
	for name := range s.missing {
		if !known[name] {
			delete(s.missing, name)
		}
	}
	s.settle(ctx)
}

// mark adds the finalizer to an enrollment before any certificate is requested for it, so that none stays valid after the
// enrollment without being revoked (J4). Errors are refusals.
func (s *Sweeper) mark(ctx context.Context, n *v1alpha1.AttestedNode) error {
	what, uid := "write AttestedNode "+n.Name, n.UID
	for range state.WriteAttempts {
		if n.Leaving() {
			return access.CheckShutOut(n)
		}
		if n.Revokes() {
			return nil
		}
		n.Finalizers = append(n.Finalizers, v1alpha1.RevokeCertificates)
		err := s.state.Cluster.Client.Update(ctx, n)
		if err == nil {
			return nil
		}
		if !apierrors.IsConflict(err) {
			return clusterview.Unavailable(what, err)
		}
		if err := s.state.Cluster.Client.Get(ctx, client.ObjectKeyFromObject(n), n); err != nil {
			return clusterview.Unavailable(what, err)
		}
		if n.UID != uid {
			return clusterview.Unavailable(what, errors.New("it has a new enrollment meanwhile"))
		}
	}
	return clusterview.Unavailable(what, fmt.Errorf("it changed %d times meanwhile", state.WriteAttempts))
}

// settle updates the list of nodes that may not write from the enrollments, without expired entries, and lets nodes file
// certificate requests again when their requests have been deleted.
func (s *Sweeper) settle(ctx context.Context) {
	if err := s.list.Settle(ctx, s.list.Unsettled()...); err != nil {
		s.state.Log.ErrorContext(ctx, "which nodes may write to the API could not be changed; trying again", "err", err)
	}
	l := s.list.Get()
	if l == nil {
		return
	}
	for _, node := range l.Nodes() {
		if !l.Entry(node).Paused || len(s.requests.FiledBy(node)) > 2*certificates.MaxRequests { // as many as stay at most
			continue
		}
		if err := s.list.SetPaused(ctx, node, false); err != nil {
			s.state.Log.ErrorContext(ctx, "a node still files no certificate requests; trying again", "node", node, "err", err)
		}
	}
}

// countRefused counts nodes that no longer fit, and those that were cloned. An attacker that impersonates joinservice can
// make a node count refusals, but not this process.
func (s *Sweeper) countRefused(nodes []*v1alpha1.AttestedNode) {
	s.refused.Reset()
	for _, r := range []attestv1.Reason{attestv1.Reason_REASON_POLICY_REFUSED, attestv1.Reason_REASON_EK_UNTRUSTED, attestv1.Reason_REASON_LOCK_FOREIGN, attestv1.Reason_REASON_CLOCK_WENT_BACK,
		attestv1.Reason_REASON_HARDWARE_UNTRUSTED, attestv1.Reason_REASON_HARDWARE_COLLATERAL, attestv1.Reason_REASON_HARDWARE_TCB} {
		s.refused.WithLabelValues(attest.ReasonName(r)).Set(0) // 0 is a value too: it shows that this joinservice counts
	}
	cloned := 0.0
	for _, n := range nodes {
		if meta.IsStatusConditionTrue(n.Status.Conditions, v1alpha1.ConditionCloned) {
			cloned++
		}
		if v := n.Status.LastVerdict; v != nil && !v.Accepted && !n.ShutOut() {
			s.refused.WithLabelValues(v.Reason).Inc()
		}
	}
	s.cloned.Set(cloned)
}

// look handles one enrollment, and returns how its node vanished; empty if it has not.
func (s *Sweeper) look(ctx context.Context, n *v1alpha1.AttestedNode) (how string, err error) {
	now := s.list.Clock().Earliest
	if now.IsZero() {
		return "", nil // nothing ends before the clocks are known
	}
	switch {
	case s.enrollments.Expired(n) && s.enrollments.Unfinished(n):
		return "", s.drop(ctx, n, "its ticket failed, and every certificate that was asked for with it has expired")
	case s.enrollments.Expired(n):
		return "", s.drop(ctx, n, "its machine's certificates have expired since it was released")
	case s.enrollments.Unfinished(n) || n.Status.ReleasedAt != nil:
		return "", nil
	}
	if s.state.HasNode(n.Name) {
		delete(s.missing, n.Name)
	} else if s.missing[n.Name].IsZero() {
		s.missing[n.Name] = now
	}
	how, why := s.howVanished(n, now)
	if err := s.report(ctx, n, how, why); err != nil || how == "" {
		return how, err
	}
	if s.mayEnd(n, now) {
		return how, s.drop(ctx, n, why)
	}
	return how, nil
}

// howVanished returns how a node vanished, and since when it shows no activity.
func (s *Sweeper) howVanished(n *v1alpha1.AttestedNode, now time.Time) (how, why string) {
	st := n.Status
	if st.Ticket == nil && st.LastVerdict == nil {
		return "", "" // the owner waits for its machine
	}
	last := lastSign(n)
	if since := s.missing[n.Name]; !since.IsZero() {
		joined := st.Ticket == nil && st.LastVerdict != nil || st.Ticket != nil && st.LastVerdict != nil && st.LastVerdict.Time.Sub(st.Ticket.IssuedAt.Time) > time.Minute
		switch {
		case joined && now.Sub(since) > s.cfg.VanishedAfter:
			return vanishedNodeGone, fmt.Sprintf("there is no Node since %s or before; the machine's last verdict is of %s", state.UTC(since), state.UTC(st.LastVerdict.Time.Time))
		case !joined && now.Sub(last) > s.cfg.VanishedAfter:
			return vanishedNeverCame, fmt.Sprintf("no Node came of the ticket of %s", state.UTC(last))
		}
		// A report is not withdrawn because this process has just started to observe.
		if c := meta.FindStatusCondition(st.Conditions, v1alpha1.ConditionVanished); c != nil && c.Status == metav1.ConditionTrue && c.Reason != vanishedSilent {
			return c.Reason, c.Message
		}
		return "", ""
	}
	if now.Sub(last) > s.cfg.VanishedAfter {
		return vanishedSilent, fmt.Sprintf("the machine attested last at %s; see muster-attester on it", state.UTC(last))
	}
	return "", ""
}

// lastSign returns when any activity of the machine was last seen.
func lastSign(n *v1alpha1.AttestedNode) time.Time {
	last := enroll.LastTicketActivity(n)
	if t := n.Status.Ticket; t != nil && t.IssuedAt.After(last) {
		last = t.IssuedAt.Time
	}
	if v := n.Status.LastVerdict; v != nil && v.Time.After(last) {
		last = v.Time.Time
	}
	return last
}

// report updates the condition, and emits an event when it changes.
func (s *Sweeper) report(ctx context.Context, n *v1alpha1.AttestedNode, how, why string) error {
	was := meta.FindStatusCondition(n.Status.Conditions, v1alpha1.ConditionVanished)
	vanished := was != nil && was.Status == metav1.ConditionTrue
	if how == "" && !vanished || vanished && was.Reason == how {
		return nil
	}
	next := metav1.Condition{Type: v1alpha1.ConditionVanished, Status: metav1.ConditionTrue, Reason: how, Message: why, LastTransitionTime: metav1.NewTime(s.state.Now()), ObservedGeneration: n.Generation}
	kind := state.Warning
	if how == "" {
		next.Status, next.Reason, next.Message, kind = metav1.ConditionFalse, "Present", "the node is there and its machine attests", state.Normal
	}
	live := n.DeepCopy()
	// Another way to vanish starts a new period.
	live.Status.Conditions = slices.DeleteFunc(live.Status.Conditions, func(c metav1.Condition) bool { return c.Type == next.Type })
	live.Status.Conditions = append(live.Status.Conditions, next)
	if err := s.state.Cluster.Client.Status().Update(ctx, live); err != nil {
		return err
	}
	s.state.Log.WarnContext(ctx, "a node's signs of life changed", "node", n.Name, "machine", n.Spec.MachineID, "how", next.Reason, "why", next.Message)
	s.state.Emit(ctx, n, kind, next.Reason, next.Message)
	return nil
}

// mayEnd is the rule by which enrollments end without the owner: none ends while a certificate of it can be valid (J4). One
// is issued with a ticket, or renewed on a verdict of at most VerdictMaxAge.
func (s *Sweeper) mayEnd(n *v1alpha1.AttestedNode, now time.Time) bool {
	c := meta.FindStatusCondition(n.Status.Conditions, v1alpha1.ConditionVanished)
	if s.cfg.ReleaseAfter == 0 || c == nil || c.Status != metav1.ConditionTrue || c.Reason == vanishedSilent {
		return false
	}
	if n.Spec.Role != v1alpha1.RoleWorker || n.ShutOut() || !enrollment.ByTicket(n) || s.state.HasNode(n.Name) {
		return false
	}
	since, last := c.LastTransitionTime.Time, lastSign(n)
	if last.After(since) {
		since = last // it has no Node, but its machine attests
	}
	return now.Sub(since) > s.cfg.ReleaseAfter && now.Sub(last) > s.state.CertificateLife+s.cfg.VerdictMaxAge+enroll.HoldMargin
}

// drop deletes an enrollment that holds nothing any more.
func (s *Sweeper) drop(ctx context.Context, n *v1alpha1.AttestedNode, why string) error {
	if err := s.record("deletion decided", n, why); err != nil {
		return err
	}
	if err := s.enrollments.Delete(ctx, n); err != nil {
		return err
	}
	s.state.Log.InfoContext(ctx, "an enrollment is deleted", "node", n.Name, "machine", n.Spec.MachineID, "why", why)
	s.state.Emit(ctx, n, state.Normal, "Deleted", why)
	return s.list.Settle(ctx, n.Name)
}

func (s *Sweeper) record(event string, n *v1alpha1.AttestedNode, why string) error {
	return s.state.Audit.Write(audit.Record{
		Service: "joinservice", Event: event, Reason: attest.ReasonName(attestv1.Reason_REASON_ACCEPTED), Detail: why,
		Node: n.Name, Machine: n.Spec.MachineID, Role: string(n.Spec.Role), Disk: n.Spec.DiskID,
	})
}
