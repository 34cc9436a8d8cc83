package epoch

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	gotpm "github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport/linuxudstpm"
	"go.uber.org/goleak"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/tpm"
	"github.com/muster-k8s/muster/trust/tpm/tpmtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestADiskIsTheNewestOnlyIfTheCounterSaysSo(t *testing.T) {
	at := func(n uint64) *Record { return &Record{Counter: n} }
	for name, tt := range map[string]struct {
		record  *Record
		counter uint64
		defined bool
		want    verdict
		refused bool
	}{
		"neither":                          {nil, 0, false, unwritten, false},
		"the very value":                   {at(7), 7, true, current, false},
		"a crash before the increment":     {at(8), 7, true, interrupted, true}, // until it is incremented
		"a crash at a boot":                {at(9), 7, true, interrupted, true},
		"the counter went on":              {at(6), 7, true, older, true},
		"the counter went on for long":     {at(1), 7000, true, older, true},
		"no record, and a counter":         {nil, 7, true, forgotten, true},
		"a record, and no counter":         {at(7), 0, false, cleared, true},
		"a value that never was":           {at(10), 7, true, ahead, true},
		"a value that is another TPM's":    {at(1 << 60), 7, true, ahead, true},
		"no increment makes it come round": {at(0), 1<<64 - 1, true, older, true},
	} {
		got := decide(tt.record, tt.counter, tt.defined)
		if got != tt.want {
			t.Errorf("%s: %d, want %d", name, got, tt.want)
		}
		err := got.refusal(tt.record, tt.counter)
		if refused := attest.ReasonOf(err) == attestv1.Reason_REASON_CLUSTER_ROLLED_BACK; refused != tt.refused {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := verdict(0).refusal(nil, 0); err == nil { // A3
		t.Error("the zero value of a verdict refuses nothing")
	}
}

// refuses fails unless the disk is refused.
func refuses(t *testing.T, k Keeper, what string) {
	t.Helper()
	s, err := k.Check(t.Context())
	if err != nil || attest.ReasonOf(s.Err) != attestv1.Reason_REASON_CLUSTER_ROLLED_BACK {
		t.Errorf("%s: %+v, %v, want CLUSTER_ROLLED_BACK", what, s, err)
	}
	if err := k.Advance(t.Context(), Record{Epoch: 99}); attest.ReasonOf(err) != attestv1.Reason_REASON_CLUSTER_ROLLED_BACK {
		t.Errorf("%s: it was written over: %v", what, err)
	}
}

// stands fails unless the disk is the newest, with that epoch.
func stands(t *testing.T, k Keeper, epoch uint64) {
	t.Helper()
	s, err := k.Check(t.Context())
	if err != nil || s.Err != nil || s.Record == nil || s.Record.Epoch != epoch || s.Record.Counter != s.Counter {
		t.Errorf("%+v, %v, want epoch %d", s, err, epoch)
	}
}

func do(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// A restart does not reset a real TPM's counter.
func TestAnOlderCopyOfTheDiskIsFound(t *testing.T) {
	e := tpmtest.SWTPM(t)
	ctx, dev, dir := t.Context(), e.Open(), t.TempDir()
	k := Keeper{Dir: dir, TPM: dev}
	if s, err := k.Check(ctx); err != nil || s.Err != nil || s.Record != nil || s.Counter != 0 {
		t.Fatalf("a machine of a version without: %+v, %v", s, err)
	}
	if err := k.Count(ctx); err == nil {
		t.Error("a disk without a record is counted")
	}
	do(t, k.Begin(ctx, Record{}))
	stands(t, k, 0)
	file := filepath.Join(dir, fileName)
	keep := func() []byte {
		t.Helper()
		b, err := os.ReadFile(file)
		do(t, err)
		return b
	}
	first := keep()
	do(t, k.Advance(ctx, Record{Epoch: 3, PolicySerial: 5, Bans: []string{"node4"}, Written: time.Now()}))
	stands(t, k, 3)
	second := keep()
	do(t, k.Advance(ctx, Record{Epoch: 4}))
	same := keep()
	do(t, k.Count(ctx)) // the cluster's epoch is the same, and the disk has changed
	newest := keep()
	e.Restart()
	stands(t, k, 4)
	for what, copied := range map[string][]byte{"the first": first, "an earlier one": second, "the one before, of the same epoch": same, "half": newest[:len(newest)/2], "none": nil} {
		do(t, os.Remove(file))
		if copied != nil {
			do(t, os.WriteFile(file, copied, 0o600))
		}
		refuses(t, k, what)
		do(t, os.WriteFile(file, newest, 0o600))
		stands(t, k, 4)
	}
	// The owner accepts the older copy.
	do(t, os.WriteFile(file, second, 0o600))
	do(t, k.Begin(ctx, Record{Epoch: 3, PolicySerial: 5, Bans: []string{"node4"}}))
	stands(t, k, 3)
	if r, err := k.Load(); err != nil || r.PolicySerial != 5 || !slices.Equal(r.Bans, []string{"node4"}) {
		t.Errorf("%+v, %v", r, err)
	}
	accepted := keep()
	do(t, os.WriteFile(file, newest, 0o600)) // an earlier disk
	refuses(t, k, "the one that was the newest before")
	do(t, os.WriteFile(file, accepted, 0o600))
	stands(t, k, 3)

	// An attacker with the TPM deletes the counter, makes it again, or replaces it.
	remove := func() {
		t.Helper()
		do(t, undefine(e))
	}
	remove()
	refuses(t, k, "the counter is gone")
	if _, err := dev.DefineCounter(ctx); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		refuses(t, k, "the counter is another one") // and is not incremented until it fits
	}
	remove()
	r, err := k.Load()
	do(t, err)
	raw, err := linuxudstpm.Open(e.Socket)
	do(t, err)
	tpmtest.WriteNV(t, raw, uint32(tpm.CounterIndex), []byte{0, 0, 0, 0, 0, 0, 0, byte(r.Counter)})
	do(t, raw.Close())
	refuses(t, k, "an index that can be set")
	known, err := os.ReadFile(file)
	do(t, err)
	do(t, os.Remove(file))
	refuses(t, k, "an index that can be set, and no record")
	do(t, os.WriteFile(file, known, 0o600))
	do(t, k.Begin(ctx, Record{Epoch: 3}))
	stands(t, k, 3)
}

// undefine deletes the index of the counter.
func undefine(e *tpmtest.Emulator) error {
	raw, err := linuxudstpm.Open(e.Socket)
	if err != nil {
		return err
	}
	defer func() { _ = raw.Close() }()
	public, err := gotpm.NVReadPublic{NVIndex: tpm.CounterIndex}.Execute(raw)
	if err != nil {
		return err
	}
	_, err = gotpm.NVUndefineSpace{
		AuthHandle: gotpm.AuthHandle{Handle: gotpm.TPMRHOwner, Auth: gotpm.PasswordAuth(nil)},
		NVIndex:    gotpm.NamedHandle{Handle: tpm.CounterIndex, Name: public.NVName},
	}.Execute(raw)
	return err
}

// failing is a counter whose power is cut.
type failing struct {
	*attesttest.Machine
	before, after bool
}

var errPower = errors.New("the power is gone")

func (f *failing) IncrementCounter(ctx context.Context) (uint64, error) {
	if f.before {
		return 0, errPower
	}
	n, err := f.Machine.IncrementCounter(ctx)
	if f.after {
		return 0, errPower
	}
	return n, err
}

func TestACrashBetweenFileAndCounterIsSettled(t *testing.T) {
	for name, f := range map[string]*failing{"before the increment": {before: true}, "after the increment": {after: true}} {
		t.Run(name, func(t *testing.T) {
			f.Machine = attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{})
			k := Keeper{Dir: t.TempDir(), TPM: f}
			do(t, k.Begin(t.Context(), Record{Epoch: 1}))
			old, err := os.ReadFile(filepath.Join(k.Dir, fileName))
			do(t, err)
			if err := k.Advance(t.Context(), Record{Epoch: 2}); !errors.Is(err, errPower) {
				t.Fatal(err)
			}
			f.before, f.after = false, false
			stands(t, k, 2)
			stands(t, k, 2) // it is completed once
			// The disk from before the crash is an older copy from then on.
			do(t, os.WriteFile(filepath.Join(k.Dir, fileName), old, 0o600))
			refuses(t, k, "the copy of before")
		})
	}
}

