package bootstrapper_test

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"errors"
	"path/filepath"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// A machine that joins keeps the serial that it accepted, also across restarts, and refuses an older policy.
func TestAJoinerGoesBackToNoOlderPolicy(t *testing.T) {
	type presented struct {
		serial uint64
		other  bool // the same serial with other bytes
	}
	for name, tt := range map[string]struct {
		then presented
		want string // empty: accepted
	}{
		"a lower serial":                   {presented{4, false}, "POLICY_INVALID"},
		"the same serial with other bytes": {presented{5, true}, "POLICY_INVALID"},
		"the same policy":                  {presented{5, false}, ""},
		"a higher serial":                  {presented{6, true}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := newFixture(t, "node2")
			w.meta.Role = "worker"
			pub, priv := ownerKey(t)
			w.image.OwnerKeys = attest.OwnerKeys{pub}
			j := newJoinservice(t, w, attesttest.NewMachine(t, w.ca, attesttest.Options{}), priv)
			present := func(p presented) {
				json := attesttest.Policy(t, w.ca, []*attesttest.Machine{w.tpm}, attesttest.ControlPlanes(j.host), func(m *attestv1.Policy) { m.Serial = p.serial })
				if p.other {
					json = append(bytes.Clone(json), ' ')
				}
				j.signs(attest.SignPolicy(priv, json))
			}
			w.meta.JoinEndpoints = []string{j.addr}
			// The machine accepts the policy, and stops before it has the lock.
			present(presented{serial: 5})
			w.dieAfter(2)
			if err := w.boot().end(t); err == nil {
				t.Fatal("it lives")
			}
			if rec := w.record(); rec.Policy == nil || rec.Policy.Serial != 5 || rec.Locked() {
				t.Fatalf("journal %+v", rec)
			}
			present(tt.then)
			w.dieAfter(-1)
			r := w.boot()
			defer r.kill(t)
			asked := j.asked()
			if tt.want != "" {
				eventually(t, "refused with "+tt.want, func() bool { return counter(t, r.metrics, "muster_join_attempts_total", tt.want) > 0 })
				if rec := w.record(); rec.Locked() || rec.Policy.Serial != 5 || j.asked() != asked {
					t.Errorf("something was sent, or done: %+v", rec)
				}
				return
			}
			eventually(t, "joined", func() bool { return w.record().Step == journal.StepDone })
			if got := w.record().Policy; got == nil || got.Serial != tt.then.serial {
				t.Errorf("remembered %+v", got)
			}
		})
	}
}

// The lowest serial of the image is measured, so no copy of a disk can lower it, and a machine with an empty disk knows it (B7).
func TestNoPolicyBelowTheLowestSerialOfTheImageIsAccepted(t *testing.T) {
	w := newFixture(t, "node2")
	w.meta.Role = "worker"
	pub, priv := ownerKey(t)
	w.image.OwnerKeys, w.image.LowestPolicySerial = attest.OwnerKeys{pub}, 5
	j := newJoinservice(t, w, attesttest.NewMachine(t, w.ca, attesttest.Options{}), priv)
	present := func(serial uint64) {
		j.signs(attest.SignPolicy(priv, attesttest.Policy(t, w.ca, []*attesttest.Machine{w.tpm}, attesttest.ControlPlanes(j.host), func(m *attestv1.Policy) { m.Serial = serial })))
	}
	w.meta.JoinEndpoints = []string{j.addr}
	present(4)
	r := w.start(attestv1.Reason_REASON_POLICY_INVALID)
	r.kill(t)
	if j.asked() != 0 || w.record().Locked() || w.record().Policy != nil {
		t.Errorf("something was sent, or done, or remembered: %+v", w.record())
	}
	present(5)
	r = w.boot()
	eventually(t, "joined", func() bool { return w.record().Step == journal.StepDone })
	r.kill(t)
	w.image.LowestPolicySerial = 6 // the next image
	metrics := w.reattest()
	eventually(t, "refused", func() bool { return counter(t, metrics, reattestations, "POLICY_INVALID") > 0 })
	w.stopReattesting()
	if len(j.reattested()) != 0 {
		t.Error("it attested all the same")
	}
}

