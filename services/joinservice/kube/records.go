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
	// recordEvery is how often what was noted is written. It also keeps these writes, which nothing
	// depends on, out of the way of a ticket's own and of its return.
	recordEvery = 5 * time.Second
	// refreshAfter is how old an entry may grow before the same refusal is written again.
	refreshAfter = time.Minute
	// sweepEvery is how often entries that have expired are looked for.
	sweepEvery = 10 * time.Minute
	// usedAfter is how long after it was first seen a request for a ticket is of no use any more: its signer had [signTimeout].
	usedAfter = 2 * signTimeout
)

// records is what the owner is shown and nothing depends on: who waits, and when nodes'
// certificates end. It is noted in memory, at most one entry for each machine and node, and written
// in the background.
type records struct {
	mu    sync.Mutex
	wait  map[string]*waiting.Entry // by machine; nil: it was admitted
	certs map[string]expiry         // by node
}

type expiry struct{ client, serving time.Time }

func newRecords() *records {
	return &records{wait: map[string]*waiting.Entry{}, certs: map[string]expiry{}}
}

// Refused notes that a machine with genuine evidence was refused. The caller says nothing else of it
// than what it asked for and where it came from.
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

// Rejoined notes that a machine got its disk's key after a reboot: it waits no more.
func (k *Kube) Rejoined(m attest.MachineID) {
	r := k.records
	r.mu.Lock()
	defer r.mu.Unlock()
	r.wait[m.String()] = nil
}

// discardRequests deletes the requests of tickets that are over, used or not. Those of a minute are one request to the API server, or two. What it does not
// delete, Kubernetes does after an hour.
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

// ServeRecords writes what was noted until ctx ends, and deletes used certificate requests. What fails is tried again with what is noted
// next; a record that is lost costs a line of `muster status`.
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

// writeWaiting brings the ConfigMap up to date with one read and at most one write. A merge patch of
// some keys cannot lose another replica's.
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

// waitingPatch says which keys change, nil for those that go.
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
			// Who is listed stays: else many machines could push out the one that the owner looks for.
		default:
			next := *e
			next.Since = e.Last
			if next.Node == "" { // it was refused before it could say, and has said it before
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

// writeExpiry puts the ends into the node's status, unless they are there: each replica sees the same
// certificates.
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

// withExpiry sets what is later than what stands, and says whether anything was. What the machine itself reports then takes its place.
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
