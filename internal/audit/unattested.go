package audit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
)

// queueSize bounds how many refusals of unattested peers are kept in memory.
const queueSize = 256

// Each record costs an fsync, and space that records of other refusals need; unattested peers can cause one at any time. So
// their records have a limit; refusals above it are only counted.
const (
	recordRate  = 4 // records a second
	recordBurst = 50
	reportEvery = 10 * time.Second // how often the number of unrecorded refusals is recorded
)

// UnattestedRefusals records peers that were refused before they reached the service: in the exchange of attested TLS, or
// at an RPC that their connection may not call. It works in the background. Under a flood it drops records and only records
// their number.
type UnattestedRefusals struct {
	service string
	audit   *Log
	log     *slog.Logger
	dropped prometheus.Counter
	records chan Record
	now     func() time.Time

	unrecorded atomic.Int64 // since the last record of their number
	// Both are used by Serve only. Peers without a TPM that a root of the policy certifies can use up the first, but not
	// the second.
	bucket, genuine bucket
}

// NewUnattestedRefusals returns UnattestedRefusals that write the records of the service.
func NewUnattestedRefusals(service string, log *Log, l *slog.Logger, r prometheus.Registerer) (*UnattestedRefusals, error) {
	if service == "" || log == nil || l == nil || r == nil {
		return nil, errors.New("audit: every argument of NewUnattestedRefusals is required")
	}
	dropped := prometheus.NewCounter(prometheus.CounterOpts{Name: "muster_refusals_unrecorded_total", Help: "Refusals that were counted, but not put into the audit log, since there were too many."})
	if err := r.Register(dropped); err != nil {
		return nil, fmt.Errorf("audit: %w", err)
	}
	return &UnattestedRefusals{service: service, audit: log, log: l, dropped: dropped, records: make(chan Record, queueSize), now: time.Now, bucket: newBucket(recordRate, recordBurst), genuine: newBucket(recordRate, recordBurst)}, nil
}

// Connection is for [atls.ServerConfig]'s Observe: it records a refused connection. machine is empty if no verified
// evidence named one.
func (s *UnattestedRefusals) Connection(u atls.SetUp, machine string) {
	if refusal, ok := errors.AsType[*attest.Refusal](u.Err); ok && !refusal.Remote {
		s.add(Record{Event: "connection refused", Machine: machine, Detail: about(u.Remote, machine, u.Err.Error())}, u.Err)
	}
}

// Call records a call that was refused before it reached its handler; machine is empty if the caller did not attest.
func (s *UnattestedRefusals) Call(procedure, remote, machine string, err error) {
	s.add(Record{Event: "call refused", Machine: machine, Detail: about(remote, machine, procedure+": "+err.Error())}, err)
}

// about returns the text of a record: the peer, and the reason. For an unattested peer at most [MaxChosen] bytes follow the
// address, also if they are not chosen by the peer: the whole text is in the service's log.
func about(remote, machine, why string) string {
	if machine == "" {
		why = plainText(why, MaxChosen)
	}
	return plainText(remote, 64) + ": " + why // an IPv6 address with a zone and a port
}

func (s *UnattestedRefusals) add(r Record, err error) {
	r.Time, r.Service, r.Reason = s.now(), s.service, attest.ReasonName(attest.ReasonOf(err)) // R1
	select {
	case s.records <- r:
	default:
		s.Skip()
	}
}

// Skip counts a refusal that is not recorded.
func (s *UnattestedRefusals) Skip() {
	s.unrecorded.Add(1)
	s.dropped.Inc()
}

// Serve writes records until ctx ends, and the rest then.
func (s *UnattestedRefusals) Serve(ctx context.Context) error {
	report := time.NewTicker(reportEvery)
	defer report.Stop()
	defer s.report()
	for {
		select {
		case <-report.C:
			s.report()
		case r := <-s.records:
			s.take(r)
		case <-ctx.Done():
			for {
				select {
				case r := <-s.records:
					s.take(r)
				default:
					return nil
				}
			}
		}
	}
}

// take records one refusal, if the limit allows it.
func (s *UnattestedRefusals) take(r Record) {
	from := &s.bucket
	if r.Machine != "" && r.Reason != attest.ReasonName(attestv1.Reason_REASON_EK_UNTRUSTED) {
		from = &s.genuine
	}
	if !from.left(s.now()) {
		s.Skip()
		return
	}
	from.tokens--
	s.write(r)
}

// report records how many refusals were not recorded one by one.
func (s *UnattestedRefusals) report() {
	if n := s.unrecorded.Swap(0); n > 0 {
		s.write(Record{
			Time: s.now(), Service: s.service, Event: "connections refused", Reason: attest.ReasonName(attestv1.Reason_REASON_BUSY),
			Detail: fmt.Sprintf("%d more refusals were not recorded one by one", n),
		})
	}
}

func (s *UnattestedRefusals) write(r Record) {
	if err := s.audit.refuse(r); err != nil {
		s.dropped.Inc()
		s.log.Error("the audit record of a refusal cannot be written", "reason", r.Reason, "err", err)
	}
}