// The power is cut between file and counter, and an attacker keeps a copy of that disk. An older one boots, the owner changes something, and the copy is
// restored once the counter has reached its value.
func TestACopyOfTheMomentBeforeTheCounterIsNeverTheNewest(t *testing.T) {
	f := &failing{Machine: attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{})}
	k := Keeper{Dir: t.TempDir(), TPM: f}
	file := filepath.Join(k.Dir, fileName)
	do(t, k.Begin(t.Context(), Record{Epoch: 1}))
	for epoch := uint64(2); epoch < 5; epoch++ {
		older, err := os.ReadFile(file)
		do(t, err)
		f.before = true
		if err := k.Advance(t.Context(), Record{Epoch: 100}); !errors.Is(err, errPower) {
			t.Fatal(err)
		}
		f.before = false
		kept, err := os.ReadFile(file)
		do(t, errors.Join(err, os.WriteFile(file, older, 0o600)))
		stands(t, k, epoch-1)
		do(t, k.Renew(t.Context())) // as at each boot
		stands(t, k, epoch-1)
		do(t, k.Advance(t.Context(), Record{Epoch: epoch}))
		newest, err := os.ReadFile(file)
		do(t, errors.Join(err, os.WriteFile(file, kept, 0o600)))
		refuses(t, k, "the copy of that moment")
		do(t, os.WriteFile(file, newest, 0o600))
		stands(t, k, epoch)
	}
}

