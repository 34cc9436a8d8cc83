package bootstrapper

import (
	"context"

	"google.golang.org/protobuf/types/known/timestamppb"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/gen/muster/init/v1/initv1connect"
	"github.com/muster-k8s/muster/internal/buildinfo"
	"github.com/muster-k8s/muster/services/bootstrapper/discovery"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
)

var _ initv1connect.MachineServiceHandler = (*Bootstrapper)(nil)

// phases maps each step of the journal to its phase in init.v1.
var phases = map[journal.Step]initv1.Phase{
	journal.StepWaiting: initv1.Phase_PHASE_WAITING, journal.StepLocking: initv1.Phase_PHASE_WAITING,
	journal.StepLocked: initv1.Phase_PHASE_LOCKED, journal.StepDisk: initv1.Phase_PHASE_DISK,
	journal.StepComponents: initv1.Phase_PHASE_COMPONENTS, journal.StepConfigured: initv1.Phase_PHASE_CONFIGURED,
	journal.StepKubeadm: initv1.Phase_PHASE_CONFIGURED, journal.StepKubeadmRan: initv1.Phase_PHASE_KUBEADM,
	journal.StepDone: initv1.Phase_PHASE_DONE,
}

// GetStatus implements [initv1connect.MachineServiceHandler]. An unauthenticated client may call it, so the answer has nothing secret.
func (b *Bootstrapper) GetStatus(context.Context, *initv1.GetStatusRequest) (*initv1.GetStatusResponse, error) {
	rec := b.node.Lock.Record()
	out := &initv1.GetStatusResponse{
		Phase: phases[rec.Step], Now: timestamppb.Now(), Version: buildinfo.Read().Version, MachineId: b.node.MachineID[:], DiskId: b.node.DiskID.String(),
	}
	switch rec.Kind {
	case journal.KindInit, journal.KindAdopt:
		out.Taker = initv1.Taker_TAKER_INIT
	case journal.KindJoin:
		out.Taker = initv1.Taker_TAKER_JOIN
	case journal.KindNone:
	}
	b.node.Attempts.Report(out, !rec.Kind.ByOwner() && rec.Step != journal.StepDone || b.node.Waits())
	if since := b.node.Since(); !since.IsZero() {
		out.Since = timestamppb.New(since)
	}
	if meta, err := b.node.Metadata(); err == nil {
		out.NodeName, out.Role, out.InitAllowed = meta.Name, meta.Role, meta.InitSecretHash != nil
	} else {
		out.LastReason, out.LastReasonUnproven, out.LastAttempt = attestv1.Reason_REASON_MACHINE_CONFIG, false, out.GetNow()
	}
	out.Remedy = discovery.RemedyOf(out)
	return out, nil
}
