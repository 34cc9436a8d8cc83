package certificates

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/pem"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/trust/attest"
)

// Ordered returns the certificate that the control planes have issued for the owner's order, or a zero one if there is none
// yet. filed reports whether its request exists. The caller has verified the order, and the control planes verify it again.
// Errors are refusals: API_UNAVAILABLE, or CSR_INVALID if the control planes have denied it.
func (r *Requests) Ordered(ctx context.Context, order ownerorder.Signed) (cert Certificate, filed bool, err error) {
	object := &certificatesv1.CertificateSigningRequest{}
	if err := r.state.Cluster.Client.Get(ctx, client.ObjectKey{Name: order.Name()}, object); err != nil {
		if apierrors.IsNotFound(err) {
			return Certificate{}, false, nil
		}
		return Certificate{}, false, clusterview.Unavailable("get CertificateSigningRequest", err)
	}
	for _, c := range object.Status.Conditions {
		if c.Type == certificatesv1.CertificateFailed || c.Type == certificatesv1.CertificateDenied {
			return Certificate{}, true, attest.Refuse(attestv1.Reason_REASON_CSR_INVALID, "the cluster's control planes deny it: %s", c.Message)
		}
	}
	if len(object.Status.Certificate) == 0 {
		return Certificate{}, true, nil
	}
	block, _ := pem.Decode(object.Status.Certificate)
	asked, err := x509.ParseCertificateRequest(order.Request)
	if block == nil || err != nil {
		return Certificate{}, true, attest.Refuse(attestv1.Reason_REASON_INTERNAL, "CertificateSigningRequest %s has no certificate in PEM, or no request", object.Name)
	}
	leaf, err := x509.ParseCertificate(block.Bytes)
	if err != nil || !bytes.Equal(leaf.RawSubjectPublicKeyInfo, asked.RawSubjectPublicKeyInfo) {
		return Certificate{}, true, attest.Refuse(attestv1.Reason_REASON_INTERNAL, "CertificateSigningRequest %s has no certificate for the key that was asked for", object.Name)
	}
	return Certificate{PEM: object.Status.Certificate, Leaf: leaf}, true, nil
}

// FileOrder files the request of a verified order, with the order in it. An existing request is not changed.
func (r *Requests) FileOrder(ctx context.Context, order ownerorder.Signed) error {
	err := r.state.Cluster.Client.Create(ctx, &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{Name: order.Name(), Annotations: map[string]string{ownerorder.Annotation: order.Note()}},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: order.Request}),
			SignerName: clusterinfo.AdministratorSigner, Usages: []certificatesv1.KeyUsage{certificatesv1.UsageClientAuth},
		},
	})
	switch {
	case apierrors.IsAlreadyExists(err): // another replica was first
		return nil
	case apierrors.IsInvalid(err):
		return attest.Refuse(attestv1.Reason_REASON_CSR_INVALID, "order.csr: %w", err)
	case err != nil:
		return clusterview.Unavailable("create CertificateSigningRequest", err)
	}
	return nil
}
