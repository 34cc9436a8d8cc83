package bootstrapper_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	recoverv1 "github.com/muster-k8s/muster/gen/muster/recover/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/epoch"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/tpm/tpmtest"
)

// cutOff cuts the power just before the named effect and keeps the machine off for a time.
func (w *fixture) cutOff(t *testing.T, at string, off time.Duration, become func(r *running)) {
	t.Helper()
	w.dieAfter(-1)
	w.at = at
	r := w.boot()
	become(r)
	if err := r.end(t); err == nil || !w.did(at) {
		t.Fatalf("it was not cut off: %v, %q", err, w.steps)
	}
	w.dieAfter(-1)
	w.later(off)
}

// startsWithCertificates fails the test if the kubelet is started with an expired certificate: such a kubelet exits and runs no pod.
func (w *fixture) startsWithCertificates(t *testing.T) {
	t.Helper()
	w.machine.Step = func(name string) error {
		if name == "start "+machine.UnitKubelet {
			if c := w.kubeletPair(t, clientFile); w.now().After(c.NotAfter) {
				t.Errorf("the kubelet is started at %s with a certificate that ended at %s", w.now(), c.NotAfter)
			}
		}
		return w.step(name)
	}
}

// B3: only the machine itself can sign these certificates, since the API server needs the kubelet.
func TestAnInitCutOffForLongerThanItsCertificatesGoesOn(t *testing.T) {
	w := first(t)
	w.cutOff(t, "before the cluster's objects", 48*time.Hour, func(r *running) { _ = w.init(t.Context(), r, w.request()) })
	w.startsWithCertificates(t)
	r := w.boot()
	if out := w.init(t.Context(), r, w.request()); out.err != nil {
		t.Fatal(out.err, w.logged)
	}
	if err := r.end(t); err != nil || w.record().Step != journal.StepDone {
		t.Errorf("%v, %+v", err, w.record())
	}
}

// B3: the kubelet's certificate of one year has been replaced by one of one day.
func TestAnAdoptionCutOffForLongerThanItsCertificatesGoesOn(t *testing.T) {
	for _, at := range []string{"before the cluster's objects", "before the journal says done"} {
		w := controlPlane(t)
		w.cutOff(t, at, 48*time.Hour, func(r *running) { _ = w.adopt(t.Context(), r, w.adoption()) })
		w.startsWithCertificates(t)
		r := w.boot()
		if out := w.adopt(t.Context(), r, w.adoption()); out.err != nil {
			t.Fatal(at, out.err, w.logged)
		}
		if err := r.end(t); err != nil || w.record().Step != journal.StepDone {
			t.Errorf("%s: %v, %+v", at, err, w.record())
		}
	}
}

// waitsForEtcd makes the joinservice issue no ticket until the machine's etcd runs again, and refuse some more times after that.
func (j *joinservice) waitsForEtcd(w *fixture, refusals int) {
	j.script(func(context.Context, *joinv1.IssueJoinTicketRequest) (*joinv1.IssueJoinTicketResponse, error) {
		if !w.machine.Running(machine.UnitKubelet) || refusals > 0 {
			refusals--
			return nil, attest.Refuse(attestv1.Reason_REASON_API_UNAVAILABLE, "etcd has lost its quorum")
		}
		return nil, nil
	}, nil)
}

// B3: without this machine's etcd, which the kubelet runs, etcd may have no quorum, and then no joinservice can sign anything.
func TestAJoinCutOffForLongerThanItsCertificatesGoesOn(t *testing.T) {
	w, j := joiner(t)
	w.cutOff(t, "kubeadm join is half done", 48*time.Hour, func(*running) {})
	w.startsWithCertificates(t)
	j.waitsForEtcd(w, 0)
	r := w.boot()
	defer r.kill(t)
	eventually(t, "its kubelet runs, and it asks", func() bool { return w.machine.Running(machine.UnitKubelet) && j.asked() > 1 })
}

