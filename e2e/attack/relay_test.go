package attack

import (
	"context"
	"crypto/tls"
	"net"
	"testing"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/gen/muster/attest/v1/attestv1connect"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

const (
	accepted = attestv1.Reason_REASON_ACCEPTED
	mismatch = attestv1.Reason_REASON_BINDING_MISMATCH
)

// A man in the middle that holds the server's private key forwards every byte of the exchange, with the evidence (A1).
func TestRelayWithTheServersPrivateKey(t *testing.T) {
	x := newTarget(t, nil)
	conf := &tls.Config{Certificates: []tls.Certificate{x.stolen}, NextProtos: []string{alpn}, MinVersion: tls.VersionTLS13}
	middle := evil(t, conf, func(victim *tls.Conn) {
		if victim.HandshakeContext(t.Context()) != nil {
			return
		}
		up, err := (&tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true, NextProtos: []string{alpn}}}).DialContext(t.Context(), "tcp", x.addr)
		if err != nil {
			return
		}
		splice(victim, up)
	})
	if err := reaches(t, x.transport(t, nil), middle); attest.ReasonOf(err) != mismatch {
		t.Errorf("the client was relayed: %v, want %v", err, mismatch)
	}

	// Nor does the server accept the relayed client as an honest one, whatever the client's own result is.
	s := <-x.seen
	if s.Err == nil || s.Peer != nil {
		t.Errorf("the server accepted %v through the relay", s.Peer)
	}

	// A relay that forwards TCP without a TLS session of its own is a router.
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	router := accept(t, l, func(victim net.Conn) {
		if up, err := new(net.Dialer).DialContext(t.Context(), "tcp", x.addr); err == nil {
			splice(victim, up)
		}
	})
	if err := reaches(t, x.transport(t, nil), router); err != nil {
		t.Errorf("repaired: %v", err)
	}
}

// An attacker asks a good machine's GetEvidence for evidence over the binding of the attacker's session (A5).
func TestRelayThroughGetEvidence(t *testing.T) {
	x := newTarget(t, nil)
	oracle := attestv1connect.NewEvidenceServiceClient(refusaltest.Plain(t), "https://"+x.addr, rpc.ClientOptions()...)
	attack := honest(x.machine())
	attack.evidence = func(ctx context.Context, b attest.Binding) (*attestv1.Evidence, error) {
		resp, err := oracle.GetEvidence(ctx, &attestv1.GetEvidenceRequest{Nonce: b[:]})
		return resp.GetEvidence(), err
	}
	if got := x.play(t, attack); got != mismatch {
		t.Errorf("%v, want %v", got, mismatch)
	}
	// The nonce may also be the statement of a machine: it is hashed once more.
	attack.evidence = func(ctx context.Context, b attest.Binding) (*attestv1.Evidence, error) {
		s := attest.NewStatement(attest.PurposeMachine, b)
		resp, err := oracle.GetEvidence(ctx, &attestv1.GetEvidenceRequest{Nonce: s[:]})
		return resp.GetEvidence(), err
	}
	if got := x.play(t, attack); got != mismatch {
		t.Errorf("a statement as nonce: %v, want %v", got, mismatch)
	}
	if got := x.play(t, honest(x.machine())); got != accepted {
		t.Errorf("repaired: %v", got)
	}
}

// Evidence that a pod may request from its machine is not accepted as the machine's (A5).
func TestEvidenceOfAnotherPurpose(t *testing.T) {
	x := newTarget(t, nil)
	for _, p := range []attest.Purpose{attest.PurposeJoinservice, attest.PurposeKMS, attest.PurposePublic} {
		if got := x.play(t, honest(x.client.Attester(p))); got != mismatch {
			t.Errorf("%s: %v, want %v", p, got, mismatch)
		}
	}
	if got := x.play(t, honest(x.client.Attester(attest.PurposeMachine))); got != accepted {
		t.Errorf("repaired: %v", got)
	}
}

