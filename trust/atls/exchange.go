package atls

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/internal/checked"
)

// sideConfig is one side's configuration: the evidence that it sends and the evidence that it requests.
type sideConfig struct {
	role     role
	attester attest.Attester
	// appraises is false for a server with NoAppraiser: it asks for no evidence.
	appraises bool
	verifier  attest.Verifier
	appraiser attest.Appraiser
	// purpose is the purpose that the peer's evidence must have (A5).
	purpose attest.Purpose
	// unattested accepts a peer that sends no evidence, without a Peer: its requests reach the level
	// "session" only. No client sets it: a client always appraises its server.
	unattested bool
	timeouts   timeouts
	// peers limits the resources that the peer uses until it has attested; nil at a client, which chose its
	// peer and has one at a time.
	peers *unattested
}

// exchange is one run of the protocol between the handshake and HTTP/2.
//
// One goroutine reads and decides, another one writes. With a single goroutine, two sides that each write a
// megabyte first would block each other.
type exchange struct {
	sideConfig
	conn     *tls.Conn
	ekm      [32]byte
	deadline time.Time

	out      chan []byte   // at most one frame of each kind, so sending never blocks
	written  chan struct{} // closed when the writer is done
	writeErr error         // set by the writer; read only after written is closed

	offers      [32]byte
	gives       attestv1.Format // the format that the peer requested; FORMAT_UNSPECIFIED: none
	wants       attestv1.Format // the format that we asked for and the peer has; FORMAT_UNSPECIFIED: none
	pending     attest.Pending
	digest      [32]byte // of the peer's evidence, as received
	seen        map[kind]bool
	verdictSent bool // our verdict has been sent
	// challenge is the peer's challenge, deferred until the peer itself has attested.
	challenge *attestv1.Challenge

	peer  *attest.Peer
	times Times
}

// Times is how long each part of an exchange took.
type Times struct {
	// Handshake is the TLS handshake, Total the exchange that followed it.
	Handshake, Total time.Duration
	// Attest is the making of our own evidence, Verify the check and appraisal of the peer's; 0 if there was
	// none.
	Attest, Verify time.Duration
}

type kind int

const (
	kindOffer kind = iota
	kindEvidence
	kindChallenge
	kindResponse
	kindVerdict
)

func (k kind) String() string {
	return [...]string{"Offer", "Evidence", "Challenge", "Response", "Verdict"}[k]
}

func kindOf(f *attestv1.Frame) kind {
	switch f.GetMessage().(type) {
	case *attestv1.Frame_Evidence:
		return kindEvidence
	case *attestv1.Frame_Challenge:
		return kindChallenge
	case *attestv1.Frame_Response:
		return kindResponse
	case *attestv1.Frame_Verdict:
		return kindVerdict
	default:
		return kindOffer // decodeFrame accepts no other kind
	}
}

// run exchanges frames until both verdicts are known. It returns the peer, or nil if the peer was not
// appraised. If this side refused, the reason was sent to the peer. After any error, which is an
// [ExchangeError], the connection cannot be used any more.
func (p sideConfig) run(ctx context.Context, conn *tls.Conn, ekm [32]byte) (*attest.Peer, Times, error) {
	start := time.Now()
	x := &exchange{
		sideConfig: p,
		conn:       conn,
		ekm:        ekm,
		deadline:   start.Add(p.timeouts.exchange),
		out:        make(chan []byte, int(kindVerdict)+1),
		written:    make(chan struct{}),
		seen:       make(map[kind]bool),
	}
	defer p.peers.release()
	work := x.deadline.Add(-verdictReserve)
	ctx, cancel := context.WithDeadline(ctx, work)
	defer cancel()
	if err := errors.Join(conn.SetReadDeadline(work), conn.SetWriteDeadline(x.deadline)); err != nil {
		return nil, x.times, err
	}
	go x.write()
	err := x.finish(x.decide(ctx))
	x.times.Total = time.Since(start)
	if err != nil {
		return nil, x.times, &ExchangeError{Accepted: x.peer != nil, Err: err}
	}
	if err := errors.Join(conn.SetReadDeadline(time.Time{}), conn.SetWriteDeadline(time.Time{})); err != nil {
		return nil, x.times, err
	}
	return x.peer, x.times, nil
}

func (x *exchange) write() {
	defer close(x.written)
	for b := range x.out {
		if _, err := x.conn.Write(b); err != nil {
			x.writeErr = err
			return
		}
	}
}

