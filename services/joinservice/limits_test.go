package joinservice

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/services/joinservice/certificates"
	"github.com/muster-k8s/muster/services/joinservice/limit"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// This checks docs/operate.md on a day of one machine that asks for all it can get: the rates, the records for each, and
// their size.
func TestWhatOneMachineIsGrantedADayIsAsLargeAsDocumented(t *testing.T) {
	const day = 24 * time.Hour
	tickets := ticketRate.Most(day)
	records := 2*tickets + // "ticket decided", "ticket issued"
		min(tickets, leaseRate.Most(day)) + // "turn ended", once for each ticket
		returnRate.Most(day) + rejoinRate.Most(day) + 2*renewalRate.Most(day) + orderRate.Most(day) +
		certificates.MostApproved(day)
	bytes := float64(records) * audit.MaxRecord
	text, err := os.ReadFile("../../docs/operate.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		fmt.Sprintf("what one machine is granted: at most %.0f MB a day", bytes/1e6),
		fmt.Sprintf("records of grants are kept for at least %.0f days with one such machine, and for more than a day with ten", math.Floor(audit.Kept/bytes)),
		fmt.Sprintf("%d tickets at once and then one a minute", ticketRate.Burst),
	} {
		if !strings.Contains(strings.Join(strings.Fields(string(text)), " "), want) {
			t.Errorf("docs/operate.md does not say %q", want)
		}
	}
	if audit.Kept/bytes < 10 {
		t.Error("ten machines have it rotated within a day")
	}
	if ticketRate != rejoinRate || ticketRate != returnRate || ticketRate != renewalRate || ticketRate.Every != time.Minute {
		t.Error("docs/operate.md says that these rates are the same")
	}
}

// Grants to a machine are recorded, and often written in the cluster, so one that asks without end has to wait; the refusal
// has the pause, and after it the machine is served (J3).
func TestOneMachineGetsNoMoreTicketsThanItsRate(t *testing.T) {
	unlocked, locked := func(*attesttest.Machine) {}, func(m *attesttest.Machine) { m.LockTo(shared.ID) }
	wanted := ticketRequest(t)
	for name, tt := range map[string]struct {
		lock   func(*attesttest.Machine)
		rate   limit.Rate
		ask    func(t *testing.T, l *lone) error
		passes attestv1.Reason // the result without the limit
		event  string
		metric string
	}{
		"tickets": {unlocked, ticketRate, func(t *testing.T, l *lone) error {
			_, err := l.IssueJoinTicket(t.Context(), wanted)
			return err
		}, attestv1.Reason_REASON_KMS_UNAVAILABLE, "ticket refused", "muster_join_tickets_total"},
		"rejoin tickets": {unlocked, rejoinRate, func(t *testing.T, l *lone) error { return l.rejoin(t) }, attestv1.Reason_REASON_KMS_UNAVAILABLE, "rejoin refused", "muster_rejoin_tickets_total"},
		"returned tickets": {unlocked, returnRate, func(t *testing.T, l *lone) error {
			_, err := l.ReturnJoinTicket(t.Context(), &joinv1.ReturnJoinTicketRequest{TicketId: make([]byte, ticketIDSize)})
			return err
		}, attestv1.Reason_REASON_TICKET_UNKNOWN, "return refused", "muster_join_returns_total"},
		"verdicts": {locked, reattestRate, func(t *testing.T, l *lone) error { return l.reattest(t) }, attestv1.Reason_REASON_ACCEPTED, "verdict refused", "muster_rpc_requests_total"},
		"renewals of a join Lease": {locked, leaseRate, func(t *testing.T, l *lone) error {
			_, err := l.RenewJoinLease(t.Context(), &joinv1.RenewJoinLeaseRequest{TicketId: make([]byte, ticketIDSize)})
			return err
		}, attestv1.Reason_REASON_SERVER_NOT_LISTED, "lease refused", "muster_join_lease_renewals_total"},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLone(t, true, tt.lock)
			for i := range tt.rate.Burst {
				if err := tt.ask(t, l); rpc.ReasonFrom(err) != tt.passes {
					t.Fatalf("%d: %v, want %s", i, err, attest.ReasonName(tt.passes))
				}
			}
			err := refusaltest.Refused(t, l.observations, attestv1.Reason_REASON_BUSY, l.places(tt.event, tt.metric), func() error { return tt.ask(t, l) })
			if wait := rpc.RetryAfterFrom(err); wait != tt.rate.Every {
				t.Errorf("it is to come again in %s, want %s", wait, tt.rate.Every)
			}
			l.ahead.Add(int64(tt.rate.Every)) // by the service's clock
			if err := tt.ask(t, l); rpc.ReasonFrom(err) != tt.passes {
				t.Errorf("it came after the pause: %v, want %s", err, attest.ReasonName(tt.passes))
			}
			if err := tt.ask(t, l); rpc.ReasonFrom(err) != attestv1.Reason_REASON_BUSY {
				t.Errorf("and once more: %v, want BUSY", err)
			}
		})
	}
}

