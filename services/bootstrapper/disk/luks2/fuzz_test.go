package luks2_test

import (
	"bytes"
	"encoding/json"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2"
	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2/luks2test"
)

// variable are the values in which two accepted disks may differ; the rest must be equal.
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

// FuzzJSON tries texts under good checksums: what is accepted is what Muster writes.
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

// FuzzHeader tries binary headers, with the checksums corrected or as they are.
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
