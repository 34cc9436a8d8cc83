package disk

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2"
	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2/luks2test"
	"github.com/muster-k8s/muster/trust/attest"
)

// After the unlock and before SetKey, an attacker with the hardware adds a disk that reports the same identity: the link points to that disk, which is a
// full copy.
func TestAKeyGoesToTheDiskThatIsOpenWhereverTheLinkLeads(t *testing.T) {
	for name, integrity := range map[string]luks2.Integrity{"hmac-sha256": luks2.HMACSHA256, "none": luks2.NoIntegrity} {
		t.Run(name, func(t *testing.T) {
			r, _ := formatted(t, integrity)
			ours := r.device
			before, err := os.ReadFile(ours)
			if err != nil {
				t.Fatal(err)
			}
			theirs, link := filepath.Join(t.TempDir(), "theirs"), filepath.Join(t.TempDir(), "by-id")
			if err := os.WriteFile(theirs, before, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink(theirs, link); err != nil {
				t.Fatal(err)
			}
			r.device = link
			if err := r.SetKey(t.Context(), key(t, 1)); err != nil {
				t.Fatal(err)
			}
			if after, err := os.ReadFile(theirs); err != nil || !bytes.Equal(before, after) {
				t.Error("the disk that the link leads to was written", err)
			}
			for _, c := range r.calls {
				for _, a := range c.args {
					if a == link || a == theirs {
						t.Errorf("a program saw the disk that the link leads to: %q", c.args)
					}
				}
			}
			r.closed(t)
			r.is(t, StateNew) // the attacker's disk
			r.device = ours
			r.is(t, StateLocked)
		})
	}
}

// Invariant B5.
func TestADiskThatIsNotTheOneBeneathTheVolumeGetsNoKey(t *testing.T) {
	const slaves, at = "dm-7/slaves", "dm-7/slaves/dm-8/slaves"
	other := luks2test.Genuine(t, key(t, 9).Expose(), luks2.HMACSHA256, luks2.LabelNew)
	other.UUID = "11111111-2222-4333-8444-555555555555"
	remove := func(name string) func(*testing.T, *fixture) {
		return func(t *testing.T, r *fixture) {
			if err := os.RemoveAll(filepath.Join(r.sys, "block", name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	for name, tt := range map[string]struct {
		spoil func(t *testing.T, r *fixture)
		want  string
	}{
		"another disk's header": {func(t *testing.T, r *fixture) { r.put(t, other.Bytes()) }, "was replaced while the disk was open"},
		"nothing beneath it":    {remove(slaves + "/dm-8"), "dm-7 has 0 devices beneath it"},
		"two beneath it": {func(t *testing.T, r *fixture) {
			r.writeSysfs(t, map[string]string{slaves + "/dm-9/slaves/x/dev": "0:0"})
		}, "dm-7 has 2 devices"},
		"two beneath dm-integrity":   {func(t *testing.T, r *fixture) { r.writeSysfs(t, map[string]string{at + "/vdb/dev": "0:0"}) }, "dm-8 has 2 devices"},
		"no dm-integrity":            {remove(at), "no such file"},
		"a device without a number":  {remove(at + "/disk/dev"), "no such file"},
		"a device of another number": {func(t *testing.T, r *fixture) { r.writeSysfs(t, map[string]string{at + "/disk/dev": "252:0"}) }, "is device 0:0, and /dev/mapper/muster-state is on 252:0"},
		"a device that left": {func(t *testing.T, r *fixture) {
			remove(at+"/disk")(t, r)
			r.writeSysfs(t, map[string]string{at + "/gone/dev": "0:0"})
		}, "no such file"},
		"a name that is a path": {func(t *testing.T, r *fixture) {
			remove(at+"/disk")(t, r)
			r.writeSysfs(t, map[string]string{at + "/cciss!c0d0/dev": "0:0"})
		}, "cciss/c0d0: no such file"},
		"dm-integrity, of none wanted": {func(t *testing.T, r *fixture) { r.integrity = luks2.NoIntegrity }, "no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			r, _ := formatted(t, luks2.HMACSHA256)
			tt.spoil(t, r)
			if err := r.SetKey(t.Context(), key(t, 1)); attest.ReasonOf(err) != stateDisk || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %s", err, tt.want)
			}
			if len(r.calls) > 0 {
				t.Errorf("a program ran: %q", r.calls[0].args)
			}
		})
	}
}

// This is the kernel's own number of a device, without a device-mapper.
func TestADeviceIsOpenedByItsNumber(t *testing.T) {
	for number, ok := range map[string]bool{"1:3": true, "1:5": false, "0:0": false} {
		l := &LUKS{device: "/dev/null", number: number}
		f, err := l.openDevice(os.O_RDONLY)
		if (err == nil) != ok {
			t.Errorf("%s: %v", number, err)
		}
		if err == nil {
			if err := f.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}
