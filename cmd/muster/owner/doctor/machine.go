package doctor

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/muster-k8s/muster/cmd/muster/owner/appraisal"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
)

// Names of the checks of one machine.
const (
	CheckReach    = "reachability"
	CheckEvidence = "evidence"
	CheckVerdict  = "verdict"
	CheckLock     = "node lock"
	CheckMachine  = "bootstrapper"
	CheckJoining  = "joining"
)

// ExamineMachine examines, from the owner's workstation, a machine that should become a node. `bootstrapper
// doctor` makes the checks that are only possible on the machine itself.
func ExamineMachine(ctx context.Context, cfg appraisal.VerifyConfig) *checkup.Report {
	r := &checkup.Report{}
	sight, err := appraisal.Verify(ctx, cfg)
	if err != nil {
		remedy := "Check the network between this computer and the machine, and the machine's console, which shows what it waits for. If it is a node already, it serves no port: `muster doctor --node NODE`."
		if errors.Is(err, syscall.ECONNREFUSED) {
			remedy = "The machine is a node already, or its bootstrapper is not running. For a node, run `muster doctor --node NODE`; otherwise look at its console."
		}
		r.Err(CheckReach, remedy, err)
		return r
	}
	r.OK(CheckReach, "%s speaks muster-atls/1", cfg.Addr)
	evidence(r, sight)
	s, err := appraisal.AskMachine(ctx, cfg)
	if err != nil {
		r.Err(CheckMachine, problem.Explain(err).Remedy+" "+"Use a bootstrapper of this version.", err)
		return r
	}
	status(r, s)
	return r
}

func evidence(r *checkup.Report, s *appraisal.Report) {
	reason, why := attest.ReasonOf(s.Err), s.Err
	if refusal, ok := errors.AsType[*attest.Refusal](s.Err); ok {
		why = refusal // without the text of the connection error
	}
	remedy := rpc.RemedyOf(reason)
	if s.Problem != nil && s.Problem.Remedy != "" {
		remedy = s.Problem.Remedy
	}
	if remedy == "" {
		remedy = "Don't trust the machine until you know why; docs/reason-codes.md explains the code."
	}
	if s.Machine == "" {
		r.Add(CheckEvidence, checkup.Fail, remedy, "%v", why)
		return
	}
	r.OK(CheckEvidence, "genuine, from the TPM of machine %s (%s)", s.Machine, endorsedBy(s))
	switch {
	case reason == attestv1.Reason_REASON_LOCK_FOREIGN:
		r.Add(CheckLock, checkup.Fail, remedy, "it is %s", s.Lock)
	case s.Err != nil:
		r.Add(CheckVerdict, checkup.Fail, remedy, "%v", why)
	default:
		r.OK(CheckVerdict, "accepted by the policy of serial %d", s.PolicySerial)
	}
	if r.Clean(CheckLock) {
		r.OK(CheckLock, "%s", s.Lock)
	}
}

// endorsedBy returns the endorsement, with the root if there is one.
func endorsedBy(s *appraisal.Report) string {
	if s.Root == "" {
		return s.Endorsement
	}
	return s.Endorsement + ", below " + s.Root
}

func status(r *checkup.Report, s *appraisal.MachineStatus) {
	word := "says"
	if !s.Proven {
		word = "says, unproven,"
	}
	disk := "and has no state disk yet"
	if s.Disk != "" {
		disk = "with the state disk " + s.Disk
	}
	r.OK(CheckMachine, "version %s %s that it is at the phase %s, %s", s.Version, word, s.Phase, disk)
	d := &doctor{}
	d.skew(CheckClock, "the machine's clock", s.Skew, time.Second)
	if len(d.Findings) == 0 {
		d.OK(CheckClock, "the machine's clock agrees with this computer's")
	}
	r.Findings = append(r.Findings, d.Findings...)
	switch {
	case s.Reason != "":
		remedy := s.Remedy
		if remedy == "" {
			remedy = "joinservice's log and audit log have details."
		}
		by := ""
		if s.ReasonUnproven {
			by = ", from a peer that was not attested as a joinservice"
		}
		r.Add(CheckJoining, checkup.Fail, remedy, "%s%s: %s", s.Reason, by, attempts(s))
	case len(s.JoinEndpoints) == 0 && !s.InitAllowed:
		r.Add(CheckJoining, checkup.Fail, "Correct the machine's metadata: name joinEndpoints, or initSecretHash if it should become the first.", "it has no joinservice to try, and allows no init")
	case len(s.JoinEndpoints) == 0:
		r.OK(CheckJoining, "it waits for muster init")
	default:
		r.OK(CheckJoining, "no attempt has failed")
	}
}

func attempts(s *appraisal.MachineStatus) string {
	if s.Phase == "unlocking" {
		return fmt.Sprintf("%d attempts to open its state disk failed, at %d joinservices", s.FailedAttempts, len(s.JoinEndpoints))
	}
	if s.FailedAttempts == 0 {
		return "its latest init failed"
	}
	return fmt.Sprintf("%d attempts to join failed, at %d joinservices", s.FailedAttempts, len(s.JoinEndpoints))
}
