package bootstrapper

import (
	"context"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/gen/muster/init/v1/initv1connect"
	"github.com/muster-k8s/muster/internal/buildinfo"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
)

var _ initv1connect.MachineServiceHandler = (*Bootstrapper)(nil)

// tries is what the owner may be told of the machine's tries: reasons, times and whom it asks,
// never an error's text, which is for the log (R1).
type tries struct {
	mu        sync.Mutex
	reason    attestv1.Reason // of the latest that failed
	last      time.Time
	next      time.Time // zero: now, or never
	failed    uint32
	endpoints []string

	step  journal.Step
	since time.Time // when step was reached; zero: it was always at it
}

// seen notes a record of the journal, beginning with the one that an earlier life left.
func (t *tries) seen(r journal.Record) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r.Step != t.step {
		if t.step, t.since = r.Step, r.Changed; t.since.IsZero() {
			t.since = time.Now()
		}
	}
}

// fail notes a try that failed.
func (t *tries) fail(reason attestv1.Reason, join bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.reason, t.last = reason, time.Now()
	if join {
		t.failed++
	}
}

// wait notes that the next try begins in d.
func (t *tries) wait(d time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.next = time.Now().Add(d)
}

// begin notes that a try of these endpoints is under way.
func (t *tries) begin(endpoints []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.next, t.endpoints = time.Time{}, slices.Clone(endpoints)
}

// phases says what of init.v1 a step of the journal is.
var phases = map[journal.Step]initv1.Phase{
	journal.StepWaiting: initv1.Phase_PHASE_WAITING, journal.StepLocking: initv1.Phase_PHASE_WAITING,
	journal.StepLocked: initv1.Phase_PHASE_LOCKED, journal.StepDisk: initv1.Phase_PHASE_DISK,
	journal.StepComponents: initv1.Phase_PHASE_COMPONENTS, journal.StepConfigured: initv1.Phase_PHASE_CONFIGURED,
	journal.StepKubeadm: initv1.Phase_PHASE_CONFIGURED, journal.StepKubeadmRan: initv1.Phase_PHASE_KUBEADM,
	journal.StepDone: initv1.Phase_PHASE_DONE,
}

// GetStatus implements [initv1connect.MachineServiceHandler]. Anybody may ask, so it tells
// nothing that has to be kept from anybody.
func (b *Bootstrapper) GetStatus(context.Context, *initv1.GetStatusRequest) (*initv1.GetStatusResponse, error) {
	rec := b.lock.record()
	out := &initv1.GetStatusResponse{
		Phase: phases[rec.Step], Now: timestamppb.Now(), Version: buildinfo.Read().Version, MachineId: b.machineID[:],
	}
	switch rec.Kind {
	case journal.KindInit, journal.KindAdopt:
		out.Taker = initv1.Taker_TAKER_INIT
	case journal.KindJoin:
		out.Taker = initv1.Taker_TAKER_JOIN
	case journal.KindNone:
	}
	t := &b.tries
	t.mu.Lock()
	out.FailedTries, out.JoinEndpoints = t.failed, slices.Clone(t.endpoints)
	if !t.since.IsZero() {
		out.Since = timestamppb.New(t.since)
	}
	if !t.last.IsZero() {
		out.LastReason, out.LastTry = t.reason, timestamppb.New(t.last)
	}
	if !t.next.IsZero() && !rec.Kind.ByOwner() && rec.Step != journal.StepDone {
		out.NextTry = timestamppb.New(t.next)
	}
	t.mu.Unlock()
	if meta, err := b.cfg.Metadata(); err == nil {
		out.NodeName, out.Role, out.InitAllowed = meta.Name, meta.Role, meta.InitSecretHash != nil
	} else {
		out.LastReason, out.LastTry = attestv1.Reason_REASON_MACHINE_CONFIG, out.GetNow()
	}
	if out.GetLastReason() != attestv1.Reason_REASON_UNSPECIFIED {
		out.Remedy = rpc.RemedyOf(out.GetLastReason())
	}
	return out, nil
}
