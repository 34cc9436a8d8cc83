package main

import (
	"bytes"
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	gotpm "github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
	"github.com/muster-k8s/muster/trust/keys"
	"github.com/muster-k8s/muster/trust/tpm"
	"github.com/muster-k8s/muster/trust/tpm/tpmtest"
)

// virtual is a virtual machine: a process of swtpm, memory that each boot resets, and an address.
type virtual struct {
	tpm     *tpmtest.Emulator
	secret  keys.BootSecret
	address string
}

// virtual makes a machine that has joined as w1 with disk1. Its Lease does not exist until its kubelet runs.
func (s *fixture) virtual(t *testing.T) *virtual {
	t.Helper()
	v := &virtual{tpmtest.SWTPM(t, tpmtest.Bare()), keys.NewBootSecret(), "127.0.0.2"}
	chip, err := net.Dial("unix", v.tpm.Socket)
	if err != nil {
		t.Fatal(err)
	}
	tpmtest.Provision(t, transport.FromReadWriter(chip), s.ca, 0x01C0000A, gotpm.ECCEKTemplate)
	if err := chip.Close(); err != nil {
		t.Fatal(err)
	}
	// It has booted nothing: all its PCRs are zero.
	zero := func(pcrs ...uint32) (out []*attestv1.PcrValue) {
		for _, i := range pcrs {
			out = append(out, &attestv1.PcrValue{Index: i, Value: strings.Repeat("00", 32)})
		}
		return out
	}
	s.inForce(t, s.policy(t, func(p *attestv1.Policy) {
		p.Serial = 2
		p.Tpm2.Images = append(p.Tpm2.Images, &attestv1.Image{Name: "virtual", Pcrs: zero(4, 8, 9, 11, 12, 13, 14)})
		p.Tpm2.Classes = append(p.Tpm2.Classes, &attestv1.MachineClass{Name: "virtual", Pcrs: zero(0, 2, 3, 7)})
	}))
	if err := patiently(t, func() error { return s.ticket(t, v) }); err != nil {
		t.Fatal(err)
	}
	return v
}

// copied is the machine's copy, which was switched on; the original machine continues to run.
func (v *virtual) copied(address string) *virtual {
	return &virtual{v.tpm.Copy(), keys.NewBootSecret(), address}
}

// reboot switches the machine off and on.
func (v *virtual) reboot() {
	v.tpm.Restart()
	v.secret = keys.NewBootSecret()
}

// askAs calls a joinservice over a connection with new evidence, and closes it: a machine may have 8.
func (s *fixture) askAs(t *testing.T, v *virtual, endpoint string, call func(joinv1connect.JoinServiceClient) error) error {
	t.Helper()
	a, err := tpm2.NewAttester(tpm2.Config{TPM: v.tpm.Open(), Purpose: attest.PurposeMachine, Bank: tpm.SHA256})
	if err != nil {
		t.Fatal(err)
	}
	transport, err := atls.NewTransport(atls.ClientConfig{
		Attester: a, Verifier: attesttest.Verifier(t, s.ca), PeerPurpose: attest.PurposeJoinservice, Appraiser: presented{s},
		DialContext: (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(v.address)}}).DialContext,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = transport.Close() }()
	return call(joinv1connect.NewJoinServiceClient(rpc.HTTPClient(transport), "https://"+endpoint, rpc.ClientOptions()...))
}

// key asks a joinservice for the key of disk1.
func (s *fixture) key(t *testing.T, v *virtual, endpoint string) error {
	t.Helper()
	return s.askAs(t, v, endpoint, func(c joinv1connect.JoinServiceClient) error {
		resp, err := c.IssueRejoinTicket(t.Context(), again(func(r *joinv1.IssueRejoinTicketRequest) { r.BootSecret = v.secret.Expose() }))
		if err == nil && !bytes.Equal(resp.GetDiskKey(), s.DiskKey(t, disk1)) {
			err = errors.New("another key")
		}
		return err
	})
}

