package nodelock

import (
	"bytes"
	"context"
	"sync"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/discovery"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/tpm"
)

// Journal stores the machine's state: [journal.File].
type Journal interface {
	Load() (journal.Record, error)
	Save(r journal.Record) error
}

// Lock is the machine's one transition from unlocked to locked (B1), for which init and join race (B2). Its durable half is the journal, its irrevocable
// half PCR 15.
//
// The order makes every crash resolvable (B3): the journal records the holder of the lock before PCR 15 is extended, and the extension after it. After a
// crash in between, PCR 15 is zero or has the value for the journal's cluster; Lock handles both.
type Lock struct {
	file    Journal
	pcrs    PCRs
	bank    tpm.Bank
	machine string        // this machine's ID
	taken   chan struct{} // closed once the journal has a holder
	seen    func(journal.Record)

	mu  sync.Mutex // one caller at a time; held while journal and TPM are written
	rec journal.Record
}

// Open reads the journal. It calls seen with every record, also with the first one.
func Open(file Journal, pcrs PCRs, bank tpm.Bank, machine string, seen func(journal.Record)) (*Lock, error) {
	rec, err := file.Load()
	if err != nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_NODE_LOCKED, "%w", err)
	}
	l := &Lock{file: file, pcrs: pcrs, bank: bank, machine: machine, taken: make(chan struct{}), rec: rec, seen: seen}
	if rec.Locked() {
		close(l.taken)
	}
	seen(rec)
	return l, nil
}

// Record returns the present record.
func (l *Lock) Record() journal.Record {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.rec
}

// Acquire takes the lock for claim, whose Step is ignored, or finds that claim already holds it: the same kind, cluster and, for an init, idempotency
// key. Otherwise it refuses with NODE_LOCKED, or with LOCK_FOREIGN if PCR 15 is that of another cluster.
func (l *Lock) Acquire(ctx context.Context, claim journal.Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.rec.Locked() {
		if err := MayResume(l.rec, claim); err != nil {
			return err
		}
		// The recorded request stays that of kubeadm's last run.
		claim.Step, claim.ResultSent, claim.RequestDigest = l.rec.Step, l.rec.ResultSent, l.rec.RequestDigest
	} else {
		claim.Step = journal.StepLocking
	}
	if claim.OwnerKeys == nil {
		claim.OwnerKeys = l.rec.OwnerKeys
	}
	claim.Policy = l.rec.Policy
	if err := l.save(claim); err != nil { // B1: from here on the lock is claim's in every case
		return err
	}
	if err := Settle(ctx, l.pcrs, l.bank, [32]byte(claim.ClusterID)); err != nil {
		return err
	}
	if l.rec.Step == journal.StepLocking {
		claim.Step = journal.StepLocked
		return l.save(claim)
	}
	return nil
}

// MayResume returns an error unless claim holds the lock in rec.
func MayResume(rec, claim journal.Record) error {
	switch {
	case rec.Kind != claim.Kind:
		return attest.Refuse(attestv1.Reason_REASON_NODE_LOCKED, "the machine was taken by %s: to start over, %s", Taker(rec.Kind), discovery.StartOver)
	case rec.Kind.ByOwner() && !bytes.Equal(rec.KeyDigest, claim.KeyDigest):
		return attest.Refuse(attestv1.Reason_REASON_NODE_LOCKED, "the machine was taken by %s with another idempotency key: use the directory of that cluster, or to start over, %s", Taker(rec.Kind), discovery.StartOver)
	case !bytes.Equal(rec.ClusterID, claim.ClusterID):
		return attest.Refuse(attestv1.Reason_REASON_LOCK_FOREIGN, "the machine is locked to another cluster: to start over, %s", discovery.StartOver)
	}
	return nil
}

// Taker describes the holder of the lock, for an error.
func Taker(k journal.Kind) string {
	switch k {
	case journal.KindInit:
		return "an init"
	case journal.KindAdopt:
		return "an adoption"
	case journal.KindJoin, journal.KindNone:
	}
	return "a join"
}

// Relock extends PCR 15 after a reboot of a locked machine.
func (l *Lock) Relock(ctx context.Context) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.rec.Locked() {
		return nil
	}
	return Settle(ctx, l.pcrs, l.bank, [32]byte(l.rec.ClusterID))
}

// Moved reports whether the node on this disk was another machine, and if so lets this machine become a node again: a mainboard was exchanged, and the
// TPM with it. The credentials on the disk were issued to the old machine, whose certificates its owner retires; so this one joins again, also where the
// owner made the old one a node. The lock stays with its cluster (B1), and the files of kubeadm are cleaned up as after an interrupted run (B3).
func (l *Lock) Moved() (bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.rec.Step != journal.StepDone || l.rec.MachineID == "" || l.rec.MachineID == l.machine {
		return false, nil
	}
	return true, l.save(journal.Record{
		Step: journal.StepKubeadm, Kind: journal.KindJoin, ClusterID: l.rec.ClusterID, NodeName: l.rec.NodeName, DiskID: l.rec.DiskID,
		OwnerKeys: l.rec.OwnerKeys, Policy: l.rec.Policy,
	})
}

// Advance records that a step was reached. An earlier step is not recorded, so that an unfinished kubeadm run stays recorded until it is cleaned up.
func (l *Lock) Advance(s journal.Step) error {
	return l.Update(func(r *journal.Record) { r.Step = max(r.Step, s) })
}

// Cleaned records that nothing is left of an unfinished kubeadm run.
func (l *Lock) Cleaned() error {
	return l.Update(func(r *journal.Record) { r.Step = min(r.Step, journal.StepComponents) })
}

// NewestPolicy refuses a policy that is older than the accepted one, or another one with the same serial. With keep it stores p as accepted. The image's
// owner has the keys.
func (l *Lock) NewestPolicy(p journal.Policy, owner attest.OwnerKeys, keep bool) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := discovery.NotOlder(l.rec.Policy, p, owner); err != nil || !keep {
		return err
	}
	if discovery.Same(l.rec.Policy, p, owner) {
		return nil
	}
	rec := l.rec
	rec.Policy = &p
	return l.save(rec)
}

// Update changes the record.
func (l *Lock) Update(change func(*journal.Record)) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.rec
	change(&r)
	return l.save(r)
}

// save is called with the mutex held. If it returns an error, it does not keep the record.
func (l *Lock) save(r journal.Record) error {
	if r.Locked() {
		r.MachineID = l.machine
	}
	if err := l.file.Save(r); err != nil {
		return err
	}
	was := l.rec.Locked()
	l.rec = r
	if !was && r.Locked() {
		close(l.taken)
	}
	l.seen(r)
	return nil
}

// Taken returns a channel that is closed once the journal has a holder.
func (l *Lock) Taken() <-chan struct{} { return l.taken }
