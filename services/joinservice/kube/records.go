package kube

import (
	"context"
	"encoding/json"
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/objects/waiting"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/trust/attest"
)

const (
	// recordEvery is how often the noted entries are written. It also keeps these writes, on which nothing depends, from
	// delaying a ticket or its return.
	recordEvery = 5 * time.Second
	// refreshAfter is the age at which an entry of the same refusal is written again.
	refreshAfter = time.Minute
	// sweepEvery is how often expired entries are searched.
	sweepEvery = 10 * time.Minute
	// usedAfter is how long after it was first seen a request for a ticket is no longer needed: its signer had
	// [signTimeout].
	usedAfter = 2 * signTimeout
)

// records is data for the owner on which nothing depends: waiting machines, and when nodes' certificates end. It is kept in
// memory, at most one entry for each machine and node, and written in the background.
type records struct {
	mu    sync.Mutex
	wait  map[string]*waiting.Entry // by machine; nil: the machine was admitted
	certs map[string]expiry         // by node
}

type expiry struct{ client, serving time.Time }

func newRecords() *records {
	return &records{wait: map[string]*waiting.Entry{}, certs: map[string]expiry{}}
}

// Refused notes that a machine with genuine evidence was refused. The only other data from the caller are what it asked for
// and its address.
func (k *Kube) Refused(e waiting.Entry) {
	if e.Node == "" {
		if id, err := attest.ParseMachineID(e.Machine); err == nil {
			for _, n := range k.cluster.Nodes.ByMachine(id) {
				e.Node, e.Role = n.Name, string(n.Spec.Role)
			}
		}
	}
	r := k.records
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, known := r.wait[e.Machine]; !known && len(r.wait) >= waiting.Max {
		return // the list has no room for more either
	}
	r.wait[e.Machine] = &e
}

// Admitted notes that a machine has a ticket, and when the certificates in it end.
func (k *Kube) Admitted(m attest.MachineID, node string, clientEnd, servingEnd time.Time) {
	r := k.records
	r.mu.Lock()
	defer r.mu.Unlock()
	r.wait[m.String()] = nil
	r.certs[node] = expiry{clientEnd, servingEnd}
}

// Rejoined notes that a machine got its disk's key after a reboot: it is removed from the list.
func (k *Kube) Rejoined(m attest.MachineID) {
	r := k.records
	r.mu.Lock()
	defer r.mu.Unlock()
	r.wait[m.String()] = nil
}

// discardRequests deletes the requests of finished tickets, used or not. Those of one minute take one or two requests to
// the API server. Kubernetes deletes the rest after an hour.
func (k *Kube) discardRequests(ctx context.Context) {
	for window, last := range k.requests.windows() {
		if k.now().Sub(last) < usedAfter {
			continue
		}
		if err := k.cluster.Client.DeleteAllOf(ctx, &certificatesv1.CertificateSigningRequest{}, client.MatchingLabels{clusterview.TicketWindow: window}); err != nil && ctx.Err() == nil {
			k.log.WarnContext(ctx, "used certificate requests are left; trying again", "label", clusterview.TicketWindow+"="+window, "err", err)
		}
	}
}

// ServeRecords writes the noted entries until ctx ends, and deletes used certificate requests. After a failure it tries
// again with the next entries; a lost record only affects a line of `muster status`.
func (k *Kube) ServeRecords(ctx context.Context) error {
	if err := k.cluster.Await(ctx); err != nil {
		return err
	}
	tick := time.NewTicker(recordEvery)
	defer tick.Stop()
	swept := time.Now()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		r := k.records
		r.mu.Lock()
		wait, certs := r.wait, r.certs
		r.wait, r.certs = map[string]*waiting.Entry{}, map[string]expiry{}
		r.mu.Unlock()
		if len(wait) > 0 || time.Since(swept) > sweepEvery {
			swept = time.Now()
			if err := k.writeWaiting(ctx, wait, swept); err != nil && ctx.Err() == nil {
				k.log.WarnContext(ctx, "who waits cannot be written", "configmap", waiting.ConfigMap, "err", err)
			}
		}
		k.discardRequests(ctx)
		for node, e := range certs {
			if err := k.writeExpiry(ctx, node, e); err != nil && ctx.Err() == nil {
				k.log.WarnContext(ctx, "when a node's certificates end cannot be written", "node", node, "err", err)
			}
		}
	}
}

// writeWaiting updates the ConfigMap with one read and at most one write. A merge patch of some keys cannot overwrite
// another replica's.
func (k *Kube) writeWaiting(ctx context.Context, news map[string]*waiting.Entry, now time.Time) error {
	m := &corev1.ConfigMap{}
	if err := k.cluster.Client.Get(ctx, client.ObjectKey{Namespace: clusterinfo.Namespace, Name: waiting.ConfigMap}, m); err != nil {
		return client.IgnoreNotFound(err)
	}
	patch := waitingPatch(m.Data, news, now)
	if len(patch) == 0 {
		return nil
	}
	b, err := json.Marshal(map[string]any{"data": patch})
	if err != nil {
		return err
	}
	return k.cluster.Client.Patch(ctx, m, client.RawPatch(types.MergePatchType, b))
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
	for machine, e := range news {
		old, listed := known[machine]
		switch {
		case e == nil && listed:
			patch[machine] = nil
			delete(known, machine)
		case e == nil:
		case !listed && len(known) >= waiting.Max:
			// Listed machines stay: otherwise many machines could displace the one that the owner looks for.
		default:
			next := *e
			next.Since = e.Last
			if next.Node == "" { // it was refused before it sent its name, and has sent it before
				next.Node, next.Role = old.Node, old.Role
			}
			if listed && old.Reason == next.Reason {
				next.Since = old.Since
				if old.Node == next.Node && old.Role == next.Role && next.Last.Sub(old.Last) < refreshAfter {
					continue
				}
			}
			if text, err := next.Encode(); err == nil {
				patch[machine], known[machine] = text, next
			}
		}
	}
	return patch
}

// writeExpiry writes the ends into the node's status, unless they are there: each replica sees the same certificates.
func (k *Kube) writeExpiry(ctx context.Context, node string, e expiry) error {
	n := k.cluster.Nodes.ByName(node)
	if n == nil || !withExpiry(n.Status.DeepCopy(), e) {
		return nil
	}
	return k.writeStatus(ctx, n.DeepCopy(), func(s *v1alpha1.AttestedNodeStatus) error {
		withExpiry(s, e)
		return nil
	})
}

// withExpiry sets the values that are later than the present ones, and reports whether any was. Values that the machine
// itself reports replace them.
func withExpiry(s *v1alpha1.AttestedNodeStatus, e expiry) (changed bool) {
	set := func(to **metav1.Time, end time.Time) {
		if !end.IsZero() && (*to == nil || end.Unix() > (*to).Unix()) {
			*to, changed = new(metav1.NewTime(end)), true
		}
	}
	if s.Certificates == nil {
		s.Certificates = &v1alpha1.NodeCertificates{}
	}
	set(&s.Certificates.ClientExpiresAt, e.client)
	set(&s.Certificates.ServingExpiresAt, e.serving)
	return changed
}
