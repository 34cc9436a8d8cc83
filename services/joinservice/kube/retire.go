package kube

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/clusterinfo"
	"github.com/muster-k8s/muster/internal/enrolled"
	"github.com/muster-k8s/muster/services/joinservice/nodecert"
	"github.com/muster-k8s/muster/trust/attest"
)

// A name that the owner took from a machine has a retirement in the ConfigMap: only certificates that
// are listed there write under the name (J4). joinservice lists those that it hands out from then on:
// with a ticket, and when a kubelet that holds a listed one has renewed it.

// Vouch lists a certificate of the ticket if older ones of the node's name are retired. Its errors are
// refusals.
//
// The owner may take the name away at this very moment: bans the enrolment or deletes it, then strikes the node. So
// the enrolment is read anew, after the node was listed. If there is neither, the strike is yet to come,
// and either finds the certificate or keeps it from being listed.
func (e *Enrolment) Vouch(ctx context.Context, c *x509.Certificate) error {
	if !e.retired {
		return nil
	}
	var now v1alpha1.AttestedNode
	err := e.kube.cluster.Client.Get(ctx, client.ObjectKeyFromObject(e.node), &now)
	if client.IgnoreNotFound(err) != nil {
		return unavailable("read AttestedNode "+e.node.Name, err)
	}
	gone := err != nil || now.UID != e.node.UID || now.ShutOut() || now.Spec.MachineID != e.node.Spec.MachineID
	if !gone {
		err = e.kube.vouch(ctx, e.node.Name, enrolled.ID(c), func(m *corev1.ConfigMap, _ enrolled.Retirement) bool {
			return m.Data[e.node.Name] == e.node.Spec.MachineID
		})
		if !errors.Is(err, errStruck) {
			return err
		}
	}
	return errors.Join(attest.Refuse(attestv1.Reason_REASON_BANNED, "the owner took the name %q from the machine", e.node.Name), e.kube.unlist(ctx, e.node.Name, e.node.Spec.MachineID))
}

// errStruck says that a certificate may not be listed any more.
var errStruck = errors.New("struck meanwhile")

// vouch lists a certificate if still says so of what is really there, by compare-and-swap on that: the
// view may be behind.
func (k *Kube) vouch(ctx context.Context, node, id string, still func(*corev1.ConfigMap, enrolled.Retirement) bool) error {
	for range writeAttempts {
		m := &corev1.ConfigMap{}
		if err := k.cluster.Client.Get(ctx, client.ObjectKey{Namespace: clusterinfo.Namespace, Name: enrolled.ConfigMap}, m); err != nil {
			return unavailable("read ConfigMap "+enrolled.ConfigMap, err)
		}
		old, there := m.Data[enrolled.Key(node)]
		if !there {
			return nil
		}
		r, err := enrolled.ParseRetirement(old)
		if err != nil {
			return attest.Refuse(attestv1.Reason_REASON_INTERNAL, "ConfigMap %s: %s: %w", enrolled.ConfigMap, enrolled.Key(node), err)
		}
		if r.Admits(id) {
			return nil
		}
		if !still(m, r) {
			return errStruck
		}
		path := "/data/" + enrolled.Key(node) // no character in it needs an escape (RFC 6901)
		change := map[string]string{"op": "replace", "path": path, "value": r.With(id).String()}
		if r.Lapsed(time.Now()) {
			change = map[string]string{"op": "remove", "path": path}
		}
		patch, err := json.Marshal([]map[string]string{{"op": "test", "path": "/metadata/resourceVersion", "value": m.ResourceVersion}, change})
		if err != nil {
			return err
		}
		_, err = k.patchEnrolled(ctx, types.JSONPatchType, patch)
		if err == nil {
			return nil
		}
		if !apierrors.IsInvalid(err) && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) { // another replica was faster
			return unavailable("write ConfigMap "+enrolled.ConfigMap, err)
		}
	}
	return unavailable("write ConfigMap "+enrolled.ConfigMap, fmt.Errorf("it changed %d times meanwhile", writeAttempts))
}

// retirement gives what the view knows of a node's older certificates. One that cannot be read admits
// nobody.
func (v *enrolledView) retirement(node string) (r enrolled.Retirement, there bool) {
	v.mu.RLock()
	text, there := v.data[enrolled.Key(node)]
	v.mu.RUnlock()
	if there {
		r, _ = enrolled.ParseRetirement(text)
	}
	return r, there
}

// credentials says which certificate the API server saw when a request was filed. Nobody can write
// that by hand: the API server sets it.
func credentials(o *certificatesv1.CertificateSigningRequest) []string {
	return o.Spec.Extra[enrolled.CredentialID]
}

// checkCredential lets a request wait that was filed with a certificate which is retired: the
// name's next machine must not have it approved (J4). It may be one that is about to be listed.
func (a *Approver) checkCredential(node string, o *certificatesv1.CertificateSigningRequest) error {
	r, retired := a.kube.enrolled.retirement(node)
	if !retired || r.Admits(credentials(o)...) {
		return nil
	}
	return &notYet{attest.Refuse(attestv1.Reason_REASON_CERTIFICATE_RETIRED, "it was filed with a certificate of a machine that had the name %q before", node)}
}

// vouchRenewed lists the certificate that a kubelet got for a listed one. It is false if that could not be done.
func (a *Approver) vouchRenewed(ctx context.Context, o kubelets) bool {
	if o.listed || o.Spec.SignerName != signerOf[nodecert.Client] || len(o.Status.Certificate) == 0 {
		return true
	}
	node := filer(o.CertificateSigningRequest)
	retirement, retired := a.kube.enrolled.retirement(node)
	if !retired || !retirement.Admits(credentials(o.CertificateSigningRequest)...) {
		return true
	}
	if err := a.kube.vouchSigned(ctx, node, o.CertificateSigningRequest); err != nil && !errors.Is(err, errStruck) {
		a.kube.log.ErrorContext(ctx, "a renewed certificate cannot be listed, so its node cannot write with it; trying again", "request", o.Name, "node", node, "err", err)
		return false
	}
	a.kube.requests.note(o, func(k *kubelets) { k.listed = true })
	return true
}

func (k *Kube) vouchSigned(ctx context.Context, node string, o *certificatesv1.CertificateSigningRequest) error {
	block, _ := pem.Decode(o.Status.Certificate)
	if block == nil {
		return nil // nobody can authenticate with that
	}
	c, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil //nolint:nilerr // as above
	}
	return k.vouch(ctx, node, enrolled.ID(c), func(_ *corev1.ConfigMap, r enrolled.Retirement) bool { return r.Admits(credentials(o)...) })
}
