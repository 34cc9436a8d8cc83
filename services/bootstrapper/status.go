package bootstrapper

import (
	"context"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/gen/muster/init/v1/initv1connect"
	"github.com/muster-k8s/muster/internal/buildinfo"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/seek"
)

var _ initv1connect.MachineServiceHandler = (*Bootstrapper)(nil)

// steps is when the journal's step was reached.
type steps struct {
	mu    sync.Mutex
	step  journal.Step
	since time.Time // zero: it was always at it
}

// seen notes a record of the journal, beginning with the one that an earlier life left.
func (t *steps) seen(r journal.Record) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r.Step != t.step {
		if t.step, t.since = r.Step, r.Changed; t.since.IsZero() {
			t.since = time.Now()
		}
	}
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
	b.tries.Tell(out, !rec.Kind.ByOwner() && rec.Step != journal.StepDone || b.renewing.Load() || b.older.Load())
	b.steps.mu.Lock()
	if since := b.steps.since; !since.IsZero() {
		out.Since = timestamppb.New(since)
	}
	b.steps.mu.Unlock()
	if meta, err := b.cfg.Metadata(); err == nil {
		out.NodeName, out.Role, out.InitAllowed = meta.Name, meta.Role, meta.InitSecretHash != nil
	} else {
		out.LastReason, out.LastReasonUnproven, out.LastTry = attestv1.Reason_REASON_MACHINE_CONFIG, false, out.GetNow()
	}
	out.Remedy = seek.RemedyOf(out)
	return out, nil
}
