package disk

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/internal/disktest"
	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2"
	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2/luks2test"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// call is one run of a program.
type call struct {
	args   []string
	header []byte
}

// fixture is a state disk in a file, on a machine that can't map it: all else is real.
type fixture struct {
	*LUKS
	root  string
	calls []call
	// before is called before a program runs.
	before func(args []string)
	// mapping simulates the mapping in sysfs alone, since the machine can't map the disk.
	mapping bool
}

func newFixture(t *testing.T, integrity luks2.Integrity, header []byte) *fixture {
	t.Helper()
	r := &fixture{root: disktest.Small(t, 1<<20)}
	device := filepath.Join(t.TempDir(), "disk")
	const size = 32 << 20
	if err := os.WriteFile(device, slices.Concat(header, make([]byte, luks2.Size-len(header)), luks2test.Superblock(size)), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(device, size); err != nil {
		t.Fatal(err)
	}
	l, err := OpenLUKS(device, WithRoot(r.root))
	if err != nil {
		t.Fatal(err)
	}
	l.integrity, l.dev = integrity, filepath.Dir(device)
	l.run = func(ctx context.Context, files []*os.File, line func(string), name string, args ...string) error {
		if r.before != nil {
			r.before(args)
		}
		c := call{args: append([]string{name}, args...)}
		if len(files) > 0 {
			c.header = make([]byte, luks2.Size)
			if _, err := files[0].ReadAt(c.header, 0); err != nil {
				t.Error(err)
			}
		}
		r.calls = append(r.calls, c)
		maps := name == "cryptsetup" && (args[0] == "close" || args[0] == "open" && !slices.Contains(args, "--test-passphrase"))
		if r.mapping && (maps || name == "mkfs.ext4") {
			return nil
		}
		return run(ctx, files, line, name, args...)
	}
	r.LUKS = l
	return r
}

// opened writes to sysfs that a volume with this UUID is open, with the fixture's device beneath it.
func (r *fixture) opened(t *testing.T, uuid string) {
	t.Helper()
	beneath := "dm-7/slaves/"
	if r.integrity == luks2.HMACSHA256 {
		beneath += "dm-8/slaves/"
	}
	r.writeSysfs(t, map[string]string{
		"dm-7/dm/name": mappedName, "dm-7/dm/uuid": "CRYPT-LUKS2-" + strings.ReplaceAll(uuid, "-", "") + "-" + mappedName,
		beneath + filepath.Base(r.device) + "/dev": "0:0", // of a file, which is no block device
	})
}

// writeSysfs writes files of sysfs.
func (r *fixture) writeSysfs(t *testing.T, files map[string]string) {
	t.Helper()
	for name, text := range files {
		name = filepath.Join(r.sys, "block", name)
		if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func (r *fixture) closed(t *testing.T) {
	t.Helper()
	if err := os.RemoveAll(r.sys); err != nil {
		t.Fatal(err)
	}
}

func (r *fixture) is(t *testing.T, want State) {
	t.Helper()
	if got, err := r.State(); err != nil || got != want {
		t.Fatalf("state %v, %v; want %v", got, err, want)
	}
}

// hasNoKey fails if an argument has the key in any form.
func (r *fixture) hasNoKey(t *testing.T, k keys.Disk) {
	t.Helper()
	for _, c := range r.calls {
		for _, a := range c.args {
			if strings.Contains(a, string(k.Expose())) || strings.Contains(a, hex.EncodeToString(k.Expose())) {
				t.Errorf("the key is an argument: %q", c.args)
			}
		}
	}
}

// formatted returns a new disk as Format leaves it, apart from its data.
func formatted(t *testing.T, integrity luks2.Integrity) (r *fixture, first keys.Disk) {
	t.Helper()
	first = key(t, 9)
	r = newFixture(t, integrity, luks2test.Genuine(t, first.Expose(), integrity, luks2.LabelNew).Bytes())
	r.opened(t, luks2test.UUID)
	if err := writeFirstKey(r.firstKey, first); err != nil {
		t.Fatal(err)
	}
	return r, first
}

func TestADiskBecomesAClustersAndIsUnlockedByItsKeyAlone(t *testing.T) {
	for name, integrity := range map[string]luks2.Integrity{"hmac-sha256": luks2.HMACSHA256, "none": luks2.NoIntegrity} {
		t.Run(name, func(t *testing.T) {
			r, first := formatted(t, integrity)
			r.is(t, StateOpen)
			for range 2 {
				if err := r.SetKey(t.Context(), key(t, 1)); err != nil {
					t.Fatal(err)
				}
				if _, err := os.Stat(r.firstKey); err == nil {
					t.Error("the first key is still there")
				}
			}
			if err := r.SetKey(t.Context(), key(t, 2)); attest.ReasonOf(err) != stateDisk || !strings.Contains(err.Error(), "another cluster") {
				t.Errorf("another cluster's key: %v", err)
			}
			if err := r.SetKey(t.Context(), keys.Disk{}); attest.ReasonOf(err) != stateDisk {
				t.Errorf("no key: %v", err)
			}
			r.closed(t)
			r.is(t, StateLocked)
			if id, err := r.ID(); err != nil || id.String() != luks2test.UUID {
				t.Error(id, err)
			}
			r.mapping = true
			for _, wrong := range []keys.Disk{first, key(t, 2)} {
				if err := r.Unlock(t.Context(), wrong); !errors.Is(err, ErrWrongKey) || attest.ReasonOf(err) != stateDisk {
					t.Errorf("a wrong key: %v", err)
				}
			}
			if err := r.Unlock(t.Context(), key(t, 1)); err != nil {
				t.Fatal(err)
			}
			if last := r.calls[len(r.calls)-1].args; last[1] != "open" || !slices.Contains(last, headerFD) || !slices.Contains(last, mappedName) {
				t.Errorf("opened by %q", last)
			}
			for _, k := range []keys.Disk{first, key(t, 1), key(t, 2)} {
				r.hasNoKey(t, k)
			}
		})
	}
}

func TestFormatWritesTheHeaderThatMusterAccepts(t *testing.T) {
	r := newFixture(t, luks2.NoIntegrity, nil)
	r.mapping = true
	r.is(t, StateBlank)
	if _, err := r.ID(); attest.ReasonOf(err) != stateDisk {
		t.Errorf("the ID of a blank disk: %v", err)
	}
	if err := r.Format(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	r.is(t, StateNew)
	id, err := r.ID()
	if err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(r.firstKey)
	if err != nil || st.Mode() != 0o600 {
		t.Fatal(st, err)
	}
	first, err := readFirstKey(r.firstKey)
	if err != nil {
		t.Fatal(err)
	}
	r.hasNoKey(t, first)
	// The machine was off, and formats the disk again.
	if err := os.Remove(r.firstKey); err != nil {
		t.Fatal(err)
	}
	if err := r.Format(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if again, err := r.ID(); err != nil || again != id {
		t.Errorf("the ID was %s, and is %s, %v", id, again, err)
	}
	second, err := readFirstKey(r.firstKey)
	if err != nil || bytes.Equal(first.Expose(), second.Expose()) {
		t.Error("the first key is the same twice", err)
	}
	if err := r.Unlock(t.Context(), second); attest.ReasonOf(err) != stateDisk || !strings.Contains(err.Error(), "is new") {
		t.Errorf("unlock a new disk: %v", err)
	}
	r.opened(t, id.String())
	if err := r.SetKey(t.Context(), key(t, 1)); err != nil {
		t.Fatal(err)
	}
	r.closed(t)
	r.is(t, StateLocked)
	if err := r.Unlock(t.Context(), key(t, 1)); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(r.device); err != nil || bytes.Contains(b, key(t, 1).Expose()) || bytes.Contains(b, second.Expose()) {
		t.Error("a key lies on the disk", err)
	}
	if err := r.Format(t.Context(), nil); attest.ReasonOf(err) != stateDisk || !strings.Contains(err.Error(), "not blank") {
		t.Errorf("a disk that is a cluster's was formatted: %v", err)
	}
}

// This machine has no device-mapper, so the volume can't be opened.
func TestAFormatThatFailsLeavesTheDiskAsItWas(t *testing.T) {
	r := newFixture(t, luks2.NoIntegrity, nil)
	r.before = func(args []string) {
		if args[0] == "open" {
			r.device = "/dev/null" // there is also nothing to open
		}
	}
	device := r.device
	if err := r.Format(t.Context(), nil); attest.ReasonOf(err) != stateDisk {
		t.Fatal(err)
	}
	r.device = device
	r.is(t, StateBlank)
	if _, err := os.Stat(r.firstKey); err == nil {
		t.Error("it left a key")
	}
}

func TestACrashLeavesADiskThatIsNewOrACluster(t *testing.T) {
	r, _ := formatted(t, luks2.HMACSHA256)
	before, err := r.read()
	if err != nil {
		t.Fatal(err)
	}
	if err := r.SetKey(t.Context(), key(t, 1)); err != nil {
		t.Fatal(err)
	}
	r.closed(t)
	after, err := r.read()
	if err != nil {
		t.Fatal(err)
	}
	// The first sector is written after all others.
	for _, upTo := range []int{512, 513, 4096, luks2.MetadataSize, 2 * luks2.MetadataSize, 600_000, luks2.Size} {
		torn := slices.Concat(before[:512], after[512:upTo], before[upTo:])
		r.put(t, torn)
		r.is(t, StateNew)
		if id, err := r.ID(); err != nil || id.String() != luks2test.UUID {
			t.Error(id, err)
		}
		// Only the bootstrapper has stopped, and is started again: the remedy keeps the disk's ID.
		r.opened(t, luks2test.UUID)
		if err := r.SetKey(t.Context(), key(t, 1)); upTo > 512 && (attest.ReasonOf(err) != stateDisk || !strings.Contains(err.Error(), "reboot the machine")) {
			t.Errorf("a header that is new up to %d: %v", upTo, err)
		}
		r.closed(t)
	}
	r.put(t, after)
	r.is(t, StateLocked)
	// The first sector makes a new disk of a blank one.
	r.put(t, slices.Concat(before[:512], make([]byte, luks2.Size-512)))
	r.is(t, StateNew)
}

func (r *fixture) put(t *testing.T, header []byte) {
	t.Helper()
	f, err := os.OpenFile(r.device, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(header, 0); err != nil {
		t.Fatal(err)
	}
}

func TestAMachineThatLostTheFirstKeyReboots(t *testing.T) {
	r, _ := formatted(t, luks2.HMACSHA256)
	if err := os.Remove(r.firstKey); err != nil {
		t.Fatal(err)
	}
	if err := r.SetKey(t.Context(), key(t, 1)); attest.ReasonOf(err) != stateDisk || !strings.Contains(err.Error(), "reboot") {
		t.Error(err)
	}
	if err := writeFirstKey(r.firstKey, key(t, 8)); err != nil {
		t.Fatal(err)
	}
	if err := r.SetKey(t.Context(), key(t, 1)); attest.ReasonOf(err) != stateDisk {
		t.Errorf("another first key: %v", err)
	}
	r.closed(t)
	r.is(t, StateNew)
}

func TestTheFirstKeyIsWrittenToMemoryOnly(t *testing.T) {
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(here, "state-key")
	if err := writeFirstKey(file, key(t, 1)); err == nil || !strings.Contains(err.Error(), "not on a file system in memory") {
		t.Error(err)
	}
	if _, err := os.Stat(file); err == nil {
		t.Error("it was written")
	}
	damaged := filepath.Join(t.TempDir(), "k")
	if err := os.WriteFile(damaged, []byte("0102secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := readFirstKey(damaged); err == nil || strings.Contains(err.Error(), "0102") {
		t.Error(err)
	}
}

func TestWhatIsOpenIsTheKernelsWord(t *testing.T) {
	r, _ := formatted(t, luks2.HMACSHA256)
	other := "11111111-2222-4333-8444-555555555555"
	r.opened(t, other)
	if id, err := r.ID(); err != nil || id.String() != other {
		t.Error(id, err)
	}
	if err := r.SetKey(t.Context(), key(t, 1)); attest.ReasonOf(err) != stateDisk || !strings.Contains(err.Error(), "was replaced") {
		t.Error(err)
	}
	r.opened(t, luks2test.UUID)
	if err := r.SetKey(t.Context(), key(t, 1)); err != nil {
		t.Fatal(err)
	}
	r.opened(t, other)
	if err := r.Unlock(t.Context(), key(t, 1)); attest.ReasonOf(err) != stateDisk || !strings.Contains(err.Error(), "another disk is open") {
		t.Error(err)
	}
	uuid := filepath.Join(r.sys, "block/dm-7/dm/uuid")
	for _, text := range []string{"", "LVM-x", "CRYPT-PLAIN-muster-state", "CRYPT-LUKS1-0f1e2d3c4b5a49688776655443322110-muster-state", "CRYPT-LUKS2-0f1e-muster-state",
		"CRYPT-LUKS2-0f1e2d3c4b5a4968877665544332211X-muster-state", "CRYPT-LUKS2-0f1e2d3c4b5a49688776655443322110-other"} {
		if err := os.WriteFile(uuid, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := r.ID(); attest.ReasonOf(err) != stateDisk {
			t.Errorf("%q: %v", text, err)
		}
		if _, err := r.State(); attest.ReasonOf(err) != stateDisk {
			t.Errorf("%q: %v", text, err)
		}
	}
	r.closed(t)
	if err := r.SetKey(t.Context(), key(t, 1)); attest.ReasonOf(err) != stateDisk || !strings.Contains(err.Error(), "not open") {
		t.Errorf("a volume that is not open got a key: %v", err)
	}
}
