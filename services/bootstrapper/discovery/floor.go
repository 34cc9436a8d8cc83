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
// The initramfs can't read the journal before the disk is open, so it may have accepted an old policy that the owner signed, and with it a joinservice
// that the owner has removed since. The initramfs calls this function too, before anything of the disk runs: later the attester may accept newer
// policies.
func Accepted(root string, journaled *journal.Policy) error {
	attested, err := policyIn(root, journal.AttesterPolicy)
	if err != nil {
		return err
	}
	unlocked, err := policyIn(root, journal.UnlockPolicy)
	if err != nil || unlocked == nil {
		return err
	}
	return NotOlder(newer(journaled, attested), *unlocked) // J2
}

// Recall returns the newest policy that this machine has accepted, for its journal; nil: none. Like [Accepted], but it compares only with the journal,
// which only its caller writes.
func Recall(root string, journaled *journal.Policy) (*journal.Policy, error) {
	attested, err := policyIn(root, journal.AttesterPolicy)
	if err != nil {
		return nil, err
	}
	unlocked, err := policyIn(root, journal.UnlockPolicy)
	if err != nil {
		return nil, err
	}
	if unlocked != nil {
		if err := NotOlder(journaled, *unlocked); err != nil { // J2
			return nil, err
		}
	}
	return newer(newer(journaled, attested), unlocked), nil
}

func policyIn(root, path string) (*journal.Policy, error) {
	rec, err := journal.Open(filepath.Join(root, path)).Load()
	if err != nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_NODE_LOCKED, "%w", err)
	}
	return rec.Policy, nil
}

// newer returns the newer of two policies; nil is older than all. Of two owners' policies it returns the first.
func newer(a, b *journal.Policy) *journal.Policy {
	if a == nil || b != nil && bytes.Equal(a.OwnerKey, b.OwnerKey) && b.Serial > a.Serial {
		return b
	}
	return a
}

// Floor keeps the newest accepted policy in a file, beside one that another process keeps.
type Floor struct {
	File interface {
		Load() (journal.Record, error)
		Save(r journal.Record) error
	}
	// Known is the policy of the other process; nil: none.
	Known *journal.Policy
}

// Newest is for [Verification]. A policy with keep is on the disk when it returns nil.
func (f Floor) Newest(p journal.Policy, keep bool) error {
	rec, err := f.File.Load()
	if err != nil {
		return attest.Refuse(attestv1.Reason_REASON_NODE_LOCKED, "%w", err)
	}
	known := newer(f.Known, rec.Policy)
	if err := NotOlder(known, p); err != nil || !keep {
		return err
	}
	if known != nil && bytes.Equal(known.OwnerKey, p.OwnerKey) && known.Serial == p.Serial {
		return nil // the same policy
	}
	return f.File.Save(journal.Record{Policy: &p})
}