func (x *exchange) send(f *attestv1.Frame) ([]byte, error) {
	raw, err := encodeFrame(f)
	if err != nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_INTERNAL, "%w", err)
	}
	x.out <- raw
	return raw, nil
}

// finish sends the verdict if it was not sent yet, waits until everything is written, and gives a refused
// peer time to read its reason.
func (x *exchange) finish(err error) error {
	refusal, ours := errors.AsType[*attest.Refusal](err)
	ours = ours && !refusal.Remote
	if ours {
		v := &attestv1.Verdict{Reason: verdictCode(refusal.Reason)}
		if refusal.RetryAfter > 0 {
			v.RetryAfter = durationpb.New(refusal.RetryAfter)
		}
		if !x.verdictSent { // otherwise we accepted already, and can only close
			_, _ = x.send(verdictFrame(v))
		}
	}
	close(x.out)
	if err != nil && !ours {
		// Nothing more to send: the writer may be blocked by a peer that does not read.
		_ = x.conn.SetWriteDeadline(time.Unix(1, 0))
	}
	<-x.written
	if err == nil {
		return classify(x.writeErr)
	}
	if ours && x.writeErr == nil {
		x.linger()
	}
	return err
}

// linger waits briefly for the refused peer to close the connection. If we closed it while bytes of the peer
// are unread, TCP would reset the connection and discard our verdict.
func (x *exchange) linger() {
	if x.conn.CloseWrite() != nil {
		return
	}
	until := time.Now().Add(lingerTimeout)
	if until.After(x.deadline) {
		until = x.deadline
	}
	x.peers.discards(2 * maxEvidenceFrame)
	if x.conn.SetReadDeadline(until) == nil {
		_, _ = io.CopyN(io.Discard, x.conn, 2*maxEvidenceFrame)
	}
}

// classify turns a timeout into a refusal. Other network errors are no refusals, because a peer that went
// away may be back soon.
func classify(err error) error {
	var timeout net.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, new(*attest.Refusal)):
		return err
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded),
		errors.As(err, &timeout) && timeout.Timeout():
		return attest.Refuse(attestv1.Reason_REASON_DEADLINE, "the exchange was not complete after %s", exchangeTimeout)
	default:
		return err
	}
}

// decide reads and answers frames until both verdicts are "accepted", or returns the cause of the failure.
func (x *exchange) decide(ctx context.Context) error {
	own := &attestv1.Offer{Gives: x.attester.Formats()}
	if x.appraises {
		own.Accepts = x.verifier.Formats()
	}
	sent, err := x.send(offerFrame(own))
	if err != nil {
		return err
	}
	f, received, err := readFrame(x.conn, maxFrame, x.peers.sends)
	if err != nil {
		return classify(err)
	}
	if kindOf(f) != kindOffer {
		return invalidFrame("the first frame is %s, not an Offer", kindOf(f))
	}
	x.seen[kindOffer] = true
	if x.role == roleClient {
		x.offers = hashOffers(sent, received)
	} else {
		x.offers = hashOffers(received, sent)
	}
	if err := x.agree(own, f.GetOffer()); err != nil {
		return err
	}
	if x.gives != attestv1.Format_FORMAT_UNSPECIFIED {
		if err := x.attest(ctx); err != nil {
			return err
		}
	}
	if x.wants == attestv1.Format_FORMAT_UNSPECIFIED {
		if err := x.accept(); err != nil {
			return err
		}
	}
	for !x.seen[kindVerdict] || !x.verdictSent {
		if err := x.next(ctx); err != nil {
			return classify(err)
		}
	}
	return nil
}

// next reads one frame and processes it.
func (x *exchange) next(ctx context.Context) error {
	limit := maxFrame
	if x.expects(kindEvidence) == nil {
		limit = maxEvidenceFrame
	}
	f, raw, err := readFrame(x.conn, limit, x.peers.sends)
	if err != nil {
		return err
	}
	return x.handle(ctx, f, raw)
}

