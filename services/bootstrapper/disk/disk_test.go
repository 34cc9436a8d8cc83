package disk

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const stateDisk = attestv1.Reason_REASON_STATE_DISK

func key(t *testing.T, b byte) keys.Disk {
	t.Helper()
	k, err := keys.ParseDisk(bytes.Repeat([]byte{b}, keys.Size))
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func TestADiskKeepsItsIDAndItsKey(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	d, err := Open("plain", dir)
	if err != nil {
		t.Fatal(err)
	}
	first, err := d.ID()
	if err != nil {
		t.Fatal(err)
	}
	again, err := Open("plain", dir)
	if err != nil {
		t.Fatal(err)
	}
	if second, err := again.ID(); err != nil || second != first {
		t.Fatalf("%v then %v, %v", first, second, err)
	}
	for range 2 {
		if err := again.SetKey(t.Context(), key(t, 1)); err != nil {
			t.Fatal(err)
		}
	}
	if err := again.SetKey(t.Context(), key(t, 2)); attest.ReasonOf(err) != stateDisk || !strings.Contains(err.Error(), "remove the folder") {
		t.Errorf("another key: %v", err)
	}
	if err := again.SetKey(t.Context(), keys.Disk{}); attest.ReasonOf(err) != stateDisk {
		t.Errorf("no key: %v", err)
	}
	b, err := os.ReadFile(filepath.Join(dir, checkFile))
	if err != nil || bytes.Contains(b, []byte(strings.Repeat("01", 32))) {
		t.Errorf("the key itself was written: %q, %v", b, err)
	}
}

func TestTwoDisksHaveTwoIDs(t *testing.T) {
	seen := map[string]bool{}
	for range 100 {
		id, err := keys.ParseDiskID(newUUID())
		if err != nil || seen[id.String()] {
			t.Fatal(id, err)
		}
		seen[id.String()] = true
	}
}

func TestModesAreRefused(t *testing.T) {
	if _, err := Open("luks", "sda"); attest.ReasonOf(err) != stateDisk || !strings.Contains(err.Error(), "absolute") {
		t.Error(err)
	}
	if _, err := Open("luks", "/dev/sda", WithIntegrity("crc32")); attest.ReasonOf(err) != stateDisk {
		t.Error(err)
	}
	if _, err := Open("", "/x"); attest.ReasonOf(err) != stateDisk {
		t.Error(err)
	}
}

func TestADamagedFileIsRefusedAndNotReplaced(t *testing.T) {
	dir := t.TempDir()
	d, err := Open("plain", dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, uuidFile), []byte("not a uuid"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := d.ID(); attest.ReasonOf(err) != stateDisk {
		t.Error(err)
	}
	if err := os.Remove(filepath.Join(dir, uuidFile)); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, checkFile), []byte("zz"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := d.SetKey(t.Context(), key(t, 1)); attest.ReasonOf(err) != stateDisk {
		t.Error(err)
	}
}
