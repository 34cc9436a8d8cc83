// Package peerdial opens sessions from the owner's workstation: the client gives no evidence, and appraises the
// machine at the other end before it sends a byte of a request (A6).
//
// The result of the appraisal is kept, also of a refused machine, so that a person can see the evidence and its differences
// from the policy.
package peerdial

import (
	"context"
	"errors"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
)

// Target describes the expected peer. All fields except Only and DialContext are required.
type Target struct {
	// Addr is HOST:PORT.
	Addr string
	// Purpose is the required purpose of the peer's evidence (A5).
	Purpose attest.Purpose
	// Policy is the owner's.
	Policy *attest.Policy
	// Locks are the acceptable states of the node lock.
	Locks []attest.Lock
	// Only is the one acceptable machine; nil for any that the policy accepts. After a session has accepted a machine, it
	// accepts only that one, because the following requests are meant for it.
	Only *attest.MachineID
	// DialContext opens the TCP connection; nil for a [net.Dialer].
	DialContext func(ctx context.Context, network, addr string) (net.Conn, error)
}

// Result is the appraisal of a peer's evidence.
type Result struct {
	Claims    attest.Claims
	Appraisal attest.Appraisal
	// Err is why the machine was refused; nil if it was accepted.
	Err error
}

// Session is one or more connections to the target; the peer is appraised on each connection.
type Session struct {
	url       string
	transport *atls.Transport
	client    *http.Client

	connected atomic.Bool // once

	mu     sync.Mutex
	result *Result
}

// dialTimeout bounds the wait for a TCP connection, as in package atls.
const dialTimeout = 5 * time.Second

// Open prepares a session. The first request dials.
func Open(t Target) (*Session, error) {
	if t.Policy == nil {
		return nil, errors.New("peerdial: Policy is missing: without one no peer is accepted (A3)")
	}
	if len(t.Locks) == 0 {
		return nil, errors.New("peerdial: Locks are missing: without one no peer is accepted (A3)")
	}
	verifier, err := tpm2.NewVerifier(tpm2.VerifierConfig{Roots: t.Policy.Roots, Now: time.Now})
	if err != nil {
		return nil, err
	}
	inner := t.Policy.For(t.Locks...)
	if t.Purpose != attest.PurposeMachine {
		inner = t.Policy.ForServer(t.Locks...) // A7
	}
	s, dial := &Session{url: "https://" + t.Addr}, t.DialContext
	if dial == nil {
		dial = (&net.Dialer{Timeout: dialTimeout, KeepAlive: 30 * time.Second}).DialContext
	}
	s.transport, err = atls.NewTransport(atls.ClientConfig{
		Attester:    atls.NoAttester,
		Verifier:    verifier,
		Appraiser:   &appraiser{inner: inner, only: t.Only, keep: s.keep},
		PeerPurpose: t.Purpose,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := dial(ctx, network, addr)
			if err == nil {
				s.connected.Store(true)
			}
			return c, err
		},
	})
	if err != nil {
		return nil, err
	}
	s.client = rpc.HTTPClient(s.transport)
	return s, nil
}

// Unanswered returns the error of a request. If the request timed out before there was a connection, it returns a dial error, because HTTP
// clients then return only the timeout.
func (s *Session) Unanswered(err error) error {
	if s.connected.Load() || !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return &net.OpError{Op: "dial", Net: "tcp", Err: err}
}

// URL is the base for generated clients.
func (s *Session) URL() string { return s.url }

// Client sends requests to accepted peers only.
func (s *Session) Client() *http.Client { return s.client }

// Result returns the latest appraisal; false if there was no genuine evidence yet.
func (s *Session) Result() (Result, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.result == nil {
		return Result{}, false
	}
	return *s.result, true
}

// Close ends all connections.
func (s *Session) Close() error { return s.transport.Close() }

func (s *Session) keep(j Result) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.result = &j
}

// appraise checks the evidence by the policy, and the machine against the session's first one.
type appraiser struct {
	inner attest.Appraiser
	keep  func(Result)

	mu   sync.Mutex
	only *attest.MachineID
}

func (j *appraiser) Appraise(ctx context.Context, c attest.Claims) (attest.Appraisal, error) {
	a, err := j.inner.Appraise(ctx, c)
	if err == nil {
		if err = j.pin(c.Machine()); err != nil {
			a = attest.Appraisal{}
		}
	}
	j.keep(Result{Claims: c, Appraisal: a, Err: err})
	return a, err
}

func (j *appraiser) pin(id attest.MachineID) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.only == nil {
		j.only = &id
	}
	if id != *j.only {
		return attest.Refuse(attestv1.Reason_REASON_POLICY_REFUSED, "the machine is %s, but %s is expected at this address", id, *j.only)
	}
	return nil
}

// Exchange runs handshake and exchange by a request that every Muster service answers to every client: the health check. The
// error is nil if the peer was accepted, whatever its answer.
func (s *Session) Exchange(ctx context.Context) (attest.Peer, error) {
	ctx, peer := atls.CapturePeer(ctx)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+"/grpc.health.v1.Health/Check", http.NoBody)
	if err != nil {
		return attest.Peer{}, err
	}
	resp, err := s.client.Do(req)
	if resp != nil {
		_ = resp.Body.Close()
	}
	if p, ok := peer(); ok {
		return p, nil
	}
	if err == nil {
		err = errors.New("the connection was not appraised") // A1: cannot happen, since a client always appraises
	}
	return attest.Peer{}, err
}
