package renewal

import (
	"context"
	"crypto"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	certutil "k8s.io/client-go/util/cert"
	kubeadmconstants "k8s.io/kubernetes/cmd/kubeadm/app/constants"
	certsphase "k8s.io/kubernetes/cmd/kubeadm/app/phases/certs"
	"k8s.io/kubernetes/cmd/kubeadm/app/util/pkiutil"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/trust/attest"
)

const (
	// maxRequest bounds a request, in bytes of PEM.
	maxRequest = 8 << 10
	// requestsAtOnce bounds the requests that are in memory. The chart's admission bounds each to 8 KiB, and to 2 KiB for each kind of metadata.
	requestsAtOnce = 50
)

// administrators signs requests of [clusterinfo.AdministratorSigner]. Kubernetes' own signers can't do this: they issue no certificate that is valid for
// longer than a node's.
type administrators struct {
	requests requests
	Config
}

// requests lists and updates the cluster's CertificateSigningRequests.
type requests interface {
	List(ctx context.Context, o metav1.ListOptions) (*certificatesv1.CertificateSigningRequestList, error)
	UpdateApproval(ctx context.Context, name string, r *certificatesv1.CertificateSigningRequest, o metav1.UpdateOptions) (*certificatesv1.CertificateSigningRequest, error)
	UpdateStatus(ctx context.Context, r *certificatesv1.CertificateSigningRequest, o metav1.UpdateOptions) (*certificatesv1.CertificateSigningRequest, error)
}

// sign decides on all undecided requests.
func (a administrators) sign(ctx context.Context) error {
	var errs error
	left := false
	o := metav1.ListOptions{FieldSelector: "spec.signerName=" + clusterinfo.AdministratorSigner, Limit: requestsAtOnce}
	for {
		list, err := a.requests.List(ctx, o)
		if err != nil {
			return errors.Join(errs, err)
		}
		for i := range list.Items {
			errs = errors.Join(errs, a.look(ctx, &list.Items[i], &left))
		}
		if o.Continue = list.Continue; o.Continue == "" {
			return errs
		}
	}
}

// look decides on an undecided request. The first order that is left to other control planes is logged, and sets left.
func (a administrators) look(ctx context.Context, r *certificatesv1.CertificateSigningRequest, left *bool) error {
	denied := slices.ContainsFunc(r.Status.Conditions, func(c certificatesv1.CertificateSigningRequestCondition) bool {
		return c.Type == certificatesv1.CertificateDenied || c.Type == certificatesv1.CertificateFailed
	})
	if r.Spec.SignerName != clusterinfo.AdministratorSigner || denied || len(r.Status.Certificate) > 0 {
		return nil
	}
	err := a.decide(ctx, r)
	if other := (*othersDecide)(nil); errors.As(err, &other) {
		if a.Now().Sub(r.CreationTimestamp.Time) < ownerorder.MaxAge+ownerorder.MaxAhead && !*left { // an older request's order has expired for every control plane
			*left = true
			a.Log.WarnContext(ctx, "an order for an administrator's certificate is left to other control planes", "request", r.Name, "err", err)
		}
		return nil
	}
	if err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) { // another control plane was faster
		return fmt.Errorf("request %s: %w", r.Name, err)
	}
	return nil
}

func (a administrators) decide(ctx context.Context, r *certificatesv1.CertificateSigningRequest) error {
	log := a.Log.With("request", r.Name, "by", r.Spec.Username)
	approved := slices.ContainsFunc(r.Status.Conditions, func(c certificatesv1.CertificateSigningRequestCondition) bool {
		return c.Type == certificatesv1.CertificateApproved
	})
	request, err := a.renewalOf(r)
	if other := (*othersDecide)(nil); errors.As(err, &other) {
		return err
	}
	if err != nil {
		log.WarnContext(ctx, "a request for an administrator's certificate is denied", "err", err)
		if approved { // by another process: the API server takes no denial of an approved request
			r.Status.Conditions = append(r.Status.Conditions, condition(certificatesv1.CertificateFailed, "NotARenewal", err.Error()))
			_, err = a.requests.UpdateStatus(ctx, r, metav1.UpdateOptions{})
			return err
		}
		r.Status.Conditions = append(r.Status.Conditions, condition(certificatesv1.CertificateDenied, "NotARenewal", err.Error()))
		_, err = a.requests.UpdateApproval(ctx, r.Name, r, metav1.UpdateOptions{})
		return err
	}
	if !approved {
		r.Status.Conditions = append(r.Status.Conditions, condition(certificatesv1.CertificateApproved, "Renewal", "The requester has the identity that is asked for, or the owner's order."))
		if r, err = a.requests.UpdateApproval(ctx, r.Name, r, metav1.UpdateOptions{}); err != nil {
			return err
		}
	}
	cert, err := a.issue(request)
	if err != nil {
		return err
	}
	r.Status.Certificate = pkiutil.EncodeCertPEM(cert)
	if _, err := a.requests.UpdateStatus(ctx, r, metav1.UpdateOptions{}); err != nil {
		return err
	}
	log.InfoContext(ctx, "an administrator's certificate is renewed", "serial", cert.SerialNumber.Text(16), "ends", cert.NotAfter.UTC().Format(time.RFC3339))
	return nil
}

