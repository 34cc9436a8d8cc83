// Package statedisk runs the state disk's code on a machine with device-mapper: a virtual one, whose disk the test
// can change between two boots.
package statedisk

import (
	"bytes"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const marker = "MUSTER-MARKER-ON-THE-STATE-DISK"

func TestTheStateDisk(t *testing.T) {
	m := newMachine(t, 40<<20)

	// The power is cut while the first boot formats the disk: the next one finds it as it was.
	m.boot(t, "format", regexp.MustCompile("^progress ([2-9]|[12][0-9])[0-9]{6} of"))

	said := m.boot(t, "format", nil)
	wants(t, said, "^state blank$", `^formatted in .* told [1-9][0-9]* times, last ([0-9]+) of ([0-9]+)$`, "^first key: mode -rw-------$", "^disk .* is open$")
	id := submatch(t, said, "^disk ([0-9a-f-]{36}) is open$")
	m.hasNoMarker(t)

	// It was switched off before it had a cluster's key. Its ID stays: it may have been sent already. The key goes to
	// the disk that is open, though the configured link leads to a copy by then.
	said = m.boot(t, "join", nil)
	wants(t, said, "^state new$", "^key set in ", "^another key: STATE_DISK: .*another cluster", "^the second disk is as it was: true, <nil>$")
	if again := submatch(t, said, "^disk ([0-9a-f-]{36}) is open$"); again != id {
		t.Errorf("the disk was %s, and is %s", id, again)
	}
	m.hasNoMarker(t)
	b, size := m.content(t)
	if h, err := luks2.Parse(b[:luks2.Size], luks2.HMACSHA256); err != nil {
		t.Error(err)
	} else if h.ID.String() != id || h.Label != luks2.LabelState {
		t.Errorf("header of %s, %s", h.ID, h.Label)
	}

	if err := luks2.CheckSuperblock(b[luks2.Size:][:luks2.SuperblockSize], size); err != nil {
		t.Errorf("dm-integrity's superblock: %v: %x", err, b[luks2.Size:][:64])
	}

	said = m.boot(t, "unlock", nil)
	wants(t, said, "^state locked$", "^wrong key: STATE_DISK: .*does not open", "^unlocked in ", "^disk "+id+"$", "^blocks: [1-9][0-9]* good, 0 bad$",
		"^marker: 32000 bytes, whole true, <nil>$")
	m.hasNoMarker(t)

	// One bit, somewhere in the data: the kernel returns no block whose MAC is wrong.
	m.flip(t, 24<<20)
	wants(t, m.boot(t, "unlock", nil), "^blocks: [1-9][0-9]* good, [1-9][0-9]* bad$")
}

func (m *machine) hasNoMarker(t *testing.T) {
	t.Helper()
	b, _ := m.content(t)
	if i := bytes.Index(b, []byte(marker)); i >= 0 {
		t.Errorf("the marker lies on the disk, at %d, for all to read", i)
	}
}

func (m *machine) content(t *testing.T) (b []byte, size int64) {
	t.Helper()
	b, err := os.ReadFile(m.disk)
	if err != nil {
		t.Fatal(err)
	}
	return b, int64(len(b))
}

func (m *machine) flip(t *testing.T, at int64) {
	t.Helper()
	f, err := os.OpenFile(m.disk, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, 1)
	if _, err := f.ReadAt(b, at); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 1
	if _, err := f.WriteAt(b, at); err != nil {
		t.Fatal(err)
	}
}

func wants(t *testing.T, said []string, patterns ...string) {
	t.Helper()
	for _, p := range patterns {
		if !slices.ContainsFunc(said, regexp.MustCompile(p).MatchString) {
			t.Errorf("nothing fits %s in:\n%s", p, strings.Join(said, "\n"))
		}
	}
}

func submatch(t *testing.T, said []string, pattern string) string {
	t.Helper()
	re := regexp.MustCompile(pattern)
	for _, s := range said {
		if m := re.FindStringSubmatch(s); m != nil {
			return m[1]
		}
	}
	t.Fatalf("nothing fits %s in:\n%s", pattern, strings.Join(said, "\n"))
	return ""
}
