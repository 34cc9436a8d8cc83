package disk

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2"
	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2/luks2test"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// clusters returns a cluster's disk, which is open, and its key.
func clusters(t *testing.T, integrity luks2.Integrity) (*fixture, keys.Disk) {
	t.Helper()
	r, _ := formatted(t, integrity)
	if err := r.SetKey(t.Context(), key(t, 1)); err != nil {
		t.Fatal(err)
	}
	return r, key(t, 1)
}

func openID(t *testing.T) keys.DiskID {
	t.Helper()
	id, err := keys.ParseDiskID(luks2test.UUID)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func TestAnErasedDiskIsBlank(t *testing.T) {
	for name, integrity := range map[string]luks2.Integrity{"hmac-sha256": luks2.HMACSHA256, "none": luks2.NoIntegrity} {
		t.Run(name, func(t *testing.T) {
			r, k := clusters(t, integrity)
			if err := r.Erase(openID(t)); err != nil {
				t.Fatal(err)
			}
			if err := r.Erase(openID(t)); err != nil {
				t.Errorf("the second time: %v", err)
			}
			r.closed(t)
			r.is(t, StateBlank)
			if err := r.Unlock(t.Context(), k); err == nil {
				t.Error("it still opens")
			}
		})
	}
}

func TestAnInterruptedEraseLeavesADiskThatBoots(t *testing.T) {
	r, _ := clusters(t, luks2.HMACSHA256)
	before, err := r.read()
	if err != nil {
		t.Fatal(err)
	}
	r.closed(t)
	now := slices.Clone(before)
	parts := erasure(before)
	for i, p := range parts {
		for cut := 0; cut <= len(p.content); cut += luks2.MarkSize {
			torn := slices.Clone(now)
			copy(torn[p.at:], p.content[:cut])
			want := StateNew
			switch {
			case i == 0 && cut == 0:
				want = StateLocked
			case i == len(parts)-1 && cut > 0:
				want = StateBlank
			}
			if cut%(64<<10) == 0 || cut == len(p.content) || i != 1 {
				r.put(t, torn)
				r.is(t, want)
			}
		}
		copy(now[p.at:], p.content)
	}
	if !luks2.Blank(now) {
		t.Error("something is left")
	}
}

func TestOnlyTheDiskThatIsOpenIsErased(t *testing.T) {
	t.Run("no other UUID", func(t *testing.T) {
		r, _ := clusters(t, luks2.HMACSHA256)
		other, err := keys.ParseDiskID("5f0c95b6-2a3d-4c7e-9f10-000000000077")
		if err != nil {
			t.Fatal(err)
		}
		if err := r.Erase(other); attest.ReasonOf(err) != stateDisk {
			t.Error(err)
		}
		r.closed(t)
		r.is(t, StateLocked)
		if err := r.Erase(openID(t)); attest.ReasonOf(err) != stateDisk || !strings.Contains(err.Error(), "not open") {
			t.Error(err)
		}
		r.is(t, StateLocked)
	})
	t.Run("wherever the link leads", func(t *testing.T) {
		r, _ := clusters(t, luks2.HMACSHA256)
		ours, theirs := r.device, filepath.Join(t.TempDir(), "theirs")
		before, err := os.ReadFile(ours)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(theirs, before, 0o600); err != nil {
			t.Fatal(err)
		}
		r.device = theirs
		if err := r.Erase(openID(t)); err != nil {
			t.Fatal(err)
		}
		if after, err := os.ReadFile(theirs); err != nil || !bytes.Equal(before, after) {
			t.Error("the other disk was written", err)
		}
		r.closed(t)
		r.device = ours
		r.is(t, StateBlank)
	})
	t.Run("a header that was replaced meanwhile", func(t *testing.T) {
		r, _ := clusters(t, luks2.HMACSHA256)
		r.put(t, bytes.Repeat([]byte{7}, 4096))
		if err := r.Erase(openID(t)); err != nil {
			t.Fatal(err)
		}
		r.closed(t)
		r.is(t, StateBlank)
	})
}
