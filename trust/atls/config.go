package atls

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/muster-k8s/muster/trust/admission"
	"github.com/muster-k8s/muster/trust/attest"
)

// ServerConfig says what a [Listener] gives and asks for. All fields are required unless
// they say otherwise.
type ServerConfig struct {
	// Attester makes this server's evidence; [NoAttester] if it has none, which only
	// clients that judge nobody accept, and Muster has no such client.
	Attester attest.Attester
	// Verifier checks clients' evidence. Not needed with JudgeNobody.
	Verifier attest.Verifier
	// Appraiser decides which clients are acceptable. [NoAppraiser] asks no client for
	// evidence.
	Appraiser attest.Appraiser
	// ClientPurpose is what a client's evidence must have been made for (A5). Not needed
	// with JudgeNobody.
	ClientPurpose attest.Purpose
	// Generation gives the generation of the policy that is in force. Connections that
	// another generation accepted are wound up. Not needed with JudgeNobody.
	Generation func() int64
	// RefuseUnattested ends the exchange with PEER_WILL_NOT_ATTEST for a client that
	// offers no evidence. Otherwise it gets a session without a peer: what is served at the
	// level "attested" refuses it.
	RefuseUnattested bool
	// MaxAge is how old a verdict may be before its connection is wound up; 0: 1 h.
	MaxAge time.Duration
	// Limits bound what peers can take that have not attested; zero fields have defaults.
	Limits Limits
	// Challenges shares the TPM among peers that did not attest; nil: a queue of this Listener's own. Servers
	// of one process give the same.
	Challenges *admission.Queue
	// Certificate is shown to clients instead of a self-signed one of this process. It
	// carries no trust for muster-atls/1; a client of the plain HTTPS side may want it.
	// Optional.
	Certificate *tls.Certificate
	// Observe, if set, is told of every connection once its set-up has ended or was
	// refused. It must be fast and safe for concurrent use.
	Observe func(SetUp)
	// Log takes what strangers are not told: why a peer was refused.
	Log *slog.Logger
}

// SetUp is what became of one connection before HTTP.
type SetUp struct {
	// Role is ours: "server" or "client".
	Role string
	// Remote is the peer's network address.
	Remote string
	// Dropped says which limit closed a connection: before TLS "source_rate", "rate",
	// "source_setup_full", "setup_full" or "closed", after its set-up "source_open_full", "open_full",
	// "machine_open_full" or "attested_full"; empty if none did.
	Dropped string
	// Plain is set for a client that asked for plain HTTPS, so that no exchange took place.
	Plain bool
	// Err is why the set-up failed; nil if it did not. [attest.ReasonOf] has its reason.
	Err error
	// Peer is whom the exchange accepted; nil for a session without one.
	Peer *attest.Peer
	// Times says how long it took.
	Times Times
}

func (c *ServerConfig) sideConfig() (sideConfig, error) {
	p := sideConfig{
		role:       roleServer,
		attester:   c.Attester,
		judges:     c.Appraiser != NoAppraiser,
		verifier:   c.Verifier,
		appraiser:  c.Appraiser,
		purpose:    c.ClientPurpose,
		unattested: !c.RefuseUnattested,
	}
	var missing error
	if c.Log == nil {
		missing = errors.New("atls: Log is missing")
	}
	if p.judges && c.Generation == nil {
		missing = errors.Join(missing, errors.New("atls: Generation is missing"))
	}
	return p, errors.Join(missing, p.check())
}

// check refuses every configuration that would check nothing (A3).
func (p sideConfig) check() error {
	var errs []error
	if p.attester == nil {
		errs = append(errs, errors.New("atls: Attester is missing; NoAttester is for a program without evidence"))
	}
	if p.appraiser == nil {
		errs = append(errs, errors.New("atls: Appraiser is missing"))
	}
	if !p.judges {
		return errors.Join(errs...)
	}
	if p.verifier == nil {
		errs = append(errs, errors.New("atls: Verifier is missing"))
	} else if len(p.verifier.Formats()) == 0 {
		errs = append(errs, errors.New("atls: Verifier knows no format, so nobody would be judged"))
	}
	switch p.purpose { // A5
	case attest.PurposeMachine, attest.PurposeJoinservice, attest.PurposeKMS:
	case attest.PurposePublic:
		errs = append(errs, errors.New(`atls: evidence of the purpose "public" is anybody's, so no session accepts it`))
	default:
		errs = append(errs, fmt.Errorf("atls: unknown purpose %q", p.purpose))
	}
	return errors.Join(errs...)
}
