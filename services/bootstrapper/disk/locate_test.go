package disk

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2"
	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2/luks2test"
)

// The kernel gives a disk another name when other disks are attached.
func TestTheStateDiskIsFoundUnderAnotherName(t *testing.T) {
	header := func(t *testing.T, label string) []byte {
		return luks2test.Genuine(t, key(t, 1).Expose(), luks2.HMACSHA256, label).Bytes()
	}
	blank, foreign := make([]byte, luks2.Size), []byte(strings.Repeat("a user's data", luks2.Size))[:luks2.Size]
	for name, tt := range map[string]struct {
		configured []byte
		others     map[string][]byte
		late       bool // the others appear after a second
		want       string
	}{
		"it has its name":                        {header(t, luks2.LabelState), map[string][]byte{"sdz": header(t, luks2.LabelState)}, false, "disk"},
		"a new one has its name":                 {header(t, luks2.LabelNew), map[string][]byte{"sdz": header(t, luks2.LabelState)}, false, "disk"},
		"a first boot":                           {blank, map[string][]byte{"sdz": foreign}, false, "disk"},
		"a first boot, without other disks":      {blank, nil, false, "disk"},
		"its header is damaged":                  {foreign, nil, false, "disk"},
		"another disk has its name":              {foreign, map[string][]byte{"sdy": blank, "sdz": header(t, luks2.LabelState)}, false, "sdz"},
		"a blank disk has its name":              {blank, map[string][]byte{"sdz": header(t, luks2.LabelState)}, false, "sdz"},
		"a blank disk has it, and it comes late": {blank, map[string][]byte{"sdz": header(t, luks2.LabelState)}, true, "sdz"},
		"another disk has the mark of a new one": {foreign, map[string][]byte{"sdz": header(t, luks2.LabelNew)}, false, "disk"},
		"after a reset, the same":                {blank, map[string][]byte{"sdz": header(t, luks2.LabelNew)}, false, "disk"},
		"it is the volume of a mapping":          {foreign, map[string][]byte{"dm-3": header(t, luks2.LabelState)}, false, "disk"},
		"two have other names":                   {foreign, map[string][]byte{"sdy": header(t, luks2.LabelState), "sdz": header(t, luks2.LabelState)}, false, ""},
	} {
		synctest.Test(t, func(t *testing.T) {
			r := newFixture(t, luks2.HMACSHA256, tt.configured)
			place := func() {
				for other, content := range tt.others {
					if err := os.WriteFile(filepath.Join(r.dev, other), content, 0o600); err != nil {
						t.Fatal(err)
					}
					if err := os.MkdirAll(filepath.Join(r.sys, "class/block", other), 0o700); err != nil {
						t.Fatal(err)
					}
				}
			}
			if tt.late {
				time.AfterFunc(time.Second, place)
			} else {
				place()
			}
			got, err := r.Locate(t.Context(), Settle)
			if tt.want == "" {
				if err == nil || !strings.Contains(err.Error(), "sdy") || !strings.Contains(err.Error(), "sdz") {
					t.Errorf("%s: %q, %v", name, got, err)
				}
				return
			}
			if err != nil || filepath.Base(got) != tt.want || got != r.device {
				t.Errorf("%s: %q, %v, want %s", name, got, err, tt.want)
			}
		})
	}
	named, err := OpenLUKS("/dev/disk/by-id/virtio-muster-state")
	if err != nil {
		t.Fatal(err)
	}
	if got, err := named.Locate(t.Context(), 0); err != nil || got != named.device {
		t.Errorf("a path that names the disk itself: %q, %v", got, err)
	}
}
