package tpm2

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"sync"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/hardware"
	"github.com/muster-k8s/muster/trust/attest/tpm2/eventlog"
	"github.com/muster-k8s/muster/trust/tpm"
)

// Config configures an Attester. TPM, Purpose and Bank are required.
type Config struct {
	// TPM makes the quotes.
	TPM tpm.Device
	// Purpose is the purpose of every quote of this Attester (A5). It is set here, when the process
	// that owns the TPM starts; no request can change it.
	Purpose attest.Purpose
	// Bank is the bank that is quoted.
	Bank tpm.Bank
	// EventLog is the path of the firmware's event log, usually
	// /sys/kernel/security/tpm0/binary_bios_measurements. Empty: the machine has none, and none is
	// sent.
	EventLog string
	// Hardware makes hardware reports; nil if the machine has none.
	Hardware Hardware
}

// Hardware makes the hardware reports of a machine. Implementations are safe for concurrent use.
type Hardware interface {
	// Report returns a report over data, or nil if the machine has no hardware that makes one.
	Report(ctx context.Context, data hardware.ReportData) (*attestv1.HardwareReport, error)
}

// Attester implements [attest.Attester] with a TPM. One quote runs at a time, and callers that come
// meanwhile share the next one.
type Attester struct {
	cfg    Config
	flight chan struct{} // holds one token: the right to quote
	next   time.Time     // when the next quote may begin; owned by the token's holder

	mu      sync.Mutex
	waiting *batch // takes statements until its quote begins; nil if there is none
}

// publicInterval is the interval between quotes for the public. Any client may ask for one, and a
// TPM that is busy with them would have no time for machines that join.
const publicInterval = time.Second

// reportInterval is the interval between quotes with a hardware report or a NitroTPM document. Sessions
// need one before their peer has proven anything, and hosts throttle their guests' requests.
const reportInterval = time.Second

// batch is a set of statements that share a quote.
type batch struct {
	leaves  []digest
	callers int // that still wait for the result
	cancel  context.CancelFunc
	done    chan struct{} // closed when quote and err are set
	quote   tpm.Quote
	by      endorsed
	report  *attestv1.HardwareReport // nil: the machine makes none
	err     error
}

// NewAttester returns an Attester. The error names the part of cfg that is missing or wrong.
func NewAttester(cfg Config) (*Attester, error) {
	switch {
	case cfg.TPM == nil:
		return nil, errors.New("tpm2: NewAttester: TPM is missing")
	case cfg.Bank.Size() == 0:
		return nil, fmt.Errorf("tpm2: NewAttester: unknown %s", cfg.Bank)
	}
	switch cfg.Purpose {
	case attest.PurposeMachine, attest.PurposeJoinservice, attest.PurposeKMS, attest.PurposePublic, attest.PurposeOrder:
	default:
		return nil, fmt.Errorf("tpm2: NewAttester: unknown purpose %q", cfg.Purpose)
	}
	a := &Attester{cfg: cfg, flight: make(chan struct{}, 1)}
	a.flight <- struct{}{}
	return a, nil
}

// Formats implements [attest.Attester].
func (a *Attester) Formats() []attestv1.Format {
	return []attestv1.Format{attestv1.Format_FORMAT_TPM2}
}

// Attest implements [attest.Attester].
func (a *Attester) Attest(ctx context.Context, f attestv1.Format, b attest.Binding) (*attestv1.Evidence, error) {
	if f != attestv1.Format_FORMAT_TPM2 {
		return nil, refuse(attestv1.Reason_REASON_FORMAT_NONE, "a TPM makes no evidence of format %s", f)
	}
	batch, i, err := a.join(ctx, attest.NewStatement(a.cfg.Purpose, b)) // A5
	if err != nil {
		return nil, err
	}
	select {
	case <-batch.done:
	case <-ctx.Done():
		a.leave(batch)
		return nil, fmt.Errorf("waiting for a quote: %w", context.Cause(ctx))
	}
	if batch.err != nil {
		return nil, batch.err
	}
	events, err := a.readLog()
	if err != nil {
		return nil, err
	}
	return a.evidence(batch, i, events), nil
}

// AttestAll makes evidence over 1 to 1,024 bindings with one quote. It is for callers that may
// quote only at a limited rate and collect requests meanwhile. For the rest see [Attester.Attest].
func (a *Attester) AttestAll(ctx context.Context, f attestv1.Format, bindings []attest.Binding) ([]*attestv1.Evidence, error) {
	if f != attestv1.Format_FORMAT_TPM2 {
		return nil, refuse(attestv1.Reason_REASON_FORMAT_NONE, "a TPM makes no evidence of format %s", f)
	}
	if len(bindings) == 0 || len(bindings) > maxLeaves {
		return nil, fmt.Errorf("tpm2: a quote cannot be made over %d statements", len(bindings))
	}
	b := &batch{done: make(chan struct{}), cancel: func() {}}
	for _, binding := range bindings {
		b.leaves = append(b.leaves, leaf(attest.NewStatement(a.cfg.Purpose, binding))) // A5
	}
	if a.run(ctx, b); b.err != nil {
		return nil, b.err
	}
	events, err := a.readLog()
	if err != nil {
		return nil, err
	}
	out := make([]*attestv1.Evidence, len(bindings))
	for i := range out {
		out[i] = a.evidence(b, i, events) // all share the log's bytes
	}
	return out, nil
}