// Each increment wears out the memory of a TPM's counter, and a machine may wait for its ticket for days.
func TestAJoinThatWaitsForATicketCountsOnceInABoot(t *testing.T) {
	w, j := joiner(t)
	w.cutOff(t, "kubeadm join is half done", 0, func(*running) {})
	before, err := w.tpm.Counter(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	const refusals = 5
	j.waitsForEtcd(w, refusals)
	w.at = "kubeadm reset begins" // the record starts anew after it
	if err := w.boot().end(t); err == nil {
		t.Fatal("it is a node")
	}
	after, err := w.tpm.Counter(t.Context())
	if err != nil || after != before+2 || j.asked() < refusals {
		t.Errorf("the counter went from %d to %d, %v, in %d attempts", before, after, err, j.asked())
	}
}

// B7: a machine never serves the cluster from an older copy of the disk, also in the middle of an init, and for every caller.
func TestAnInitIsNotResumedFromAnOlderCopyOfItsDisk(t *testing.T) {
	w := first(t)
	w.counter, w.image.Listen.Recover = tpmtest.SWTPM(t).Open(), "127.0.0.1:0"
	p := plane{w, w.signer}
	w.cutOff(t, "before the cluster's objects", 0, func(r *running) { _ = w.init(t.Context(), r, w.request()) })
	older := t.TempDir()
	if err := os.CopyFS(older, os.DirFS(w.root)); err != nil {
		t.Fatal(err)
	}
	if err := p.keeper().Advance(t.Context(), epoch.Record{Epoch: 1}); err != nil {
		t.Fatal(err)
	}
	p.restore(older)
	r := w.boot()
	ended := make(chan outcome, 1)
	go func() { ended <- w.init(t.Context(), r, w.request()) }()
	eventually(t, "it waits for its owner", func() bool { return p.on() != "" })
	if w.exists(mayStart) || w.did("start "+machine.UnitKubelet) || w.machine.Running(machine.UnitKubelet) {
		t.Error("the kubelet may start")
	}
	d, err := p.client().DescribeEpoch(t.Context(), &recoverv1.DescribeEpochRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.client().AcceptEpoch(t.Context(), p.order(d).Wire(p.priv)); err != nil {
		t.Fatal(err)
	}
	if out := <-ended; out.err != nil {
		t.Error(out.err)
	}
	if err := r.end(t); err != nil || !w.machine.Running(machine.UnitKubelet) {
		t.Errorf("accepted: %v", err)
	}
}

// B7: neither a join that is to be taken back nor one that is complete but for the journal's last step serves an older copy of the cluster.
func TestAJoinIsNotResumedFromAnOlderCopyOfItsDisk(t *testing.T) {
	for _, at := range []string{"kubeadm join is half done", "before the journal says " + journal.StepDone.String()} {
		t.Run(at, func(t *testing.T) {
			w, _ := joiner(t)
			w.counter, w.image.Listen.Recover = tpmtest.SWTPM(t).Open(), "127.0.0.1:0"
			p := plane{fixture: w}
			w.cutOff(t, at, 0, func(*running) {})
			older := t.TempDir()
			if err := os.CopyFS(older, os.DirFS(w.root)); err != nil {
				t.Fatal(err)
			}
			if err := p.keeper().Advance(t.Context(), epoch.Record{Epoch: 1}); err != nil {
				t.Fatal(err)
			}
			w.reboot()
			p.restore(older)
			r := w.boot()
			defer r.kill(t)
			eventually(t, "it waits for its owner, or starts", func() bool { return p.on() != "" || w.did("start "+machine.UnitKubelet) })
			if w.exists(mayStart) || w.did("start "+machine.UnitKubelet) {
				t.Error("the kubelet may start")
			}
		})
	}
}

// B7: an older copy of an adopted control plane's disk is detected from the time before its kubelet is started.
func TestAnAdoptionBeginsItsRecordBeforeItServes(t *testing.T) {
	w := controlPlane(t)
	w.cutOff(t, "start "+machine.UnitKubelet, 0, func(r *running) { _ = w.adopt(t.Context(), r, w.adoption()) })
	k := epoch.Keeper{Dir: filepath.Join(w.root, epoch.Folder), TPM: w.tpm}
	if s, err := k.Check(t.Context()); err != nil || s.Err != nil || s.Record == nil {
		t.Errorf("%+v, %v", s, err)
	}
}
