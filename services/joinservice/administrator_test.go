package joinservice

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

var renewAdministrator = refusaltest.Call(joinv1connect.JoinServiceRenewAdministratorProcedure)

// orders is an owner without a kubeconfig, at an address that no other test of the run uses.
type orders struct {
	*lone
	client joinv1connect.JoinServiceClient
	key    *ecdsa.PrivateKey
	order  ownerorder.Order
}

func newOrders(t *testing.T) *orders {
	t.Helper()
	o := &orders{lone: newLone(t, true, func(*attesttest.Machine) {})}
	o.client = o.lone.client(t, atls.NoAttester, "127.0.4.1")
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: ownerorder.Administrator, Organization: []string{ownerorder.Group}}}, key)
	if err != nil {
		t.Fatal(err)
	}
	o.key, o.order = key, ownerorder.Order{Cluster: shared.ID, Request: der, At: o.began.Truncate(time.Second)}
	return o
}

func (o *orders) send(t *testing.T, w *joinv1.AdministratorOrder) (*joinv1.RenewAdministratorResponse, error) {
	return o.client.RenewAdministrator(t.Context(), &joinv1.RenewAdministratorRequest{Order: w})
}

// pending sends the order, and expects the answer that it is filed.
func (o *orders) pending(t *testing.T) {
	t.Helper()
	resp, err := o.send(t, o.order.Sign(shared.Owner).Wire())
	if err != nil || len(resp.GetCertificate()) > 0 || resp.GetRetryAfter().AsDuration() != adminPoll {
		t.Fatalf("%v, %v; want an answer to ask again", resp, err)
	}
}

// filed reads the request of the order.
func (o *orders) filed(t *testing.T) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	r := &certificatesv1.CertificateSigningRequest{}
	if err := shared.Client.Get(t.Context(), client.ObjectKey{Name: o.order.Name()}, r); err != nil {
		t.Fatal(err)
	}
	return r
}