// A node that attests again keeps the serial that it accepted, also across restarts of its attester, and sends no evidence to a joinservice that
// presents an older policy.
func TestANodeAttestsUnderNoOlderPolicy(t *testing.T) {
	w := newFixture(t, "node2")
	pub, priv := ownerKey(t)
	w.image.OwnerKeys, w.meta.Role = attest.OwnerKeys{pub}, "worker"
	j := newJoinservice(t, w, attesttest.NewMachine(t, w.ca, attesttest.Options{}), priv)
	present := func(serial uint64) {
		j.signs(attest.SignPolicy(priv, attesttest.Policy(t, w.ca, []*attesttest.Machine{w.tpm}, attesttest.ControlPlanes(j.host), func(m *attestv1.Policy) { m.Serial = serial })))
	}
	w.meta.JoinEndpoints = []string{j.addr}
	w.tpm.LockTo(clusterID)
	file := journal.Open(filepath.Join(w.root, journal.AttesterPolicy))
	kept := func() uint64 {
		t.Helper()
		rec, err := file.Load()
		if err != nil {
			t.Fatal(err)
		}
		if rec.Policy == nil {
			return 0
		}
		return rec.Policy.Serial
	}
	for _, step := range []struct {
		presented uint64
		want      string
		kept      uint64
	}{{5, "ACCEPTED", 5}, {4, "POLICY_INVALID", 5}, {6, "ACCEPTED", 6}, {5, "POLICY_INVALID", 6}} {
		present(step.presented)
		before := len(j.reattested())
		metrics := w.reattest() // a new process each time
		eventually(t, step.want, func() bool { return counter(t, metrics, reattestations, step.want) > 0 })
		if got := kept(); got != step.kept {
			t.Errorf("after serial %d the attester's file has %d, want %d", step.presented, got, step.kept)
		}
		if step.want != "ACCEPTED" && len(j.reattested()) != before {
			t.Errorf("serial %d: it attested all the same", step.presented)
		}
		w.stopReattesting()
	}
	// The bootstrapper also knows it at its next start.
	rec := journal.Record{Step: journal.StepDone, Kind: journal.KindJoin, ClusterID: clusterID[:], NodeName: "node2", MachineID: w.tpm.ID().String()}
	if err := w.journal.Save(rec); err != nil {
		t.Fatal(err)
	}
	r := w.boot()
	defer r.kill(t)
	eventually(t, "the journal has it too", func() bool { p := w.record().Policy; return p != nil && p.Serial == 6 })
}

// The initramfs can't read the journal, so the machine may have accepted an older policy there: nothing of its disk is started then.
func TestANodeWhoseDiskWasOpenedUnderAnOlderPolicyDoesNotStart(t *testing.T) {
	pub, _ := ownerKey(t)
	policy := func(serial uint64) *journal.Policy {
		return &journal.Policy{OwnerKey: journal.Hex(pub), Serial: serial, Digest: bytes.Repeat([]byte{1}, 32)}
	}
	w := newFixture(t, "node2")
	w.tpm.LockTo(clusterID)
	rec := journal.Record{Step: journal.StepDone, Kind: journal.KindJoin, ClusterID: clusterID[:], NodeName: "node2", MachineID: w.tpm.ID().String(), Policy: policy(5)}
	if err := w.journal.Save(rec); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		unlocked uint64
		want     attestv1.Reason
		kept     uint64
	}{
		{4, attestv1.Reason_REASON_POLICY_INVALID, 5},
		{5, attestv1.Reason_REASON_ACCEPTED, 5},
		{7, attestv1.Reason_REASON_ACCEPTED, 7},
		{6, attestv1.Reason_REASON_POLICY_INVALID, 7},
	} {
		if err := journal.Open(filepath.Join(w.root, journal.UnlockPolicy)).Save(journal.Record{Policy: policy(tt.unlocked)}); err != nil {
			t.Fatal(err)
		}
		w.dieAfter(-1)
		r := w.boot()
		if tt.want == attestv1.Reason_REASON_ACCEPTED {
			eventually(t, "it goes on", func() bool { return !w.exists(journal.UnlockPolicy) })
			r.kill(t)
		} else if err := r.end(t); attest.ReasonOf(err) != tt.want {
			t.Errorf("serial %d: %v, want %s", tt.unlocked, err, attest.ReasonName(tt.want))
		} else if w.did("start "+machine.UnitKubelet) || w.did("start "+machine.UnitAttester) {
			t.Errorf("serial %d: something was started", tt.unlocked)
		}
		if got := w.record().Policy.Serial; got != tt.kept {
			t.Errorf("serial %d: the journal has %d, want %d", tt.unlocked, got, tt.kept)
		}
	}
	// A newer policy that the attester accepts meanwhile does not make the disk's policy older, also when the bootstrapper starts often.
	err := errors.Join(
		journal.Open(filepath.Join(w.root, journal.UnlockPolicy)).Save(journal.Record{Policy: policy(8)}),
		journal.Open(filepath.Join(w.root, journal.AttesterPolicy)).Save(journal.Record{Policy: policy(9)}),
	)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		r := w.boot()
		eventually(t, "it goes on", func() bool { return w.record().Policy.Serial == 9 && !w.exists(journal.UnlockPolicy) })
		r.kill(t)
	}
}

