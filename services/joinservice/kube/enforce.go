package kube

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/cluster"
	"github.com/muster-k8s/muster/trust/attest"
)

// Enforcer makes bans and deletions take effect: the node is struck from those that may write, the machine's connections are
// closed, its Node and pods are deleted, and an enrollment that is being deleted ends. A ban that is lifted puts the
// node back.
type Enforcer struct {
	kube *Kube

	mu      sync.Mutex
	struck  map[string]bool // by node name: what was last seen
	shut    map[string]bool
	tasks   map[string]bool // by node name: its place in the list is to be settled; true: put it back
	leaving map[string]bool // by node name: it is to be evicted
	changes []change        // that nobody was told of yet
	kick    chan struct{}
	kickCut chan struct{}
	// kickLeave wakes the evictions.
	kickLeave chan struct{}
}

// change is one in who is shut out.
type change struct {
	node, machine string
	event         string // as the audit log has it
	shut          bool
}

// NewEnforcer returns an Enforcer. Call it before the informers run.
func (k *Kube) NewEnforcer() (*Enforcer, error) {
	e := &Enforcer{
		kube: k, struck: map[string]bool{}, shut: map[string]bool{}, tasks: map[string]bool{}, leaving: map[string]bool{},
		kick: make(chan struct{}, 1), kickCut: make(chan struct{}, 1), kickLeave: make(chan struct{}, 1),
	}
	if err := errors.Join(
		cluster.Watch(k.cluster, e.set, e.remove),
		cluster.Watch(k.cluster, e.present, func(*corev1.Node) {}),
	); err != nil {
		return nil, err
	}
	k.enrolled.follow = e.listed
	return e, nil
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
	if _, pending := e.tasks[n.Name]; struck(n) != e.struck[n.Name] || keepsNode(n) && !pending {
		e.add(n.Name, was && !n.ShutOut())
	}
	if n.ShutOut() {
		e.leaving[n.Name] = true
		wake(e.kickLeave)
	}
	e.shut[n.Name], e.struck[n.Name] = n.ShutOut(), struck(n)
}

func (e *Enforcer) changed(n *v1alpha1.AttestedNode, event string, shut bool) {
	e.changes = append(e.changes, change{n.Name, n.Spec.MachineID, event, shut})
	wake(e.kickCut)
}

// present finds a Node that came, or was made by somebody, under a name that is shut out.
func (e *Enforcer) present(n *corev1.Node) {
	e.mu.Lock()
	shut := e.shut[n.Name]
	e.mu.Unlock()
	if shut {
		e.evict(n.Name)
	}
}

// remove strikes a forgotten node. Its connections stay: one may be waiting for the very answer that
// its ticket was taken back, and no request on it is believed.
func (e *Enforcer) remove(n *v1alpha1.AttestedNode) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.shut[n.Name] {
		e.changed(n, "enrollment ended", false)
	}
	delete(e.shut, n.Name)
	delete(e.struck, n.Name)
	e.add(n.Name, false)
}

// listed finds nodes that were banned or released while their ticket was being made: their names come
// to the list after we looked.
func (e *Enforcer) listed(nodes map[string]string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for node := range nodes {
		if e.struck[node] {
			e.add(node, false)
		}
	}
}

func (e *Enforcer) add(node string, put bool) {
	e.tasks[node] = put
	wake(e.kick)
}

func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default: // it is awake
	}
}

// Serve works until ctx ends. cut closes the connections of a machine; it waits for no API server.
func (e *Enforcer) Serve(ctx context.Context, cut func(attest.MachineID)) error {
	var others sync.WaitGroup
	defer others.Wait()
	others.Go(func() { e.cut(ctx, cut) })
	others.Go(func() { e.evictions(ctx) })
	for {
		var retry <-chan time.Time
		if !e.pass(ctx) {
			retry = time.After(retryApproval/2 + rand.N(retryApproval)) //nolint:gosec // spreading load is no secret
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
			e.kube.tellAuditor(ctx, c.event, c.node, c.machine, reason)
		}
	}
}

// pass settles every node that is to be settled once. It is false if one of them could not be.
func (e *Enforcer) pass(ctx context.Context) bool {
	e.mu.Lock()
	tasks := e.tasks
	e.tasks = map[string]bool{}
	e.mu.Unlock()
	left := maps.Clone(tasks)
	for node, put := range tasks {
		if err := e.kube.settle(ctx, node, put); err != nil {
			if ctx.Err() != nil {
				return true
			}
			e.kube.log.ErrorContext(ctx, "who may write to the API could not be changed; trying again", "node", node, "err", err)
			continue
		}
		delete(left, node)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for node, put := range left {
		if _, newer := e.tasks[node]; !newer {
			e.tasks[node] = put
		}
	}
	return len(left) == 0
}
