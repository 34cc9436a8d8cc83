// Package sweeping carries out what the owner has decided about nodes, and removes what is no longer used: it evicts nodes
// that are banned or removed, reports nodes that vanished, and deletes enrollments that hold nothing any more.
package sweeping

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/services/joinservice/access"
	"github.com/muster-k8s/muster/services/joinservice/certificates"
	"github.com/muster-k8s/muster/services/joinservice/state"
	"github.com/muster-k8s/muster/trust/attest"
)

// Enforcer enforces bans and removals: the node may not write, the machine's connections are closed, its Node and pods are
// deleted, and an enrollment that is being removed ends. After a ban is lifted the node may write again.
type Enforcer struct {
	state    *state.State
	list     *access.List
	requests *certificates.Requests
	evicting sync.Map // UIDs of enrollments whose eviction this replica has seen start, and not end

	mu      sync.Mutex
	shut    map[string]bool // by node name: the last state seen
	tasks   map[string]bool // names of nodes whose entry in the list is to be updated
	lifted  map[string]bool // names of nodes with the annotation of an interrupted `muster replace`, `forget` or `reset`, whose ban was lifted
	leaving map[string]bool // by node name: it is to be evicted
	changes []change        // not reported yet
	kick    chan struct{}
	kickCut chan struct{}
	// kickLeave wakes the evictions.
	kickLeave chan struct{}
}

// change is a change of the set of nodes that are shut out.
type change struct {
	node, machine string
	event         string // event of the audit log
	shut          bool
}

// NewEnforcer returns an Enforcer. Call it before the informers run.
func NewEnforcer(s *state.State, l *access.List, r *certificates.Requests) (*Enforcer, error) {
	e := &Enforcer{
		state: s, list: l, requests: r, shut: map[string]bool{}, tasks: map[string]bool{}, lifted: map[string]bool{}, leaving: map[string]bool{},
		kick: make(chan struct{}, 1), kickCut: make(chan struct{}, 1), kickLeave: make(chan struct{}, 1),
	}
	l.OnChange(e.listed)
	return e, errors.Join(
		clusterview.Watch(s.Cluster, e.set, e.remove),
		clusterview.Watch(s.Cluster, e.present, func(*corev1.Node) {}),
	)
}

func (e *Enforcer) set(n *v1alpha1.AttestedNode) {
	e.mu.Lock()
	defer e.mu.Unlock()
	was := e.shut[n.Name]
	switch {
	case n.ShutOut() && !was:
		e.changed(n, "machine shut out", true)
	case was && !n.ShutOut():
		e.changed(n, "machine let in again", false)
	}
	if unfinished(n) {
		e.lifted[n.Name] = true
		wake(e.kick)
	}
	if e.list.Differs(n.Name, n) {
		e.add(n.Name)
	}
	if n.ShutOut() {
		e.leaving[n.Name] = true
		wake(e.kickLeave)
	}
	e.shut[n.Name] = n.ShutOut()
}

func (e *Enforcer) changed(n *v1alpha1.AttestedNode, event string, shut bool) {
	e.changes = append(e.changes, change{n.Name, n.Spec.MachineID, event, shut})
	wake(e.kickCut)
}

// present handles a Node that appears under a name that is shut out.
func (e *Enforcer) present(n *corev1.Node) {
	e.mu.Lock()
	shut := e.shut[n.Name]
	e.mu.Unlock()
	if shut {
		e.queue(n.Name)
	}
}

// remove queues a removed node. Its connections stay open: one may be waiting for the answer that its ticket was returned,
// and no other request on it succeeds.
func (e *Enforcer) remove(n *v1alpha1.AttestedNode) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.shut[n.Name] {
		e.changed(n, "enrollment ended", false)
	}
	delete(e.shut, n.Name)
	if e.list.Differs(n.Name, nil) {
		e.add(n.Name)
	}
}

// listed queues nodes whose list entries and AttestedNodes differ: both arrive by separate informers, in any order.
func (e *Enforcer) listed() {
	if e.state.Cluster.Ready() != nil {
		return // Serve checks after the informers have synced
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, node := range e.list.Unsettled() {
		e.add(node)
	}
}

func (e *Enforcer) add(node string) {
	e.tasks[node] = true
	wake(e.kick)
}

func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default: // it is already awake
	}
}

// Serve works until ctx ends. cut closes the connections of a machine; it does not wait for an API server.
func (e *Enforcer) Serve(ctx context.Context, cut func(attest.MachineID)) error {
	var others sync.WaitGroup
	defer others.Wait()
	others.Go(func() { e.cut(ctx, cut) })
	others.Go(func() { e.evictions(ctx) })
	others.Go(func() {
		if e.state.Cluster.Await(ctx) == nil {
			e.listed()
		}
	})
	for {
		var retry <-chan time.Time
		if !e.pass(ctx) {
			retry = time.After(retryWait/2 + rand.N(retryWait)) //nolint:gosec // spreading load is no secret
		}
		select {
		case <-ctx.Done():
			return nil
		case <-e.kick:
		case <-retry:
		}
	}
}

func (e *Enforcer) cut(ctx context.Context, cut func(attest.MachineID)) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-e.kickCut:
		}
		e.mu.Lock()
		changes := e.changes
		e.changes = nil
		e.mu.Unlock()
		for _, c := range changes {
			if id, err := attest.ParseMachineID(c.machine); err == nil && c.shut {
				cut(id)
			}
		}
		for _, c := range changes {
			reason := attestv1.Reason_REASON_ACCEPTED
			if c.shut {
				reason = attestv1.Reason_REASON_BANNED
			}
			e.state.Audited(ctx, c.event, c.node, c.machine, reason)
		}
	}
}

// pass updates the list once for every node that is queued. It returns false if one of them failed.
func (e *Enforcer) pass(ctx context.Context) bool {
	e.mu.Lock()
	nodes, lifted := slices.Collect(maps.Keys(e.tasks)), e.lifted
	e.tasks, e.lifted = map[string]bool{}, map[string]bool{}
	e.mu.Unlock()
	var err error
	for node := range lifted {
		if failed := e.dropUnfinished(ctx, node); failed != nil {
			err = errors.Join(err, failed)
		} else {
			delete(lifted, node)
		}
	}
	if err = errors.Join(err, e.list.Settle(ctx, nodes...)); err == nil || ctx.Err() != nil {
		return true
	}
	e.state.Log.ErrorContext(ctx, "which nodes may write to the API could not be changed; trying again", "nodes", len(nodes), "err", err)
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, node := range nodes {
		e.tasks[node] = true
	}
	maps.Copy(e.lifted, lifted)
	return false
}

// dropUnfinished removes the annotations of an interrupted `muster replace`, `forget` or `reset` from an enrollment whose ban was lifted by hand.
func (e *Enforcer) dropUnfinished(ctx context.Context, node string) error {
	n := &v1alpha1.AttestedNode{}
	if err := e.state.Cluster.Client.Get(ctx, client.ObjectKey{Name: node}, n); apierrors.IsNotFound(err) || err == nil && !unfinished(n) {
		return nil
	} else if err != nil {
		return clusterview.Unavailable("read AttestedNode "+node, err)
	}
	delete(n.Annotations, v1alpha1.KeepNode)
	delete(n.Annotations, v1alpha1.Removing)
	if err := e.state.Cluster.Client.Update(ctx, n); err != nil && !apierrors.IsNotFound(err) {
		return clusterview.Unavailable("write AttestedNode "+node, err)
	}
	return nil
}