// While the maximum number of requests waits for a slow key service, the next ones are refused early, with a pause, and
// leave nothing.
func TestRequestsAboveTheSlotsAreRefusedEarly(t *testing.T) {
	asked, answers := make(chan struct{}, ticketSlots), make(chan struct{})
	l := newLone(t, true, func(*attesttest.Machine) {}, serveKeyless(t, keyless{asked: asked, answers: answers}))
	wanted := ticketRequest(t)
	first := l.JoinServiceClient
	l.JoinServiceClient = l.client(t, l.machine.Attester(attest.PurposeMachine), "127.0.0.1") // the first one's connection has no more streams
	ask := func() error {
		_, err := l.IssueJoinTicket(t.Context(), wanted)
		return err
	}
	answered := make(chan error, ticketSlots)
	for range ticketSlots {
		go func() {
			_, err := first.IssueJoinTicket(t.Context(), wanted)
			answered <- err
		}()
	}
	for range ticketSlots {
		<-asked
	}
	before := shared.Node(t, "w1")
	rejoined := make(chan error, 1)
	go func() { rejoined <- l.rejoin(t) }()
	err := refusaltest.Refused(t, l.observations, attestv1.Reason_REASON_BUSY, l.places("ticket refused", "muster_join_tickets_total"), ask)
	for what, err := range map[string]error{"a ticket": err, "the key of a disk": <-rejoined} {
		if pause := rpc.RetryAfterFrom(err); rpc.ReasonFrom(err) != attestv1.Reason_REASON_BUSY || pause < slotWait || pause > 3*slotWait {
			t.Errorf("%s: %v, to come again in %s", what, err, pause)
		}
	}
	if after := shared.Node(t, "w1"); after.ResourceVersion != before.ResourceVersion {
		t.Error("the AttestedNode was written")
	}
	close(answers)
	for range ticketSlots {
		if err := <-answered; rpc.ReasonFrom(err) == attestv1.Reason_REASON_BUSY {
			t.Errorf("a request that had a slot: %v", err)
		}
	}
	if err := ask(); rpc.ReasonFrom(err) == attestv1.Reason_REASON_BUSY { // and so it recovers without help
		t.Errorf("with all slots free: %v", err)
	}
}

// ticketRequest returns the request of the machine, with all that it takes to reach the key of its disk.
func ticketRequest(t *testing.T) *joinv1.IssueJoinTicketRequest {
	t.Helper()
	req := &joinv1.IssueJoinTicketRequest{NodeName: "w1", Role: joinv1.Role_ROLE_WORKER, DiskId: disk1, DiskMode: joinv1.DiskMode_DISK_MODE_LUKS, BootSecret: bytes.Repeat([]byte{1}, 32)}
	for _, c := range []struct {
		to    *[]byte
		names []string
	}{{&req.KubeletClientCsr, nil}, {&req.KubeletServingCsr, []string{"w1"}}} {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		template := &x509.CertificateRequest{Subject: pkix.Name{CommonName: "system:node:w1", Organization: []string{"system:nodes"}}, DNSNames: c.names}
		if c.names != nil {
			template.IPAddresses = []net.IP{net.IPv4(192, 168, 77, 12).To4()}
		}
		if *c.to, err = x509.CreateCertificateRequest(rand.Reader, template, key); err != nil {
			t.Fatal(err)
		}
	}
	return req
}