// The exporter is the same at both ends, so an attacker sends a peer its own evidence. Both sides expect the purpose
// that they have, so that only the role differs (A1).
func TestReflection(t *testing.T) {
	x := newTarget(t, func(c *rpc.Config) { c.ATLS.ClientPurpose = attest.PurposeJoinservice })
	both := &attestv1.Offer{Gives: tpm2, Accepts: tpm2}

	t.Run("at a server", func(t *testing.T) {
		reflect := func(repaired bool) attestv1.Reason {
			w := open(t, x.addr, nil)
			mine := w.send(t, both)
			_, theirs, err := w.receive()
			if err != nil {
				t.Fatal(err)
			}
			f, _, err := w.receive()
			if err != nil || f.GetEvidence() == nil {
				t.Fatalf("%v, %v; want the server's evidence", f, err)
			}
			ev := f.GetEvidence()
			a := x.client.Attester(attest.PurposeJoinservice)
			if repaired {
				if ev, err = a.Attest(t.Context(), attestv1.Format_FORMAT_TPM2, w.bind(client, mine, theirs)); err != nil {
					t.Fatal(err)
				}
			}
			w.send(t, ev)
			w.send(t, &attestv1.Verdict{Reason: accepted})
			for {
				f, _, err := w.receive()
				if err != nil {
					t.Fatal(err)
				}
				if f.GetVerdict() != nil {
					return f.GetVerdict().GetReason()
				}
				mac, err := a.Respond(t.Context(), f.GetChallenge(), w.bind(client, mine, theirs))
				if err != nil {
					t.Fatal(err)
				}
				w.send(t, &attestv1.Response{Mac: mac})
			}
		}
		if got := reflect(false); got != mismatch {
			t.Errorf("%v, want %v", got, mismatch)
		}
		if got := reflect(true); got != accepted {
			t.Errorf("repaired: %v", got)
		}
	})

	t.Run("at a client", func(t *testing.T) {
		for _, repaired := range []bool{false, true} {
			verdicts := make(chan attestv1.Reason, 1)
			conf := &tls.Config{Certificates: []tls.Certificate{x.stolen}, NextProtos: []string{alpn}, MinVersion: tls.VersionTLS13}
			mirror := evil(t, conf, func(c *tls.Conn) {
				w, err := newWire(t, c)
				if err != nil {
					return
				}
				mine := encode(t, both)
				puts := func(b []byte) bool { _, err := w.Write(b); return err == nil } // the client may not have waited
				if !puts(mine) {
					return
				}
				_, theirs, err := w.receive()
				if err != nil {
					return
				}
				f, _, err := w.receive()
				if err != nil {
					return
				}
				ev := f.GetEvidence()
				a := x.server.Attester(attest.PurposeMachine)
				b := w.bind(server, theirs, mine)
				if repaired {
					if ev, err = a.Attest(t.Context(), attestv1.Format_FORMAT_TPM2, b); err != nil {
						return
					}
				}
				if !puts(encode(t, ev)) || !puts(encode(t, &attestv1.Verdict{Reason: accepted})) {
					return
				}
				for {
					f, _, err := w.receive()
					if err != nil {
						return
					}
					if f.GetVerdict() != nil {
						select {
						case verdicts <- f.GetVerdict().GetReason():
						default: // of an earlier session of the same client
						}
						return
					}
					mac, err := a.Respond(t.Context(), f.GetChallenge(), b)
					if err != nil {
						return
					}
					if !puts(encode(t, &attestv1.Response{Mac: mac})) {
						return
					}
				}
			})
			var got attestv1.Reason
			var reached error
			_ = insist(t, func() error {
				reached = reach(t, x.transport(t, func(c *atls.ClientConfig) { c.PeerPurpose = attest.PurposeMachine }), mirror)
				select {
				case got = <-verdicts: // after it, the mirror only ends the session
					return nil
				default:
					return reached
				}
			})
			if !repaired && attest.ReasonOf(reached) != mismatch {
				t.Errorf("%v, want %v", reached, mismatch)
			}
			if got == attestv1.Reason_REASON_UNSPECIFIED {
				select {
				case got = <-verdicts:
				case <-time.After(patience):
				}
			}
			if want := map[bool]attestv1.Reason{false: mismatch, true: accepted}[repaired]; got != want {
				t.Errorf("repaired %v: the client's verdict is %v, want %v", repaired, got, want)
			}
		}
	})
}

