package discovery

import (
	"strings"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/internal/rpc"
)

// A worker that was forgotten must not be enrolled as a control plane.
func TestTheRemedyOfAMachineIsForItsRole(t *testing.T) {
	s := &initv1.GetStatusResponse{LastReason: attestv1.Reason_REASON_NOT_ENROLLED, Role: "worker"}
	if got := RemedyOf(s); strings.Contains(got, "control-plane") || !strings.Contains(got, "--role worker --machine-id ID --disk-id UUID") {
		t.Errorf("a worker: %q", got)
	}
	s.Role = "control-plane"
	if got := RemedyOf(s); !strings.Contains(got, "--role control-plane") {
		t.Errorf("a control plane: %q", got)
	}
	s.LastReasonUnproven = true
	if got := RemedyOf(s); got != rpc.RemedyUnproven {
		t.Errorf("by a peer that has not proven anything: %q", got)
	}
}
