// Package epoch detects a control plane whose state disk was replaced by an earlier copy, before anything of the cluster is served from it (B7).
//
// The cluster's epoch increases with each change of the policy, of enrollments, of bans, of a disk's machine, and with each phase of a key's rotation: a
// restored copy would undo these. A control plane writes the epoch into a file on its state disk, and increments its TPM's counter each time. The file
// stores the counter value. An older copy of the disk has a lower value than the TPM, and the machine then waits for the owner's signed order.
//
// The file is written before the counter is incremented. So after a crash in between, the file is one ahead of the counter, or up to two at a boot, and
// the counter is incremented; every other difference is refused.
package epoch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/tpm"
)

// Folder has the file. It is beside the journal's folder, where only the bootstrapper writes.
const Folder = "/var/lib/muster/renewal"

const (
	fileName = "epoch.json"
	lockName = "epoch.lock"
	// version is the version of the file's format.
	version = 1
	// renewal is the number of increments at a boot: more than for a change of the cluster.
	renewal = 2
	// MaxBans bounds the bans in a record.
	MaxBans = 1000
)

// Counter is the TPM's counter: [tpm.Device].
type Counter interface {
	Counter(ctx context.Context) (uint64, error)
	IncrementCounter(ctx context.Context) (uint64, error)
	DefineCounter(ctx context.Context) (uint64, error)
}

// Record is the last state of the cluster that a control plane knew.
type Record struct {
	// Version is the version of this file's format: 1.
	Version int `json:"version"`
	// Counter is the value of the TPM's counter for this record.
	Counter uint64 `json:"counter"`
	// Epoch is the cluster's epoch; 0 if the machine has not asked the cluster yet.
	Epoch uint64 `json:"epoch"`
	// PolicySerial is the policy's serial.
	PolicySerial uint64 `json:"policySerial"`
	// Bans are the names of banned nodes, in order, at most [MaxBans].
	Bans []string `json:"bans,omitempty"`
	// BannedMachines are their machine IDs, in the same order; empty if an earlier version wrote the record.
	BannedMachines []string `json:"bannedMachines,omitempty"`
	// EpochID distinguishes this epoch from others with the same number, in another history of the cluster; empty if it has none yet.
	EpochID string `json:"epochID,omitempty"`
	// Written is the time of writing, by the machine's clock.
	Written time.Time `json:"written"`
}

// Keeper keeps one machine's record and counter consistent. It excludes other processes of the machine meanwhile.
type Keeper struct {
	// Dir is the folder of the file.
	Dir string
	// TPM is the machine's TPM.
	TPM Counter
}

// Standing is the state of disk and TPM.
type Standing struct {
	// Record is the disk's record; nil if it has none.
	Record *Record
	// Counter is the TPM's counter; 0 if it has none.
	Counter uint64
	// Err is why the disk is not the newest; nil if it is.
	Err error
}

// Load reads the record; nil if there is none.
func (k Keeper) Load() (*Record, error) {
	path := filepath.Join(k.Dir, fileName)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var r Record
	if err := json.Unmarshal(b, &r); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if r.Version != version || r.Counter == 0 || r.Counter == math.MaxUint64 {
		return nil, fmt.Errorf("%s: version %d and counter %d make no sense", path, r.Version, r.Counter)
	}
	return &r, nil
}

// Check compares the disk with the TPM, and completes what a crash interrupted. If the disk is not the newest, Standing.Err is a refusal with
// CLUSTER_ROLLED_BACK; err is the error of a TPM or a disk that can't be read.
func (k Keeper) Check(ctx context.Context) (s Standing, err error) {
	err = k.exclusive(func() error {
		s, err = k.check(ctx)
		return err
	})
	return s, err
}

func (k Keeper) check(ctx context.Context) (Standing, error) {
	var s Standing
	counter, err := k.TPM.Counter(ctx)
	none := errors.Is(err, tpm.ErrNoCounter)
	foreign := errors.Is(err, tpm.ErrForeignCounter)
	if err != nil && !none && !foreign {
		return s, fmt.Errorf("compare the state disk with the TPM: %w", err)
	}
	s.Counter = counter
	if s.Record, s.Err = k.Load(); s.Err != nil {
		s.Err = attest.Refuse(attestv1.Reason_REASON_CLUSTER_ROLLED_BACK, "the record of the cluster's epoch can't be read: %w", s.Err)
		return s, nil //nolint:nilerr // the result of the comparison is in s.Err
	}
	if foreign {
		s.Err = attest.Refuse(attestv1.Reason_REASON_CLUSTER_ROLLED_BACK, "%w", err)
		return s, nil
	}
	verdict := decide(s.Record, counter, !none)
	for range renewal {
		if verdict != interrupted {
			break
		}
		if s.Counter, err = k.TPM.IncrementCounter(ctx); err != nil {
			return s, err
		}
		verdict = decide(s.Record, s.Counter, true)
	}
	s.Err = verdict.refusal(s.Record, s.Counter)
	return s, nil
}

// verdict is the result of comparing a record with a counter.
type verdict int

const (
	// current: the disk is the newest.
	current verdict = iota + 1
	// unwritten: neither exists; an earlier version of Muster kept none.
	unwritten
	// interrupted: a crash came between the file and the counter.
	interrupted
	// older: the counter was incremented after the disk was written.
	older
	// forgotten: the counter exists, and the disk has no record.
	forgotten
	// cleared: the disk has a counter value, and the TPM has no counter.
	cleared
	// ahead: the disk has a value that the counter never had.
	ahead
)

