package kube

import (
	"context"
	"maps"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/cluster"
	"github.com/muster-k8s/muster/trust/attest"
)

// Enforcer makes bans and forgotten nodes take effect: the node is struck from those that may
// write, and a banned machine's connections are closed. A ban that is lifted puts the node back.
type Enforcer struct {
	kube *Kube

	mu     sync.Mutex
	tasks  map[string]task // by node name; a newer one replaces an older
	banned map[string]bool
	kick   chan struct{}
}

type task struct {
	machine string
	kind    taskKind
}

type taskKind int

const (
	taskForget taskKind = iota + 1 // strike
	taskBan                        // strike, and close connections
	taskLift                       // put back
)

// NewEnforcer returns an Enforcer. Call it before the informers run.
func (k *Kube) NewEnforcer() (*Enforcer, error) {
	e := &Enforcer{kube: k, tasks: map[string]task{}, banned: map[string]bool{}, kick: make(chan struct{}, 1)}
	return e, cluster.Watch(k.cluster, e.set, e.remove)
}

func (e *Enforcer) set(n *v1alpha1.AttestedNode) {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch was := e.banned[n.Name]; {
	case n.Spec.Banned && !was:
		e.banned[n.Name] = true
		e.add(n, taskBan)
	case !n.Spec.Banned && was:
		delete(e.banned, n.Name)
		e.add(n, taskLift)
	case !n.Spec.Banned && e.tasks[n.Name].kind == taskForget:
		delete(e.tasks, n.Name) // it was forgotten and enrolled anew
	}
}

// remove strikes a forgotten node. That a node has no AttestedNode would not be reason enough: the
// enrolment of a joining machine may not have reached us yet. Its connections stay: one may be
// waiting for the very answer that its ticket was taken back, and no request on it is believed.
func (e *Enforcer) remove(n *v1alpha1.AttestedNode) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.banned, n.Name)
	e.add(n, taskForget)
}

func (e *Enforcer) add(n *v1alpha1.AttestedNode, kind taskKind) {
	e.tasks[n.Name] = task{n.Spec.MachineID, kind}
	select {
	case e.kick <- struct{}{}:
	default: // it is awake
	}
}

// Serve works until ctx ends. cut closes the connections of a machine.
func (e *Enforcer) Serve(ctx context.Context, cut func(attest.MachineID)) error {
	for {
		var retry <-chan time.Time
		if !e.pass(ctx, cut) {
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

func (e *Enforcer) pass(ctx context.Context, cut func(attest.MachineID)) bool {
	e.mu.Lock()
	tasks := maps.Clone(e.tasks)
	e.mu.Unlock()
	for _, t := range tasks { // before any request that could hold a ban up
		if id, err := attest.ParseMachineID(t.machine); err == nil && t.kind == taskBan {
			cut(id)
		}
	}
	ok := true
	for node, t := range tasks {
		if err := e.do(ctx, node, t); err != nil {
			if ctx.Err() != nil {
				return true
			}
			ok = false
			e.kube.log.ErrorContext(ctx, "who may write to the API could not be changed; trying again", "node", node, "err", err)
			continue
		}
		e.mu.Lock()
		if e.tasks[node] == t {
			delete(e.tasks, node)
		}
		e.mu.Unlock()
	}
	return ok
}

func (e *Enforcer) do(ctx context.Context, node string, t task) error {
	if t.kind == taskLift {
		_, err := e.kube.list(ctx, node, t.machine)
		return err
	}
	if e.kube.enrolled.get(node) != t.machine {
		return nil // struck already, or another machine's name by now
	}
	if err := e.kube.unlist(ctx, node, t.machine); err != nil {
		return err
	}
	e.kube.log.InfoContext(ctx, "node struck from those that may write", "node", node, "machine", t.machine)
	return nil
}
