package journal

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func locked() Record {
	return Record{
		Step: StepKubeadm, Kind: KindInit, ClusterID: bytes.Repeat([]byte{1}, 32), MeasurementSalt: bytes.Repeat([]byte{2}, 32),
		KeyDigest: bytes.Repeat([]byte{3}, 32), RequestDigest: bytes.Repeat([]byte{4}, 32), NodeName: "node1",
	}
}

func TestAMissingJournalIsAnUnlockedMachine(t *testing.T) {
	r, err := Open(filepath.Join(t.TempDir(), "none", "journal")).Load()
	if err != nil || r.Locked() || r.Step != StepWaiting {
		t.Fatalf("got %+v, %v", r, err)
	}
}

func TestWhatIsSavedIsLoaded(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		f := Open(filepath.Join(t.TempDir(), "sub", "journal"))
		b32 := func(name string) Hex { return rapid.SliceOfN(rapid.Byte(), 32, 32).Draw(rt, name) }
		want := Record{
			Step: Step(rapid.IntRange(1, len(stepNames)-1).Draw(rt, "step")), Kind: rapid.SampledFrom([]Kind{KindInit, KindJoin}).Draw(rt, "kind"),
			ClusterID: b32("cluster"), MeasurementSalt: b32("salt"), KeyDigest: b32("key"), RequestDigest: b32("request"),
			NodeName: rapid.String().Draw(rt, "name"), OwnerKeys: []Hex{b32("owner"), b32("owner's next")}, ResultSent: rapid.Bool().Draw(rt, "sent"),
			Policy: &Policy{OwnerKey: b32("policy owner"), Serial: rapid.Uint64Min(1).Draw(rt, "serial"), Digest: b32("digest")},
		}
		want.NodeName = strings.ToValidUTF8(want.NodeName, "")
		if err := f.Save(Record{}); err != nil {
			rt.Fatal(err)
		}
		if err := f.Save(want); err != nil {
			rt.Fatal(err)
		}
		got, err := f.Load()
		if err != nil {
			rt.Fatal(err)
		}
		got.Changed = time.Time{}
		if !reflect.DeepEqual(got, want) {
			rt.Fatalf("got %+v\nwant %+v", got, want)
		}
	})
}

// A torn, shortened, lengthened or changed file is never accepted as a record, neither as an older one nor as that of an unlocked machine.
func TestADamagedJournalIsAnError(t *testing.T) {
	whole, err := Encode(locked())
	if err != nil {
		t.Fatal(err)
	}
	for n := range whole {
		if _, err := Decode(whole[:n]); !errors.Is(err, ErrCorrupt) {
			t.Fatalf("first %d bytes: %v", n, err)
		}
		for bit := range 8 {
			c := bytes.Clone(whole)
			c[n] ^= 1 << bit
			if _, err := Decode(c); !errors.Is(err, ErrCorrupt) {
				t.Fatalf("bit %d of byte %d: %v", bit, n, err)
			}
		}
	}
	for name, b := range map[string][]byte{
		"appended": append(bytes.Clone(whole), ' '), "doubled": append(bytes.Clone(whole), whole...),
		"zeroes": make([]byte, len(whole)), "long": bytes.Repeat([]byte("x"), maxSize+1),
	} {
		if _, err := Decode(b); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestALoadErrorSaysWhatToDo(t *testing.T) {
	f := Open(filepath.Join(t.TempDir(), "journal"))
	if err := os.WriteFile(f.Path(), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := f.Load()
	if !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), "remove the file") {
		t.Fatal(err)
	}
}

func TestARecordThatContradictsItselfIsNotWritten(t *testing.T) {
	f := Open(filepath.Join(t.TempDir(), "journal"))
	for name, change := range map[string]func(*Record){
		"a lock without a taker":     func(r *Record) { r.Kind = KindNone },
		"a taker without a lock":     func(r *Record) { r.Step = StepWaiting },
		"a short cluster ID":         func(r *Record) { r.ClusterID = r.ClusterID[:31] },
		"an init without its key":    func(r *Record) { r.KeyDigest = nil },
		"an init without its salt":   func(r *Record) { r.MeasurementSalt = nil },
		"a short owner's key":        func(r *Record) { r.OwnerKeys = []Hex{{1}} },
		"half a policy":              func(r *Record) { r.Policy = &Policy{Serial: 1} },
		"a kind that does not exist": func(r *Record) { r.Kind = "other" },
		"a step that does not exist": func(r *Record) { r.Step = 99 },
	} {
		r := locked()
		change(&r)
		if err := f.Save(r); err == nil {
			t.Errorf("%s was written", name)
		}
	}
	if _, err := os.Stat(f.Path()); !os.IsNotExist(err) {
		t.Errorf("a refused record left a file: %v", err)
	}
}

// An attacker who was root once can leave it, and the machine could not write its journal any more.
func TestAFolderDoesNotKeepTheJournalFromBeingWritten(t *testing.T) {
	f := Open(filepath.Join(t.TempDir(), "journal"))
	if err := os.MkdirAll(filepath.Join(f.Path()+".new", "inside"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := f.Save(Record{}); err != nil {
		t.Error(err)
	}
}

// A process that reads while records are replaced gets a whole one (rename), and no temporary file is left.
func TestReadersSeeWholeRecords(t *testing.T) {
	f := Open(filepath.Join(t.TempDir(), "journal"))
	if err := f.Save(locked()); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		for i := range 50 {
			r := locked()
			r.NodeName = strings.Repeat("n", i*20)
			if err := f.Save(r); err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	for {
		if _, err := Open(f.Path()).Load(); err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			left, err := os.ReadDir(filepath.Dir(f.Path()))
			if err != nil || len(left) != 1 {
				t.Fatalf("left %v, %v", left, err)
			}
			st, err := os.Stat(f.Path())
			if err != nil || st.Mode().Perm() != 0o600 {
				t.Fatalf("mode %v, %v", st.Mode(), err)
			}
			return
		default:
		}
	}
}