// decide compares a record, nil if there is none, with the counter (B7).
func decide(r *Record, counter uint64, defined bool) verdict {
	switch {
	case r == nil && !defined:
		return unwritten
	case r == nil:
		return forgotten
	case !defined:
		return cleared
	case r.Counter == counter:
		return current
	case r.Counter < counter:
		return older
	case r.Counter-counter <= renewal:
		return interrupted
	}
	return ahead
}

func (v verdict) refusal(r *Record, counter uint64) error {
	refuse := func(format string, args ...any) error {
		return attest.Refuse(attestv1.Reason_REASON_CLUSTER_ROLLED_BACK, format, args...)
	}
	switch v {
	case current, unwritten:
		return nil
	case older:
		return refuse("the state disk is an older copy: it was written at %d of the TPM's counter, which is at %d", r.Counter, counter)
	case forgotten:
		return refuse("the TPM's counter is at %d, and the state disk, an older copy, knows of none", counter)
	case cleared:
		return refuse("the TPM has lost its counter, which was at %d: the TPM was cleared, or the counter was deleted", r.Counter)
	case ahead:
		return refuse("the state disk was written at %d of a counter, and the TPM's is at %d: it was another one", r.Counter, counter)
	case interrupted:
	}
	return refuse("the TPM's counter does not increase") // it was incremented and does not have the right value
}

// Advance writes a newer record and increments the counter. It refuses with CLUSTER_ROLLED_BACK if the disk is not the newest.
func (k Keeper) Advance(ctx context.Context, r Record) error {
	return k.onNewest(ctx, func(s Standing) error { return k.write(ctx, r, s.Counter, 1) })
}

// Count writes the record again and increments the counter, so that every copy of the disk from before is an older one. It refuses with
// CLUSTER_ROLLED_BACK if the disk is not the newest.
func (k Keeper) Count(ctx context.Context) error {
	return k.onNewest(ctx, func(s Standing) error {
		if s.Record == nil {
			return fmt.Errorf("%s has no record: it is made when the machine starts", k.Dir)
		}
		return k.write(ctx, *s.Record, s.Counter, 1)
	})
}

// Renew writes the record again, for a value of the counter that is two higher. It is called at each boot: a power cut between file and counter leaves a
// disk with a value that the counter has not reached yet. An attacker who keeps a copy of that disk, and boots an older one first, would otherwise have
// a valid copy once the counter reaches that value, whatever has changed in between. It refuses with CLUSTER_ROLLED_BACK if the disk is not the newest.
func (k Keeper) Renew(ctx context.Context) error {
	return k.onNewest(ctx, func(s Standing) error { return k.write(ctx, *s.Record, s.Counter, renewal) })
}

func (k Keeper) onNewest(ctx context.Context, do func(Standing) error) error {
	return k.exclusive(func() error {
		s, err := k.check(ctx)
		if err == nil {
			err = s.Err
		}
		if err != nil {
			return err
		}
		return do(s)
	})
}

// Begin is for a machine that becomes a control plane, or whose owner has accepted its disk: the earlier state of disk and TPM is ignored.
//
// A change of the record is made on the newest disk. In contrast, this first increments the counter past every value that a disk may have, also one
// from a crash before the last increment, and then writes the file. In the other order, an attacker could cut the power in between, restore the
// newest disk, which is still valid, and replace it with the accepted one after the counter has reached its value: in another boot than the order
// is for (B7). After a crash here no disk is the newest, and the caller begins again.
func (k Keeper) Begin(ctx context.Context, r Record) error {
	return k.exclusive(func() error {
		counter, err := k.TPM.Counter(ctx)
		if errors.Is(err, tpm.ErrNoCounter) || errors.Is(err, tpm.ErrForeignCounter) {
			counter, err = 0, nil
		}
		if err != nil {
			return err
		}
		if counter == 0 {
			return k.write(ctx, r, counter, 0)
		}
		if counter, err = k.count(ctx, counter, renewal+1); err != nil {
			return err
		}
		return k.save(r, counter)
	})
}

// write writes the file with the value that the counter has after some steps, and then increments the counter (B7). The first value of a counter is
// known only after the TPM has defined it, so in that case the file is written after that.
func (k Keeper) write(ctx context.Context, r Record, counter, steps uint64) (err error) {
	if counter == 0 {
		if counter, err = k.TPM.DefineCounter(ctx); err != nil {
			return err
		}
		return k.save(r, counter)
	}
	if err := k.save(r, counter+steps); err != nil {
		return err
	}
	_, err = k.count(ctx, counter, steps)
	return err
}

// count increments the counter some times, and returns its value.
func (k Keeper) count(ctx context.Context, counter, steps uint64) (uint64, error) {
	for range steps {
		value, err := k.TPM.IncrementCounter(ctx)
		if err != nil {
			return 0, err
		}
		if value != counter+1 {
			return 0, fmt.Errorf("the TPM's counter went from %d to %d", counter, value)
		}
		counter = value
	}
	return counter, nil
}

func (k Keeper) save(r Record, counter uint64) error {
	r.Version, r.Counter = version, counter
	r.Bans = r.Bans[:min(len(r.Bans), MaxBans)]
	r.BannedMachines = r.BannedMachines[:min(len(r.BannedMachines), MaxBans)]
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return machine.WriteFile(filepath.Join(k.Dir, fileName), append(b, '\n'), 0o600, 0o700)
}

// exclusive runs do while no other process of this machine compares or writes.
func (k Keeper) exclusive(do func() error) error {
	if err := os.MkdirAll(k.Dir, 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(k.Dir, lockName), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	for {
		if err = unix.Flock(int(f.Fd()), unix.LOCK_EX); !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return do()
}
