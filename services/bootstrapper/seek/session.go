package seek

import (
	"context"
	"log/slog"
	"net"
	"time"

	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
)

// Session is a joinservice that is judged with the first call, and then asked over the same connection.
type Session struct {
	joinv1connect.JoinServiceClient
	// Endpoint is where it is, HOST:PORT.
	Endpoint string

	transport *atls.Transport
}

// SessionConfig lists what a Session needs. All fields are required.
type SessionConfig struct {
	// Attester makes evidence of the purpose machine.
	Attester attest.Attester
	// Judges are what the joinservice is judged with, Lock is what its node lock must show.
	Judges Judges
	Lock   attest.Lock
	// Dial bounds the wait for a further connection.
	Dial time.Duration
	// Log is told of the joinservice's machine once it was judged.
	Log *slog.Logger
}

// Open gives a session over the connection that won a [Race].
func Open(ctx context.Context, cfg SessionConfig, endpoint string, first net.Conn) (*Session, error) {
	verifier, appraiser, err := cfg.Judges.Of(ctx, cfg.Lock)
	if err != nil {
		return nil, err
	}
	transport, err := atls.NewTransport(atls.ClientConfig{
		Attester: cfg.Attester, Verifier: verifier, Appraiser: appraiser, PeerPurpose: attest.PurposeJoinservice,
		DialContext: handOver(first, cfg.Dial),
		OnPeer: func(p attest.Peer) {
			cfg.Log.InfoContext(ctx, "joinservice judged", "endpoint", endpoint, "peer", p.Machine().String(), "policy_serial", p.Appraisal().PolicySerial, "by_owner_key", cfg.Judges.OwnerKey != nil)
		},
	})
	if err != nil {
		return nil, err
	}
	client := joinv1connect.NewJoinServiceClient(rpc.HTTPClient(transport), "https://"+endpoint, rpc.ClientOptions()...)
	return &Session{JoinServiceClient: client, Endpoint: endpoint, transport: transport}, nil
}

// Close ends it.
func (s *Session) Close() { _ = s.transport.Close() } // nothing is left to be told
