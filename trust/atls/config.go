package atls

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/peerlimit"
)

// ServerConfig configures a [Listener]. All fields are required unless their comment says
// otherwise.
type ServerConfig struct {
	// Attester makes this server's evidence. [NoAttester] means that the server has none. Only
	// clients that do not appraise their server accept that, and Muster has no such client.
	Attester attest.Attester
	// Verifier checks clients' evidence. Not needed with NoAppraiser.
	Verifier attest.Verifier
	// Appraiser decides which clients are acceptable. With [NoAppraiser] the server asks no client
	// for evidence.
	Appraiser attest.Appraiser
	// ClientPurpose is the purpose that a client's evidence must have (A5). Not needed with
	// NoAppraiser.
	ClientPurpose attest.Purpose
	// Generation returns the generation of the policy in force. Connections that were accepted
	// under another generation are closed with GOAWAY. Not needed with NoAppraiser.
	Generation func() int64
	// RefuseUnattested ends the exchange with PEER_WILL_NOT_ATTEST if the client offers no
	// evidence. Otherwise such a client gets a session without a peer, which requests at the level
	// "attested" refuse.
	RefuseUnattested bool
	// MaxAge is the age at which a verdict expires and its connection is closed with GOAWAY; 0
	// means 1 h.
	MaxAge time.Duration
	// Limits bound the resources that peers can use before they attest. Zero fields have defaults.
	Limits Limits
	// Challenges shares the TPM among unattested peers. Servers of one process must use the same
	// queue; nil means a queue for this Listener alone.
	Challenges *peerlimit.Queue
	// Certificate is presented to clients in place of this process's self-signed one. It carries no
	// trust for muster-atls/1, but a client of plain HTTPS may need it. Optional.
	Certificate *tls.Certificate
	// Observe, if set, is called for every connection once its set-up has ended or was refused. It
	// must be fast and safe for concurrent use.
	Observe func(SetUp)
	// Log receives what is not sent to unattested peers: the cause of a refusal.
	Log *slog.Logger

	timeouts timeouts // zero: the defaults
}

// SetUp is the result of one connection's set-up, before HTTP.
type SetUp struct {
	// Role is this side's role: "server" or "client".
	Role string
	// Remote is the peer's network address.
	Remote string
	// Dropped is the limit that closed the connection: before TLS "source_rate", "rate",
	// "source_setup_full", "setup_full" or "closed"; after its set-up "source_open_full",
	// "open_full", "machine_open_full" or "attested_full". It is empty if no limit did.
	Dropped string
	// Plain is set if the client asked for plain HTTPS, so no exchange took place.
	Plain bool
	// Err is the cause if the set-up failed, nil otherwise. [attest.ReasonOf] returns its reason.
	Err error
	// Peer is the accepted peer; nil for a session without one.
	Peer *attest.Peer
	// Times has the durations.
	Times Times
}

func (c *ServerConfig) sideConfig() (sideConfig, error) {
	p := sideConfig{
		role:       roleServer,
		attester:   c.Attester,
		appraises:  c.Appraiser != NoAppraiser,
		verifier:   c.Verifier,
		appraiser:  c.Appraiser,
		purpose:    c.ClientPurpose,
		unattested: !c.RefuseUnattested,
		timeouts:   c.timeouts.withDefaults(),
	}
	var missing error
	if c.Log == nil {
		missing = errors.New("atls: Log is missing")
	}
	if p.appraises && c.Generation == nil {
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
	if !p.appraises {
		return errors.Join(errs...)
	}
	if p.verifier == nil {
		errs = append(errs, errors.New("atls: Verifier is missing"))
	} else if len(p.verifier.Formats()) == 0 {
		errs = append(errs, errors.New("atls: Verifier knows no format, so no peer could be appraised"))
	}
	switch p.purpose { // A5
	case attest.PurposeMachine, attest.PurposeJoinservice, attest.PurposeKMS:
	case attest.PurposePublic:
		errs = append(errs, errors.New(`atls: evidence of the purpose "public" is available to every client, so no session accepts it`))
	case attest.PurposeOrder:
		errs = append(errs, errors.New(`atls: evidence of the purpose "order" passes through the cluster, so no session accepts it`))
	default:
		errs = append(errs, fmt.Errorf("atls: unknown purpose %q", p.purpose))
	}
	return errors.Join(errs...)
}
