package cluster

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ApproveFirstNode approves the certificate requests that the first machine's kubelet has filed
// for itself, and waits for the serving one. Nobody else can: the approving controller is
// off, joinservice does not run yet, and once it does, the admission policy keeps even an
// administrator from approving. A request that asks for anything more than its node may have
// stays pending.
func (c *Client) ApproveFirstNode(ctx context.Context, node string, addresses []string, say func(string)) error {
	return until(ctx, func(ctx context.Context) (bool, error) {
		var all certificatesv1.CertificateSigningRequestList
		if err := c.client.List(ctx, &all); err != nil {
			return false, err
		}
		served := false
		for i := range all.Items {
			csr := &all.Items[i]
			if !ownRequest(csr, node) {
				continue
			}
			if !decided(csr) {
				if err := checkRequest(csr, node, addresses); err != nil {
					say(fmt.Sprintf("left %s pending: %s", csr.Name, err))
					continue
				}
				if err := c.approve(ctx, csr); err != nil {
					return false, err
				}
				say("approved " + csr.Name)
			}
			served = served || csr.Spec.SignerName == certificatesv1.KubeletServingSignerName
		}
		if !served {
			return false, errPending
		}
		return true, nil
	})
}

func ownRequest(csr *certificatesv1.CertificateSigningRequest, node string) bool {
	return csr.Spec.Username == "system:node:"+node && slices.Contains(csr.Spec.Groups, "system:nodes") &&
		(csr.Spec.SignerName == certificatesv1.KubeletServingSignerName || csr.Spec.SignerName == certificatesv1.KubeAPIServerClientKubeletSignerName)
}

func decided(csr *certificatesv1.CertificateSigningRequest) bool {
	return slices.ContainsFunc(csr.Status.Conditions, func(c certificatesv1.CertificateSigningRequestCondition) bool {
		return c.Type == certificatesv1.CertificateApproved || c.Type == certificatesv1.CertificateDenied
	})
}

// checkRequest says whether a request asks for no more than its node may have: the subject, the
// names and the usages of that node.
func checkRequest(csr *certificatesv1.CertificateSigningRequest, node string, addresses []string) error {
	block, rest := pem.Decode(csr.Spec.Request)
	if block == nil || block.Type != "CERTIFICATE REQUEST" || len(rest) > 0 {
		return errors.New("it is no single PEM certificate request")
	}
	r, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		return err
	}
	if err := r.CheckSignature(); err != nil {
		return err
	}
	if r.Subject.CommonName != "system:node:"+node || !slices.Equal(r.Subject.Organization, []string{"system:nodes"}) || len(r.Subject.Names) != 2 {
		return fmt.Errorf("it asks for the subject %q", r.Subject)
	}
	if len(r.EmailAddresses) > 0 || len(r.URIs) > 0 {
		return errors.New("it asks for e-mail addresses or URIs")
	}
	usages := []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageKeyEncipherment, certificatesv1.UsageServerAuth}
	if csr.Spec.SignerName == certificatesv1.KubeAPIServerClientKubeletSignerName {
		if len(r.DNSNames) > 0 || len(r.IPAddresses) > 0 {
			return errors.New("a client certificate has no names")
		}
		usages[2] = certificatesv1.UsageClientAuth
	} else if len(r.DNSNames)+len(r.IPAddresses) == 0 {
		return errors.New("a serving certificate needs names")
	}
	for _, name := range r.DNSNames {
		if name != node {
			return fmt.Errorf("it asks for the name %q", name)
		}
	}
	for _, ip := range r.IPAddresses {
		a, ok := netip.AddrFromSlice(ip)
		if !ok || !slices.Contains(addresses, a.Unmap().String()) {
			return fmt.Errorf("it asks for the address %s", ip)
		}
	}
	for _, u := range csr.Spec.Usages {
		if !slices.Contains(usages, u) {
			return fmt.Errorf("it asks for the usage %q", u)
		}
	}
	return nil
}

func (c *Client) approve(ctx context.Context, csr *certificatesv1.CertificateSigningRequest) error {
	csr.Status.Conditions = append(csr.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
		Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: "FirstMachine",
		Message: "The owner judged this machine and initialised the cluster on it.", LastUpdateTime: metav1.Now(),
	})
	return c.client.SubResource("approval").Update(ctx, csr)
}
