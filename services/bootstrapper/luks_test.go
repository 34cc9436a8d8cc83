package bootstrapper_test

import (
	"bytes"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/disk"
	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2"
	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2/luks2test"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/trust/keys"
)

// firstKey is the first key of encrypted disks in tests, until the cluster's key replaces it.
var firstKey = bytes.Repeat([]byte{9}, 32)

// encrypt gives the machine an encrypted disk with this header in a file. A fake sysfs shows the disk as open, since only the initramfs would open it.
func (w *fixture) encrypt(header luks2test.Header) {
	w.t.Helper()
	integrity, beneath := metadata.IntegrityNone, "sys/block/dm-0/slaves/state/dev"
	if strings.Contains(header.JSON, `"integrity"`) {
		integrity, beneath = metadata.IntegrityHMAC, "sys/block/dm-0/slaves/dm-1/slaves/state/dev"
	}
	w.image.StateDisk = metadata.StateDisk{Mode: metadata.DiskLUKS, Path: "/dev/state", Integrity: integrity}
	if err := component.DesiredFile(filepath.Join(w.root, component.UnlockFile)).Save(component.Desired{Uncompared: component.UncomparedNew}); err != nil {
		w.t.Fatal(err)
	}
	for file, content := range map[string][]byte{
		"dev/state": append(header.Bytes(), make([]byte, 1<<20)...), "run/muster/state-key": []byte(hex.EncodeToString(firstKey) + "\n"),
		"sys/block/dm-0/dm/name": []byte("muster-state\n"),
		"sys/block/dm-0/dm/uuid": []byte("CRYPT-LUKS2-" + strings.ReplaceAll(luks2test.UUID, "-", "") + "-muster-state\n"),
		beneath:                  []byte("0:0\n"), // of a file, which is no block device
	} {
		if err := machine.WriteFile(filepath.Join(w.root, file), content, 0o600, 0o700); err != nil {
			w.t.Fatal(err)
		}
	}
}

func TestAMachineWithAnEncryptedDiskSaysSoAndSetsItsKey(t *testing.T) {
	w, j := worker(t)
	w.encrypt(luks2test.Genuine(t, firstKey, luks2.HMACSHA256, luks2.LabelNew))
	r := w.boot()
	if err := r.end(t); err != nil {
		t.Fatal(err, w.logged)
	}
	w.isNode(t)
	if req := j.requests[0]; req.GetDiskMode() != joinv1.DiskMode_DISK_MODE_LUKS || req.GetDiskId() != luks2test.UUID {
		t.Error(req)
	}
	if _, err := os.Stat(filepath.Join(w.root, disk.FirstKeyFile)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the first key is still there: %v", err)
	}
	d, err := disk.Open(metadata.DiskLUKS, filepath.Join(w.root, "dev/state"), disk.WithRoot(w.root))
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		key []byte
		ok  bool
	}{{bytes.Repeat([]byte{0xD1}, 32), true}, {firstKey, false}} {
		key, err := keys.ParseDisk(tt.key)
		if err != nil {
			t.Fatal(err)
		}
		if err := d.SetKey(t.Context(), key); (err == nil) != tt.ok {
			t.Errorf("a key: %v", err)
		}
	}
}

func TestAMachineTellsThatItsDiskHasNoIntegrity(t *testing.T) {
	for integrity, kind := range map[string]luks2.Integrity{metadata.IntegrityNone: luks2.NoIntegrity, metadata.IntegrityHMAC: luks2.HMACSHA256} {
		w, _ := worker(t)
		w.encrypt(luks2test.Genuine(t, firstKey, kind, luks2.LabelNew))
		r := w.boot()
		if err := r.end(t); err != nil {
			t.Fatal(err, w.logged)
		}
		if got := counter(t, r.metrics, "muster_insecure_config", metadata.InsecureIntegrity); got == 1 != (kind == luks2.NoIntegrity) {
			t.Errorf("%s: %v", integrity, got)
		}
	}
}

func TestAHeaderThatMusterDidNotWriteFailsTheInit(t *testing.T) {
	w := first(t)
	good := luks2test.Genuine(t, firstKey, luks2.HMACSHA256, luks2.LabelNew)
	w.encrypt(good.Replace(t, `"encryption":"aes-xts-plain64","integrity"`, `"encryption":"cipher_null-ecb","integrity"`))
	r := w.boot()
	defer r.kill(t)
	refusaltest.Refused(t, w.observations(r), attestv1.Reason_REASON_STATE_DISK, initFailed(), func() error { return w.init(t.Context(), r, w.request()).err })
	w.encrypt(good)
	if err := w.init(t.Context(), r, w.request()).err; err != nil {
		t.Errorf("with the genuine header: %v", err)
	}
}
