package discovery

import (
	"context"
	"log/slog"
	"net"
	"sync"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
)

// Session is a connection to a joinservice, which is verified with the first call.
type Session struct {
	joinv1connect.JoinServiceClient
	// Endpoint is its address, HOST:PORT.
	Endpoint string

	transport *atls.Transport
	mu        sync.Mutex
	peers     []attest.Peer // whose machines were appraised
}

// SessionConfig lists what a Session needs. All fields are required.
type SessionConfig struct {
	// Attester makes evidence of the purpose machine.
	Attester attest.Attester
	// Verification appraises the joinservice; Lock is the required state of its node lock.
	Verification Verification
	Lock         attest.Lock
	// Dial bounds the wait for another connection.
	Dial time.Duration
	// Log logs the joinservice's machine once it was appraised.
	Log *slog.Logger
}

// Open returns a session over the connection that won a [Race].
func Open(ctx context.Context, cfg SessionConfig, endpoint string, first net.Conn) (*Session, error) {
	verifier, appraiser, err := cfg.Verification.Of(ctx, cfg.Lock)
	if err != nil {
		return nil, err
	}
	s := &Session{Endpoint: endpoint}
	s.transport, err = atls.NewTransport(atls.ClientConfig{
		Attester: cfg.Attester, Verifier: verifier, Appraiser: appraiser, PeerPurpose: attest.PurposeJoinservice,
		DialContext: handOver(first, cfg.Dial),
		OnPeer: func(p attest.Peer) {
			s.mu.Lock()
			s.peers = append(s.peers, p)
			s.mu.Unlock()
			cfg.Log.InfoContext(ctx, "joinservice verified", "endpoint", endpoint, "peer", p.Machine().String(), "policy_serial", p.Appraisal().PolicySerial, "by_owner_key", len(cfg.Verification.OwnerKeys) > 0)
		},
	})
	if err != nil {
		return nil, err
	}
	s.JoinServiceClient = joinv1connect.NewJoinServiceClient(rpc.HTTPClient(s.transport), "https://"+endpoint, rpc.ClientOptions()...)
	return s, nil
}

// Belongs checks that the joinservice's machine is locked to the cluster in the joinservice's answer, by its quoted PCR 15. Otherwise it refuses with
// LOCK_FOREIGN. Several clusters may have the same owner's policy, and none of them may answer for another one.
func (s *Session) Belongs(clusterID [32]byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.peers) == 0 {
		return attest.Refuse(attestv1.Reason_REASON_PEER_NOT_ATTESTED, "no joinservice was appraised")
	}
	for _, p := range s.peers {
		if err := attest.CheckLock(p.Claims(), attest.LockedTo(clusterID)); err != nil {
			return attest.Refuse(attestv1.Reason_REASON_LOCK_FOREIGN, "the joinservice speaks for cluster %x, to which its own machine does not belong: %w", clusterID, err)
		}
	}
	return nil
}

// Close closes the session.
func (s *Session) Close() { _ = s.transport.Close() } // an error has no consequence
