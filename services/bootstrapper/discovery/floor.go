package discovery

import (
	"bytes"
	"path/filepath"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/trust/attest"
)

// Accepted compares the policy that the state disk was opened under, below root, with the newest one that this machine had accepted before, by its
// journal and its attester. An older one is refused with POLICY_INVALID; files that can't be read are NODE_LOCKED.
//
// The initramfs can't read the journal before the disk is open, so it may have accepted an old policy of the owner, and with it a removed
// joinservice. The initramfs calls this function too, before anything of the disk runs: later the attester may accept newer policies. owner has the
// keys of the image.
func Accepted(root string, journaled *journal.Policy, owner attest.OwnerKeys) error {
	attested, err := policyIn(root, journal.AttesterPolicy)
	if err != nil {
		return err
	}
	unlocked, err := policyIn(root, journal.UnlockPolicy)
	if err != nil || unlocked == nil {
		return err
	}
	return NotOlder(newer(journaled, attested, owner), *unlocked, owner) // J2
}

// Recall returns the newest policy that this machine has accepted, for its journal; nil if there is none. Like [Accepted], but it compares only with the journal,
// which only its caller writes.
func Recall(root string, journaled *journal.Policy, owner attest.OwnerKeys) (*journal.Policy, error) {
	attested, err := policyIn(root, journal.AttesterPolicy)
	if err != nil {
		return nil, err
	}
	unlocked, err := policyIn(root, journal.UnlockPolicy)
	if err != nil {
		return nil, err
	}
	if unlocked != nil {
		if err := NotOlder(journaled, *unlocked, owner); err != nil { // J2
			return nil, err
		}
	}
	return newer(newer(journaled, attested, owner), unlocked, owner), nil
}

func policyIn(root, path string) (*journal.Policy, error) {
	rec, err := journal.Open(filepath.Join(root, path)).Load()
	if err != nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_NODE_LOCKED, "%w", err)
	}
	return rec.Policy, nil
}

// newer returns the newer of two policies; nil is older than all. Of two owners' policies it returns that of the image's owner, or else the first.
func newer(a, b *journal.Policy, owner attest.OwnerKeys) *journal.Policy {
	switch {
	case a == nil:
		return b
	case b == nil:
		return a
	case compared(*a, *b, owner) && b.Serial > a.Serial, !compared(*a, *b, owner) && owner.Has(b.OwnerKey):
		return b
	}
	return a
}

// compared reports whether the serials of two policies are of one sequence: that of one key, or that of all keys of the image. So the key that is being
// replaced can't bring back what the new one has replaced. A key that the image no longer has bounds nothing any more: if it was disclosed, it may have
// signed the highest serial there is.
func compared(a, b journal.Policy, owner attest.OwnerKeys) bool {
	return bytes.Equal(a.OwnerKey, b.OwnerKey) || owner.Has(a.OwnerKey) && owner.Has(b.OwnerKey) // B7
}

// Same reports whether p, which is not older than the known policy, is that policy; nil if none is known.
func Same(known *journal.Policy, p journal.Policy, owner attest.OwnerKeys) bool {
	return known != nil && compared(*known, p, owner) && known.Serial == p.Serial
}

// Floor keeps the newest accepted policy in a file, beside one that another process keeps.
type Floor struct {
	File interface {
		Load() (journal.Record, error)
		Save(r journal.Record) error
	}
	// Known is the policy of the other process; nil if there is none.
	Known *journal.Policy
}

// Newest is for [Verification]. A policy with keep is on the disk when it returns nil.
func (f Floor) Newest(p journal.Policy, owner attest.OwnerKeys, keep bool) error {
	rec, err := f.File.Load()
	if err != nil {
		return attest.Refuse(attestv1.Reason_REASON_NODE_LOCKED, "%w", err)
	}
	known := newer(f.Known, rec.Policy, owner)
	if err := NotOlder(known, p, owner); err != nil || !keep {
		return err
	}
	if Same(known, p, owner) {
		return nil
	}
	return f.File.Save(journal.Record{Policy: &p})
}
