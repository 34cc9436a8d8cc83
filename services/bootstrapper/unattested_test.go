package bootstrapper_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/atls/atlstest"
	"github.com/muster-k8s/muster/trust/attest"
)

// An attacker who redirects a machine's connection can refuse it without a TPM: the machine continues, and does not report the refusal as a
// joinservice's.
func TestARefusalByAStrangerIsNotToldAsAJoinservices(t *testing.T) {
	for reason, want := range map[attestv1.Reason]string{
		attestv1.Reason_REASON_BANNED:         "BANNED",
		attestv1.Reason_REASON_POLICY_REFUSED: "POLICY_REFUSED",
		attestv1.Reason_REASON_NOT_ENROLLED:   "FRAME_INVALID", // no verdict has this reason
	} {
		t.Run(attest.ReasonName(reason), func(t *testing.T) {
			w, _ := worker(t)
			peer := atlstest.UnattestedServer(t, &attestv1.Verdict{Reason: reason, RetryAfter: durationpb.New(time.Hour)})
			w.meta.JoinEndpoints = []string{peer}
			w.screen = filepath.Join(t.TempDir(), "console")
			if err := os.WriteFile(w.screen, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			r := w.boot()
			defer r.kill(t)
			var screen string
			eventually(t, "the console says what it waits for", func() bool {
				b, err := os.ReadFile(w.screen)
				if err != nil {
					t.Fatal(err)
				}
				screen = string(b)
				return strings.Contains(screen, "next try in")
			})
			by, text := want+" by "+peer, "which was not attested as a joinservice"
			if want == "FRAME_INVALID" {
				by, text = "this machine does not accept what "+peer, "answers: FRAME_INVALID"
			}
			if !strings.Contains(screen, by) || !strings.Contains(screen, text) || strings.Contains(screen, "NOT_ENROLLED") {
				t.Errorf("the console: %q, want %q and %q", screen, by, text)
			}
			s := statusOf(t, asker(t, r))
			if attest.ReasonName(s.GetLastReason()) != want || s.GetRemedy() == rpc.RemedyOf(reason) || s.GetLastReasonUnproven() != (want != "FRAME_INVALID") {
				t.Errorf("the status: %v", s)
			}
			if next := s.GetNextAttempt().AsTime().Sub(s.GetLastAttempt().AsTime()); s.GetNextAttempt() != nil && next > 6*time.Second {
				t.Errorf("the next try is %s after the last", next)
			}
			if remedy := rpc.RemedyOf(reason); strings.Contains(w.logged.String(), remedy) {
				t.Errorf("the log has the remedy %q", remedy)
			}
		})
	}
}

func TestAStrangerRaisesNoAlertAboutARefusedNode(t *testing.T) {
	for _, reason := range []attestv1.Reason{attestv1.Reason_REASON_BANNED, attestv1.Reason_REASON_POLICY_REFUSED, attestv1.Reason_REASON_NOT_ENROLLED} {
		t.Run(attest.ReasonName(reason), func(t *testing.T) {
			w, _ := node(t)
			w.meta.JoinEndpoints = []string{atlstest.UnattestedServer(t, &attestv1.Verdict{Reason: reason})}
			metrics := w.reattest()
			eventually(t, "two attempts", func() bool { return counter(t, metrics, reattestations) >= 2 })
			if want := "UNPROVEN_" + attest.ReasonName(reason); reason != attestv1.Reason_REASON_NOT_ENROLLED && counter(t, metrics, reattestations, want) == 0 {
				t.Errorf("no try counts as %s", want)
			}
			if n := counter(t, metrics, reattestations, attest.ReasonName(reason)); n != 0 {
				t.Errorf("%v attempts count as refused by the cluster: %s", n, attest.ReasonName(reason))
			}
		})
	}
}

// A joinservice refuses a machine before it has answered its challenge, so its first refusal counts as unattested if the attester has never met it. The
// refusal of a joinservice that it has met is the cluster's, and raises the alert.
func TestANodeThatIsRefusedByItsClusterCountsAsSuch(t *testing.T) {
	w, _ := node(t)
	w.tpm.SetPCR(12, clusterID[:])
	metrics := w.reattest()
	eventually(t, "refusals by an unknown joinservice", func() bool { return counter(t, metrics, reattestations, "UNPROVEN_POLICY_REFUSED") >= 2 })
	if n := counter(t, metrics, reattestations, "POLICY_REFUSED"); n != 0 {
		t.Errorf("%v refusals count as the cluster's", n)
	}

	w, _ = node(t)
	metrics = w.reattest()
	eventually(t, "a verdict", func() bool { return counter(t, metrics, reattestations, "ACCEPTED") >= 1 })
	w.tpm.SetPCR(12, clusterID[:])
	eventually(t, "refusals by a known joinservice", func() bool { return counter(t, metrics, reattestations, "POLICY_REFUSED") >= 2 })
	if n := counter(t, metrics, reattestations, "UNPROVEN_POLICY_REFUSED"); n != 0 {
		t.Errorf("%v refusals count as unattested", n)
	}
}
