package bootstrapper_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// joiner returns a machine that becomes a control plane, and its joinservice.
func joiner(t *testing.T) (*fixture, *joinservice) {
	t.Helper()
	w, j := worker(t)
	w.meta.Role = "control-plane"
	return w, j
}

// holdKubeadm makes `kubeadm join` wait in the middle until release is called.
func (w *fixture) holdKubeadm() (reached chan struct{}, release func()) {
	reached, hold := make(chan struct{}), make(chan struct{})
	w.machine.Step = func(name string) error {
		if name == "kubeadm join begins" {
			close(reached)
			<-hold
		}
		return nil
	}
	return reached, func() { close(hold) }
}

func TestAControlPlaneKeepsItsTurnAndGivesItBack(t *testing.T) {
	w, j := joiner(t)
	w.leaseRenewal = 50 * time.Millisecond
	reached, release := w.holdKubeadm()
	r := w.boot()
	<-reached
	eventually(t, "it is renewed", func() bool { n, _ := j.leases(); return n >= 3 })
	if _, ended := j.leases(); ended != 0 {
		t.Error("it ended before kubeadm did")
	}
	release()
	if err := r.end(t); err != nil {
		t.Fatal(err)
	}
	w.isNode(t)
	if _, ended := j.leases(); ended != 1 {
		t.Errorf("it ended %d times", ended)
	}
	for _, q := range j.renewals {
		if string(q.GetTicketId()) != strings.Repeat("\a", 16) {
			t.Errorf("renewed with %x", q.GetTicketId())
		}
	}
}

func TestAWorkerHasNoTurn(t *testing.T) {
	w, j := worker(t)
	if err := w.boot().end(t); err != nil {
		t.Fatal(err)
	}
	if renewed, ended := j.leases(); renewed+ended > 0 || slices.Contains(w.machine.Calls(), "leave etcd") {
		t.Errorf("renewed %d, ended %d, calls %v", renewed, ended, w.machine.Calls())
	}
}

// The joinservice that issued the ticket may be gone: any other one renews the lease.
func TestATurnIsRenewedByAnotherJoinservice(t *testing.T) {
	w, _ := joiner(t)
	pub, priv := ownerKey(t)
	w.image.OwnerKeys = attest.OwnerKeys{pub}
	on := []*attesttest.Machine{attesttest.NewMachine(t, w.ca, attesttest.Options{}), attesttest.NewMachine(t, w.ca, attesttest.Options{})}
	first := newJoinservice(t, w, on[0], priv, attesttest.ControlPlanes(on...))
	second := newJoinservice(t, w, on[1], priv, attesttest.ControlPlanes(on...))
	w.leaseRenewal = 50 * time.Millisecond
	first.renewal = func(int) error {
		return attest.RefuseFor(time.Millisecond, attestv1.Reason_REASON_API_UNAVAILABLE, "the API server restarts")
	}
	w.meta.JoinEndpoints = []string{first.addr, second.addr}
	reached, release := w.holdKubeadm()
	r := w.boot()
	<-reached
	eventually(t, "the other one renews it", func() bool { n, _ := second.leases(); return n >= 2 })
	if n, _ := first.leases(); n == 0 {
		t.Error("the first was not asked")
	}
	release()
	if err := r.end(t); err != nil {
		t.Fatal(err)
	}
	_, one := first.leases()
	_, two := second.leases()
	if one+two == 0 {
		t.Error("no joinservice was notified of the end")
	}
	if !strings.Contains(w.logged.String(), "could not be renewed; trying again") {
		t.Error("the log does not say so")
	}
}

func TestALostTurnIsToldAndKubeadmGoesOn(t *testing.T) {
	for name, answer := range map[string]struct {
		err  error
		life time.Duration
		want string
	}{
		"another machine has it": {attest.Refuse(attestv1.Reason_REASON_CONTROL_PLANE_BUSY, "x"), time.Minute, "join lease was lost"},
		"it is unknown":          {attest.Refuse(attestv1.Reason_REASON_TICKET_UNKNOWN, "x"), time.Minute, "join lease was lost"},
		"none answers":           {attest.Refuse(attestv1.Reason_REASON_API_UNAVAILABLE, "x"), 200 * time.Millisecond, "may have been lost: it was not renewed in time"},
	} {
		t.Run(name, func(t *testing.T) {
			w, j := joiner(t)
			j.lease, w.leaseRenewal = answer.life, 50*time.Millisecond
			j.renewal = func(int) error { return answer.err }
			reached, release := w.holdKubeadm()
			r := w.boot()
			<-reached
			eventually(t, "logged", func() bool { return strings.Contains(w.logged.String(), answer.want) })
			release()
			if err := r.end(t); err != nil {
				t.Fatal(err)
			}
			w.isNode(t)
			if n := len(slices.DeleteFunc(w.machine.Calls(), func(c string) bool { return c != "kubeadm join" })); n != 1 {
				t.Errorf("kubeadm join ran %d times", n)
			}
		})
	}
}

