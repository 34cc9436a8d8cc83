package unlock

import (
	"context"

	"google.golang.org/protobuf/types/known/timestamppb"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/gen/muster/init/v1/initv1connect"
	"github.com/muster-k8s/muster/internal/buildinfo"
	"github.com/muster-k8s/muster/services/bootstrapper/discovery"
)

var _ initv1connect.MachineServiceHandler = (*Unlocker)(nil)

// GetStatus implements [initv1connect.MachineServiceHandler]. An unauthenticated client may call it, so the answer has nothing secret.
func (u *Unlocker) GetStatus(context.Context, *initv1.GetStatusRequest) (*initv1.GetStatusResponse, error) {
	out := &initv1.GetStatusResponse{Now: timestamppb.Now(), Version: buildinfo.Read().Version}
	u.mu.Lock()
	out.Phase, out.Since = u.phase, timestamppb.New(u.since)
	if u.machine != nil {
		out.MachineId = u.machine[:]
	}
	out.DiskId = u.disk.String()
	u.mu.Unlock()
	u.attempts.Report(out, true)
	if meta, err := u.cfg.Metadata(); err == nil {
		out.NodeName, out.Role = meta.Name, meta.Role
	} else {
		out.LastReason, out.LastReasonUnproven, out.LastAttempt = attestv1.Reason_REASON_MACHINE_CONFIG, false, out.GetNow()
	}
	out.Remedy = discovery.RemedyOf(out)
	return out, nil
}