// opens expects the machine to get the key of disk1.
func (s *fixture) opens(t *testing.T, v *virtual) {
	t.Helper()
	if err := patiently(t, func() error { return s.key(t, v, s.join.Addr) }); err != nil {
		t.Errorf("the machine at %s: %v", v.address, err)
	}
}

// attests expects the machine to get a verdict.
func (s *fixture) attests(t *testing.T, v *virtual) {
	t.Helper()
	if err := patiently(t, func() error { return s.verdict(t, v) }); err != nil {
		t.Fatalf("the machine at %s: %v", v.address, err)
	}
}

// verdict re-attests as a node does; its machine is locked to the cluster.
func (s *fixture) verdict(t *testing.T, v *virtual) error {
	t.Helper()
	return s.askAs(t, v, s.join.Addr, func(c joinv1connect.JoinServiceClient) error {
		_, err := c.Reattest(t.Context(), &joinv1.ReattestRequest{BootSecret: v.secret.Expose()})
		return err
	})
}

// ticket requests a ticket, as w1 with disk1.
func (s *fixture) ticket(t *testing.T, v *virtual) error {
	t.Helper()
	w := worker(t, encrypted)
	w.BootSecret = v.secret.Expose()
	return s.askAs(t, v, s.join.Addr, func(c joinv1connect.JoinServiceClient) error {
		_, err := c.IssueJoinTicket(t.Context(), w.IssueJoinTicketRequest)
		return err
	})
}

func (s *fixture) lock(t *testing.T, v *virtual) {
	t.Helper()
	if err := v.tpm.Open().Measure(t.Context(), attest.LockPCR, s.ID[:]); err != nil {
		t.Fatal(err)
	}
}

// kubeletLease creates w1's Lease, and returns a function that writes it as its kubelet does, over that client.
func (s *fixture) kubeletLease(t *testing.T, over client.Client) func(context.Context) error {
	t.Helper()
	l := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: corev1.NamespaceNodeLease, Name: "w1"}}
	l.Spec.RenewTime = new(metav1.NewMicroTime(time.Now().Add(-time.Hour))) // its clock is an hour behind
	if err := over.Create(t.Context(), l); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Client.Delete(context.WithoutCancel(t.Context()), l) })
	return func(ctx context.Context) error {
		l.Spec.RenewTime = new(metav1.NewMicroTime(l.Spec.RenewTime.Add(time.Second)))
		err := over.Update(ctx, l)
		if apierrors.IsConflict(err) { // an earlier write whose answer did not come
			return errors.Join(err, over.Get(ctx, client.ObjectKeyFromObject(l), l))
		}
		return err
	}
}

