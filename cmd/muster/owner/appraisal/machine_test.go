package appraisal

import (
	"context"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/gen/muster/init/v1/initv1connect"
	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// waiting is a waiting machine that serves the real attested TLS.
type waiting struct{ id attest.MachineID }

func (w waiting) GetStatus(context.Context, *initv1.GetStatusRequest) (*initv1.GetStatusResponse, error) {
	now := time.Now()
	return &initv1.GetStatusResponse{
		Phase: initv1.Phase_PHASE_WAITING, Now: timestamppb.New(now.Add(3 * time.Hour)), LastReason: attestv1.Reason_REASON_POLICY_REFUSED, LastReasonUnproven: true, Remedy: "send me money",
		LastAttempt: timestamppb.New(now), NextAttempt: timestamppb.New(now.Add(time.Minute)), FailedAttempts: 3, JoinEndpoints: []string{"192.0.2.1:30090"},
		Version: "v1\x1b[2J", MachineId: w.id[:], NodeName: "node2", Role: "worker", DiskId: "3f1c\x1b[2J",
	}, nil
}

func TestAMachineIsAskedProvenOrNot(t *testing.T) {
	ca, other := attesttest.NewCA(t), attesttest.NewCA(t)
	good := attesttest.NewMachine(t, ca, attesttest.Options{})
	policy := attesttest.ParsedPolicy(t, ca, []*attesttest.Machine{good})
	for name, tt := range map[string]struct {
		machine *attesttest.Machine
		problem string
	}{
		"an accepted machine":                            {machine: good},
		"a machine with another image":                   {attesttest.NewMachine(t, ca, attesttest.Options{Image: "tampered"}), "POLICY_REFUSED"},
		"a machine whose TPM nobody in the policy knows": {attesttest.NewMachine(t, other, attesttest.Options{}), "EK_UNTRUSTED"},
	} {
		t.Run(name, func(t *testing.T) {
			l := ownertest.Listen(t)
			ownertest.Serve(t, l, tt.machine.Attester(attest.PurposeMachine), rpc.Serve(initv1connect.MachineServiceName,
				initv1connect.MachineServiceHandler(waiting{tt.machine.ID()}), initv1connect.NewMachineServiceHandler))
			var cfg VerifyConfig
			cfg.Addr, cfg.Purpose, cfg.Policy, cfg.Locks = l.Addr().String(), attest.PurposeMachine, policy, []attest.Lock{attest.Unlocked()}
			s, err := AskMachine(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			if s.Proven != (tt.problem == "") || (s.Problem == nil) != s.Proven || s.Problem != nil && s.Problem.Reason != tt.problem {
				t.Errorf("%+v, problem %+v", s, s.Problem)
			}
			if s.Phase != "waiting" || s.Reason != "POLICY_REFUSED" || s.NodeName != "node2" || s.Machine != tt.machine.ID().String() || s.FailedAttempts != 3 || s.NextAttempt == nil {
				t.Errorf("%+v", s)
			}
			if strings.Contains(s.Remedy, "money") || s.Remedy != rpc.RemedyUnproven || !s.ReasonUnproven || strings.Contains(s.Version+s.Disk, "\x1b") || !strings.HasPrefix(s.Disk, "3f1c") {
				t.Errorf("the machine wrote to our terminal: %q, %q, %q", s.Remedy, s.Version, s.Disk)
			}
			if s.Skew < 2*time.Hour || s.Skew > 4*time.Hour {
				t.Errorf("its clock is 3 h ahead, and we say %s", s.Skew)
			}
		})
	}
}

func TestWhoDoesNotWaitIsNamed(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	var cfg VerifyConfig
	cfg.Purpose, cfg.Policy, cfg.Locks = attest.PurposeMachine, attesttest.ParsedPolicy(t, ca, []*attesttest.Machine{m}), []attest.Lock{attest.Unlocked()}
	gone := ownertest.Listen(t)
	cfg.Addr = gone.Addr().String()
	if err := gone.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := AskMachine(t.Context(), cfg); err == nil || !strings.Contains(problem.Explain(err).Remedy, "node already") {
		t.Errorf("nobody listens: %v, %q", err, problem.Explain(err).Remedy)
	}
	l := ownertest.Listen(t)
	ownertest.Serve(t, l, m.Attester(attest.PurposeMachine), rpc.Serve(joinv1connect.JoinServiceName,
		joinv1connect.JoinServiceHandler(joinv1connect.UnimplementedJoinServiceHandler{}), joinv1connect.NewJoinServiceHandler))
	cfg.Addr = l.Addr().String()
	if _, err := AskMachine(t.Context(), cfg); err == nil || !strings.Contains(problem.Explain(err).Remedy, "9000") {
		t.Errorf("another service: %v, %q", err, problem.Explain(err).Remedy)
	}
}

// A worker that was forgotten must not be enrolled as a control plane.
func TestTheRemedyOfAMachineIsForItsRole(t *testing.T) {
	for role, want := range map[string]string{"worker": "--role worker --machine-id ID --disk-id UUID", "control-plane": "--role control-plane"} {
		var s MachineStatus
		s.fill(&initv1.GetStatusResponse{Role: role, LastReason: attestv1.Reason_REASON_NOT_ENROLLED}, time.Now())
		if !strings.Contains(s.Remedy, want) || role == "worker" && strings.Contains(s.Remedy, "control-plane") {
			t.Errorf("%s: %q", role, s.Remedy)
		}
	}
}
