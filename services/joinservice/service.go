// Package joinservice admits machines to a running cluster.
//
// A machine connects over attested TLS, so its evidence is appraised before any handler runs; the verdict is in the context
// as an [attest.Peer]. The request is compared with the policy, with the machine's enrollment and with all others; only
// then is anything written.
//
// These hold for every ticket, and the code that keeps one names it:
//
//	J1  the caller is the attested peer, never a name in the request;
//	J2  a disk key goes only to the machine that the disk is enrolled to, and to no other later;
//	J3  a ticket is on the audit log before it is on the wire;
//	J4  a node name, once enrolled, belongs to one machine;
//	J5  a ticket's credentials are useless without the machine's own keys;
//	J6  CA keys go to enrolled control planes only;
//	J7  a node's certificate is renewed on a recent verdict on its machine only;
//	J8  one machine at a time becomes a control plane;
//	J11 of a machine and its copies, one gets the key: that of the latest boot;
//	K4  no key leaves for a disk whose salt was deleted.
//
// A client that did not attest gets one thing only, and by the owner's signature:
//
//	J9  an administrator's certificate.
//
// Side effects come last: a machine that is refused leaves nothing behind. A ticket that fails later leaves the name and
// the disk to its machine, which gets them again at its next attempt.
package joinservice

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/required"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/internal/service/policy"
	"github.com/muster-k8s/muster/services/joinservice/certificates"
	"github.com/muster-k8s/muster/services/joinservice/enroll"
	"github.com/muster-k8s/muster/services/joinservice/joinlease"
	"github.com/muster-k8s/muster/services/joinservice/ownerview"
	"github.com/muster-k8s/muster/services/joinservice/token"
	"github.com/muster-k8s/muster/trust/attest"
)

// Config lists what a Service needs. All fields are required.
type Config struct {
	// Policy is the policy in force.
	Policy *policy.Store
	// Appraiser appraises a peer's claims again by the policy in force now, which may differ from the one that admitted the
	// peer.
	Appraiser attest.Appraiser
	// Members is the Appraiser for machines that are nodes already: locked to this cluster.
	Members attest.Appraiser
	// Rejoiners is the Appraiser for machines that have rebooted: unlocked.
	Rejoiners attest.Appraiser
	// Interval is how often nodes must attest again.
	Interval time.Duration
	// Owner has the public keys of which one signs each policy and each order.
	Owner attest.OwnerKeys
	// Enrollments decides on names, disks and addresses, and records that.
	Enrollments *enroll.Enrollments
	// Certificates gets certificates signed.
	Certificates *certificates.Requests
	// Records takes what the owner sees of machines that wait.
	Records *ownerview.Records
	// JoinLease manages the Lease by which machines become control planes one after another.
	JoinLease *joinlease.Manager
	// Tokens makes bootstrap tokens.
	Tokens *token.Issuer
	// Cluster returns the cluster's description.
	Cluster func() (*clusterinfo.Info, error)
	// Credential is what tickets contain for kubeadm to discover the cluster.
	Credential token.Credential
	// CA returns the cluster's present certificate authority, X.509 in PEM.
	CA func() ([]byte, error)
	// Keys is the key service.
	Keys *KeyService
	// PKI is the folder of the control plane's PKI files, as /etc/kubernetes/pki.
	PKI string
	// Audit keeps the records, those of refusals through RefusalLimits, and those of callers that did not attest through
	// UnattestedRefusals.
	Audit              *audit.Log
	RefusalLimits      *audit.RefusalLimits
	UnattestedRefusals *audit.UnattestedRefusals
	Log                *slog.Logger
	Metrics            prometheus.Registerer
}

// Service implements the RPCs of joinservice.
type Service struct {
	cfg Config
	now func() time.Time
	// limits are the rates of each machine; they bound how many records it can cause.
	limits limits
	// confirmed is the content of muster-cluster that the key service confirmed last; see confirmCluster.
	confirmed atomic.Value
	tickets   *prometheus.CounterVec
	returns   *prometheus.CounterVec
	rejoins   *prometheus.CounterVec
	renewals  *prometheus.CounterVec
	orders    *prometheus.CounterVec
	stages    *prometheus.HistogramVec
}

// New returns a Service, or an error that names the missing field of cfg.
func New(cfg Config) (*Service, error) {
	if err := required.Fields("joinservice.New", cfg); err != nil {
		return nil, err
	}
	s := &Service{
		cfg: cfg, now: time.Now, limits: newLimits(time.Now()),
		tickets: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "muster_join_tickets_total", Help: "Join tickets asked for, by role and outcome."}, []string{"role", "reason"}),
		returns: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "muster_join_returns_total", Help: "Join tickets given back, by outcome."}, []string{"reason"}),
		rejoins: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "muster_rejoin_tickets_total", Help: "Rejoin tickets asked for by machines that have rebooted, by role and outcome.",
		}, []string{"role", "reason"}),
		renewals: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "muster_join_lease_renewals_total", Help: "Renewals and releases of a control plane's join Lease, by outcome.",
		}, []string{"reason"}),
		orders: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "muster_order_reports_total", Help: "What machines have reported of their owner's orders, by state.",
		}, []string{"state"}),
		stages: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "muster_join_stage_seconds", Help: "Time of each stage of a join ticket: decide, wait (for a slot), disk_key, lease (control planes), enroll, certificates, audit; total is all of them, for tickets that were issued.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 14), // 1 ms to 8 s
		}, []string{"stage"}),
	}
	for _, state := range orderStates { // an alert sees the first refusal
		s.orders.WithLabelValues(string(state))
	}
	for _, c := range []prometheus.Collector{s.tickets, s.returns, s.rejoins, s.renewals, s.orders, s.stages} {
		if err := cfg.Metrics.Register(c); err != nil {
			return nil, fmt.Errorf("joinservice: %w", err)
		}
	}
	return s, nil
}