// runs simulates w1's kubelet until stop is called. Like a kubelet it repeats a write that fails.
func (s *fixture) runs(t *testing.T) (stop func()) {
	t.Helper()
	renew := s.kubeletLease(t, s.Client)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() {
		var failed error
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				done <- failed
				return
			case <-tick.C:
				if err := renew(ctx); err != nil && ctx.Err() == nil {
					failed = err
				}
			}
		}
	}()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Logf("a write of w1's Lease had to be repeated: %v", err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// cloned asks, and expects the refusal in all places, a report that names both addresses, and the metric of the alert.
func (s *fixture) cloned(t *testing.T, want attestv1.Reason, event, refused, known string, ask func() error) {
	t.Helper()
	machine := s.Node(t, "w1").Spec.MachineID
	about := []string{"event", event, "machine", machine}
	_ = refusaltest.Refused(t, s.observations(t), want, refusaltest.Places{Metric: []string{"muster_rpc_requests_total"}, Log: about, Audit: about}, ask)
	both := func(text string) bool {
		first, second, ok := strings.Cut(text, "is refused")
		return ok && strings.Contains(first, refused) && strings.Contains(second, known)
	}
	if !s.recorded(t, func(r audit.Record) bool { return r.Reason == attest.ReasonName(want) && both(r.Detail) }) {
		t.Errorf("no record has %s and %s: %+v", refused, known, s.records(t))
	}
	membertest.Eventually(t, func() error {
		c := meta.FindStatusCondition(s.Node(t, "w1").Status.Conditions, v1alpha1.ConditionCloned)
		return membertest.Want(c != nil && c.Status == metav1.ConditionTrue && both(c.Message), "condition %+v", c)
	})
	s.emitted(t, "w1", "MachineCloned", refused)
	membertest.Eventually(t, func() error {
		n := s.join.Metric(t, "muster_nodes_cloned")
		return membertest.Want(n == 1, "%v nodes count as cloned", n)
	})
	if s.Node(t, "w1").Status.LastVerdict == nil || !s.Node(t, "w1").Status.LastVerdict.Accepted {
		t.Error("the verdict on the machine that was accepted is undone")
	}
}

// watching makes joinservice watch a Lease for as long as by default, so that a kubelet on a slow machine renews it
// meanwhile. A machine whose kubelet has ended asks another one, see [fixture.beside], which lets it in sooner.
func watching(s *fixture) { s.flags = append(s.flags, "--lease-watch=15s") }

// sweepsSoon is for tests that wait until joinservice has counted enrollments.
func sweepsSoon(s *fixture) { s.timing.Sweep = 200 * time.Millisecond }

// J11: while the original runs, a machine that has booted its TPM once more is a copy.
func TestACopyGetsNoKeyWhileTheOriginalRuns(t *testing.T) {
	s := setUp(t, watching, sweepsSoon)
	original := s.virtual(t)
	s.lock(t, original)
	s.attests(t, original)
	running := s.runs(t)
	before := s.Node(t, "w1").Status.Boot
	clone := original.copied("127.0.0.3")
	s.cloned(t, attestv1.Reason_REASON_MACHINE_CLONED, "rejoin refused", "127.0.0.3", "127.0.0.2", func() error { return s.key(t, clone, s.join.Addr) })
	if after := s.Node(t, "w1").Status.Boot; *after != *before {
		t.Errorf("the copy's boot is recorded: %+v", after)
	}
	s.attests(t, original)
	// In an honest reboot the kubelet ends before the machine asks. Its Lease is watched first, which takes its time.
	running()
	original.reboot()
	other, began := s.beside(t, 0, "--lease-watch=2s"), time.Now()
	other.opens(t, original)
	if took := time.Since(began); took < 2*time.Second {
		t.Errorf("a Lease that had just been written was looked at for %s", took)
	}
	s.cloned(t, attestv1.Reason_REASON_MACHINE_CLONED, "rejoin refused", "127.0.0.3", "127.0.0.2", func() error { return s.key(t, clone, s.join.Addr) }) // at this point it counts the same
}

// J11: an enrollment that was deleted and created again, such as from an export, has no status. Its Node and the Node's kubelet live on.
func TestACopyGetsNoKeyWhenTheEnrollmentWasMadeAnew(t *testing.T) {
	s := setUp(t, watching, sweepsSoon)
	original := s.virtual(t)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}
	if err := s.Client.Create(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Client.Delete(context.WithoutCancel(t.Context()), node) })
	s.lock(t, original)
	s.attests(t, original)
	running := s.runs(t)
	anew := func() {
		s.setStatus(t, "w1", func(st *v1alpha1.AttestedNodeStatus) { *st = v1alpha1.AttestedNodeStatus{} })
	}
	refused := func(what string, v *virtual) {
		t.Helper()
		if err := s.key(t, v, s.join.Addr); rpc.ReasonFrom(err) != attestv1.Reason_REASON_MACHINE_CLONED {
			t.Errorf("%s: %v", what, err)
		}
	}
	locked, open := original.copied("127.0.0.3"), original.copied("127.0.0.4")
	open.secret = locked.secret
	anew()
	refused("a copy asks for the key", open)
	anew()
	s.lock(t, locked)
	s.attests(t, locked)
	refused("a copy attests before", open)
	anew()
	running()
	original.reboot()
	s.beside(t, 0, "--lease-watch=2s").opens(t, original)
}

