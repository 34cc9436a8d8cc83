package rpc

import (
	"context"
	"errors"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/peerlimit"
)

// PublicAttester makes evidence with the purpose "public" for several nonces with one quote.
type PublicAttester interface {
	Formats() []attestv1.Format
	AttestAll(ctx context.Context, f attestv1.Format, nonces []attest.Binding) ([]*attestv1.Evidence, error)
}

const (
	// publicInterval is the minimum time between quotes with the purpose "public": unattested clients must not block the
	// TPM.
	publicInterval = time.Second
	// publicBatch is how many callers share one quote; further callers get BUSY.
	publicBatch = 64
	// publicPerSource is how many of those may come from one source.
	publicPerSource = 8
	// publicTimeout bounds one quote.
	publicTimeout = 10 * time.Second
	// evidenceCopies is how many copies of evidence are in memory while it is sent: as a message, as bytes, and in the
	// write buffer.
	evidenceCopies = 3
)

// Evidence implements muster.attest.v1.EvidenceService: evidence of this machine for any client's nonce, for debugging. No
// session accepts its purpose: otherwise an attacker could use these signatures to impersonate this machine (A5).
type Evidence struct {
	attester PublicAttester

	mu      sync.Mutex
	open    *publicQuote // accepts callers until its quote starts; nil if there is none
	notUpTo time.Time    // no quote starts before
}

// publicQuote is shared by the callers that came while it was open.
type publicQuote struct {
	nonces   []attest.Binding
	sources  map[peerlimit.Source]int
	done     chan struct{}
	evidence []*attestv1.Evidence // set before done is closed, as is err
	err      error
}

// NewEvidence returns an Evidence that uses an attester with the purpose "public".
func NewEvidence(a PublicAttester) (*Evidence, error) {
	if a == nil || len(a.Formats()) == 0 {
		return nil, errors.New("rpc: NewEvidence needs an attester that has evidence to give")
	}
	return &Evidence{attester: a}, nil
}

// GetEvidence implements [attestv1connect.EvidenceServiceHandler].
func (e *Evidence) GetEvidence(ctx context.Context, req *attestv1.GetEvidenceRequest) (*attestv1.GetEvidenceResponse, error) {
	if n := len(req.GetNonce()); n != len(attest.Binding{}) {
		return nil, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "nonce has %d bytes, want %d", n, len(attest.Binding{}))
	}
	q, i, wait, err := e.join(sourceFrom(ctx), attest.Binding(req.GetNonce()))
	if err != nil {
		return nil, err
	}
	if i == 0 {
		// The first caller makes the quote, for the later ones too: so it continues even if this caller disconnects.
		e.quote(context.WithoutCancel(ctx), q, wait)
	}
	select {
	case <-q.done:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if q.err != nil {
		return nil, q.err
	}
	ev := q.evidence[i]
	// A caller may not read its answer.
	if err := hold(ctx, evidenceCopies*int64(proto.Size(ev))); err != nil {
		return nil, err
	}
	return &attestv1.GetEvidenceResponse{Evidence: ev}, nil
}

// join adds a nonce to the open quote, or opens one. The caller that opens it must wait for wait before it starts.
func (e *Evidence) join(source peerlimit.Source, nonce attest.Binding) (q *publicQuote, i int, wait time.Duration, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := time.Now()
	if e.open == nil {
		e.open = &publicQuote{done: make(chan struct{}), sources: map[peerlimit.Source]int{}}
		wait = max(e.notUpTo.Sub(now), 0)
	}
	q = e.open
	if len(q.nonces) >= publicBatch {
		return nil, 0, 0, attest.RefuseFor(publicInterval, attestv1.Reason_REASON_BUSY, "%d callers share the next quote already", publicBatch)
	}
	if q.sources[source] >= publicPerSource {
		return nil, 0, 0, attest.RefuseFor(publicInterval, attestv1.Reason_REASON_BUSY, "%d callers of %s share the next quote already", publicPerSource, source)
	}
	q.sources[source]++
	q.nonces = append(q.nonces, nonce)
	return q, len(q.nonces) - 1, wait, nil
}

func (e *Evidence) quote(ctx context.Context, q *publicQuote, wait time.Duration) {
	defer close(q.done)
	<-time.After(wait) // at most publicInterval
	e.mu.Lock()
	e.open = nil // from here on its nonces are fixed
	e.notUpTo = time.Now().Add(publicInterval)
	nonces := q.nonces
	e.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, publicTimeout)
	defer cancel()
	q.evidence, q.err = e.attester.AttestAll(ctx, e.attester.Formats()[0], nonces)
	if q.err == nil && len(q.evidence) != len(nonces) {
		q.err = errors.New("the attester gave less evidence than it was asked for")
	}
}
