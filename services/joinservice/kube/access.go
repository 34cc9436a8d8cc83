package kube

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
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/enrollment"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/services/joinservice/nodecert"
	"github.com/muster-k8s/muster/trust/attest"
)

// accessBatch bounds how many nodes one write of the list is about.
const accessBatch = 64

// revokedWithin is how much earlier a stored revocation may end than the one that this replica would write, and still count
// as the same.
const revokedWithin = 10 * time.Minute

// accessView is the latest informer state of the list of nodes that may not write.
type accessView struct {
	follow func() // called after each change; set before the informers run, or nil

	mu       sync.RWMutex
	list     *nodeaccess.List
	controls []string
}

// entry returns the list's entry of a node, and false if no list has been seen.
func (v *accessView) entry(node string) (nodeaccess.Entry, bool) {
	v.mu.RLock()
	defer v.mu.RUnlock()
	if v.list == nil {
		return nodeaccess.Entry{}, false
	}
	return v.list.Entry(node), true
}

// get returns the list, which the caller must not change; nil if none has been seen.
func (v *accessView) get() *nodeaccess.List {
	v.mu.RLock()
	defer v.mu.RUnlock()
	return v.list
}

// controlPlanes returns the listed control planes. The slice must not be changed.
func (v *accessView) controlPlanes() []string {
	v.mu.RLock()
	defer v.mu.RUnlock()
	return v.controls
}

func (v *accessView) set(l *nodeaccess.List) {
	var controls []string
	if l != nil {
		controls = slices.DeleteFunc(l.Nodes(), func(name string) bool { return !l.Entry(name).ControlPlane })
	}
	v.mu.Lock()
	v.list, v.controls = l, controls
	v.mu.Unlock()
	if v.follow != nil {
		v.follow()
	}
}

// setAccess stores the list and queues the waiting certificate requests again: one may wait for its certificate to be
// allowed.
func (k *Kube) setAccess(m *corev1.ConfigMap) {
	l, err := nodeaccess.Parse(m.Data)
	if err != nil { // admission evaluates the text as it is
		k.log.Error("the list of nodes that may not write cannot be read, so it is not changed; correct it by hand", "err", err)
		return
	}
	k.access.set(l)
	k.requests.wakeAll()
}

func (k *Kube) present(node string) enrollment.Present {
	p := k.nodes.get(node)
	return enrollment.Present{Is: p.uid != "", ControlPlane: p.controlPlane}
}

// needsAccess reports whether the list and the AttestedNode of a node differ, as far as this replica knows.
func (k *Kube) needsAccess(node string, n *v1alpha1.AttestedNode) bool {
	l := k.access.get()
	if l == nil {
		return false // no node writes without it
	}
	have := l.Entry(node)
	return !enrollment.Access(have, n, k.present(node), l.MembersOnly, k.clock()).Equal(have)
}

// unsettled returns the nodes whose list entries and AttestedNodes differ.
func (k *Kube) unsettled() []string {
	var out []string
	l := k.access.get()
	if l == nil {
		return nil
	}
	for _, n := range k.cluster.Nodes.All() {
		if k.needsAccess(n.Name, n) {
			out = append(out, n.Name)
		}
	}
	for _, node := range l.Nodes() {
		if k.cluster.Nodes.ByName(node) == nil && k.needsAccess(node, nil) {
			out = append(out, node)
		}
	}
	return out
}

// settle updates the list of nodes that may not write from their AttestedNodes at the API server (J4). Code that changes an
// AttestedNode calls it afterwards; [Enforcer] calls it for changes by others.
func (k *Kube) settle(ctx context.Context, nodes ...string) error {
	k.lookAtClocks(ctx)
	batch := accessBatch
	var full error
	for len(nodes) > 0 {
		some := nodes[:min(len(nodes), batch)]
		was := k.access.get() // read first: the informer may be as quick as the answer
		now, err := enrollment.Reconcile(ctx, k.cluster.Client, k.present, k.clock(), some...)
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
			if suspended := now.Entry(node).Suspended; was != nil && was.Entry(node).Suspended != suspended {
				k.log.InfoContext(ctx, "whether a node may write to the API changed", "node", node, "may", !suspended)
				n := &v1alpha1.AttestedNode{}
				if err := k.cluster.Client.Get(ctx, client.ObjectKey{Name: node}, n); err == nil {
					k.showConditions(ctx, n, suspended)
				}
			}
		}
	}
	if full != nil {
		return clusterview.Unavailable("write", full)
	}
	return nil
}

// showConditions updates the conditions of an AttestedNode from its other fields and the list. Conditions are for people:
// if a write fails, the sweeper repeats it later.
func (k *Kube) showConditions(ctx context.Context, n *v1alpha1.AttestedNode, suspended bool) {
	if !enrollment.SetConditions(n, suspended) {
		return
	}
	if err := k.cluster.Client.Status().Update(ctx, n); err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
		k.log.WarnContext(ctx, "the conditions of an AttestedNode could not be written; trying again", "node", n.Name, "err", err)
	}
}