// agree determines which evidence each side has to send. The attester uses its first format that the verifier
// accepts.
func (x *exchange) agree(own, peer *attestv1.Offer) error {
	none := attestv1.Format_FORMAT_UNSPECIFIED
	if slices.Contains(peer.GetGives(), none) || slices.Contains(peer.GetAccepts(), none) {
		return invalidFrame("the offer lists FORMAT_UNSPECIFIED")
	}
	if len(own.GetGives()) > 0 && len(peer.GetAccepts()) > 0 {
		if x.gives = choose(own.GetGives(), peer.GetAccepts()); x.gives == none {
			return attest.Refuse(attestv1.Reason_REASON_FORMAT_NONE, "we give %v, the peer accepts %v", own.GetGives(), peer.GetAccepts())
		}
	}
	if !x.appraises {
		return nil
	}
	if len(peer.GetGives()) == 0 {
		if x.unattested {
			return nil
		}
		return attest.Refuse(attestv1.Reason_REASON_PEER_WILL_NOT_ATTEST, "the peer offers no evidence")
	}
	if x.wants = choose(peer.GetGives(), own.GetAccepts()); x.wants == none {
		return attest.Refuse(attestv1.Reason_REASON_FORMAT_NONE, "the peer gives %v, we accept %v", peer.GetGives(), own.GetAccepts())
	}
	return nil
}

func choose(gives, accepts []attestv1.Format) attestv1.Format {
	for _, f := range gives {
		if slices.Contains(accepts, f) {
			return f
		}
	}
	return attestv1.Format_FORMAT_UNSPECIFIED
}

// attest makes and sends our evidence. It needs both offers, because they are part of the binding.
func (x *exchange) attest(ctx context.Context) error {
	if err := x.peers.gets(); err != nil {
		return err
	}
	start := time.Now()
	done := x.peers.works()
	ev, err := x.attester.Attest(ctx, x.gives, newBinding(x.role, x.ekm, x.offers))
	done()
	x.times.Attest = time.Since(start)
	if err != nil {
		return ownFault(err, "make evidence")
	}
	raw, err := x.send(evidenceFrame(ev))
	x.peers.got(len(raw))
	return err
}

// ownFault wraps errors of our own attester or verifier: the peer receives the reason if there is one.
func ownFault(err error, doing string) error {
	if err := classify(err); errors.As(err, new(*attest.Refusal)) {
		return err
	}
	return attest.Refuse(attestv1.Reason_REASON_INTERNAL, "%s: %w", doing, err)
}

// expects returns the error if a frame of that kind is not allowed now, or nil. Each kind is allowed once at
// most.
func (x *exchange) expects(k kind) error {
	var ok bool
	switch k {
	case kindOffer:
	case kindEvidence:
		ok = x.wants != attestv1.Format_FORMAT_UNSPECIFIED
	case kindChallenge:
		// A challenge is allowed only for our evidence, before the peer's verdict on it, and from a peer
		// whose own evidence was checked, if we asked for any: unauthenticated peers must not use our TPM's
		// time.
		ok = x.gives != attestv1.Format_FORMAT_UNSPECIFIED && !x.seen[kindVerdict] &&
			(x.wants == attestv1.Format_FORMAT_UNSPECIFIED || x.pending != nil)
	case kindResponse:
		ok = x.pending != nil && x.pending.Challenge() != nil
	case kindVerdict:
		ok = true
	}
	if !ok || x.seen[k] {
		return invalidFrame("an unexpected frame: %s", k)
	}
	return nil
}

func (x *exchange) handle(ctx context.Context, f *attestv1.Frame, raw []byte) error {
	k := kindOf(f)
	if err := x.expects(k); err != nil {
		return err
	}
	x.seen[k] = true
	switch k {
	case kindEvidence:
		x.digest = sha256.Sum256(evidenceIn(raw)) // of the bytes received, not of a new encoding
		return x.verify(ctx, f.GetEvidence())
	case kindChallenge:
		if x.role == roleServer && x.wants != attestv1.Format_FORMAT_UNSPECIFIED && x.peer == nil {
			// A server waits until the peer is accepted. A client does not wait: otherwise both sides would
			// wait for each other.
			x.challenge = f.GetChallenge()
			return nil
		}
		return x.respond(ctx, f.GetChallenge())
	case kindResponse:
		return x.complete(ctx, f.GetResponse())
	case kindVerdict:
		return x.verdict(f.GetVerdict())
	default:
		return invalidFrame("an unexpected frame: %s", k)
	}
}

