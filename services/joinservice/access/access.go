// Package access maintains the list of nodes that may not write to the Kubernetes API (ConfigMap muster-node-access), which
// admission evaluates.
package access

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"slices"
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/enrollment"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/services/joinservice/state"
	"github.com/muster-k8s/muster/trust/attest"
)

// accessBatch limits the nodes in one write of the list.
const accessBatch = 64

// revokedWithin is how much earlier a stored revocation may end than the one that this replica would write, and still count
// as the same.
const revokedWithin = 10 * time.Minute

// List is the latest informer state of the list, and writes to it at the API server.
type List struct {
	state *state.State
	// follow are called after each change.
	follow []func()

	mu       sync.RWMutex
	list     *nodeaccess.List
	controls []string

	clocks clocks
}

// Watch returns the list, and registers its informer.
func Watch(s *state.State) (*List, error) {
	a := &List{state: s}
	return a, clusterview.WatchConfigMap(s.Cluster, nodeaccess.ConfigMap, a.parse, func(*corev1.ConfigMap) { a.set(nil) })
}

// OnChange makes f be called after each change of the list. Call it before the informers run.
func (a *List) OnChange(f func()) { a.follow = append(a.follow, f) }

// Entry returns the list's entry of a node, and false if no list has been seen.
func (a *List) Entry(node string) (nodeaccess.Entry, bool) {
	a.mu.RLock()
	defer a.mu.RUnlock()
	if a.list == nil {
		return nodeaccess.Entry{}, false
	}
	return a.list.Entry(node), true
}

// Get returns the list, which the caller must not change; nil if none has been seen.
func (a *List) Get() *nodeaccess.List {
	a.mu.RLock()
	defer a.mu.RUnlock()
	return a.list
}

// controlPlanes returns the listed control planes. The slice must not be changed.
func (a *List) controlPlanes() []string {
	a.mu.RLock()
	defer a.mu.RUnlock()
	return a.controls
}

func (a *List) set(list *nodeaccess.List) {
	var controls []string
	if list != nil {
		controls = slices.DeleteFunc(list.Nodes(), func(name string) bool { return !list.Entry(name).ControlPlane })
	}
	a.mu.Lock()
	a.list, a.controls = list, controls
	a.mu.Unlock()
	for _, f := range a.follow {
		f()
	}
}

func (a *List) parse(m *corev1.ConfigMap) {
	list, err := nodeaccess.Parse(m.Data)
	if err != nil { // admission evaluates the text as it is
		a.state.Log.Error("the list of nodes that may not write cannot be read, so it is not changed; correct it by hand", "err", err)
		return
	}
	a.set(list)
}

// Differs reports whether the list and the AttestedNode of a node differ, as far as this replica knows.
func (a *List) Differs(node string, n *v1alpha1.AttestedNode) bool {
	l := a.Get()
	if l == nil {
		return false // no node writes without it
	}
	have := l.Entry(node)
	return !enrollment.Access(have, n, a.state.Present(node), l.MembersOnly, a.Clock()).Equal(have)
}

// Unsettled returns the nodes whose list entries and AttestedNodes differ.
func (a *List) Unsettled() []string {
	var out []string
	l := a.Get()
	if l == nil {
		return nil
	}
	for _, n := range a.state.Cluster.Nodes.All() {
		if a.Differs(n.Name, n) {
			out = append(out, n.Name)
		}
	}
	for _, node := range l.Nodes() {
		if a.state.Cluster.Nodes.ByName(node) == nil && a.Differs(node, nil) {
			out = append(out, node)
		}
	}
	return out
}