// revoke revokes all certificates of the name of an enrollment that is being removed, before the name can be given to
// another machine (J4).
func (k *Kube) revoke(ctx context.Context, n *v1alpha1.AttestedNode) error {
	changed := false
	k.lookAtClocks(ctx)
	at := k.clock().Latest
	if n.DeletionTimestamp.After(at) {
		at = n.DeletionTimestamp.Time
	}
	_, err := enrollment.Change(ctx, k.cluster.Client, func(ctx context.Context, l *nodeaccess.List) error {
		if now, err := k.shutOut(ctx, n.Name, n.UID); now == nil || err != nil {
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
		k.log.InfoContext(ctx, "an enrollment is being removed: its certificates are revoked", "node", n.Name, "machine", n.Spec.MachineID)
	}
	return nil
}

// allow lets a certificate write that was signed for the machine of an enrollment whose name has revoked certificates. Its
// errors are refusals: BANNED if the owner has meanwhile banned the machine or removed its name.
func (k *Kube) allow(ctx context.Context, n *v1alpha1.AttestedNode, c *x509.Certificate) error {
	taken := attest.Refuse(attestv1.Reason_REASON_BANNED, "the owner took the name %q from the machine", n.Name)
	_, err := enrollment.Change(ctx, k.cluster.Client, func(ctx context.Context, l *nodeaccess.List) error {
		now := &v1alpha1.AttestedNode{}
		if err := k.cluster.Client.Get(ctx, client.ObjectKeyFromObject(n), now); apierrors.IsNotFound(err) {
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

// pauseRequests makes admission refuse certificate requests of a node until the [Sweeper] finds that most of them are
// deleted.
func (k *Kube) pauseRequests(ctx context.Context, node string) error {
	if e, known := k.access.entry(node); !known || e.Paused {
		return nil
	}
	if err := k.setPaused(ctx, node, true); err != nil {
		return err
	}
	k.log.WarnContext(ctx, "a node files certificate requests faster than they can be deleted; admission takes none of it for a minute", "node", node)
	return nil
}

func (k *Kube) setPaused(ctx context.Context, node string, paused bool) error {
	_, err := enrollment.Change(ctx, k.cluster.Client, func(_ context.Context, l *nodeaccess.List) error {
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

// credentials returns the IDs of the certificates that authenticated the request when it was filed. Clients cannot forge
// them: the API server sets them.
func credentials(o *certificatesv1.CertificateSigningRequest) []string {
	return o.Spec.Extra[nodeaccess.CredentialID]
}

// checkCredential makes a request wait if it was filed with a revoked certificate: otherwise the next machine of the name
// would have it approved (J4). The certificate may be one that is about to be allowed.
func (a *Approver) checkCredential(node string, o *certificatesv1.CertificateSigningRequest) error {
	e, _ := a.kube.access.entry(node)
	if e.Revoked == nil || e.Revoked.Allows(credentials(o)...) {
		return nil
	}
	return &notYet{attest.Refuse(attestv1.Reason_REASON_CERTIFICATE_RETIRED, "it was filed with a certificate of a machine that had the name %q before", node)}
}

// allowRenewed allows the certificate that a kubelet got by means of an allowed one. It returns false if that failed.
func (a *Approver) allowRenewed(ctx context.Context, o kubelets) bool {
	if o.listed || o.Spec.SignerName != signerOf[nodecert.Client] || len(o.Status.Certificate) == 0 {
		return true
	}
	node := filer(o.CertificateSigningRequest)
	if e, _ := a.kube.access.entry(node); e.Revoked == nil || !e.Revoked.Allows(credentials(o.CertificateSigningRequest)...) {
		return true
	}
	if err := a.kube.allowSigned(ctx, node, o.CertificateSigningRequest); err != nil {
		a.kube.log.ErrorContext(ctx, "a renewed certificate cannot be allowed, so its node cannot write with it; trying again", "request", o.Name, "node", node, "err", err)
		return false
	}
	a.kube.requests.note(o, func(k *kubelets) { k.listed = true })
	return true
}

func (k *Kube) allowSigned(ctx context.Context, node string, o *certificatesv1.CertificateSigningRequest) error {
	block, _ := pem.Decode(o.Status.Certificate)
	if block == nil {
		return nil // no client can authenticate with it
	}
	c, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil //nolint:nilerr // as above
	}
	_, err = enrollment.Change(ctx, k.cluster.Client, func(_ context.Context, l *nodeaccess.List) error {
		if e := l.Entry(node); e.Revoked != nil && e.Revoked.Allows(credentials(o)...) { // otherwise it was revoked meanwhile
			l.Set(node, e.Allow(nodeaccess.ID(c)))
		}
		return nil
	})
	return err
}
