package doctor

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/cmd/muster/owner/appraisal"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/trust/attest"
)

func TestEachHarmOfAMachineIsFoundFromAfar(t *testing.T) {
	good := func() (*appraisal.Report, *appraisal.MachineStatus) {
		return &appraisal.Report{Machine: "aa", Root: "CN=x", Lock: "unlocked", PolicySerial: 1, Accepted: true},
			&appraisal.MachineStatus{Proven: true, Phase: "waiting", Disk: "3f1c9d2a-5b7e-4c1d-8a6f-0123456789ab", JoinEndpoints: []string{"192.0.2.1:30090"}}
	}
	for name, tt := range map[string]struct {
		check string
		level checkup.Level
		says  string
		harm  func(*appraisal.Report, *appraisal.MachineStatus)
	}{
		"nothing": {harm: func(*appraisal.Report, *appraisal.MachineStatus) {}},
		"no evidence": {CheckEvidence, checkup.Fail, "EK_UNTRUSTED: x", func(s *appraisal.Report, _ *appraisal.MachineStatus) {
			s.Machine, s.Err = "", attest.Refuse(attestv1.Reason_REASON_EK_UNTRUSTED, "x")
		}},
		"a reason without a remedy": {CheckEvidence, checkup.Fail, "AK_TEMPLATE", func(s *appraisal.Report, _ *appraisal.MachineStatus) {
			s.Machine, s.Err = "", attest.Refuse(attestv1.Reason_REASON_AK_TEMPLATE, "x")
		}},
		"another boot": {CheckVerdict, checkup.Fail, "POLICY_REFUSED: x", func(s *appraisal.Report, _ *appraisal.MachineStatus) {
			s.Err = errors.Join(attest.Refuse(attestv1.Reason_REASON_POLICY_REFUSED, "x"))
		}},
		"another lock": {CheckLock, checkup.Fail, "another cluster", func(s *appraisal.Report, _ *appraisal.MachineStatus) {
			s.Lock, s.Err = "locked to another cluster", attest.Refuse(attestv1.Reason_REASON_LOCK_FOREIGN, "x")
		}},
		"a clock": {CheckClock, checkup.Fail, "differs from this computer's by", func(_ *appraisal.Report, m *appraisal.MachineStatus) { m.Skew = -3 * time.Hour }},
		"refusals": {CheckJoining, checkup.Fail, "BUSY: 3 attempts", func(_ *appraisal.Report, m *appraisal.MachineStatus) {
			m.Reason, m.Remedy, m.FailedAttempts = "BUSY", "Wait.", 3
		}},
		"a failed init": {CheckJoining, checkup.Fail, "latest init", func(_ *appraisal.Report, m *appraisal.MachineStatus) { m.Reason = "KUBEADM_FAILED" }},
		"nowhere to go": {CheckJoining, checkup.Fail, "no joinservice", func(_ *appraisal.Report, m *appraisal.MachineStatus) { m.JoinEndpoints = nil }},
	} {
		t.Run(name, func(t *testing.T) {
			s, m := good()
			tt.harm(s, m)
			r := &checkup.Report{}
			evidence(r, s)
			status(r, m)
			var bad []checkup.Finding
			if !slices.ContainsFunc(r.Findings, func(f checkup.Finding) bool {
				return f.Check == CheckMachine && f.Level == checkup.OK && strings.HasSuffix(f.Detail, "at the phase waiting, with the state disk "+m.Disk)
			}) {
				t.Errorf("the disk is missing: %+v", r.Findings)
			}
			for _, f := range r.Findings {
				if f.Level != checkup.OK {
					bad = append(bad, f)
				}
			}
			if tt.check == "" && len(bad) == 0 {
				return
			}
			if len(bad) != 1 || bad[0].Check != tt.check || bad[0].Level != tt.level || !strings.Contains(bad[0].Detail, tt.says) || bad[0].Remedy == "" {
				t.Errorf("%+v", bad)
			}
		})
	}
}