// B7: an owner accepts an older copy, with or without a power cut in the middle. A copy of the disk from that moment is older in the next boot, also if
// the newest disk is restored meanwhile.
func TestACopyOfAnAcceptanceIsNotTheNewestLater(t *testing.T) {
	for name, cut := range map[string]bool{"it was carried out": false, "it was cut off": true} {
		t.Run(name, func(t *testing.T) {
			f := &failing{Machine: attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{})}
			k := Keeper{Dir: t.TempDir(), TPM: f}
			file := filepath.Join(k.Dir, fileName)
			do(t, k.Begin(t.Context(), Record{Epoch: 1}))
			do(t, k.Advance(t.Context(), Record{Epoch: 2}))
			older, err := os.ReadFile(file)
			do(t, errors.Join(err, k.Advance(t.Context(), Record{Epoch: 3})))
			newest, err := os.ReadFile(file)
			do(t, errors.Join(err, os.WriteFile(file, older, 0o600)))
			refuses(t, k, "the older copy")
			f.after = cut
			if err := k.Begin(t.Context(), Record{Epoch: 2}); errors.Is(err, errPower) != cut {
				t.Fatal(err)
			}
			f.after = false
			kept, err := os.ReadFile(file)
			do(t, errors.Join(err, os.WriteFile(file, newest, 0o600)))
			refuses(t, k, "the disk that was the newest before the order")
			do(t, os.WriteFile(file, kept, 0o600))
			if cut {
				refuses(t, k, "the copy of an order that was cut off")
				return
			}
			stands(t, k, 2)
			do(t, k.Renew(t.Context())) // as at each boot
			do(t, os.WriteFile(file, kept, 0o600))
			refuses(t, k, "the copy of the order's boot")
		})
	}
}

// foreign is a TPM with another object at the counter's index.
type foreign struct{ *attesttest.Machine }

func (foreign) Counter(context.Context) (uint64, error) { return 0, tpm.ErrForeignCounter }

func TestADiskWithoutAReadableRecordOrATPMWithAForeignIndexWaitsForTheOwner(t *testing.T) {
	m := attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{})
	k := Keeper{Dir: t.TempDir(), TPM: m} // the TPM has no counter
	do(t, os.WriteFile(filepath.Join(k.Dir, fileName), []byte("{"), 0o600))
	refuses(t, k, "a record that can't be read")
	do(t, os.Remove(filepath.Join(k.Dir, fileName)))
	refuses(t, Keeper{Dir: k.Dir, TPM: foreign{m}}, "a foreign index")
}

func TestATPMThatCannotBeAskedStartsNothing(t *testing.T) {
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	m := attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{})
	k := Keeper{Dir: t.TempDir(), TPM: m}
	do(t, k.Begin(t.Context(), Record{Epoch: 1}))
	if s, err := k.Check(gone); err == nil {
		t.Errorf("%+v", s)
	}
}
