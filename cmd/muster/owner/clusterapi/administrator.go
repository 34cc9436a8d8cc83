package clusterapi

import (
	"context"
	"encoding/pem"
	"fmt"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
)

// SignAdministrator files a PKCS#10 request in DER for this client's identity, waits until a control plane's machine
// has signed it, and removes the request. It returns the certificate in PEM as the cluster returns it: the caller
// must check it.
func (c *Client) SignAdministrator(ctx context.Context, request []byte) ([]byte, error) {
	csr := &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "muster-administrator-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: request}),
			SignerName: clusterinfo.AdministratorSigner, Usages: []certificatesv1.KeyUsage{certificatesv1.UsageClientAuth},
		},
	}
	if err := c.client.Create(ctx, csr); err != nil {
		return nil, fmt.Errorf("file a certificate request: %w", err)
	}
	defer func() { _ = c.client.Delete(context.WithoutCancel(ctx), csr) }() // if this fails, Kubernetes removes it within a day
	err := until(ctx, func(ctx context.Context) (bool, error) {
		if err := c.client.Get(ctx, client.ObjectKeyFromObject(csr), csr); err != nil {
			return false, err
		}
		for _, cond := range csr.Status.Conditions {
			if cond.Type == certificatesv1.CertificateDenied || cond.Type == certificatesv1.CertificateFailed {
				return false, fmt.Errorf("the cluster's control planes deny it: %s", cond.Message)
			}
		}
		return len(csr.Status.Certificate) > 0, nil
	})
	if err != nil {
		return nil, fmt.Errorf("wait for the certificate: %w", err)
	}
	return csr.Status.Certificate, nil
}

// Administers returns an error if the API server does not accept this client's credentials: anonymous requests may not list namespaces.
func (c *Client) Administers(ctx context.Context) error {
	var list corev1.NamespaceList
	return c.client.List(ctx, &list, client.Limit(1))
}