// A joinservice issues tickets only for fresh evidence: a machine with old evidence connects again, with new evidence.
func TestAJoinerThatIsToldThatItsEvidenceIsOldMakesNew(t *testing.T) {
	w := newFixture(t, "node2")
	w.meta.Role = "worker"
	pub, priv := ownerKey(t)
	w.image.OwnerKeys = attest.OwnerKeys{pub}
	j := newJoinservice(t, w, attesttest.NewMachine(t, w.ca, attesttest.Options{}), priv)
	w.meta.JoinEndpoints = []string{j.addr}
	var seen [][32]byte // one for each attempt
	j.script(func(ctx context.Context, _ *joinv1.IssueJoinTicketRequest) (*joinv1.IssueJoinTicketResponse, error) {
		p, ok := attest.PeerFrom(ctx)
		if !ok {
			return nil, attest.ErrNoPeer
		}
		if seen = append(seen, p.Claims().EvidenceDigest()); len(seen) < 3 {
			return nil, attest.Refuse(attestv1.Reason_REASON_VERDICT_OLD, "old")
		}
		return nil, nil
	}, nil)
	if err := w.boot().end(t); err != nil {
		t.Fatal(err)
	}
	if len(seen) != 3 || seen[0] == seen[1] || seen[1] == seen[2] {
		t.Errorf("it came with the evidence %x", seen)
	}
}

// A control plane that its owner has removed is refused by the policy in force. A machine that has accepted a newer policy refuses the older one that
// listed it.
func TestARemovedControlPlaneIsNotBelieved(t *testing.T) {
	w, j := worker(t)
	_, priv := ownerKey(t)
	w.image.OwnerKeys = attest.OwnerKeys{priv.Public().(ed25519.PublicKey)}
	sign := func(serial uint64, control ...*attesttest.Machine) *attestv1.SignedPolicy {
		return attest.SignPolicy(priv, attesttest.Policy(t, w.ca, []*attesttest.Machine{w.tpm}, attesttest.ControlPlanes(control...), func(p *attestv1.Policy) { p.Serial = serial }))
	}
	old := sign(1, j.host)
	j.signs(sign(2, attesttest.NewMachine(t, w.ca, attesttest.Options{})))
	r := w.start(attestv1.Reason_REASON_SERVER_NOT_LISTED)
	r.kill(t)
	if j.asked() != 0 || w.record().Locked() || w.record().Policy != nil {
		t.Errorf("something was sent, or done, or a policy remembered by the word of who is not believed: %+v", w.record())
	}
	if err := w.journal.Save(journal.Record{Policy: &journal.Policy{OwnerKey: journal.Hex(w.image.OwnerKeys[0]), Serial: 2, Digest: bytes.Repeat([]byte{1}, 32)}}); err != nil {
		t.Fatal(err)
	}
	j.signs(old)
	w.logged = &logBuffer{}
	r = w.start(attestv1.Reason_REASON_POLICY_INVALID)
	r.kill(t)
	if j.asked() != 0 || w.record().Locked() {
		t.Error("something was sent, or done")
	}
}