// evidence returns the evidence for statement i of a batch that has its quote.
func (a *Attester) evidence(batch *batch, i int, events []byte) *attestv1.Evidence {
	e := &attestv1.Tpm2Evidence{
		EkCertificates: batch.by.certificates,
		EkPublic:       batch.by.bare,
		PlatformKey:    batch.by.platform,
		NitroDocument:  batch.by.nitro,
		AkPublic:       batch.quote.AKPublic,
		Attest:         batch.quote.Attest,
		Signature:      batch.quote.Signature,
		Bank:           uint32(batch.quote.Bank),
		Pcrs:           batch.quote.PCRs,
		LeafIndex:      uint32(i),
		Events:         events,
		Hardware:       batch.report,
	}
	for _, h := range path(batch.leaves, i) {
		e.Path = append(e.Path, h[:])
	}
	return &attestv1.Evidence{
		Format: attestv1.Format_FORMAT_TPM2,
		Body:   &attestv1.Evidence_Tpm2{Tpm2: e},
	}
}

// join adds a statement to the waiting batch, or begins a new one.
func (a *Attester) join(ctx context.Context, s attest.Statement) (*batch, int, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.cfg.Purpose == attest.PurposePublic && a.waiting != nil && len(a.waiting.leaves) == maxLeaves {
		return nil, 0, attest.RefuseFor(publicInterval, attestv1.Reason_REASON_BUSY, "%d callers wait for public evidence", maxLeaves)
	}
	if a.waiting == nil || len(a.waiting.leaves) == maxLeaves {
		// Not the caller's context: other callers share the quote. It is canceled when no caller
		// wants the result any more.
		shared, cancel := context.WithCancel(context.WithoutCancel(ctx))
		a.waiting = &batch{done: make(chan struct{}), cancel: cancel}
		go a.run(shared, a.waiting)
	}
	b := a.waiting
	b.leaves = append(b.leaves, leaf(s))
	b.callers++
	return b, len(b.leaves) - 1, nil
}

// leave is called by a caller that gives up.
func (a *Attester) leave(b *batch) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if b.callers--; b.callers == 0 {
		if a.waiting == b {
			a.waiting = nil // no caller may join a batch that is canceled
		}
		b.cancel()
	}
}

// run makes the batch's quote when it gets the token. It returns when the quote is done.
func (a *Attester) run(ctx context.Context, b *batch) {
	defer close(b.done)
	defer b.cancel()
	select {
	case <-a.flight:
		defer func() { a.flight <- struct{}{} }()
	case <-ctx.Done():
		b.err = context.Cause(ctx)
		return
	}
	timer := time.NewTimer(time.Until(a.next))
	select {
	case <-timer.C:
	case <-ctx.Done():
		timer.Stop()
		b.err = context.Cause(ctx)
		return
	}
	if a.cfg.Purpose == attest.PurposePublic {
		a.next = time.Now().Add(publicInterval)
	}
	a.mu.Lock()
	if a.waiting == b {
		a.waiting = nil // from here on its leaves do not change
	}
	a.mu.Unlock()
	top := root(b.leaves)
	if b.by, b.err = a.endorse(ctx, top); b.err != nil {
		return
	}
	// Public evidence has no report, because no session accepts such evidence or verifies its report, and any
	// client may request it.
	if b.quote, b.err = a.cfg.TPM.Quote(ctx, top, a.cfg.Bank); b.err != nil || a.cfg.Hardware == nil || a.cfg.Purpose == attest.PurposePublic {
		return
	}
	ak := sha256.Sum256(b.quote.AKPublic)
	name := append([]byte{0x00, 0x0B}, ak[:]...)
	if b.report, b.err = a.cfg.Hardware.Report(ctx, hardware.NewReportData(name, top)); b.err != nil {
		b.err = fmt.Errorf("hardware report: %w", b.err)
	}
	if b.report != nil || b.err != nil {
		a.next = time.Now().Add(reportInterval)
	}
}

// readLog returns the quoted bank's event log as evidence carries it. It returns nil if the machine
// has no log, or one that does not follow the specification or is too long: such a machine can
// still be appraised by the values of its PCRs.
func (a *Attester) readLog() ([]byte, error) {
	if a.cfg.EventLog == "" {
		return nil, nil
	}
	log, err := eventlog.Read(a.cfg.EventLog, a.cfg.Bank)
	var b []byte
	if err == nil {
		b, err = log.Marshal()
	}
	if attest.ReasonOf(err) == attestv1.Reason_REASON_EVIDENCE_MALFORMED {
		return nil, nil
	}
	return b, err
}

// Respond implements [attest.Attester]. The challenge's secret does not leave this function: the
// returned MAC is useless in another session. It refuses a challenge that this TPM cannot open with
// ACTIVATION_FAILED.
func (a *Attester) Respond(ctx context.Context, c *attestv1.Challenge, b attest.Binding) ([]byte, error) {
	if len(c.GetCredentialBlob()) > 256 || len(c.GetEncryptedSecret()) > 512 {
		return nil, refuse(attestv1.Reason_REASON_FRAME_INVALID, "a challenge of %d and %d bytes", len(c.GetCredentialBlob()), len(c.GetEncryptedSecret()))
	}
	secret, err := a.cfg.TPM.ActivateCredential(ctx, c.GetCredentialBlob(), c.GetEncryptedSecret())
	if err != nil {
		if ctx.Err() != nil {
			return nil, err
		}
		return nil, refuse(attestv1.Reason_REASON_ACTIVATION_FAILED, "%w", err)
	}
	if len(secret) != sha256.Size {
		return nil, refuse(attestv1.Reason_REASON_ACTIVATION_FAILED, "the challenge's secret has %d bytes, want %d", len(secret), sha256.Size)
	}
	return ActivationMAC(secret, b), nil
}
