package main

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/membertest"
	waitlist "github.com/muster-k8s/muster/internal/objects/waiting"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/keys"
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

// The machines of an autoscaling group come one after the other; what waits elsewhere is approved by another command. Machines are at the
// port of their own loopback address, and the test writes the list that joinservice would write.
func TestMachinesOfANetworkAreApproved(t *testing.T) {
	api, path, ca := cluster(t), filepath.Join(t.TempDir(), "muster-prod"), attesttest.NewCA(t)
	boot := func(address, image string) *attesttest.Machine {
		m := attesttest.NewMachine(t, ca, attesttest.Options{Image: image})
		serveMachineAt(t, m, address+":9000")
		return m
	}
	first, second, elsewhere, tampered := boot("127.77.1.1", ""), boot("127.77.1.2", ""), boot("127.77.2.1", ""), boot("127.77.1.3", "tampered")
	at := map[*attesttest.Machine]string{first: "127.77.1.1", second: "127.77.1.2", elsewhere: "127.77.2.1", tampered: "127.77.1.3"}
	policy := attesttest.Policy(t, ca, []*attesttest.Machine{first}, func(p *attestv1.Policy) { p.Tpm2.MachineIds = []string{strings.Repeat("5e", 32)} })
	if err := ownersFolder(path, api, policy); err != nil {
		t.Fatal(err)
	}
	dir, err := ownerdir.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	c := dir.Cluster()
	c.Stage, c.ClusterID = ownerdir.StageInstalled, keys.ClusterID{3}.String()
	if err := errors.Join(dir.Save(c), dir.Close()); err != nil {
		t.Fatal(err)
	}
	if dir, err = ownerdir.View(path); err != nil {
		t.Fatal(err)
	}
	kube, err := access.Connect(dir)
	if err != nil {
		t.Fatal(err)
	}
	_, signed, err := policies.SignedPolicy(dir)
	if err == nil {
		err = ownertest.PutPolicy(t.Context(), kube, signed)
	}
	if err != nil {
		t.Fatal(err)
	}
	wait := func(machines ...*attesttest.Machine) {
		list := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: clusterapi.Namespace, Name: waitlist.ConfigMap}, Data: map[string]string{}}
		for _, m := range machines {
			text, err := waitlist.Entry{Machine: m.ID().String(), Reason: "POLICY_REFUSED", Address: at[m], List: "tpm2.machineIds", Since: time.Now(), Last: time.Now()}.Encode()
			if err != nil {
				t.Fatal(err)
			}
			list.Data[m.ID().String()] = text
		}
		if err := errors.Join(client.IgnoreNotFound(api.Client.Delete(t.Context(), list.DeepCopy())), api.Client.Create(t.Context(), list)); err != nil {
			t.Fatal(err)
		}
	}
	listed := func(m *attesttest.Machine) bool {
		p := &v1alpha1.AttestationPolicy{}
		if err := api.Client.Get(t.Context(), types.NamespacedName{Name: v1alpha1.PolicyName}, p); err != nil {
			t.Fatal(err)
		}
		had, err := dir.Read(ownerdir.PolicyFile)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Contains(p.Spec.Policy, m.ID().String()) && strings.Contains(string(had), m.ID().String())
	}
	approve := func(args ...string) (string, error) {
		var out strings.Builder
		err := (&app{stdout: &out, stderr: &out}).run(t.Context(), append([]string{"approve", "--directory", path}, args...))
		return out.String(), err
	}

	wait(tampered, elsewhere, first)
	if out, err := approve("--count", "2", "--for", "1m", "--from", "127.77.1.0/24", "--dry-run"); err != nil || !strings.Contains(out, first.ID().String()) || strings.Contains(out, elsewhere.ID().String()) || listed(first) {
		t.Errorf("--dry-run: %v\n%s", err, out)
	}
	type result struct {
		out string
		err error
	}
	done := make(chan result, 1)
	go func() {
		out, err := approve("--count", "2", "--for", "1m", "--from", "127.77.1.0/24", "--yes")
		done <- result{out, err}
	}()
	membertest.Eventually(t, func() error {
		if len(done) > 0 {
			got := <-done
			t.Fatalf("the command has ended: %v\n%s", got.err, got.out)
		}
		if !listed(first) {
			return errors.New("the first machine is not listed")
		}
		return nil
	})
	wait(tampered, elsewhere, second)
	got := <-done
	if got.err != nil || strings.Count(got.out, "Approved by the policy of serial") != 2 || !strings.Contains(got.out, "machine "+tampered.ID().String()+" is left out") {
		t.Errorf("--count: %v\n%s", got.err, got.out)
	}
	if !listed(second) || listed(elsewhere) || listed(tampered) {
		t.Errorf("--count: other machines are listed than those two of the network that booted the image")
	}
	wait(tampered, elsewhere)
	if out, err := approve("--count", "1", "--for", "100ms", "--from", "127.77.1.0/24", "--yes"); err == nil || exitCode(err) != exitFailed || !strings.Contains(err.Error(), "to continue: muster approve --count 1 --for 100ms --from 127.77.1.0/24") {
		t.Errorf("when the time is over: %v\n%s", err, out)
	}
	if out, err := approve("--all-from", "127.77.1.0/24", "--yes"); err == nil || exitCode(err) != exitFailed || !strings.Contains(err.Error(), "none can be approved") || listed(tampered) || listed(elsewhere) {
		t.Errorf("--all-from, of a machine with another image: %v\n%s", err, out)
	}
	if out, err := approve("--all-from", "127.77.2.0/24", "--yes"); err != nil || !strings.Contains(out, "Approved by the policy of serial 4") || !listed(elsewhere) || listed(tampered) {
		t.Errorf("--all-from: %v\n%s", err, out)
	}
}
