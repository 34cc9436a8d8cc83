package main

import (
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
)

// The command that an error names admits no machine that the one before would not have admitted.
func TestTheContinuationOfAnApprovalHasItsLimits(t *testing.T) {
	for want, tt := range map[string]struct {
		f    approving
		done int
		took time.Duration
	}{
		"0 of 1 machine was approved within 5s; to continue: muster approve --count 1 --for 5s --from 10.0.0.0/8":                             {approving{count: 1, wait: 5 * time.Second, from: "10.0.0.0/8", yes: true}, 0, 5*time.Second + 3*time.Millisecond},
		"1 of 3 machines were approved within 15s; to continue: muster approve --count 2 --for 3m0s":                                          {approving{count: 3, wait: 3 * time.Minute}, 1, 15*time.Second - 4*time.Millisecond},
		"1 of 2 machines were approved within 1m0s; to continue: muster approve --count 1 --for 1m0s --from 10.0.0.0/8 --bare-ek":             {approving{count: 2, wait: time.Minute, from: "10.0.0.0/8", ApproveConfig: policies.ApproveConfig{BareEK: true}}, 1, time.Minute},
		"0 of 2 machines were approved within 1m0s; to continue: muster approve --count 2 --for 1m0s --trust-cluster --any-account --any-tpm": {approving{count: 2, wait: time.Minute, ApproveConfig: policies.ApproveConfig{TrustCluster: true, AnyAccount: true, AnyTPM: true}}, 0, time.Minute},
	} {
		if got := tt.f.unfinished(tt.done, tt.took).Error(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// Scripts see by the exit code that nothing was approved, as for a machine that is named.
func TestAnApprovalThatLeavesOutAllMachinesFails(t *testing.T) {
	a, stdout, _ := wrapped(t, outputPlain)
	left := []policies.Candidate{{Waiting: clusterapi.Waiting{Machine: "ab"}, Problem: &problem.Problem{Message: "because"}}}
	if err := a.approveThese(&cobra.Command{}, approving{yes: true}, nil, &policies.Approver{}, nil, left); err == nil || exitCode(err) != exitFailed || !strings.Contains(err.Error(), "1 machine waits, but none can be approved") || !strings.Contains(stdout.String(), "not possible: because") {
		t.Errorf("%v: %s", err, stdout)
	}
	if err := a.approveThese(&cobra.Command{}, approving{yes: true}, nil, &policies.Approver{}, nil, nil); err != nil {
		t.Errorf("none waits: %v", err)
	}
}
