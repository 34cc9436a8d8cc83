package ownerdir

import (
	"bytes"
	"crypto/ed25519"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// rotating returns a folder, and the key that signs in it.
func rotating(t *testing.T, sync func(*os.File) error) (*Dir, ed25519.PublicKey) {
	t.Helper()
	n := example(t)
	d, err := create(filepath.Join(t.TempDir(), "muster-prod"), n, sync)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	return d, publicOf(n.OwnerKey)
}

func TestTheOwnersKeyIsReplacedInTheFolder(t *testing.T) {
	d, old := rotating(t, (*os.File).Sync)
	is := func(signs ed25519.PublicKey, keys ...ed25519.PublicKey) {
		t.Helper()
		r, err := d.KeyRotation()
		if err != nil || !r.Signs.Equal(signs) || !slices.EqualFunc(r.Keys(), keys, func(a, b ed25519.PublicKey) bool { return a.Equal(b) }) || d.Cluster().OwnerID != OwnerID(signs) {
			t.Fatalf("%+v, %v, owner %s", r, err, d.Cluster().OwnerID)
		}
		step := ""
		if len(keys) > 1 {
			step = "muster rotate owner-key --commit"
			if keys[1].Equal(old) { // the one that signed before
				step = "muster rotate owner-key --finish"
			}
		}
		if r.Command() != step {
			t.Errorf("next is %q, want %q", r.Command(), step)
		}
		if r.Since.IsZero() != (step == "") || step != "" && time.Since(r.Since).Abs() > time.Hour {
			t.Errorf("%q: the last step was at %s", step, r.Since)
		}
	}
	is(old, old)
	if name, err := d.RetireKey(); err != nil || name != "" {
		t.Errorf("nothing to retire: %q, %v", name, err)
	}
	if err := d.SwitchKey(); err != nil { // nothing is prepared
		t.Fatal(err)
	}
	is(old, old)
	next, err := d.PrepareKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := d.PrepareKey(nil); err != nil || !again.Equal(next) {
		t.Errorf("prepared again: %x, %v", again, err)
	}
	is(old, old, next)
	_, stranger, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.PrepareKey(stranger); err == nil || !strings.Contains(err.Error(), "another key is prepared") {
		t.Errorf("another key: %v", err)
	}
	for range 2 {
		if err := d.SwitchKey(); err != nil {
			t.Fatal(err)
		}
		is(next, next, old)
	}
	if _, err := d.PrepareKey(nil); err == nil || !strings.Contains(err.Error(), "that rotation is unfinished") {
		t.Errorf("a third key: %v", err)
	}
	name, err := d.RetireKey()
	if err != nil || name != "owner-retired-"+OwnerID(old)[:16]+".key" {
		t.Fatalf("%q, %v", name, err)
	}
	is(next, next)
	reading, err := d.ReadingKeys()
	if err != nil || len(reading) != 2 || !publicOf(reading[0]).Equal(next) || !publicOf(reading[1]).Equal(old) {
		t.Errorf("%d keys read backups, %v", len(reading), err)
	}
	if _, err := d.PrepareKey(reading[1]); err == nil || !strings.Contains(err.Error(), name) {
		t.Errorf("the key that was replaced: %v", err)
	}
	is(next, next)
	if _, err := d.PrepareKey(stranger); err != nil {
		t.Errorf("the next rotation: %v", err)
	}
	files, err := filepath.Glob(d.File("owner*.key"))
	if err != nil || len(files) != 3 {
		t.Errorf("%q, %v", files, err)
	}
	for _, f := range files {
		if st, err := os.Stat(f); err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", f, st.Mode(), err)
		}
	}
}

func TestAGivenKeyIsPrepared(t *testing.T) {
	d, _ := rotating(t, (*os.File).Sync)
	own, err := d.OwnerKey()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.PrepareKey(own); err == nil || !strings.Contains(err.Error(), "signs already") {
		t.Errorf("the present key: %v", err)
	}
	public, spare, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if got, err := d.PrepareKey(spare); err != nil || !got.Equal(public) {
			t.Errorf("%x, %v", got, err)
		}
	}
	if err := os.Chmod(d.File(nextKeyFile), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := d.KeyRotation(); err == nil || !strings.Contains(err.Error(), "chmod") {
		t.Errorf("a key that others can read: %v", err)
	}
	if err := os.WriteFile(d.File(nextKeyFile), []byte("damaged"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Chmod(d.File(nextKeyFile), 0o600), d.SwitchKey()); err == nil || !strings.Contains(err.Error(), nextKeyFile) {
		t.Errorf("a damaged key: %v", err)
	}
	if signs, err := d.OwnerKey(); err != nil || !bytes.Equal(signs, own) {
		t.Errorf("a damaged key signs: %v", err)
	}
}

// B3: after a crash at any write, there is a key that signs, and the same call completes the switch.
func TestASwitchIsCompletedAfterACrash(t *testing.T) {
	crash := errors.New("crash")
	for after := range 20 {
		left := -1
		d, old := rotating(t, func(f *os.File) error {
			if left == 0 {
				return crash
			}
			left--
			return f.Sync()
		})
		next, err := d.PrepareKey(nil)
		if err != nil {
			t.Fatal(err)
		}
		left = after
		err = d.SwitchKey()
		left = -1
		r, rerr := d.KeyRotation()
		if rerr != nil || !r.Signs.Equal(old) && !r.Signs.Equal(next) || !r.Keys().Has(old) || !r.Keys().Has(next) || len(r.Keys()) != 2 {
			t.Fatalf("after %d writes: %+v, %v", after, r, rerr)
		}
		if cerr := d.SwitchKey(); cerr != nil {
			t.Fatalf("after %d writes: %v", after, cerr)
		}
		if r, rerr = d.KeyRotation(); rerr != nil || !r.Signs.Equal(next) || !r.Previous.Equal(old) || r.Next != nil || d.Cluster().OwnerID != OwnerID(next) {
			t.Fatalf("after %d writes and again: %+v, %v", after, r, rerr)
		}
		if err == nil {
			if after < 5 {
				t.Errorf("only %d writes", after)
			}
			return
		}
	}
	t.Error("it has never ended")
}

func TestAFolderThatIsOnlyReadKeepsItsKeys(t *testing.T) {
	d, old := rotating(t, (*os.File).Sync)
	if _, err := d.PrepareKey(nil); err != nil {
		t.Fatal(err)
	}
	v, err := View(d.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = v.Close() }()
	if err := v.SwitchKey(); err == nil {
		t.Error("the key was switched")
	}
	if err := d.SwitchKey(); err != nil {
		t.Fatal(err)
	}
	if _, err := v.RetireKey(); err == nil {
		t.Error("the key was retired")
	}
	if r, err := d.KeyRotation(); err != nil || !r.Previous.Equal(old) {
		t.Errorf("%+v, %v", r, err)
	}
	if err := os.Remove(d.File("owner.key")); err != nil {
		t.Fatal(err)
	}
	if _, err := d.KeyRotation(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without a key that signs: %v", err)
	}
}
