package sweeping

import (
	"crypto/x509"
	"encoding/pem"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/services/joinservice/enroll"
	"github.com/muster-k8s/muster/services/joinservice/nodecert"
	"github.com/muster-k8s/muster/services/joinservice/servicetest"
	"github.com/muster-k8s/muster/services/joinservice/state"
	"github.com/muster-k8s/muster/trust/attest"
)

// kubelet returns a client with a certificate of w1 signed by the cluster's CA, and that certificate.
func kubelet(t *testing.T) (client.Client, *x509.Certificate) {
	t.Helper()
	cfg, err := servicetest.Shared.AsUser("system:node:w1", nodecert.Organization)
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(cfg.CertData)
	c, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	out, err := client.New(cfg, client.Options{Scheme: clusterview.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	return out, c
}

// clientUsages are those of a node's client certificate.
var clientUsages = []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth}

// nextOfName returns the claim of another machine that asks for the first one's name, with its own disk.
func nextOfName() enroll.Claim {
	next := servicetest.Claim(2)
	next.Disk, next.Addresses = servicetest.DiskTwo, servicetest.Elsewhere(servicetest.Claim(2)).Addresses
	return next
}

// J4: each attempt at a ticket may have got certificates, which any node can read. So the name is held from the last
// attempt on, not from the first.
func TestEachFailedTicketHoldsTheNameAnew(t *testing.T) {
	for name, before := range map[string]func(*testing.T, *sweepFixture){
		"a ticket that was never issued": func(t *testing.T, b *sweepFixture) {
			servicetest.Half(t, b.Rooms, servicetest.Claim(1))
			servicetest.Seen(t, b.Rooms, b.Unfinished)
		},
		"one that was returned": func(t *testing.T, b *sweepFixture) {
			servicetest.Enroll(t, b.Rooms, servicetest.Claim(1), "a")
			servicetest.Seen(t, b.Rooms, servicetest.Holds("a"))
			if _, err := b.ReturnTicket(t.Context(), servicetest.Claim(1).Machine, "a"); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newSweepFixture(t)
			before(t, b)
			b.current(t)
			b.clock.Pass(state.DefaultCertificateLife)
			servicetest.Half(t, b.Rooms, servicetest.Claim(1))
			b.current(t)
			b.clock.Pass(enroll.HoldMargin + time.Minute)
			next := nextOfName()
			if err := b.Check(t.Context(), next); attest.ReasonOf(err) != attestv1.Reason_REASON_NAME_TAKEN {
				t.Errorf("another machine has the name: %v", err)
			}
			next.Node, next.Addresses = "w2", servicetest.Claim(1).Addresses
			if err := b.Check(t.Context(), next); attest.ReasonOf(err) != attestv1.Reason_REASON_ADDRESS_REFUSED {
				t.Errorf("another machine has the address: %v", err)
			}
			b.after(t, 0)
			if servicetest.Shared.Node(t, "w1") == nil {
				t.Error("the enrollment has ended")
			}
			b.clock.Pass(state.DefaultCertificateLife)
			if err := b.Check(t.Context(), nextOfName()); err != nil {
				t.Errorf("once every certificate has expired: %v", err)
			}
		})
	}
}

// The same for the rule that ends the enrollment of a vanished worker.
func TestAFailedTicketHoldsAVanishedName(t *testing.T) {
	b := newSweepFixture(t)
	servicetest.Enroll(t, b.Rooms, servicetest.Claim(1), "a")
	servicetest.Seen(t, b.Rooms, servicetest.Holds("a"))
	b.after(t, 0)
	b.after(t, 61*time.Minute)
	b.vanished(t, vanishedNeverCame)
	b.clock.Pass(25 * time.Hour)
	servicetest.Half(t, b.Rooms, servicetest.Claim(1))
	b.after(t, 2*time.Minute)
	if servicetest.Shared.Node(t, "w1") == nil {
		t.Error("its enrollment has ended two minutes after certificates were issued")
	}
}

// J4: requests of a kubelet end with its enrollment, by whichever rule that ends.
func TestARequestThatWaitsEndsWithItsEnrollment(t *testing.T) {
	b := newSweepFixture(t)
	old, _ := kubelet(t)
	servicetest.Enroll(t, b.Rooms, servicetest.Claim(1), "a")
	servicetest.Seen(t, b.Rooms, servicetest.Holds("a"))
	file(t, old, "csr-old")
	membertest.Eventually(t, func() error {
		return membertest.Want(len(b.Requests.FiledBy("w1")) == 1, "the request was not seen yet")
	})
	b.after(t, 0)
	b.after(t, 61*time.Minute)
	b.after(t, 25*time.Hour+2*time.Minute)
	if servicetest.Shared.Node(t, "w1") != nil {
		t.Fatal("the enrollment is still there")
	}
	if left := servicetest.Shared.CSRs(t); len(left) > 0 {
		t.Errorf("requests are left: %v", left)
	}
}

// A node that was restored without its status, and has attested since, is not a failed ticket.
func TestANodeThatAttestsIsNotExpired(t *testing.T) {
	b := newSweepFixture(t)
	servicetest.Enroll(t, b.Rooms, servicetest.Claim(1), "a")
	b.object(t, true)
	b.status(t, func(s *v1alpha1.AttestedNodeStatus) { s.Ticket, s.LastVerdict, s.Certificates = nil, nil, nil }) // as restored
	b.after(t, 25*time.Hour)
	b.attests(t)
	b.current(t)
	b.object(t, false)
	b.after(t, 0)
	if servicetest.Shared.Node(t, "w1") == nil {
		t.Error("its enrollment has ended, and its certificates live")
	}
}

// file files a request for a client certificate of w1.
func file(t *testing.T, c client.Client, name string) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	o := &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       certificatesv1.CertificateSigningRequestSpec{Request: request(t), SignerName: certificatesv1.KubeAPIServerClientKubeletSignerName, Usages: clientUsages},
	}
	if err := c.Create(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	return o
}
