package bootstrapper_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/gen/muster/init/v1/initv1connect"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/trust/attest"
)

// asker returns a plain HTTPS client, as curl or a browser.
func asker(t *testing.T, r *running) initv1connect.MachineServiceClient {
	t.Helper()
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	t.Cleanup(transport.CloseIdleConnections)
	return initv1connect.NewMachineServiceClient(&http.Client{Transport: transport}, "https://"+r.addr)
}

func statusOf(t *testing.T, c initv1connect.MachineServiceClient) *initv1.GetStatusResponse {
	t.Helper()
	s, err := c.GetStatus(t.Context(), &initv1.GetStatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestAWaitingMachineSaysWhyItWaits(t *testing.T) {
	w, j := worker(t)
	const detail = "PCR 4 is 00, the policy accepts 11"
	j.script(func(context.Context, *joinv1.IssueJoinTicketRequest) (*joinv1.IssueJoinTicketResponse, error) {
		return nil, attest.RefuseFor(time.Hour, attestv1.Reason_REASON_POLICY_REFUSED, detail)
	}, nil)
	r := w.boot()
	defer r.kill(t)
	c := asker(t, r)
	var s *initv1.GetStatusResponse
	eventually(t, "the machine says when it tries again", func() bool { s = statusOf(t, c); return s.GetNextAttempt() != nil })
	if s.GetPhase() != initv1.Phase_PHASE_WAITING || s.GetTaker() != initv1.Taker_TAKER_UNSPECIFIED || s.GetLastReason() != attestv1.Reason_REASON_POLICY_REFUSED || s.GetFailedAttempts() != 1 {
		t.Errorf("%v", s)
	}
	if !strings.Contains(s.GetRemedy(), "policy") || s.GetNextAttempt().AsTime().Sub(s.GetNow().AsTime()) < time.Minute || s.GetLastAttempt().AsTime().After(time.Now()) {
		t.Errorf("remedy %q, now %v, next try %v", s.GetRemedy(), s.GetNow().AsTime(), s.GetNextAttempt().AsTime())
	}
	id := w.tpm.ID()
	if !bytes.Equal(s.GetMachineId(), id[:]) || s.GetNodeName() != "node2" || s.GetRole() != "worker" || s.GetInitAllowed() || s.GetVersion() == "" || !slices.Equal(s.GetJoinEndpoints(), []string{j.addr}) {
		t.Errorf("%v", s)
	}
	if strings.Contains(s.String(), "PCR 4") {
		t.Errorf("an unauthenticated client learns more than the reason: %v", s) // R1
	}
}

func TestAMachineSaysItsPhaseWhileAnInitRunsAndWhyItFailed(t *testing.T) {
	w := first(t)
	w.screen = filepath.Join(t.TempDir(), "console")
	if err := os.WriteFile(w.screen, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	reached, release := make(chan struct{}), make(chan struct{})
	w.machine.Step = func(name string) error {
		if name == "kubeadm init is half done" {
			close(reached)
			<-release
			return os.ErrDeadlineExceeded
		}
		return nil
	}
	r := w.boot()
	defer r.kill(t)
	c := asker(t, r)
	if s := statusOf(t, c); s.GetPhase() != initv1.Phase_PHASE_WAITING || !s.GetInitAllowed() || s.GetLastReason() != attestv1.Reason_REASON_UNSPECIFIED || s.GetRemedy() != "" {
		t.Errorf("before: %v", s)
	}
	ended := make(chan outcome, 1)
	go func() { ended <- w.init(t.Context(), r, w.request()) }()
	<-reached
	if s := statusOf(t, c); s.GetPhase() != initv1.Phase_PHASE_CONFIGURED || s.GetTaker() != initv1.Taker_TAKER_INIT || s.GetSince() == nil || s.GetNextAttempt() != nil {
		t.Errorf("while kubeadm runs: %v", s)
	}
	close(release)
	if out := <-ended; out.err == nil {
		t.Fatal("kubeadm failed, and the init did not")
	}
	if s := statusOf(t, c); s.GetLastReason() != attestv1.Reason_REASON_KUBEADM_FAILED || s.GetRemedy() == "" || s.GetFailedAttempts() != 0 {
		t.Errorf("after: %v", s)
	}
	screen, err := os.ReadFile(w.screen)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"muster: taking the node lock", "muster: running kubeadm init", "muster: the init has failed: KUBEADM_FAILED. "} {
		if !strings.Contains(string(screen), want) {
			t.Errorf("the console does not say %q: %s", want, screen)
		}
	}
}

func TestEveryStepOfTheJournalHasAPhase(t *testing.T) {
	w, j := worker(t)
	j.script(func(context.Context, *joinv1.IssueJoinTicketRequest) (*joinv1.IssueJoinTicketResponse, error) {
		return nil, attest.RefuseFor(time.Hour, attestv1.Reason_REASON_BUSY, "busy")
	}, nil)
	for s := journal.StepLocked; s < journal.StepKubeadmRan; s++ {
		id := bytes.Repeat([]byte{7}, 32)
		if err := w.journal.Save(journal.Record{Step: s, Kind: journal.KindJoin, ClusterID: id, Ticket: bytes.Repeat([]byte{1}, 16), NodeName: "node2"}); err != nil {
			t.Fatal(err)
		}
		r := w.boot()
		got := statusOf(t, asker(t, r))
		if got.GetPhase() == initv1.Phase_PHASE_UNSPECIFIED || got.GetTaker() != initv1.Taker_TAKER_JOIN || got.GetSince() == nil {
			t.Errorf("%s: %v", s, got)
		}
		r.kill(t)
	}
}
