// Package ownerview keeps what the owner sees of waiting machines and of nodes' certificates.
package ownerview

import (
	"context"
	"encoding/json"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/objects/waiting"
	"github.com/muster-k8s/muster/services/joinservice/enroll"
	"github.com/muster-k8s/muster/services/joinservice/state"
	"github.com/muster-k8s/muster/trust/attest"
)

const (
	// recordEvery is the default of [Records].Every. It also keeps these writes, on which nothing depends, from delaying a
	// ticket or its return.
	recordEvery = 5 * time.Second
	// refreshAfter is the age at which an entry of the same refusal is written again.
	refreshAfter = time.Minute
	// sweepEvery is how often expired entries are searched.
	sweepEvery = 10 * time.Minute
)

// Records is data for the owner on which nothing depends: waiting machines, and when nodes' certificates end. It is kept in
// memory, at most one entry for each machine and node, and written in the background.
type Records struct {
	// Every is how often the noted entries are written. [New] sets the default; another value must be set before
	// [Records.Serve].
	Every time.Duration

	state       *state.State
	enrollments *enroll.Enrollments

	mu    sync.Mutex
	wait  map[string]*waiting.Entry // by machine; nil if the machine was admitted
	certs map[string]enroll.Expiry  // by node
}

// New returns empty Records.
func New(s *state.State, e *enroll.Enrollments) *Records {
	return &Records{Every: recordEvery, state: s, enrollments: e, wait: map[string]*waiting.Entry{}, certs: map[string]enroll.Expiry{}}
}

// Refused notes that a machine with genuine evidence was refused. The only other data from the caller are what it asked for,
// its address, and texts of its event log and certificate.
func (r *Records) Refused(e waiting.Entry) {
	if e.Node == "" {
		if id, err := attest.ParseMachineID(e.Machine); err == nil {
			for _, n := range r.state.Cluster.Nodes.ByMachine(id) {
				e.Node, e.Role = n.Name, string(n.Spec.Role)
			}
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	noted := map[string]waiting.Entry{} // the limits are those of the list, so that it has room for what is noted
	for machine, o := range r.wait {
		if o != nil && machine != e.Machine {
			noted[machine] = *o
		}
	}
	evict, ok := waiting.Room(noted, e)
	if !ok {
		return
	}
	delete(r.wait, evict)
	r.wait[e.Machine] = &e
}

// Admitted notes that a machine has a ticket, and when the certificates in it end.
func (r *Records) Admitted(m attest.MachineID, node string, clientEnd, servingEnd time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.wait[m.String()] = nil
	r.certs[node] = enroll.Expiry{Client: clientEnd, Serving: servingEnd}
}

// Accepted notes that a machine attested again or got its disk's key after a reboot: it is removed from the list.
func (r *Records) Accepted(m attest.MachineID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.wait[m.String()] = nil
}

// Serve writes the noted entries until ctx ends. After a failure it tries
// again with the next entries; a lost record only affects a line of `muster status`.
func (r *Records) Serve(ctx context.Context) error {
	if err := r.state.Cluster.Await(ctx); err != nil {
		return err
	}
	tick := time.NewTicker(r.Every)
	defer tick.Stop()
	swept := time.Now()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		r.mu.Lock()
		wait, certs := r.wait, r.certs
		r.wait, r.certs = map[string]*waiting.Entry{}, map[string]enroll.Expiry{}
		r.mu.Unlock()
		if len(wait) > 0 || time.Since(swept) > sweepEvery {
			swept = time.Now()
			if err := r.writeWaiting(ctx, wait, swept); err != nil && ctx.Err() == nil {
				r.state.Log.WarnContext(ctx, "who waits cannot be written", "configmap", waiting.ConfigMap, "err", err)
			}
		}
		for node, e := range certs {
			if err := r.enrollments.WriteExpiry(ctx, node, e); err != nil && ctx.Err() == nil {
				r.state.Log.WarnContext(ctx, "when a node's certificates end cannot be written", "node", node, "err", err)
			}
		}
	}
}

// writeWaiting updates the ConfigMap with one read and at most one write. After a conflict with another replica, it starts
// again: the limits of entries apply to all replicas together.
func (r *Records) writeWaiting(ctx context.Context, news map[string]*waiting.Entry, now time.Time) error {
	var err error
	for range state.WriteAttempts {
		m := &corev1.ConfigMap{}
		if err := r.state.Cluster.Client.Get(ctx, client.ObjectKey{Namespace: clusterinfo.Namespace, Name: waiting.ConfigMap}, m); err != nil {
			return client.IgnoreNotFound(err)
		}
		patch := waitingPatch(m.Data, news, now)
		if len(patch) == 0 {
			return nil
		}
		b, merr := json.Marshal(map[string]any{"metadata": map[string]any{"resourceVersion": m.ResourceVersion}, "data": patch})
		if merr != nil {
			return merr
		}
		if err = r.state.Cluster.Client.Patch(ctx, m, client.RawPatch(types.MergePatchType, b)); !apierrors.IsConflict(err) {
			return err
		}
	}
	return err
}

// waitingPatch returns the keys that change, nil for those to delete.
func waitingPatch(have map[string]string, news map[string]*waiting.Entry, now time.Time) map[string]any {
	patch := map[string]any{}
	entries, bad := waiting.Parse(have)
	for _, key := range bad {
		patch[key] = nil
	}
	known := map[string]waiting.Entry{}
	for _, e := range entries {
		if e.Expired(now) {
			patch[e.Machine] = nil
			continue
		}
		known[e.Machine] = e
	}
	for _, machine := range slices.Sorted(maps.Keys(news)) {
		e := news[machine]
		old, listed := known[machine]
		delete(known, machine)
		if e == nil {
			if listed {
				patch[machine] = nil
			}
			continue
		}
		next := e.Short()
		next.Since = e.Last
		if next.Node == "" { // it was refused before it sent its name, and has sent it before
			next.Node, next.Role = old.Node, old.Role
		}
		if listed && old.Reason == next.Reason {
			next.Since = old.Since
			if same(old, next) && next.Last.Sub(old.Last) < refreshAfter {
				known[machine] = old
				continue
			}
		}
		text, err := next.Encode()
		evict, room := "", listed && (old.List != "") == (next.List != "") && old.Address == next.Address
		if !room {
			evict, room = waiting.Room(known, next)
		}
		switch {
		case room && err == nil:
			if evict != "" {
				delete(known, evict)
				patch[evict] = nil
			}
			patch[machine], known[machine] = text, next
		case listed:
			patch[machine] = nil // of the other kind, or of a source that has no room
		}
	}
	return patch
}

// same reports whether two entries of a machine are equal.
func same(a, b waiting.Entry) bool {
	b.Since, b.Last = a.Since, a.Last
	return a == b
}