// J11: the copy was booted once more, and asks when the original has its key and its kubelet does not run yet.
func TestACopyGetsNoKeyWhileTheOriginalComesUp(t *testing.T) {
	s := setUp(t, func(s *fixture) { s.flags = []string{"--first-lease-within=1h"} }, watching, sweepsSoon)
	original := s.virtual(t)
	clone := original.copied("127.0.0.3")
	clone.reboot()
	s.setStatus(t, "w1", func(st *v1alpha1.AttestedNodeStatus) { st.Boot.Since.Time = time.Now().Add(-2 * time.Hour) }) // it has joined long ago
	original.reboot()
	s.beside(t, 0, s.flags[0]).opens(t, original)
	clone.reboot()
	if err := s.key(t, clone, s.join.Addr); rpc.ReasonFrom(err) != attestv1.Reason_REASON_BUSY || rpc.RetryAfterFrom(err) > time.Hour {
		t.Errorf("the copy: %v, to come again in %s", err, rpc.RetryAfterFrom(err))
	}
	s.runs(t)
	s.setStatus(t, "w1", func(st *v1alpha1.AttestedNodeStatus) { st.Boot.Since.Time = st.Boot.Since.Add(-2 * time.Second) }) // the API server stores full seconds
	s.cloned(t, attestv1.Reason_REASON_MACHINE_CLONED, "rejoin refused", "127.0.0.3", "127.0.0.2", func() error { return s.key(t, clone, s.join.Addr) })
}

// In the other order the copy comes while the original is off. No TPM can distinguish them, so the original is refused, and
// reported.
func TestAnOriginalWhoseCopyCameFirstIsReported(t *testing.T) {
	for name, slow := range map[string]time.Duration{"the API server is quick": 0, "the API server is slow": 300 * time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			s := setUp(t, sweepsSoon)
			original := s.virtual(t)
			clone := original.copied("127.0.0.3")
			if slow > 0 {
				s = s.beside(t, slow)
			}
			s.opens(t, clone)
			t.Run("it ran on, cut off from the cluster", func(t *testing.T) {
				s.lock(t, original)
				s.cloned(t, attestv1.Reason_REASON_MACHINE_CLONED, "verdict refused", "127.0.0.2", "127.0.0.3", func() error { return s.verdict(t, original) })
			})
			t.Run("it boots", func(t *testing.T) {
				original.reboot()
				s.cloned(t, attestv1.Reason_REASON_MACHINE_CLONED, "rejoin refused", "127.0.0.2", "127.0.0.3", func() error { return s.key(t, original, s.join.Addr) })
			})
			t.Run("the copy goes on", func(t *testing.T) { s.opens(t, clone) })
			t.Run("its owner decides", func(t *testing.T) { // what muster replace --tpm writes
				s.setStatus(t, "w1", func(st *v1alpha1.AttestedNodeStatus) { st.Boot, st.ResetCount, st.Conditions = nil, nil, nil })
				s.opens(t, original)
				s.cloned(t, attestv1.Reason_REASON_MACHINE_CLONED, "rejoin refused", "127.0.0.3", "127.0.0.2", func() error { return s.key(t, clone, s.join.Addr) })
			})
		})
	}
}

