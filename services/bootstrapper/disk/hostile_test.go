package disk

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2"
	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2/luks2test"
	"github.com/muster-k8s/muster/trust/attest"
)

// refusesAll checks that every use of the disk is refused before a program runs.
func (r *fixture) refusesAll(t *testing.T, want string) {
	t.Helper()
	_, state := r.State()
	_, id := r.ID()
	for what, err := range map[string]error{
		"state": state, "ID": id, "unlock": r.Unlock(t.Context(), key(t, 1)), "format": r.Format(t.Context(), nil),
	} {
		if attest.ReasonOf(err) != stateDisk || what != "format" && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", what, err, want)
		}
	}
	r.opened(t, luks2test.UUID)
	if err := r.SetKey(t.Context(), key(t, 1)); attest.ReasonOf(err) != stateDisk {
		t.Errorf("a key was set: %v", err)
	}
	r.closed(t)
	if len(r.calls) > 0 {
		t.Errorf("a program saw the disk: %q", r.calls[0].args)
	}
}

// These are the vectors of package luks2, each with a key slot that opens, and the genuine header for comparison.
func TestAHostileHeaderIsRefusedBeforeAnythingIsOpened(t *testing.T) {
	files, err := filepath.Glob("luks2/testdata/refused/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	good := luks2test.Genuine(t, key(t, 1).Expose(), luks2.HMACSHA256, luks2.LabelState)
	r := newFixture(t, luks2.HMACSHA256, nil)
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		h := good
		h.JSON = strings.TrimSuffix(strings.SplitN(string(b), "\n", 3)[2], "\n")
		r.put(t, h.Bytes())
		r.refusesAll(t, "nothing of it was opened")
	}
	r.put(t, good.Bytes())
	r.mapping = true
	if err := r.Unlock(t.Context(), key(t, 1)); err != nil {
		t.Errorf("the genuine header: %v", err)
	}
}

// These are disks that cryptsetup makes for others than Muster.
func TestWhatCryptsetupWritesForOthersIsRefused(t *testing.T) {
	format := []string{"luksFormat", "--batch-mode", "--key-file", "-", "--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000", "--label", luks2.LabelState}
	ours := []string{"--luks2-metadata-size", "16k", "--luks2-keyslots-size", "1015808", "--offset", "2048", "--sector-size", "4096", "--key-size", "512"}
	for name, tt := range map[string]struct {
		first []string
		then  [][]string
		want  string
	}{
		"LUKS1":                {[]string{"luksFormat", "--batch-mode", "--key-file", "-", "--type", "luks1", "--pbkdf-force-iterations", "1000"}, nil, "it is not a LUKS2 header"},
		"cryptsetup's default": {format, nil, "metadata."},
		"Argon2id": {
			slices.Concat([]string{"luksFormat", "--batch-mode", "--key-file", "-", "--pbkdf-memory", "64", "--pbkdf-parallel", "1", "--pbkdf-force-iterations", "4", "--label", luks2.LabelState}, ours),
			nil, "metadata.keyslots.0.kdf has",
		},
		"a token": {slices.Concat(format, ours), [][]string{{"token", "add", "--key-description", "x"}}, "metadata.tokens"},
		"a key slot more": {
			slices.Concat(format, ours), [][]string{{"luksAddKey", "--key-file", "-", "--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000", "NEW"}}, "metadata.",
		},
		"a flag":          {slices.Concat(format, ours), [][]string{{"config", "--priority", "prefer", "--key-slot", "0"}}, "metadata.keyslots.0 has"},
		"re-encryption":   {slices.Concat(format, ours), [][]string{{"reencrypt", "--batch-mode", "--init-only", "--key-file", "-", "--resilience", "checksum", "--force-offline-reencrypt"}}, "metadata."},
		"no integrity":    {slices.Concat(format, ours), nil, "metadata.keyslots.0.area.size"},
		"a label of none": {slices.Concat(format, ours), [][]string{{"config", "--label", ""}}, "label"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newFixture(t, luks2.HMACSHA256, nil)
			if name != "no integrity" {
				r.integrity = luks2.NoIntegrity
			}
			other := filepath.Join(t.TempDir(), "new")
			if err := os.WriteFile(other, key(t, 3).Expose(), 0o600); err != nil {
				t.Fatal(err)
			}
			for _, args := range append([][]string{tt.first}, tt.then...) {
				last := r.device
				if args[len(args)-1] == "NEW" {
					args = slices.Concat(args[:len(args)-1], []string{r.device})
					last = other
				}
				cmd := exec.CommandContext(t.Context(), "cryptsetup", append(slices.Clone(args), last)...)
				cmd.Stdin = bytes.NewReader(key(t, 1).Expose())
				if out, err := cmd.CombinedOutput(); err != nil {
					t.Fatalf("cryptsetup %q: %v\n%s", args, err, out)
				}
			}
			r.refusesAll(t, tt.want)
		})
	}
}