// decide writes the decision of a control plane's machine.
func (o *orders) decide(t *testing.T, kind certificatesv1.RequestConditionType, certificate []byte) {
	t.Helper()
	r := o.filed(t)
	r.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{Type: kind, Status: corev1.ConditionTrue, Reason: "Test", Message: "as the test wants it"}}
	if err := shared.Client.SubResource("approval").Update(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	if r.Status.Certificate = certificate; certificate != nil {
		if err := shared.Client.Status().Update(t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
}

func certificateFor(t *testing.T, public any) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(0xabcdef), Subject: pkix.Name{CommonName: ownerorder.Administrator}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, c, c, public, key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// records counts the records of an event.
func (o *orders) records(t *testing.T, fields ...string) (n int) {
	t.Helper()
	text, err := os.ReadFile(o.done)
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(text) {
		if refusaltest.HasLine(line, fields...) {
			n++
		}
	}
	return n
}

// An owner whose kubeconfig has expired has a certificate filed, waits for it and gets it; however often the order is sent,
// there is one request (J9).
func TestTheOwnersOrderBecomesOneCertificate(t *testing.T) {
	o := newOrders(t)
	for range 3 {
		o.pending(t)
	}
	r := o.filed(t)
	block, _ := pem.Decode(r.Spec.Request)
	signed, err := ownerorder.ParseNote(r.Annotations[ownerorder.Annotation], shared.ID, block.Bytes)
	if err != nil || signed.Verify(attest.OwnerKeys{shared.Public}, shared.ID, o.began) != nil || signed.Name() != r.Name {
		t.Errorf("what is filed is not the order: %v, %+v", err, r.ObjectMeta)
	}
	if r.Spec.SignerName != clusterinfo.AdministratorSigner || fmt.Sprint(r.Spec.Usages) != "[client auth]" || r.Spec.Username != "system:serviceaccount:muster-system:joinservice" || len(r.Status.Conditions) > 0 {
		t.Errorf("filed %+v, %+v", r.Spec, r.Status)
	}
	if all := shared.CSRs(t); len(all) != 1 {
		t.Errorf("filed are %v", all)
	}
	if n := o.records(t, "event", "administrator ordered", "reason", "ACCEPTED", "request", r.Name); n != 1 {
		t.Errorf("%d records of the order, want 1", n)
	}
	want := certificateFor(t, o.key.Public())
	o.decide(t, certificatesv1.CertificateApproved, want)
	resp, err := o.send(t, o.order.Sign(shared.Owner).Wire())
	if err != nil || !bytes.Equal(resp.GetCertificate(), want) {
		t.Fatalf("%v, %v; want the certificate", resp, err)
	}
	// The folder may know only an authority that the cluster has dropped.
	if ca, err := os.ReadFile(filepath.Join(o.pki, "ca.crt")); err != nil || !bytes.Equal(resp.GetCaCertificate(), ca) {
		t.Errorf("it sends the authorities %s, %v", resp.GetCaCertificate(), err)
	}
	if n := o.records(t, "event", "administrator renewed", "reason", "ACCEPTED", "request", r.Name); n != 1 {
		t.Errorf("%d records of the certificate, want 1", n)
	}
	// An attested machine that has seen the order can send it too, and gets only that certificate.
	again, err := o.RenewAdministrator(t.Context(), &joinv1.RenewAdministratorRequest{Order: o.order.Sign(shared.Owner).Wire()})
	if err != nil || !bytes.Equal(again.GetCertificate(), want) || len(shared.CSRs(t)) != 1 {
		t.Errorf("%v, %v, %v; want the same certificate", again, err, shared.CSRs(t))
	}
}

// Invariant J9.
func TestOrdersThatAreNotTheOwnersOfNowAreRefused(t *testing.T) {
	_, otherKey, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	o := newOrders(t)
	for name, tt := range map[string]struct {
		change func(*ownerorder.Order)
		signer ed25519.PrivateKey
		spoil  func(*joinv1.AdministratorOrder)
		want   attestv1.Reason
	}{
		"another key's":          {signer: otherKey, want: attestv1.Reason_REASON_OWNER_SIGNATURE},
		"with another's request": {spoil: func(w *joinv1.AdministratorOrder) { w.Csr[20] ^= 1 }, want: attestv1.Reason_REASON_OWNER_SIGNATURE},
		"with another time":      {spoil: func(w *joinv1.AdministratorOrder) { w.SignedAt.Seconds++ }, want: attestv1.Reason_REASON_OWNER_SIGNATURE},
		"a signed policy": {spoil: func(w *joinv1.AdministratorOrder) {
			w.Signature = attest.SignPolicy(shared.Owner, w.GetCsr()).GetSignature()
		}, want: attestv1.Reason_REASON_OWNER_SIGNATURE},
		"for another cluster": {change: func(o *ownerorder.Order) { o.Cluster[0]++ }, want: attestv1.Reason_REASON_REQUEST_INVALID},
		"of yesterday":        {change: func(o *ownerorder.Order) { o.At = o.At.Add(-24 * time.Hour) }, want: attestv1.Reason_REASON_CLOCK_SKEW},
		"too old by a second": {change: func(o *ownerorder.Order) { o.At = o.At.Add(-ownerorder.MaxAge - time.Second) }, want: attestv1.Reason_REASON_CLOCK_SKEW},
		"of tomorrow":         {change: func(o *ownerorder.Order) { o.At = o.At.Add(24 * time.Hour) }, want: attestv1.Reason_REASON_CLOCK_SKEW},
		"without a cluster":   {spoil: func(w *joinv1.AdministratorOrder) { w.ClusterId = nil }, want: attestv1.Reason_REASON_REQUEST_INVALID},
		"with a long request": {change: func(o *ownerorder.Order) { o.Request = make([]byte, ownerorder.MaxRequest+1) }, want: attestv1.Reason_REASON_REQUEST_INVALID},
		"with what is no CSR": {change: func(o *ownerorder.Order) { o.Request = []byte("x") }, want: attestv1.Reason_REASON_CSR_INVALID},
		"of more than 4 KiB":  {spoil: func(w *joinv1.AdministratorOrder) { w.Signature = make([]byte, 4<<10) }, want: attestv1.Reason_REASON_REQUEST_INVALID},
		"without anything":    {spoil: func(w *joinv1.AdministratorOrder) { w.Reset() }, want: attestv1.Reason_REASON_REQUEST_INVALID},
	} {
		t.Run(name, func(t *testing.T) {
			order, signer := o.order, tt.signer
			order.Request = bytes.Clone(order.Request)
			if tt.change != nil {
				tt.change(&order)
			}
			if signer == nil {
				signer = shared.Owner
			}
			w := order.Sign(signer).Wire()
			if tt.spoil != nil {
				tt.spoil(w)
			}
			o.ahead.Add(int64(time.Second)) // another call within the source's rate
			refusaltest.Refused(t, o.observations, tt.want, renewAdministrator, func() error { _, err := o.send(t, w); return err })
			if filed := shared.CSRs(t); len(filed) > 0 {
				t.Errorf("filed are %v", filed)
			}
		})
	}
	if n := o.records(t, "event", "administrator ordered"); n != 1 { // the owner did order something that is not a CSR
		t.Errorf("%d records of orders, want 1", n)
	}
	o.pending(t) // and nothing else was wrong
}

// A control plane that refuses to sign gives the reason, and the owner gets it.
func TestAnOrderThatTheControlPlanesDenyIsRefused(t *testing.T) {
	o := newOrders(t)
	o.pending(t)
	o.decide(t, certificatesv1.CertificateDenied, nil)
	err := refusaltest.Refused(t, o.observations, attestv1.Reason_REASON_CSR_INVALID, renewAdministrator, func() error {
		_, err := o.send(t, o.order.Sign(shared.Owner).Wire())
		return err
	})
	if err == nil || !bytes.Contains([]byte(err.Error()), []byte("as the test wants it")) {
		t.Errorf("%v does not say why", err)
	}
}

// A certificate in the request's place is accepted only if it is for the order's key.
func TestAnotherKeysCertificateIsNotHandedOut(t *testing.T) {
	o := newOrders(t)
	o.pending(t)
	other, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	o.decide(t, certificatesv1.CertificateApproved, certificateFor(t, other.Public()))
	refusaltest.Refused(t, o.observations, attestv1.Reason_REASON_INTERNAL, refusaltest.Places{Metric: renewAdministrator.Metric, Log: []string{"msg", "call failed"}, Audit: renewAdministrator.Audit}, func() error {
		_, err := o.send(t, o.order.Sign(shared.Owner).Wire())
		return err
	})
}

// Calls are counted before a signature is checked, whatever their content; the owner, at another address, is served
// meanwhile.
func TestWhoSendsOrdersWithoutEndWaits(t *testing.T) {
	o := newOrders(t)
	unattested := o.lone.client(t, atls.NoAttester, "127.0.4.2")
	call := func() error {
		_, err := unattested.RenewAdministrator(t.Context(), &joinv1.RenewAdministratorRequest{})
		return err
	}
	for range adminBurst {
		refusaltest.Refused(t, o.observations, attestv1.Reason_REASON_REQUEST_INVALID, renewAdministrator, call)
	}
	err := refusaltest.Refused(t, o.observations, attestv1.Reason_REASON_BUSY, renewAdministrator, call)
	if rpc.RetryAfterFrom(err) <= 0 {
		t.Errorf("%v does not say when to come again", err)
	}
	o.pending(t)
	o.ahead.Add(int64(time.Second))
	refusaltest.Refused(t, o.observations, attestv1.Reason_REASON_REQUEST_INVALID, renewAdministrator, call) // after the pause of the refusal
}

// J3: without a record there is no request in the cluster and no certificate in an answer.
func TestWithoutAnAuditRecordNoOrderIsFiled(t *testing.T) {
	places := renewAdministrator
	places.Audit = nil
	refused := func(t *testing.T, o *orders) {
		t.Helper()
		if err := o.log.Close(); err != nil {
			t.Fatal(err)
		}
		refusaltest.Refused(t, o.observations, attestv1.Reason_REASON_AUDIT_UNAVAILABLE, places, func() error {
			resp, err := o.send(t, o.order.Sign(shared.Owner).Wire())
			if len(resp.GetCertificate()) > 0 {
				t.Error("the certificate is on the wire")
			}
			return err
		})
	}
	t.Run("a request", func(t *testing.T) {
		o := newOrders(t)
		refused(t, o)
		if filed := shared.CSRs(t); len(filed) > 0 {
			t.Errorf("filed are %v", filed)
		}
	})
	t.Run("a certificate", func(t *testing.T) {
		o := newOrders(t)
		o.pending(t)
		o.decide(t, certificatesv1.CertificateApproved, certificateFor(t, o.key.Public()))
		refused(t, o)
	})
}