// respond answers the peer's challenge, which takes one activation by our TPM.
func (x *exchange) respond(ctx context.Context, c *attestv1.Challenge) error {
	var mac []byte
	err := x.peers.challenge(ctx, x.peer != nil, func() (err error) {
		mac, err = x.attester.Respond(ctx, c, newBinding(x.role, x.ekm, x.offers))
		return err
	})
	if err != nil {
		return ownFault(err, "answer the challenge")
	}
	_, err = x.send(responseFrame(mac))
	return err
}

// verify checks that the evidence is genuine: made for this session, for the peer's role, and for the one
// purpose that we expect (A1, A5).
func (x *exchange) verify(ctx context.Context, ev *attestv1.Evidence) error {
	start := time.Now()
	defer func() { x.times.Verify += time.Since(start) }()
	if ev.GetFormat() != x.wants {
		return attest.Refuse(attestv1.Reason_REASON_EVIDENCE_MALFORMED, "the evidence is %s, agreed was %s", ev.GetFormat(), x.wants)
	}
	b := newBinding(x.role.peer(), x.ekm, x.offers)
	var pending attest.Pending
	err := x.peers.verify(ctx, func() (err error) {
		pending, err = x.verifier.Verify(ctx, ev, attest.NewStatement(x.purpose, b), b)
		return err
	})
	if err != nil {
		return x.verifierFault(err)
	}
	x.pending = pending
	if c := pending.Challenge(); c != nil {
		_, err := x.send(challengeFrame(c))
		return err
	}
	return x.appraise(ctx, nil)
}

func (x *exchange) complete(ctx context.Context, r *attestv1.Response) error {
	start := time.Now()
	defer func() { x.times.Verify += time.Since(start) }()
	return x.appraise(ctx, r)
}

// appraise decides whether genuine claims are acceptable (A1, A2).
func (x *exchange) appraise(ctx context.Context, r *attestv1.Response) error {
	var claims attest.Claims
	var appraisal attest.Appraisal
	// In the peers' queue, as the verification: a hardware report costs about as much (A10).
	if err := x.peers.verify(ctx, func() (err error) {
		if claims, err = x.pending.Complete(r); err != nil {
			return err
		}
		claims = claims.From(checked.Seal(checked.Evidence{Digest: x.digest}))
		appraisal, err = x.appraiser.Appraise(ctx, claims)
		return err
	}); err != nil {
		return x.verifierFault(err)
	}
	p := attest.NewPeer(claims, appraisal, checked.Seal(checked.Session{Purpose: string(x.purpose), VerifiedAt: time.Now()}))
	x.peer = &p
	if err := x.accept(); err != nil || x.challenge == nil {
		return err
	}
	return x.respond(ctx, x.challenge)
}

// verifierFault returns refusals unchanged and turns an error of our own into a refusal: no error of a
// verifier lets a peer pass (A3).
func (x *exchange) verifierFault(err error) error { return ownFault(err, "appraise the peer") }

func (x *exchange) accept() error {
	x.verdictSent = true
	_, err := x.send(verdictFrame(&attestv1.Verdict{Reason: attestv1.Reason_REASON_ACCEPTED}))
	return err
}

// verdict processes the peer's verdict. It may not be "accepted" before the peer has sent the requested
// evidence.
func (x *exchange) verdict(v *attestv1.Verdict) error {
	switch v.GetReason() {
	case attestv1.Reason_REASON_ACCEPTED:
		if x.wants != attestv1.Format_FORMAT_UNSPECIFIED && !x.seen[kindEvidence] {
			return invalidFrame("the peer's verdict came before its evidence")
		}
		return nil
	case attestv1.Reason_REASON_UNSPECIFIED:
		return &attest.Refusal{Reason: attestv1.Reason_REASON_INTERNAL, Remote: true}
	default:
		if !verdictCodes[v.GetReason()] {
			return invalidFrame("the peer's verdict is %s, which is none", attest.ReasonName(v.GetReason()))
		}
		return &attest.Refusal{Reason: v.GetReason(), RetryAfter: retryAfter(v.GetRetryAfter(), x.peer != nil), Remote: true}
	}
}

// retryAfter bounds the wait that the peer requests. A network attacker that answers in a server's place can
// ask for any wait, so a peer that we have not accepted can delay us for seconds at most.
func retryAfter(d *durationpb.Duration, accepted bool) time.Duration {
	if d.CheckValid() != nil {
		return 0
	}
	most := maxUnattestedRetryAfter
	if accepted {
		most = maxRetryAfter
	}
	return min(max(d.AsDuration(), 0), most)
}
