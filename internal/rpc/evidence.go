package rpc

import (
	"context"
	"errors"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/admission"
	"github.com/muster-k8s/muster/trust/attest"
)

// PublicAttester makes evidence of the purpose "public" over several nonces with one quote.
type PublicAttester interface {
	Formats() []attestv1.Format
	AttestAll(ctx context.Context, f attestv1.Format, nonces []attest.Binding) ([]*attestv1.Evidence, error)
}

const (
	// publicInterval is how often a quote of the purpose "public" is made at most: strangers
	// must not keep the TPM from its work.
	publicInterval = time.Second
	// publicBatch is how many callers share one; above it they are told BUSY.
	publicBatch = 64
	// publicPerSource is how many of those may be of one source.
	publicPerSource = 8
	// publicTimeout bounds one quote.
	publicTimeout = 10 * time.Second
	// evidenceCopies is how often evidence is in memory while it is sent: as a message, as bytes, and
	// in what is being written.
	evidenceCopies = 3
)

// Evidence is muster.attest.v1.EvidenceService: evidence of this machine for anybody's
// nonce, for debugging. No session accepts its purpose, or it would be an oracle that signs
// for whoever wants to pass for this machine (A5).
type Evidence struct {
	attester PublicAttester

	mu      sync.Mutex
	open    *publicQuote // takes callers until its quote begins; nil: none
	notUpTo time.Time    // no quote begins before
}

// publicQuote is shared by those who came while it was open.
type publicQuote struct {
	nonces   []attest.Binding
	sources  map[admission.Source]int
	done     chan struct{}
	evidence []*attestv1.Evidence // set before done is closed, as is err
	err      error
}

// NewEvidence takes an attester whose purpose is "public".
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
		// Who came first does the work, for those who came later too: so it goes on even if
		// this caller hangs up.
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
	// A caller may leave its answer unread.
	if err := hold(ctx, evidenceCopies*int64(proto.Size(ev))); err != nil {
		return nil, err
	}
	return &attestv1.GetEvidenceResponse{Evidence: ev}, nil
}

// join adds a nonce to the quote that is open, or opens one. Who opens it is told how long
// to wait before it may begin.
func (e *Evidence) join(source admission.Source, nonce attest.Binding) (q *publicQuote, i int, wait time.Duration, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := time.Now()
	if e.open == nil {
		e.open = &publicQuote{done: make(chan struct{}), sources: map[admission.Source]int{}}
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
