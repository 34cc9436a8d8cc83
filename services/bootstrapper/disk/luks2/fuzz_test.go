package luks2_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2"
	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2/luks2test"
)

// variable lists the values in which two accepted disks may differ; the rest must be equal.
var variable = [][]string{
	{"keyslots", "0", "area", "offset"}, {"keyslots", "0", "kdf", "iterations"}, {"keyslots", "0", "kdf", "salt"},
	{"digests", "0", "iterations"}, {"digests", "0", "salt"}, {"digests", "0", "digest"},
}

func withoutVariable(t *testing.T, text []byte) any {
	t.Helper()
	var v map[string]any
	if err := json.Unmarshal(text, &v); err != nil {
		t.Fatalf("what was accepted is no JSON: %v", err)
	}
	for _, path := range variable {
		o := v
		for _, p := range path[:len(path)-1] {
			o, _ = o[p].(map[string]any)
		}
		delete(o, path[len(path)-1])
	}
	return v
}

// FuzzJSON tries texts with right checksums: only a text that Muster writes is accepted (B5).
func FuzzJSON(f *testing.F) {
	for name := range kinds {
		f.Add([]byte(genuine(f, name).JSON))
	}
	files, err := filepath.Glob("testdata/refused/*.txt")
	if err != nil {
		f.Fatal(err)
	}
	for _, file := range files {
		h, _ := refused(f, file)
		f.Add([]byte(h.JSON))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		for name, integrity := range kinds {
			h := genuine(t, name)
			want := withoutVariable(t, []byte(h.JSON))
			h.JSON = string(text)
			if _, err := luks2.Parse(h.Bytes(), integrity); err != nil {
				continue
			}
			if got := withoutVariable(t, bytes.TrimRight(text, "\x00")); !reflect.DeepEqual(got, want) {
				t.Errorf("accepted as %s: %s", name, text)
			}
		}
	})
}

// FuzzHeader tries binary headers, with right checksums or unchanged ones (B5).
func FuzzHeader(f *testing.F) {
	for name := range kinds {
		b := genuine(f, name).Bytes()
		f.Add(b[:600], b[luks2.MetadataSize:][:600], true)
	}
	f.Add([]byte("LUKS\xba\xbe\x00\x01"), []byte("SKUL\xba\xbe\x00\x02"), false)
	f.Fuzz(func(t *testing.T, first, second []byte, sealed bool) {
		for name, integrity := range kinds {
			h := genuine(t, name)
			b := h.Bytes()
			copy(b, first[:min(len(first), 4096)])
			copy(b[luks2.MetadataSize:], second[:min(len(second), 4096)])
			if sealed {
				luks2test.Seal(b[:luks2.MetadataSize])
				luks2test.Seal(b[luks2.MetadataSize : 2*luks2.MetadataSize])
			}
			id, isNew := luks2.New(b)
			got, err := luks2.Parse(b, integrity)
			if err != nil {
				continue
			}
			if !bytes.Equal(got.Bytes(), b) || got.ID.String() == "" || (got.Label == luks2.LabelNew) != isNew || isNew && id != got.ID {
				t.Errorf("accepted as %+v", got)
			}
		}
	})
}

// FuzzSuperblock tries superblocks on devices of any size: only one that Linux writes is accepted, apart from two sizes that must fit (B5).
func FuzzSuperblock(f *testing.F) {
	f.Add(writtenSuperblock(f)[:64], int64(writtenSize))
	f.Add(luks2test.Superblock(1 << 40)[:64], int64(1<<40))
	f.Add(make([]byte, 64), int64(2<<20))
	f.Fuzz(func(t *testing.T, begin []byte, device int64) {
		b := make([]byte, luks2.SuperblockSize)
		copy(b, begin)
		if luks2.CheckSuperblock(b, device) != nil {
			return
		}
		sections, data := binary.LittleEndian.Uint32(b[12:]), binary.LittleEndian.Uint64(b[16:])
		if most := luks2test.Superblock(device); sections > binary.LittleEndian.Uint32(most[12:]) {
			t.Errorf("%d sections of journal on %d bytes", sections, device)
		}
		if sectors := uint64(device) / 512; sections == 0 || data == 0 || data > sectors || 2048+8+264*uint64(sections)+data+data/128 > sectors {
			t.Errorf("%d sections of journal and %d sectors of data on %d", sections, data, sectors)
		}
		want := writtenSuperblock(t)
		copy(want[12:24], b[12:24])
		if !bytes.Equal(b, want) {
			t.Errorf("accepted: %x", b[:64])
		}
	})
}