// Evidence of one session is sent in the next (A1).
func TestReplayInAnotherSession(t *testing.T) {
	x := newTarget(t, nil)
	var recorded *attestv1.Evidence
	first := honest(x.machine())
	record := first.evidence
	first.evidence = func(ctx context.Context, b attest.Binding) (*attestv1.Evidence, error) {
		var err error
		recorded, err = record(ctx, b)
		return recorded, err
	}
	if got := x.play(t, first); got != accepted {
		t.Fatalf("the session to record: %v", got)
	}
	replay := honest(x.machine())
	replay.evidence = func(context.Context, attest.Binding) (*attestv1.Evidence, error) { return recorded, nil }
	x.refuses(t, mismatch, func() attestv1.Reason { return x.play(t, replay) })
	if got := x.play(t, first); got != accepted {
		t.Errorf("repaired: %v", got)
	}
}

// The victim's TPM answers a challenge in a session with the attacker, who forwards the answer in another session.
func TestActivationAnsweredForAnotherSession(t *testing.T) {
	for _, repaired := range []bool{false, true} {
		x := newTarget(t, nil) // a verifier that does not know the machine yet
		s := honest(x.machine())
		answer := s.respond
		challenged := false
		s.respond = func(ctx context.Context, c *attestv1.Challenge, b attest.Binding) ([]byte, error) {
			challenged = true
			if !repaired {
				b[0]++ // another session's
			}
			return answer(ctx, c, b)
		}
		play := func() attestv1.Reason { return x.play(t, s) }
		if !repaired {
			x.refuses(t, attestv1.Reason_REASON_ACTIVATION_FAILED, play)
		} else if got := play(); got != accepted {
			t.Errorf("repaired: %v", got)
		}
		if !challenged {
			t.Errorf("repaired %v: not challenged", repaired)
		}
	}
}

// An attestation key in software claims the EK certificate of a good machine: its quotes verify, but the good
// machine's TPM opens no credential for it.
func TestAKeyThatIsNotInTheTPM(t *testing.T) {
	x := newTarget(t, nil)
	rogue := attesttest.NewMachine(t, x.ca, attesttest.Options{})
	a, good := rogue.Attester(attest.PurposeMachine), x.machine()
	s := honest(a)
	s.evidence = func(ctx context.Context, b attest.Binding) (*attestv1.Evidence, error) {
		ev, err := a.Attest(ctx, attestv1.Format_FORMAT_TPM2, b)
		if err != nil {
			return nil, err
		}
		ek, err := x.client.EndorsementKey(ctx)
		ev.GetTpm2().EkCertificates = ek.Certificates
		return ev, err
	}
	s.respond = func(ctx context.Context, c *attestv1.Challenge, b attest.Binding) ([]byte, error) {
		if _, err := good.Respond(ctx, c, b); err == nil {
			t.Error("the good machine's TPM opened a credential for a foreign key")
		}
		return make([]byte, 32), nil
	}
	x.refuses(t, attestv1.Reason_REASON_ACTIVATION_FAILED, func() attestv1.Reason { return x.play(t, s) })
	if got := x.play(t, honest(a)); got != accepted {
		t.Errorf("repaired: %v", got)
	}
}

