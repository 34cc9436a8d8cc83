package unlock_test

import (
	"context"
	"errors"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/unlock"
	"github.com/muster-k8s/muster/trust/keys"
)

// appraisedFirst fails if the disk is opened before the policy is saved.
type appraisedFirst struct {
	*journal.File
	w    *fixture
	fail error
}

func (j appraisedFirst) Save(r journal.Record) error {
	j.w.disk.mu.Lock()
	defer j.w.disk.mu.Unlock()
	if j.w.disk.opens > 0 {
		j.w.t.Error("the disk was open before")
	}
	if j.fail != nil {
		return j.fail
	}
	return j.File.Save(r)
}

// The initramfs can't read the journal, so the image's lowest serial holds (B7).
func TestNoDiskIsOpenedUnderAPolicyBelowTheLowestSerialOfTheImage(t *testing.T) {
	w := newFixture(t)
	w.image.LowestPolicySerial = 8
	j := w.cluster(w.like(), w.owner, func(p *attestv1.Policy) { p.Serial = 7 })
	r := w.bootFailing(attestv1.Reason_REASON_POLICY_INVALID)
	if j.asked() != 0 || w.disk.tried > 0 {
		t.Errorf("asked %d times, tried %d keys", j.asked(), w.disk.tried)
	}
	w.cluster(w.like(), w.owner, func(p *attestv1.Policy) { p.Serial = 8 })
	if err := r.end(t); err != nil {
		t.Fatal(err)
	}
}

// The running system compares its journal with the policy under which the disk was opened. That policy is saved before the disk is open. A recovery has
// no policy, and leaves none of a joinservice that gave no key.
func TestThePolicyThatOpenedTheDiskIsKept(t *testing.T) {
	serial := func(p *attestv1.Policy) { p.Serial = 7 }
	w := newFixture(t)
	w.cluster(w.like(), w.owner, serial)
	cfg := w.config()
	cfg.Policy = appraisedFirst{w.appraisedBy, w, nil}
	if err := w.bootWith(cfg).end(t); err != nil || w.disk.opens != 1 {
		t.Fatal(err, w.disk.opens)
	}
	if rec, err := w.appraisedBy.Load(); err != nil || rec.Policy == nil || rec.Policy.Serial != 7 {
		t.Errorf("kept %+v, %v", rec.Policy, err)
	}

	w = newFixture(t)
	w.meta.Role = "control-plane"
	j := w.cluster(w.like(), w.owner, serial)
	j.script(gives(wrong))
	w.recovery = func(ctx context.Context, _ keys.DiskID, try unlock.Try) error {
		eventually(t, "a wrong key was tried", func() bool { rec, err := w.appraisedBy.Load(); return err == nil && rec.Policy != nil })
		return try(ctx, parsed(t, right), clusterID, component.Desired{})
	}
	if err := w.boot().end(t); err != nil {
		t.Fatal(err)
	}
	if rec, err := w.appraisedBy.Load(); err != nil || rec.Policy != nil {
		t.Errorf("the owner opened it, and kept is %+v, %v", rec.Policy, err)
	}

	w = newFixture(t)
	w.cluster(w.like(), w.owner)
	cfg = w.config()
	cfg.Policy = appraisedFirst{w.appraisedBy, w, errors.New("no room")}
	r := w.bootWith(cfg)
	eventually(t, "refused", func() bool { return metric(t, r, attestv1.Reason_REASON_STATE_DISK) > 0 })
	if w.disk.tried > 0 {
		t.Error("a key was tried whose policy could not be kept")
	}
}