// A machine that fails ends its lease at once, and its pauses before the next attempt stay short.
func TestAFailedControlPlaneGivesItsTurnBackAndComesAgain(t *testing.T) {
	w, j := joiner(t)
	w.screen = filepath.Join(t.TempDir(), "console")
	if err := os.WriteFile(w.screen, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	fails, busy := 1, 4
	w.machine.Step = func(name string) error {
		if name == "kubeadm join is half done" && fails > 0 {
			fails--
			return os.ErrDeadlineExceeded
		}
		return nil
	}
	j.script(func(context.Context, *joinv1.IssueJoinTicketRequest) (*joinv1.IssueJoinTicketResponse, error) {
		if _, ended := j.leases(); ended == 1 && busy > 0 {
			busy--
			return nil, attest.RefuseFor(10*time.Millisecond, attestv1.Reason_REASON_CONTROL_PLANE_BUSY, "another")
		}
		return nil, nil
	}, nil)
	r := w.boot()
	if err := r.end(t); err != nil {
		t.Fatal(err)
	}
	w.isNode(t)
	if _, ended := j.leases(); ended != 2 || !w.machine.Member() {
		t.Errorf("ended %d times, in etcd: %t", ended, w.machine.Member())
	}
	if counter(t, r.metrics, "muster_join_attempts_total", "CONTROL_PLANE_BUSY") != 4 {
		t.Error("metrics")
	}
	screen, err := os.ReadFile(w.screen)
	if err != nil {
		t.Fatal(err)
	}
	announced := regexp.MustCompile(`; next try in (.*)`).FindAllStringSubmatch(string(screen), -1)
	if len(announced) == 0 {
		t.Error("no pause is announced")
	}
	for _, pause := range announced {
		if strings.TrimSpace(pause[1]) != "1 s" {
			t.Errorf("it is to come back in %q", pause[1])
		}
	}
}

// While etcd can't be asked, nothing is reset: the disk of a voting member stays (J8).
func TestNothingIsResetWhileEtcdCannotBeAsked(t *testing.T) {
	w, _ := joiner(t)
	fails := 1
	w.machine.Step = func(name string) error {
		if name == "kubeadm join is half done" && fails > 0 {
			fails--
			return os.ErrDeadlineExceeded
		}
		return nil
	}
	refusals := 0
	w.etcdDown = func() error {
		if w.machine.Member() && refusals < 3 {
			refusals++
			if slices.Contains(w.machine.Calls(), "kubeadm reset") || !w.exists("/var/lib/etcd/member") {
				t.Error("the member's disk was wiped while it had a vote")
			}
			return errors.New("etcd: no quorum")
		}
		return nil
	}
	if err := w.boot().end(t); err != nil {
		t.Fatal(err)
	}
	w.isNode(t)
	if refusals != 3 {
		t.Errorf("asked %d times", refusals)
	}
}

// A reboot in the middle of the join: etcd may need this member before any joinservice can issue a ticket.
func TestAControlPlaneThatWasCutOffStartsItsEtcdBeforeItAsks(t *testing.T) {
	w, j := joiner(t)
	w.machine.Step = func(name string) error {
		if name == "kubeadm join is half done" {
			w.die()
			return errDead
		}
		return nil
	}
	if err := w.boot().end(t); err == nil {
		t.Fatal("it did not die")
	}
	if !w.machine.Member() || !w.exists("/etc/kubernetes/manifests/etcd.yaml") {
		t.Fatal("it died too early")
	}
	w.machine.Step = nil
	w.reboot()
	j.script(func(context.Context, *joinv1.IssueJoinTicketRequest) (*joinv1.IssueJoinTicketResponse, error) {
		if w.machine.Member() && !w.machine.Running("kubelet.service") {
			return nil, attest.Refuse(attestv1.Reason_REASON_API_UNAVAILABLE, "etcd has lost its quorum")
		}
		return nil, nil
	}, nil)
	if err := w.boot().end(t); err != nil {
		t.Fatal(err, w.logged)
	}
	w.isNode(t)
}

func TestATicketOfAControlPlaneSaysWhoRunsEtcd(t *testing.T) {
	for name, change := range map[string]func(*joinv1.IssueJoinTicketResponse){
		"none":   func(r *joinv1.IssueJoinTicketResponse) { r.ControlPlaneAddresses = nil },
		"a name": func(r *joinv1.IssueJoinTicketResponse) { r.ControlPlaneAddresses = []string{"cp1"} },
		"too many": func(r *joinv1.IssueJoinTicketResponse) {
			r.ControlPlaneAddresses = slices.Repeat([]string{"192.168.77.21"}, 65)
		},
		"no lease":           func(r *joinv1.IssueJoinTicketResponse) { r.LeaseLifetime = nil },
		"a lease of no time": func(r *joinv1.IssueJoinTicketResponse) { r.LeaseLifetime = durationpb.New(0) },
		"an endless lease":   func(r *joinv1.IssueJoinTicketResponse) { r.LeaseLifetime = durationpb.New(time.Hour) },
	} {
		t.Run(name, func(t *testing.T) {
			w, j := joiner(t)
			j.script(nil, change)
			r := w.boot()
			eventually(t, "refused", func() bool { return counter(t, r.metrics, "muster_join_attempts_total", "REQUEST_INVALID") > 0 })
			if w.record().Locked() {
				t.Error("the machine was changed")
			}
			j.script(nil, nil)
			if err := r.end(t); err != nil {
				t.Fatal(err)
			}
			w.isNode(t)
		})
	}
}

// Keys are readable only by root, certificates have the modes that kubeadm sets.
func TestAControlPlanesFilesHaveTheirModes(t *testing.T) {
	w, _ := joiner(t)
	reached, release := w.holdKubeadm()
	r := w.boot()
	<-reached
	for _, name := range pkiFiles {
		st, err := os.Stat(filepath.Join(w.root, "/etc/kubernetes/pki", name))
		if err != nil {
			t.Fatal(err)
		}
		want := os.FileMode(0o600)
		if strings.HasSuffix(name, ".crt") || strings.HasSuffix(name, ".pub") {
			want = 0o644
		}
		if st.Mode() != want {
			t.Errorf("%s has mode %s, want %s", name, st.Mode(), want)
		}
	}
	release()
	if err := r.end(t); err != nil {
		t.Fatal(err)
	}
}