// Settle updates the list of nodes that may not write from their AttestedNodes at the API server (J4). Code that changes an
// AttestedNode calls it afterwards; the Enforcer calls it for changes by others.
func (a *List) Settle(ctx context.Context, nodes ...string) error {
	a.LookAtClocks(ctx)
	batch := accessBatch
	var full error
	for len(nodes) > 0 {
		some := nodes[:min(len(nodes), batch)]
		was := a.Get() // read first: the informer may be as quick as the answer
		now, err := enrollment.Reconcile(ctx, a.state.Cluster.Client, a.state.Present, a.Clock(), some...)
		switch {
		case apierrors.IsNotFound(err):
			return nil // without the list no node writes
		case errors.Is(err, nodeaccess.ErrFull) && len(some) > 1: // a ban may fit where a ban and a revocation together do not
			batch = 1
			continue
		case errors.Is(err, nodeaccess.ErrFull):
			full, nodes = err, nodes[1:]
			continue
		case err != nil:
			return clusterview.Unavailable("write", err)
		}
		nodes = nodes[len(some):]
		for _, node := range some {
			if e := now.Entry(node); was != nil && was.Entry(node).Suspended != e.Suspended {
				a.state.Log.InfoContext(ctx, "whether a node may write to the API changed", "node", node, "may", !e.Suspended)
				n := &v1alpha1.AttestedNode{}
				if err := a.state.Cluster.Client.Get(ctx, client.ObjectKey{Name: node}, n); err == nil {
					a.ShowConditions(ctx, n, e)
				}
			}
		}
	}
	if full != nil {
		return clusterview.Unavailable("write", full)
	}
	return nil
}

// ShowConditions updates the conditions of an AttestedNode from its other fields and its entry in the list. Conditions are for people:
// if a write fails, the sweeper repeats it later.
func (a *List) ShowConditions(ctx context.Context, n *v1alpha1.AttestedNode, have nodeaccess.Entry) {
	if !enrollment.SetConditions(n, have) {
		return
	}
	if err := a.state.Cluster.Client.Status().Update(ctx, n); err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
		a.state.Log.WarnContext(ctx, "the conditions of an AttestedNode could not be written; trying again", "node", n.Name, "err", err)
	}
}

// Revoke revokes all certificates of the name of an enrollment that is being removed, before the name can be given to
// another machine (J4).
func (a *List) Revoke(ctx context.Context, n *v1alpha1.AttestedNode) error {
	changed := false
	a.LookAtClocks(ctx)
	at := a.Clock().Latest
	if n.DeletionTimestamp.After(at) {
		at = n.DeletionTimestamp.Time
	}
	_, err := enrollment.Change(ctx, a.state.Cluster.Client, func(ctx context.Context, l *nodeaccess.List) error {
		if now, err := a.ShutOut(ctx, n.Name, n.UID); now == nil || err != nil {
			return err
		}
		e := l.Entry(n.Name)
		asked := e.Revoke(at.Add(-revokedWithin)).Revoked // a replica whose clock is behind may have written first
		done := e.Revoked != nil && len(e.Revoked.Allowed) == 0 && !e.Revoked.Until.Before(asked.Until)
		if changed = !done || !e.Suspended; !changed {
			return nil
		}
		e = e.Revoke(at)
		e.Suspended = true // until the enrollment is removed
		l.Set(n.Name, e)
		return nil
	})
	if apierrors.IsNotFound(err) {
		return nil // without the list no node writes
	}
	if err != nil {
		return clusterview.Unavailable("write", err)
	}
	if changed {
		a.state.Log.InfoContext(ctx, "an enrollment is being removed: its certificates are revoked", "node", n.Name, "machine", n.Spec.MachineID)
	}
	return nil
}

// Allow lets a certificate write that was signed for the machine of an enrollment whose name has revoked certificates. Its
// errors are refusals: BANNED if the owner has meanwhile banned the machine or removed its name.
func (a *List) Allow(ctx context.Context, n *v1alpha1.AttestedNode, c *x509.Certificate) error {
	taken := attest.Refuse(attestv1.Reason_REASON_BANNED, "the owner took the name %q from the machine", n.Name)
	_, err := enrollment.Change(ctx, a.state.Cluster.Client, func(ctx context.Context, l *nodeaccess.List) error {
		now := &v1alpha1.AttestedNode{}
		if err := a.state.Cluster.Client.Get(ctx, client.ObjectKeyFromObject(n), now); apierrors.IsNotFound(err) {
			return taken
		} else if err != nil {
			return clusterview.Unavailable("read AttestedNode "+n.Name, err)
		}
		if now.UID != n.UID || now.ShutOut() || now.Spec.MachineID != n.Spec.MachineID {
			return taken
		}
		l.Set(n.Name, l.Entry(n.Name).Allow(nodeaccess.ID(c)))
		return nil
	})
	switch {
	case errors.Is(err, taken):
		return taken
	case apierrors.IsNotFound(err):
		return nil // without the list no node writes
	case err != nil:
		return clusterview.Unavailable("write", err)
	}
	return nil
}