// The two sides do not have the same offers: an attacker changed one in transit (A1).
func TestAnOfferChangedOnOneSide(t *testing.T) {
	x := newTarget(t, nil)
	for name, change := range map[string]func(sent []byte) []byte{
		"another offer": func([]byte) []byte { return encode(t, &attestv1.Offer{Gives: append(tpm2, 77)}) },
		"no length":     func(sent []byte) []byte { return sent[4:] },
		"nothing":       func([]byte) []byte { return nil },
	} {
		s := honest(x.machine())
		s.hashed = change
		if got := x.play(t, s); got != mismatch {
			t.Errorf("%s: %v, want %v", name, got, mismatch)
		}
		s.hashed = nil
		if got := x.play(t, s); got != accepted {
			t.Errorf("%s, repaired: %v", name, got)
		}
	}
}

// tickets counts the session tickets that a server gave a client.
type tickets struct {
	tls.ClientSessionCache
	put int
}

func (c *tickets) Put(key string, s *tls.ClientSessionState) {
	if s != nil {
		c.put++
	}
	c.ClientSessionCache.Put(key, s)
}

// Invariant A4.
func TestResumption(t *testing.T) {
	x := newTarget(t, nil)
	cache := &tickets{ClientSessionCache: tls.NewLRUClientSessionCache(8)}
	resume := func(c *tls.Config) { c.ClientSessionCache = cache }

	for range 2 { // the server gives no session ticket
		var w *wire
		var got attestv1.Reason
		err := insist(t, func() (err error) {
			w = open(t, x.addr, resume)
			got, err = w.play(t, honest(x.machine()))
			return err
		})
		if err != nil || got != accepted || w.ConnectionState().DidResume || cache.put != 0 {
			t.Fatalf("%v, %v, resumed %v, %d tickets", got, err, w.ConnectionState().DidResume, cache.put)
		}
	}

	// The attacker makes a ticket with the stolen key, and offers it to the real server.
	conf := &tls.Config{Certificates: []tls.Certificate{x.stolen}, NextProtos: []string{alpn}, MinVersion: tls.VersionTLS13}
	forger := evil(t, conf, func(c *tls.Conn) {
		if c.HandshakeContext(t.Context()) == nil {
			_, _ = c.Write([]byte("x"))
		}
	})
	for i := range 2 {
		w := open(t, forger, resume)
		if _, err := w.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		if got := w.ConnectionState().DidResume; got != (i == 1) {
			t.Fatalf("connection %d with the forger resumes: %v", i, got)
		}
	}
	if cache.put == 0 {
		t.Fatal("the attack has no ticket")
	}
	w := open(t, x.addr, resume)
	if w.ConnectionState().DidResume {
		t.Error("the server resumed a session that it never had")
	}
	if got, err := w.play(t, honest(x.machine())); got != accepted {
		t.Errorf("a full handshake in spite of the ticket: %v, %v", got, err)
	}

	// And an honest client never offers one, whatever its server gives it.
	resumed := make(chan bool, 2)
	lure := evil(t, conf, func(c *tls.Conn) {
		if c.HandshakeContext(t.Context()) == nil {
			resumed <- c.ConnectionState().DidResume
		}
	})
	tr := x.transport(t, nil)
	for range 2 {
		if err := reach(t, tr, lure); err == nil {
			t.Error("the lure was accepted")
		}
		if <-resumed {
			t.Error("the client resumed")
		}
	}
}

// Invariant A4.
func TestOlderTLSIsNotSpoken(t *testing.T) {
	x := newTarget(t, nil)
	conf := &tls.Config{InsecureSkipVerify: true, NextProtos: []string{alpn}, MaxVersion: tls.VersionTLS12}
	if c, err := (&tls.Dialer{Config: conf}).DialContext(t.Context(), "tcp", x.addr); err == nil {
		_ = c.Close()
		t.Error("the server speaks TLS 1.2")
	}
	old := evil(t, &tls.Config{Certificates: []tls.Certificate{x.stolen}, NextProtos: []string{alpn}, MaxVersion: tls.VersionTLS12},
		func(c *tls.Conn) { _ = c.HandshakeContext(t.Context()) })
	if err := reach(t, x.transport(t, nil), old); err == nil {
		t.Error("the client speaks TLS 1.2")
	}
}