// Re-attestation records a later boot without a check whether the previous one has ended. That boot gets nothing while the
// original runs: no certificates, no ticket, and no key for another copy with its counters and its secret. The original's
// packets to joinservices are dropped here: it requests nothing.
func TestACopyThatHasAttestedGetsNothingWhileTheOriginalRuns(t *testing.T) {
	s := setUp(t, watching, sweepsSoon)
	original := s.virtual(t)
	s.lock(t, original)
	s.attests(t, original)
	running := s.runs(t)
	locked, open := original.copied("127.0.0.3"), original.copied("127.0.0.4")
	open.secret = locked.secret
	s.lock(t, locked)
	at := s // where they ask
	renewing := renewingAs(t)
	renewing.BootSecret = locked.secret.Expose()
	renew := func() error {
		return s.askAs(t, locked, at.join.Addr, func(c joinv1connect.JoinServiceClient) error {
			_, err := c.RenewNodeCertificates(t.Context(), renewing.RenewNodeCertificatesRequest)
			return err
		})
	}
	ticket := func() error { return at.ticket(t, locked) }
	key := func() error { return s.key(t, open, at.join.Addr) }
	s.cloned(t, attestv1.Reason_REASON_MACHINE_CLONED, "renewal refused", "127.0.0.3", "127.0.0.2", renew)
	s.attests(t, locked)
	s.cloned(t, attestv1.Reason_REASON_MACHINE_CLONED, "renewal refused", "127.0.0.3", "127.0.0.3", renew)
	s.cloned(t, attestv1.Reason_REASON_MACHINE_CLONED, "rejoin refused", "127.0.0.4", "127.0.0.3", key)
	s.cloned(t, attestv1.Reason_REASON_MACHINE_CLONED, "ticket refused", "127.0.0.3", "127.0.0.3", ticket)
	// The same requests, of a machine that has attested in a boot of its own, after the kubelet of the previous boot has
	// ended.
	running()
	at = s.beside(t, 0)
	for what, ask := range map[string]func() error{"certificates": renew, "a ticket": ticket, "a key": key} {
		if err := patiently(t, ask); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// An attacker who may delete Nodes causes the deletion of the Lease; the running kubelet creates it again.
func TestALeaseThatIsAwayForAMomentLetsNoCopyIn(t *testing.T) {
	s := setUp(t, watching, sweepsSoon)
	original := s.virtual(t)
	s.lock(t, original)
	s.attests(t, original)
	clone := original.copied("127.0.0.3")
	s.cloned(t, attestv1.Reason_REASON_MACHINE_CLONED, "rejoin refused", "127.0.0.3", "127.0.0.2", func() error {
		refused := make(chan error, 1)
		go func() { refused <- s.key(t, clone, s.join.Addr) }()
		membertest.Eventually(t, func() error {
			return membertest.Want(strings.Contains(string(s.join.Log.Bytes()), "checking whether the kubelet of its previous boot still renews"), "it does not wait yet")
		})
		s.runs(t)
		return <-refused
	})
}

// A machine with an empty disk asks for a ticket instead.
func TestACopyGetsNoTicketWhileTheOriginalRuns(t *testing.T) {
	s := setUp(t, watching, sweepsSoon)
	original := s.virtual(t)
	s.runs(t)
	clone := original.copied("127.0.0.3")
	s.cloned(t, attestv1.Reason_REASON_MACHINE_CLONED, "ticket refused", "127.0.0.3", "127.0.0.2", func() error { return s.ticket(t, clone) })
	if err := patiently(t, func() error { return s.ticket(t, original) }); err != nil { // it asks once more, in the same boot
		t.Errorf("the original: %v", err)
	}
}

// Copies ask two replicas at the same time, whose API server is slow.
func TestOfCopiesThatAskAtOnceOneGetsTheKey(t *testing.T) {
	s := setUp(t)
	original := s.virtual(t)
	endpoints := []string{s.beside(t, 300*time.Millisecond).join.Addr, s.beside(t, 300*time.Millisecond).join.Addr}
	all := []*virtual{original, original.copied("127.0.0.3"), original.copied("127.0.0.4"), original.copied("127.0.0.5")}
	original.reboot() // all have the same counters
	errs := make([]error, len(all))
	var wait sync.WaitGroup
	for i, v := range all {
		wait.Go(func() {
			// One request of a machine waits at a replica, the others must try again.
			errs[i] = patiently(t, func() error { return s.key(t, v, endpoints[i%2]) })
		})
	}
	wait.Wait()
	got := 0
	for i, err := range errs {
		switch reason := rpc.ReasonFrom(err); {
		case err == nil:
			got++
		case reason != attestv1.Reason_REASON_MACHINE_CLONED:
			t.Errorf("%s: %v", all[i].address, err)
		}
	}
	if got != 1 {
		t.Errorf("%d got the key: %v", got, errs)
	}
	membertest.Eventually(t, func() error {
		n := s.Node(t, "w1").Status
		return membertest.Want(meta.IsStatusConditionTrue(n.Conditions, v1alpha1.ConditionCloned), "%+v", n)
	})
}
