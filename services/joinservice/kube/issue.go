package kube

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

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/services/joinservice/nodecert"
	"github.com/muster-k8s/muster/trust/attest"
)

const (
	// signTimeout bounds the wait for Kubernetes' signer, which takes about 0.1 s.
	signTimeout = 15 * time.Second
	// retrySigner is the pause that is sent to a machine if the signer was too slow.
	retrySigner = 2 * time.Second
	// windowFormat is the label for the minute in which a request is filed for a ticket: all those of one minute are
	// deleted by one request to the API server.
	windowFormat = "2006-01-02T15.04"
	// requestPrefix starts the name of each request that is filed for a ticket.
	requestPrefix = "muster-"
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
// signer. [Kube.ServeRecords] deletes the request afterwards, with others of its minute. Errors are refusals:
// API_UNAVAILABLE, CERTIFICATE_PENDING.
func (k *Kube) Issue(ctx context.Context, r *nodecert.Request) (Certificate, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, signTimeout, errors.New("the signer is too slow; is kube-controller-manager running?"))
	defer cancel()
	object := &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{Name: requestName(r), Labels: map[string]string{clusterview.TicketWindow: k.now().UTC().Format(windowFormat)}},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request:           pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: r.DER}),
			SignerName:        signerOf[r.Kind],
			ExpirationSeconds: new(int32(k.life / time.Second)),
			Usages:            usagesOf[r.Kind],
		},
	}
	signed, forget := k.requests.await(object.Name)
	defer forget()
	if err := k.cluster.Client.Create(ctx, object); err != nil {
		return Certificate{}, clusterview.Unavailable("create CertificateSigningRequest", err)
	}
	object.Status.Conditions = append(object.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
		Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: approvedReason, Message: "join ticket for " + r.Node,
	})
	if err := k.cluster.Client.SubResource("approval").Update(ctx, object); err != nil {
		return Certificate{}, clusterview.Unavailable("approve CertificateSigningRequest", err)
	}
	select {
	case done := <-signed:
		return certificateOf(done, r)
	case <-ctx.Done():
		return Certificate{}, attest.RefuseFor(retrySigner, attestv1.Reason_REASON_CERTIFICATE_PENDING, "CertificateSigningRequest %s: %w", object.Name, context.Cause(ctx))
	}
}

func requestName(r *nodecert.Request) string {
	b := make([]byte, 8)
	_, _ = rand.Read(b) // never fails
	return fmt.Sprintf(requestPrefix+"%s-%s-%s", r.Node, r.Kind, hex.EncodeToString(b))
}

// certificateOf does not trust the signer: it checks that the certificate has the key and subject that were checked.
func certificateOf(object *certificatesv1.CertificateSigningRequest, r *nodecert.Request) (Certificate, error) {
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
	asked, err := x509.ParseCertificateRequest(r.DER)
	if err != nil || !bytes.Equal(leaf.RawSubjectPublicKeyInfo, asked.RawSubjectPublicKeyInfo) {
		return wrong("a certificate for another key")
	}
	if leaf.IsCA || leaf.Subject.CommonName != nodecert.UserPrefix+r.Node || !slices.Equal(leaf.Subject.Organization, []string{nodecert.Organization}) || !slices.Equal(leaf.DNSNames, r.DNS) {
		return wrong("a certificate for another subject")
	}
	return Certificate{PEM: object.Status.Certificate, Leaf: leaf}, nil
}