// IssueJoinTicket implements the RPC: it translates the request, decides, and translates the result.
func (s *Service) IssueJoinTicket(ctx context.Context, req *joinv1.IssueJoinTicketRequest) (*joinv1.IssueJoinTicketResponse, error) {
	a := &attempt{id: newTicketID(), began: s.now()}
	t, err := s.issueTicket(ctx, a, req)
	role := roleName(req.GetRole())
	s.tickets.WithLabelValues(role, reasonOf(err)).Inc()
	if err != nil {
		s.refuse(ctx, a, "ticket refused", err)
		s.waits(ctx, a, err)
		return nil, err
	}
	s.admitted(ctx, a, t)
	s.stages.WithLabelValues("total").Observe(s.now().Sub(a.began).Seconds())
	s.cfg.Log.InfoContext(ctx, "ticket issued", "ticket", a.id, "machine", a.record.Machine, "node", a.record.Node, "role", role, "seconds", s.now().Sub(a.began).Seconds(), "image", a.record.Image, "class", a.record.Class)
	return t.toWire(), nil
}

// ReturnJoinTicket implements the RPC.
func (s *Service) ReturnJoinTicket(ctx context.Context, req *joinv1.ReturnJoinTicketRequest) (*joinv1.ReturnJoinTicketResponse, error) {
	a := &attempt{id: hex.EncodeToString(req.GetTicketId()), began: s.now()}
	err := s.takeBack(ctx, a, req.GetTicketId())
	s.returns.WithLabelValues(reasonOf(err)).Inc()
	if err != nil {
		s.refuse(ctx, a, "return refused", err)
		return nil, err
	}
	s.cfg.Log.InfoContext(ctx, "ticket returned", "ticket", a.id, "machine", a.record.Machine, "node", a.record.Node)
	return &joinv1.ReturnJoinTicketResponse{}, nil
}

func (s *Service) takeBack(ctx context.Context, a *attempt, id []byte) error {
	peer, ok := attest.PeerFrom(ctx) // J1
	if !ok {
		return attest.Refuse(attestv1.Reason_REASON_PEER_NOT_ATTESTED, "%w", attest.ErrNoPeer)
	}
	a.peer(peer)
	if len(id) != ticketIDSize {
		a.id = ""
		return attest.Refuse(attestv1.Reason_REASON_TICKET_UNKNOWN, "a ticket ID has %d bytes, not %d", ticketIDSize, len(id))
	}
	// The evidence may be as old as the connection: nothing secret is sent, and only the ticket of the attested machine is
	// returned. A ticket may have taken longer to make than evidence is fresh.
	if err := s.limits.returns.Take(peer.Machine(), a.began); err != nil {
		return err
	}
	// A control plane's Lease ends with its ticket; a worker has none.
	if _, err := s.cfg.JoinLease.End(ctx, peer.Machine(), a.id); attest.ReasonOf(err) == attestv1.Reason_REASON_API_UNAVAILABLE {
		return err
	}
	node, err := s.cfg.Enrollments.ReturnTicket(ctx, peer.Machine(), a.id)
	a.record.Node = node
	if err != nil {
		return err
	}
	if s.cfg.Credential == token.CredentialToken {
		s.cfg.Tokens.Drop(ctx, a.id)
	}
	if err := s.write(a, "ticket returned"); err != nil {
		// The ticket is returned already, as its machine wants: only the record is missing.
		s.cfg.Log.ErrorContext(ctx, "the audit record of a returned ticket cannot be written", "ticket", a.id, "err", err)
	}
	return nil
}

// attempt collects the contents of a record.
type attempt struct {
	id     string
	began  time.Time
	record audit.Record
}

func (a *attempt) peer(p attest.Peer) {
	digest := p.Claims().EvidenceDigest()
	a.record.Machine = p.Machine().String()
	a.record.Evidence = hex.EncodeToString(digest[:])
}

// write records an action in the audit log (J3).
func (s *Service) write(a *attempt, event string) error {
	r := a.record
	r.Service, r.Event, r.Ticket, r.Reason = "joinservice", event, a.id, reasonOf(nil)
	if err := s.cfg.Audit.Write(r); err != nil {
		return attest.Refuse(attestv1.Reason_REASON_AUDIT_UNAVAILABLE, "%w", err)
	}
	return nil
}

// refuse writes to the log and to the audit log the reason that caller and metric get (R1). Above the machine's limit the
// audit log has only the number.
func (s *Service) refuse(ctx context.Context, a *attempt, event string, err error) {
	r := a.record
	r.Service, r.Event, r.Ticket, r.Reason, r.Detail = "joinservice", event, a.id, reasonOf(err), err.Error()
	if c, ok := errors.AsType[*enroll.CloneError](err); ok { // J11
		s.cfg.Enrollments.ReportClone(ctx, c)
	}
	s.cfg.Log.WarnContext(ctx, "refused", "event", event, "ticket", a.id, "machine", r.Machine, "node", r.Node, "reason", r.Reason, "err", err)
	if werr := s.cfg.RefusalLimits.Write(r.Machine, r); werr != nil {
		s.cfg.Log.ErrorContext(ctx, "the audit record of a refusal cannot be written", "err", werr)
	}
}

// reasonOf names the reason in err that a caller gets (R1).
func reasonOf(err error) string { return attest.ReasonName(rpc.ReasonOf(err)) }
