package fat

import (
	"bytes"
	"encoding/binary"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// volumeOf makes the smallest volume that the reader accepts: two tables of a sector, clusters of a sector, the file /A/B
// from cluster 4 on.
func volumeOf(change func(b []byte)) []byte {
	const sectors = 1 + 2 + 8
	b := make([]byte, sectors*512)
	le := binary.LittleEndian
	le.PutUint16(b[11:], 512)
	b[13], b[16] = 1, 2
	le.PutUint16(b[14:], 1)
	le.PutUint32(b[32:], sectors)
	le.PutUint32(b[36:], 1)
	le.PutUint32(b[44:], 2)
	b[510], b[511] = 0x55, 0xaa
	for n, next := range map[int]uint32{2: endOfFile, 3: endOfFile, 4: 6, 6: endOfFile} {
		le.PutUint32(b[512+4*n:], next)
	}
	put := func(at int, name string, attr byte, first uint16, size uint32) {
		e := b[at : at+entrySize]
		copy(e, name+strings.Repeat(" ", 11-len(name)))
		e[11] = attr
		le.PutUint16(e[26:], first)
		le.PutUint32(e[28:], size)
	}
	cluster := func(n int) int { return (3 + n - 2) * 512 }
	put(cluster(2), "LABEL", attrLabel, 0, 0)
	put(cluster(2)+32, "A", attrDir, 3, 0)
	put(cluster(3), ".", attrDir, 3, 0)
	put(cluster(3)+32, "..", attrDir, 0, 0)
	put(cluster(3)+64, "B", 0, 4, 600)
	copy(b[cluster(4):], bytes.Repeat([]byte("x"), 512))
	copy(b[cluster(6):], bytes.Repeat([]byte("y"), 88))
	change(b)
	copy(b[1024:1536], b[512:1024])
	return b
}

func TestAFileIsReadAlongItsClusters(t *testing.T) {
	b := volumeOf(func([]byte) {})
	got, err := OnlyFile(bytes.NewReader(b), int64(len(b)), "A", "B")
	if err != nil || string(got) != strings.Repeat("x", 512)+strings.Repeat("y", 88) {
		t.Errorf("%q, %v", got, err)
	}
	for _, path := range [][]string{{"A"}, {"B"}, {"A", "C"}, {"A", "B", "C"}, nil} {
		if got, err := OnlyFile(bytes.NewReader(b), int64(len(b)), path...); err == nil {
			t.Errorf("%v is %q", path, got)
		}
	}
}

func TestVolumesThatLeadNowhereAreRefused(t *testing.T) {
	le := binary.LittleEndian
	const size = 11 * 512
	for name, change := range map[string]func(b []byte){
		"a chain that is a ring":     func(b []byte) { le.PutUint32(b[512+16:], 4) },
		"a chain beyond the table":   func(b []byte) { le.PutUint32(b[512+16:], 1000) },
		"a chain beyond the volume":  func(b []byte) { le.PutUint32(b[512+16:], 100) },
		"a chain to a free cluster":  func(b []byte) { le.PutUint32(b[512+16:], 0) },
		"a chain that ends early":    func(b []byte) { le.PutUint32(b[512+16:], endOfFile) },
		"a file of 4 GiB":            func(b []byte) { le.PutUint32(b[4*512+92:], 0xffffffff) },
		"a folder that is a ring":    func(b []byte) { le.PutUint32(b[512+8:], 2); copy(b[3*512+64:], bytes.Repeat([]byte{0xe5}, 448)) },
		"no signature":               func(b []byte) { b[510] = 0 },
		"sectors of another size":    func(b []byte) { le.PutUint16(b[11:], 4096) },
		"clusters of no sector":      func(b []byte) { b[13] = 0 },
		"no table":                   func(b []byte) { b[16] = 0 },
		"tables larger than it is":   func(b []byte) { le.PutUint32(b[36:], 0xffffffff) },
		"FAT16":                      func(b []byte) { le.PutUint16(b[22:], 1) },
		"another size than it has":   func(b []byte) { le.PutUint32(b[32:], 12) },
		"a root that lies elsewhere": func(b []byte) { le.PutUint32(b[44:], 0) },
	} {
		b := volumeOf(change)
		if got, err := OnlyFile(bytes.NewReader(b), size, "A", "B"); err == nil {
			t.Errorf("%s: %d bytes", name, len(got))
		}
	}
}

func FuzzOnlyFile(f *testing.F) {
	f.Add(volumeOf(func([]byte) {}))
	f.Fuzz(func(t *testing.T, b []byte) {
		if got, err := OnlyFile(bytes.NewReader(b), int64(len(b)), "A", "B"); err == nil && len(got) > maxFile {
			t.Errorf("%d bytes", len(got))
		}
	})
}