// CVE-2025-58356 and CVE-2025-59054: the cluster's key opens a header whose data are not encrypted, since only the volume key of a header is bound to a
// key. cryptsetup accepts it.
func TestACryptsetupThatFallsForANullCipherNeverSeesIt(t *testing.T) {
	good := luks2test.Genuine(t, key(t, 1).Expose(), luks2.HMACSHA256, luks2.LabelState)
	evil := good.Replace(t, `"encryption":"aes-xts-plain64","integrity"`, `"encryption":"cipher_null-ecb","integrity"`).Bytes()
	r := newFixture(t, luks2.HMACSHA256, evil)
	f, err := inMemory(evil, true)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := r.try(t.Context(), f, key(t, 1)); err != nil {
		t.Errorf("this cryptsetup does not fall for it, so the test shows nothing: %v", err)
	}
	r.calls = nil
	r.refusesAll(t, `metadata.segments.0.encryption is "cipher_null-ecb"`)
}

// Between two calls of cryptsetup the disk returns another header. The header that was checked is the one that is opened (B5).
func TestAHeaderSwappedBetweenCheckAndOpenChangesNothing(t *testing.T) {
	good := luks2test.Genuine(t, key(t, 1).Expose(), luks2.HMACSHA256, luks2.LabelState)
	evil := good.Replace(t, `"encryption":"aes-xts-plain64","integrity"`, `"encryption":"cipher_null-ecb","integrity"`).Bytes()
	genuine := good.Bytes()
	r := newFixture(t, luks2.HMACSHA256, genuine)
	r.mapping = true
	r.before = func([]string) { r.put(t, evil) }
	if err := r.Unlock(t.Context(), key(t, 1)); err != nil {
		t.Fatal(err)
	}
	if len(r.calls) != 2 {
		t.Fatalf("%d programs ran", len(r.calls))
	}
	for _, c := range r.calls {
		if !bytes.Equal(c.header, genuine) || !slices.Contains(c.args, headerFD) {
			t.Errorf("%q worked on another header than the one that was checked", c.args)
		}
	}
	r.calls = nil
	r.refusesAll(t, "cipher_null-ecb")
}

// A key is also set on a copy: a header that was swapped meanwhile never gets the cluster's key.
func TestAHeaderSwappedWhileTheKeyIsSetIsWrittenOver(t *testing.T) {
	r, _ := formatted(t, luks2.HMACSHA256)
	evil := luks2test.Genuine(t, key(t, 5).Expose(), luks2.HMACSHA256, luks2.LabelState).Bytes()
	r.before = func([]string) { r.put(t, evil) }
	if err := r.SetKey(t.Context(), key(t, 1)); err != nil {
		t.Fatal(err)
	}
	r.closed(t)
	r.mapping, r.before = true, nil
	if err := r.Unlock(t.Context(), key(t, 1)); err != nil {
		t.Error(err)
	}
}

