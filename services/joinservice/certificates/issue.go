package certificates

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/services/joinservice/nodecert"
	"github.com/muster-k8s/muster/trust/attest"
)

const (
	// signTimeout is the default of [Requests].Sign. Kubernetes' signer takes about 0.1 s.
	signTimeout = 15 * time.Second
	// retrySigner is the pause that is sent to a machine if the signer was too slow.
	retrySigner = 2 * time.Second
	// windowFormat is the label for the minute in which a request is filed for a ticket: all those of one minute are
	// deleted by one request to the API server.
	windowFormat = "2006-01-02T15.04"
	// requestPrefix starts the name of each request that is filed for a ticket.
	requestPrefix = "muster-"
	// UsedAfter is how long after it was first seen a request for a ticket is no longer needed, by default: its signer had
	// half of that.
	UsedAfter = 2 * signTimeout
	// discardEvery is how often the requests that are no longer needed are deleted.
	discardEvery = 5 * time.Second
	// approvedReason is the reason in the condition of each request that joinservice approves.
	approvedReason = "AttestedMachine"
)

// usagesOf are exactly the usages that are requested with an ECDSA key.
var usagesOf = map[nodecert.Kind][]certificatesv1.KeyUsage{
	nodecert.Client:  {certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth},
	nodecert.Serving: {certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth},
}

var signerOf = map[nodecert.Kind]string{
	nodecert.Client:  certificatesv1.KubeAPIServerClientKubeletSignerName,
	nodecert.Serving: certificatesv1.KubeletServingSignerName,
}

// Certificate is a signed certificate.
type Certificate struct {
	// PEM is the chain, leaf first.
	PEM []byte
	// Leaf is the certificate itself.
	Leaf *x509.Certificate
}

// Issue gets a certificate for a checked request: it creates a CertificateSigningRequest, approves it, and waits for the
// signer. [Requests.Serve] deletes the request afterwards, with others of its minute. Errors are refusals:
// API_UNAVAILABLE, CERTIFICATE_PENDING.
func (r *Requests) Issue(ctx context.Context, n *nodecert.Request) (Certificate, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, r.Sign, errors.New("the signer is too slow; is kube-controller-manager running?"))
	defer cancel()
	object := &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{Name: requestName(n), Labels: map[string]string{clusterview.TicketWindow: r.state.Now().UTC().Format(windowFormat)}},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request:           pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: n.DER}),
			SignerName:        signerOf[n.Kind],
			ExpirationSeconds: new(int32(r.state.CertificateLife / time.Second)),
			Usages:            usagesOf[n.Kind],
		},
	}
	signed, forget := r.await(object.Name)
	defer forget()
	if err := r.state.Cluster.Client.Create(ctx, object); err != nil {
		return Certificate{}, clusterview.Unavailable("create CertificateSigningRequest", err)
	}
	object.Status.Conditions = append(object.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
		Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: approvedReason, Message: "join ticket for " + n.Node,
	})
	if err := r.state.Cluster.Client.SubResource("approval").Update(ctx, object); err != nil {
		return Certificate{}, clusterview.Unavailable("approve CertificateSigningRequest", err)
	}
	select {
	case done := <-signed:
		return certificateOf(done, n)
	case <-ctx.Done():
		return Certificate{}, attest.RefuseFor(retrySigner, attestv1.Reason_REASON_CERTIFICATE_PENDING, "CertificateSigningRequest %s: %w", object.Name, context.Cause(ctx))
	}
}

func requestName(n *nodecert.Request) string {
	b := make([]byte, 8)
	_, _ = rand.Read(b) // never fails
	return fmt.Sprintf(requestPrefix+"%s-%s-%s", n.Node, n.Kind, hex.EncodeToString(b))
}

// certificateOf does not trust the signer: it checks that the certificate has the key and subject that were checked.
func certificateOf(object *certificatesv1.CertificateSigningRequest, n *nodecert.Request) (Certificate, error) {
	for _, c := range object.Status.Conditions {
		if c.Type == certificatesv1.CertificateFailed || c.Type == certificatesv1.CertificateDenied {
			return Certificate{}, attest.RefuseFor(retrySigner, attestv1.Reason_REASON_CERTIFICATE_PENDING, "CertificateSigningRequest %s: %s: %s", object.Name, c.Type, c.Message)
		}
	}
	wrong := func(why string) (Certificate, error) {
		return Certificate{}, attest.Refuse(attestv1.Reason_REASON_INTERNAL, "the signer %s gave %s for %s", object.Spec.SignerName, why, object.Name)
	}
	block, _ := pem.Decode(object.Status.Certificate)
	if block == nil {
		return wrong("no PEM")
	}
	leaf, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return wrong("no certificate")
	}
	asked, err := x509.ParseCertificateRequest(n.DER)
	if err != nil || !bytes.Equal(leaf.RawSubjectPublicKeyInfo, asked.RawSubjectPublicKeyInfo) {
		return wrong("a certificate for another key")
	}
	if leaf.IsCA || leaf.Subject.CommonName != nodecert.UserPrefix+n.Node || !slices.Equal(leaf.Subject.Organization, []string{nodecert.Organization}) || !slices.Equal(leaf.DNSNames, n.DNS) {
		return wrong("a certificate for another subject")
	}
	return Certificate{PEM: object.Status.Certificate, Leaf: leaf}, nil
}

// Serve deletes the requests of finished tickets until ctx ends.
func (r *Requests) Serve(ctx context.Context) error {
	if err := r.state.Cluster.Await(ctx); err != nil {
		return err
	}
	tick := time.NewTicker(min(discardEvery, r.Sign/3))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			r.Discard(ctx)
		}
	}
}

// Discard deletes the requests of finished tickets, used or not: those of one minute at once, when it is over and the last of them was seen [UsedAfter] ago.
// Kubernetes deletes the rest after an hour.
func (r *Requests) Discard(ctx context.Context) {
	for window, last := range r.windows() {
		if began, err := time.Parse(windowFormat, window); err == nil && r.state.Now().Before(began.Add(time.Minute)) {
			continue // a ticket's request can be filed, and not seen here yet
		}
		if r.state.Now().Sub(last) < 2*r.Sign {
			continue
		}
		if err := r.state.Cluster.Client.DeleteAllOf(ctx, &certificatesv1.CertificateSigningRequest{}, client.MatchingLabels{clusterview.TicketWindow: window}); err != nil && ctx.Err() == nil {
			r.state.Log.WarnContext(ctx, "used certificate requests are left; trying again", "label", clusterview.TicketWindow+"="+window, "err", err)
		}
	}
}
