package nodelock

import (
	"bytes"
	"context"
	"crypto"
	"crypto/sha256"
	"errors"
	"path/filepath"
	"sync"
	"testing"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/tpm"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// register is PCR 15 of a machine: zero after a reboot, otherwise only extended.
type register struct {
	mu       sync.Mutex
	value    [32]byte
	extended int
	fail     func(after bool) error // called before and after an extension
}

func (r *register) ReadPCR(_ context.Context, _ tpm.Bank, _ int) ([]byte, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return bytes.Clone(r.value[:]), nil
}

func (r *register) Measure(_ context.Context, _ int, data []byte) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fail != nil {
		if err := r.fail(false); err != nil {
			return err
		}
	}
	d := sha256.Sum256(data)
	r.value = sha256.Sum256(append(r.value[:], d[:]...))
	r.extended++
	if r.fail != nil {
		return r.fail(true)
	}
	return nil
}

func newLock(t testing.TB, file Journal, pcr PCRs) *Lock {
	t.Helper()
	l, err := Open(file, pcr, tpm.SHA256, "m1", func(journal.Record) {})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func initClaim(cluster, key byte) journal.Record {
	return journal.Record{
		Kind: journal.KindInit, ClusterID: bytes.Repeat([]byte{cluster}, 32), MeasurementSalt: make([]byte, 32),
		KeyDigest: bytes.Repeat([]byte{key}, 32), RequestDigest: make([]byte, 32),
	}
}

func joinClaim(cluster byte) journal.Record {
	return journal.Record{Kind: journal.KindJoin, ClusterID: bytes.Repeat([]byte{cluster}, 32)}
}

// B1, B2: of many calls for the lock, for different clusters and kinds, exactly one gets it, and PCR 15 is extended once, with the winner's cluster.
func TestExactlyOneTakesTheLock(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		pcr, file := &register{}, journal.Open(filepath.Join(t.TempDir(), rapid.StringMatching(`[a-z]{12}`).Draw(rt, "file")))
		l := newLock(t, file, pcr)
		claims := rapid.SliceOfN(rapid.Custom(func(rt *rapid.T) journal.Record {
			if rapid.Bool().Draw(rt, "init") {
				return initClaim(rapid.Byte().Draw(rt, "cluster"), rapid.Byte().Draw(rt, "key"))
			}
			return joinClaim(rapid.Byte().Draw(rt, "cluster"))
		}), 2, 8).Draw(rt, "claims")
		errs := make([]error, len(claims))
		var wg sync.WaitGroup
		for i, c := range claims {
			wg.Go(func() { errs[i] = l.Acquire(t.Context(), c) })
		}
		wg.Wait()
		rec := l.Record()
		if pcr.extended != 1 || !bytes.Equal(pcr.value[:], attest.LockValue(crypto.SHA256, [32]byte(rec.ClusterID))) {
			rt.Fatalf("extended %d times", pcr.extended)
		}
		winners := 0
		for i, c := range claims {
			same := c.Kind == rec.Kind && bytes.Equal(c.ClusterID, rec.ClusterID) && bytes.Equal(c.KeyDigest, rec.KeyDigest)
			if (errs[i] == nil) != same {
				rt.Fatalf("claim %+v: %v; the lock is %+v", c, errs[i], rec)
			}
			if r := attest.ReasonOf(errs[i]); errs[i] != nil && r != attestv1.Reason_REASON_NODE_LOCKED && r != attestv1.Reason_REASON_LOCK_FOREIGN {
				rt.Fatalf("refused with %v", errs[i])
			}
			if same {
				winners++
			}
		}
		if winners == 0 {
			rt.Fatal("no caller won")
		}
		select {
		case <-l.taken:
		default:
			rt.Fatal("Taken is not closed")
		}
	})
}

// dying is a journal that fails at its n-th write, before or after it reached the disk.
type dying struct {
	*journal.File
	left  int
	after bool
}

var errDead = errors.New("the machine is dead")

func (d *dying) Save(r journal.Record) error {
	if d.left--; d.left > 0 {
		return d.File.Save(r)
	}
	if d.left == 0 && d.after {
		return errors.Join(d.File.Save(r), errDead)
	}
	return errDead
}

// B3: the machine stops at any point while it takes the lock, with or without a reboot. The same caller can continue, and the register has its cluster's
// value, extended once.
func TestACrashAroundTheExtensionIsResolved(t *testing.T) {
	want := attest.LockValue(crypto.SHA256, [32]byte(bytes.Repeat([]byte{7}, 32)))
	for _, reboot := range []bool{false, true} {
		for point := range 6 {
			pcr, file := &register{}, journal.Open(filepath.Join(t.TempDir(), "journal"))
			d := &dying{File: file, left: 100}
			switch point {
			case 0, 1: // around the first write
				d.left, d.after = 1, point == 1
			case 2, 3: // around the extension
				pcr.fail = func(after bool) error {
					if after == (point == 3) {
						return errDead
					}
					return nil
				}
			default: // around the second write
				d.left, d.after = 2, point == 5
			}
			if err := newLock(t, d, pcr).Acquire(t.Context(), joinClaim(7)); !errors.Is(err, errDead) {
				t.Fatalf("point %d: %v", point, err)
			}
			pcr.fail = nil
			if reboot {
				pcr.value, pcr.extended = [32]byte{}, 0
			}
			l := newLock(t, file, pcr)
			if taken := point > 0; l.Record().Locked() != taken {
				t.Fatalf("point %d: locked %v, want %v", point, l.Record().Locked(), taken)
			}
			if point > 0 {
				if err := l.Acquire(t.Context(), joinClaim(8)); err == nil {
					t.Errorf("point %d: another cluster took it", point)
				}
				if err := l.Acquire(t.Context(), initClaim(7, 1)); attest.ReasonOf(err) != attestv1.Reason_REASON_NODE_LOCKED {
					t.Errorf("point %d: an init took it: %v", point, err)
				}
			}
			if err := l.Acquire(t.Context(), joinClaim(7)); err != nil {
				t.Fatalf("point %d: %v", point, err)
			}
			if !bytes.Equal(pcr.value[:], want) || pcr.extended != 1 {
				t.Errorf("point %d: extended %d times to %x", point, pcr.extended, pcr.value)
			}
			if l.Record().Step != journal.StepLocked {
				t.Errorf("point %d: step %s", point, l.Record().Step)
			}
		}
	}
}

