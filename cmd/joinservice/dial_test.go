package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"testing"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// patience is how long a machine that builds at the same time may take.
const patience = 5 * time.Minute

// dial returns a joiner's client. It appraises the joinservice by the policy that this presents, as a machine does that
// knows its owner. Each call has a connection of its own, with new evidence: joinservice accepts evidence for a minute, and
// eight connections of a machine.
func (s *fixture) dial(t *testing.T, a attest.Attester) joinv1connect.JoinServiceClient {
	t.Helper()
	return joinv1connect.NewJoinServiceClient(anew{t, s, a}, "https://"+s.join.Addr, rpc.ClientOptions()...)
}

// overOneConnection returns a client whose calls share one connection.
func (s *fixture) overOneConnection(t *testing.T, a attest.Attester) joinv1connect.JoinServiceClient {
	t.Helper()
	return joinv1connect.NewJoinServiceClient(rpc.HTTPClient(s.transport(t, a)), "https://"+s.join.Addr, rpc.ClientOptions()...)
}

// anew sends each request over a connection of its own, which ends with the answer, and with the secret of its machine's
// boot.
type anew struct {
	t *testing.T
	s *fixture
	a attest.Attester
}

func (c anew) Do(r *http.Request) (*http.Response, error) {
	if m, ok := c.a.(interface{ Boots() uint32 }); ok {
		body, err := io.ReadAll(r.Body)
		if err = errors.Join(err, r.Body.Close()); err != nil {
			return nil, err
		}
		r.Body, r.GetBody = io.NopCloser(bytes.NewReader(bytes.Replace(body, oneSecret, secretOf(m), 1))), nil
	}
	transport := c.s.transport(c.t, c.a)
	resp, err := rpc.HTTPClient(transport).Do(r)
	if err != nil {
		_ = transport.Close()
		return nil, err
	}
	resp.Body = lastBody{resp.Body, transport}
	return resp, nil
}

type lastBody struct {
	io.ReadCloser
	connection io.Closer
}

func (b lastBody) Close() error { return errors.Join(b.ReadCloser.Close(), b.connection.Close()) }

func (s *fixture) transport(t *testing.T, a attest.Attester) *atls.Transport {
	t.Helper()
	transport, err := atls.NewTransport(atls.ClientConfig{
		Attester: a, Verifier: attesttest.Verifier(t, s.ca), PeerPurpose: attest.PurposeJoinservice, Appraiser: presented{s},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = transport.Close() })
	return transport
}

type presented struct{ s *fixture }

func (p presented) Appraise(_ context.Context, c attest.Claims) (attest.Appraisal, error) {
	policy, err := attest.OpenPolicy(attest.OwnerKeys{p.s.Public}, c.SignedPolicy())
	if err != nil {
		return attest.Appraisal{}, err
	}
	return policy.AppraiseServer(c, attest.LockedTo(p.s.ID))
}

// tooSlow reports whether a request failed as it can on a slow machine, with a reason for which machines ask again, or by a
// broken connection.
func tooSlow(err error) bool {
	return slices.Contains([]attestv1.Reason{
		attestv1.Reason_REASON_DEADLINE, attestv1.Reason_REASON_BUSY, attestv1.Reason_REASON_KMS_UNAVAILABLE,
		attestv1.Reason_REASON_API_UNAVAILABLE, attestv1.Reason_REASON_CERTIFICATE_PENDING, attestv1.Reason_REASON_UNSPECIFIED,
	}, rpc.ReasonFrom(err))
}

// patiently repeats a request while it fails because the machine is slow.
func patiently(t *testing.T, ask func() error) error {
	t.Helper()
	for end := time.Now().Add(patience); ; {
		err := ask()
		if err == nil || !tooSlow(err) || time.Now().After(end) {
			return err
		}
		if retry.Wait(t.Context(), max(50*time.Millisecond, rpc.RetryAfterFrom(err))) != nil {
			return err
		}
	}
}

// ticketFor requests a ticket that must be issued.
func (s *fixture) ticketFor(t *testing.T, m *attesttest.Machine, w *joinRequest) (ticket *joinv1.IssueJoinTicketResponse) {
	t.Helper()
	if err := patiently(t, func() (err error) {
		ticket, err = s.dial(t, m.Attester(attest.PurposeMachine)).IssueJoinTicket(t.Context(), w.IssueJoinTicketRequest)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return ticket
}

// returned gives a ticket back for its machine.
func (s *fixture) returned(t *testing.T, m *attesttest.Machine, ticket *joinv1.IssueJoinTicketResponse) {
	t.Helper()
	if err := patiently(t, func() error {
		_, err := s.dial(t, m.Attester(attest.PurposeMachine)).ReturnJoinTicket(t.Context(), &joinv1.ReturnJoinTicketRequest{TicketId: ticket.GetTicketId()})
		return err
	}); err != nil {
		t.Fatal(err)
	}
}