// PauseRequests makes admission refuse certificate requests of a node until the Sweeper finds that most of them are
// deleted.
func (a *List) PauseRequests(ctx context.Context, node string) error {
	if e, known := a.Entry(node); !known || e.Paused {
		return nil
	}
	if err := a.SetPaused(ctx, node, true); err != nil {
		return err
	}
	a.state.Log.WarnContext(ctx, "a node files certificate requests faster than they can be deleted; admission takes none of it for a minute", "node", node)
	return nil
}

// SetPaused sets whether admission refuses certificate requests of a node.
func (a *List) SetPaused(ctx context.Context, node string, paused bool) error {
	_, err := enrollment.Change(ctx, a.state.Cluster.Client, func(_ context.Context, l *nodeaccess.List) error {
		e := l.Entry(node)
		e.Paused = paused
		l.Set(node, e)
		return nil
	})
	if err != nil && !apierrors.IsNotFound(err) {
		return clusterview.Unavailable("write", err)
	}
	return nil
}

// AllowSigned lets the certificate that was signed for a request write, if the request was filed with an allowed one.
func (a *List) AllowSigned(ctx context.Context, node string, o *certificatesv1.CertificateSigningRequest) error {
	block, _ := pem.Decode(o.Status.Certificate)
	if block == nil {
		return nil // no client can authenticate with it
	}
	c, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil //nolint:nilerr // as above
	}
	_, err = enrollment.Change(ctx, a.state.Cluster.Client, func(_ context.Context, l *nodeaccess.List) error {
		if e := l.Entry(node); e.Revoked != nil && e.Revoked.Allows(Credentials(o)...) { // otherwise it was revoked meanwhile
			l.Set(node, e.Allow(nodeaccess.ID(c)))
		}
		return nil
	})
	return err
}

// ShutOut reads an enrollment that is shut out; nil if there is none any more. An empty uid matches any.
func (a *List) ShutOut(ctx context.Context, node string, uid types.UID) (*v1alpha1.AttestedNode, error) {
	n := &v1alpha1.AttestedNode{}
	err := a.state.Cluster.Client.Get(ctx, client.ObjectKey{Name: node}, n)
	if apierrors.IsNotFound(err) || err == nil && (!n.ShutOut() || uid != "" && n.UID != uid) {
		return nil, nil //nolint:nilnil // none is no error
	}
	if err != nil {
		return nil, clusterview.Unavailable("read AttestedNode "+node, err)
	}
	return n, nil
}

// CheckShutOut refuses all requests of a machine whose enrollment is banned or being deleted. A deletion counts from its
// start, before the certificates are revoked: what the machine gets meanwhile would be valid after it (J4).
func CheckShutOut(n *v1alpha1.AttestedNode) error {
	switch {
	case n.Leaving():
		return attest.Refuse(attestv1.Reason_REASON_BANNED, "the enrollment of node %q is being deleted", n.Name)
	case n.Spec.Banned:
		return attest.Refuse(attestv1.Reason_REASON_BANNED, "node %q is banned", n.Name)
	}
	return nil
}

// Credentials returns the IDs of the certificates that authenticated the request when it was filed. Clients cannot forge
// them: the API server sets them.
func Credentials(o *certificatesv1.CertificateSigningRequest) []string {
	return o.Spec.Extra[nodeaccess.CredentialID]
}