func TestAForeignValueIsRefusedAndNotExtended(t *testing.T) {
	pcr := &register{value: [32]byte{1}}
	l := newLock(t, journal.Open(filepath.Join(t.TempDir(), "journal")), pcr)
	if err := l.Acquire(t.Context(), joinClaim(7)); attest.ReasonOf(err) != attestv1.Reason_REASON_LOCK_FOREIGN {
		t.Fatal(err)
	}
	if pcr.extended != 0 {
		t.Error("it was extended")
	}
}

func TestAfterARebootTheLockIsTakenAgainForTheSameCluster(t *testing.T) {
	pcr, file := &register{}, journal.Open(filepath.Join(t.TempDir(), "journal"))
	if err := newLock(t, file, pcr).Acquire(t.Context(), joinClaim(7)); err != nil {
		t.Fatal(err)
	}
	locked := pcr.value
	for range 2 {
		pcr.value = [32]byte{}
		l := newLock(t, file, pcr)
		for range 2 { // a restart without a reboot extends nothing
			if err := l.Relock(t.Context()); err != nil || pcr.value != locked {
				t.Fatalf("%x, %v", pcr.value, err)
			}
		}
	}
	pcr.value = [32]byte{9}
	if err := newLock(t, file, pcr).Relock(t.Context()); attest.ReasonOf(err) != attestv1.Reason_REASON_LOCK_FOREIGN {
		t.Fatal(err)
	}
}

func TestStepsGoBackOnlyByCleaningUp(t *testing.T) {
	l := newLock(t, journal.Open(filepath.Join(t.TempDir(), "journal")), &register{})
	if err := l.Acquire(t.Context(), joinClaim(1)); err != nil {
		t.Fatal(err)
	}
	for _, s := range []journal.Step{journal.StepKubeadm, journal.StepDisk, journal.StepComponents} {
		if err := l.Advance(s); err != nil {
			t.Fatal(err)
		}
	}
	if s := l.Record().Step; s != journal.StepKubeadm {
		t.Fatalf("an unfinished kubeadm was forgotten: %s", s)
	}
	if err := l.Cleaned(); err != nil || l.Record().Step != journal.StepComponents {
		t.Fatalf("%s, %v", l.Record().Step, err)
	}
}

// A disk of a node with another TPM still belongs to the same cluster, and to no init any more.
func TestADiskThatMovesToAnotherTPMStaysWithItsCluster(t *testing.T) {
	for name, claim := range map[string]journal.Record{"joined": joinClaim(1), "initialized": initClaim(1, 2)} {
		for _, step := range []journal.Step{journal.StepLocked, journal.StepKubeadm, journal.StepDone} {
			t.Run(name+", "+step.String(), func(t *testing.T) {
				file := journal.Open(filepath.Join(t.TempDir(), "journal"))
				l := newLock(t, file, &register{})
				if err := errors.Join(l.Acquire(t.Context(), claim), l.Advance(step)); err != nil {
					t.Fatal(err)
				}
				if moved, err := newLock(t, file, &register{}).Moved(); moved || err != nil {
					t.Fatalf("its own TPM: %t, %v", moved, err)
				}
				other, err := Open(file, &register{}, tpm.SHA256, "m2", func(journal.Record) {})
				if err != nil {
					t.Fatal(err)
				}
				moved, err := other.Moved()
				rec, lerr := file.Load()
				if done := step == journal.StepDone; moved != done || err != nil || lerr != nil {
					t.Fatalf("another TPM: %t, %v, %v", moved, err, lerr)
				} else if done && (rec.Kind != journal.KindJoin || rec.Step != journal.StepKubeadm || rec.MachineID != "m2" || len(rec.KeyDigest) != 0) {
					t.Errorf("%+v", rec)
				}
				if !bytes.Equal(rec.ClusterID, claim.ClusterID) {
					t.Errorf("the lock changed: %+v", rec)
				}
				if again, err := other.Moved(); again || err != nil {
					t.Errorf("it moves twice: %t, %v", again, err)
				}
			})
		}
	}
}

func TestADamagedJournalLocksTheMachine(t *testing.T) {
	file := journal.Open(filepath.Join(t.TempDir(), "journal"))
	if err := file.Save(journal.Record{}); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(broken{file}, &register{}, tpm.SHA256, "m1", func(journal.Record) {}); attest.ReasonOf(err) != attestv1.Reason_REASON_NODE_LOCKED {
		t.Fatal(err)
	}
}

type broken struct{ *journal.File }

func (broken) Load() (journal.Record, error) { return journal.Record{}, journal.ErrCorrupt }