func condition(kind certificatesv1.RequestConditionType, reason, message string) certificatesv1.CertificateSigningRequestCondition {
	return certificatesv1.CertificateSigningRequestCondition{Type: kind, Status: corev1.ConditionTrue, Reason: reason, Message: message, LastUpdateTime: metav1.Now()}
}

// renewalOf returns the certificate request in r, if it is for exactly the identity that filed r. The API server writes that identity, so an
// administrator gains no right by a renewal. With the owner's order, the administrator named in the order counts as the one that filed it.
func (a administrators) renewalOf(r *certificatesv1.CertificateSigningRequest) (*x509.CertificateRequest, error) {
	block, rest := pem.Decode(r.Spec.Request)
	if block == nil || block.Type != "CERTIFICATE REQUEST" || len(rest) > 0 || len(r.Spec.Request) > maxRequest {
		return nil, errors.New("it is no single request in PEM of 8 KiB at most")
	}
	c, err := x509.ParseCertificateRequest(block.Bytes)
	if err == nil {
		err = c.CheckSignature()
	}
	if err != nil {
		return nil, err
	}
	user, groups := r.Spec.Username, r.Spec.Groups
	if note, ok := r.Annotations[ownerorder.Annotation]; ok {
		if err := a.ordered(r.Name, note, block.Bytes); err != nil {
			return nil, err
		}
		user, groups = ownerorder.Administrator, []string{ownerorder.Group}
	}
	switch {
	case !slices.Contains(groups, ownerorder.Group):
		return nil, fmt.Errorf("its user is not in the group %s", ownerorder.Group)
	case c.Subject.CommonName != user || !slices.Equal(c.Subject.Organization, []string{ownerorder.Group}) || len(c.Subject.Names) != 2:
		return nil, fmt.Errorf("it is for %s, and was filed by %s", c.Subject, user)
	case len(c.DNSNames)+len(c.IPAddresses)+len(c.EmailAddresses)+len(c.URIs) > 0:
		return nil, errors.New("a client's certificate has no further names")
	case len(r.Spec.Usages) != 1 || r.Spec.Usages[0] != certificatesv1.UsageClientAuth:
		return nil, errors.New("it is not for client authentication alone")
	}
	return c, nil
}

// othersDecide is the error of an order that this machine can't verify and another control plane may: this machine's clock may be wrong, and its image
// may have no owner's key. A denial would be final for all control planes.
type othersDecide struct{ error }

func (e *othersDecide) Unwrap() error { return e.error }

// ordered returns nil if the owner has ordered this request, for this cluster and now (J9). It does not rely on the client that filed the request: the
// key and the cluster are those of this machine's image and journal.
func (a administrators) ordered(name, note string, request []byte) error {
	order, err := ownerorder.ParseNote(note, a.Cluster, request)
	if err != nil {
		return err
	}
	if err := order.Verify(a.Owner, a.Cluster, a.Now()); len(a.Owner) == 0 || attest.ReasonOf(err) == attestv1.Reason_REASON_CLOCK_SKEW {
		return &othersDecide{err}
	} else if err != nil {
		return err
	}
	if name != order.Name() { // one order is good for one certificate
		return errors.New("it does not have the name of its order")
	}
	return nil
}

// requested is a public key for kubeadm code that needs a key pair; it signs nothing.
type requested struct{ public crypto.PublicKey }

func (r requested) Public() crypto.PublicKey { return r.public }

func (requested) Sign(io.Reader, []byte, crypto.SignerOpts) ([]byte, error) {
	return nil, errors.New("the key is another machine's")
}

// issue signs with the cluster's authority on this control plane's disk.
func (a administrators) issue(c *x509.CertificateRequest) (*x509.Certificate, error) {
	ca, key, err := certsphase.LoadCertificateAuthority(filepath.Join(a.Root, folder), withoutExt(clusterCA))
	if err != nil {
		return nil, err
	}
	now := a.Now().UTC()
	return pkiutil.NewSignedCert(&pkiutil.CertConfig{
		Config: certutil.Config{
			CommonName: c.Subject.CommonName, Organization: c.Subject.Organization,
			Usages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, NotBefore: now.Add(-kubeadmconstants.CertificateBackdate),
		},
		NotAfter: now.Add(lifeOf(a.Kubeadm)),
	}, requested{c.PublicKey}, ca, key, false)
}