// Package luks2 tests all cases; here one is enough. A disk without integrity has no superblock.
func TestAHostileSuperblockIsRefusedBeforeAnythingIsOpened(t *testing.T) {
	r := newFixture(t, luks2.HMACSHA256, luks2test.Genuine(t, key(t, 1).Expose(), luks2.HMACSHA256, luks2.LabelState).Bytes())
	r.mapping = true
	for what, spoil := range map[string]func() error{
		"erased":  func() error { return write(r.device, make([]byte, luks2.SuperblockSize), luks2.Size) },
		"version": func() error { return write(r.device, []byte{9}, luks2.Size+8) },
		"shorter": func() error { return os.Truncate(r.device, 31<<20) },
		"cut off": func() error { return os.Truncate(r.device, luks2.Size+100) },
	} {
		if err := spoil(); err != nil {
			t.Fatal(err)
		}
		if _, err := r.State(); attest.ReasonOf(err) != stateDisk || !strings.Contains(err.Error(), "superblock") {
			t.Errorf("%s: state: %v", what, err)
		}
		if err := r.Unlock(t.Context(), key(t, 1)); attest.ReasonOf(err) != stateDisk || !strings.Contains(err.Error(), "superblock") {
			t.Errorf("%s: unlock: %v", what, err)
		}
		if len(r.calls) > 0 {
			t.Errorf("%s: a program saw the disk: %q", what, r.calls[0].args)
		}
		if err := errors.Join(os.Truncate(r.device, 32<<20), write(r.device, luks2test.Superblock(32<<20), luks2.Size)); err != nil {
			t.Fatal(err)
		}
		r.is(t, StateLocked)
	}
	if err := r.Unlock(t.Context(), key(t, 1)); err != nil {
		t.Errorf("the genuine superblock: %v", err)
	}
	none := newFixture(t, luks2.NoIntegrity, luks2test.Genuine(t, key(t, 1).Expose(), luks2.NoIntegrity, luks2.LabelState).Bytes())
	if err := write(none.device, []byte("data"), luks2.Size); err != nil {
		t.Fatal(err)
	}
	none.is(t, StateLocked)
}

// write writes to an existing file.
func write(file string, b []byte, at int64) error {
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(b, at)
	return errors.Join(err, f.Close())
}

func TestADiskOfSomebodyElseIsNotFormatted(t *testing.T) {
	for name, b := range map[string][]byte{
		"a partition table": append(make([]byte, 510), 0x55, 0xaa),
		"a file system":     append(make([]byte, 1080), 0x53, 0xef),
		"a single bit":      append(make([]byte, luks2.Size-1), 1),
		"half a header":     []byte("LUKS\xba\xbe\x00\x02"),
	} {
		r := newFixture(t, luks2.HMACSHA256, b)
		r.refusesAll(t, "nothing of it was opened")
		if got, err := r.read(); err != nil || !bytes.Equal(got[:len(b)], b) {
			t.Errorf("%s was changed: %v", name, err)
		}
	}
}

func TestADiskThatCannotBeReadIsRefused(t *testing.T) {
	r := newFixture(t, luks2.HMACSHA256, nil)
	if err := os.Truncate(r.device, luks2.Size-1); err != nil {
		t.Fatal(err)
	}
	r.refusesAll(t, "read the header")
	if err := os.Remove(r.device); err != nil {
		t.Fatal(err)
	}
	r.refusesAll(t, "no such file")
}

func TestSealedHeadersCannotBeChanged(t *testing.T) {
	f, err := inMemory([]byte("checked"), true)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte("x"), 0); err == nil {
		t.Error("a sealed header was written")
	}
	if err := f.Truncate(0); err == nil {
		t.Error("a sealed header was shortened")
	}
}

func TestProgressIsReadAsCryptsetupWritesIt(t *testing.T) {
	for line, want := range map[string][2]uint64{
		`{"device":"/dev/vda","device_bytes":"3145728","device_size":"65126400","speed":"2979854","eta_ms":"20799","time_ms":"1055"}`: {3145728, 65126400},
		`{"device":"x","device_bytes":"7","device_size":"7","speed":"0","eta_ms":"0","time_ms":"0"}`:                                  {7, 7},
	} {
		if done, total, ok := parseProgress(line); !ok || done != want[0] || total != want[1] {
			t.Error(line, done, total, ok)
		}
	}
	for _, line := range []string{"", "Finished", "{}", `{"device_bytes":"8","device_size":"7"}`, `{"device_bytes":7,"device_size":7}`, `{"device_bytes":"-1","device_size":"7"}`} {
		if _, _, ok := parseProgress(line); ok {
			t.Error(line)
		}
	}
}
