// Package fat reads one file of a FAT32 file system (Microsoft, FAT: General Overview of On-Disk Format, 1.03), in the form
// that the image's build writes: it is strict, and safe for untrusted input.
package fat

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
)

const (
	entrySize = 32 // bytes of an entry of a folder
	attrDir   = 0x10
	attrLabel = 0x08
	attrLong  = 0x0f
	endOfFile = 0x0ffffff8 // and above: the last cluster of a chain
	maxFolder = 1 << 16    // bytes
	maxFile   = 1 << 30    // bytes
)

type volume struct {
	r             io.ReaderAt
	cluster, data int64 // bytes of a cluster; where cluster 2 begins
	fat           []byte
}

// errBad is the error for a malformed volume.
var errBad = errors.New("it is no FAT32 file system as the image's build makes it")

func open(r io.ReaderAt, size int64) (*volume, uint32, error) {
	b := make([]byte, 512)
	if _, err := r.ReadAt(b, 0); err != nil {
		return nil, 0, fmt.Errorf("%w: %w", errBad, err)
	}
	u16, u32 := func(o int) int64 { return int64(binary.LittleEndian.Uint16(b[o:])) }, func(o int) int64 { return int64(binary.LittleEndian.Uint32(b[o:])) }
	sector, perCluster, reserved, fats, fatSectors, sectors := u16(11), int64(b[13]), u16(14), int64(b[16]), u32(36), u32(32)
	if b[510] != 0x55 || b[511] != 0xaa || sector != 512 || perCluster == 0 || reserved == 0 || fats == 0 || fatSectors == 0 || u16(22) != 0 || sectors*sector != size {
		return nil, 0, errBad
	}
	v := &volume{r: r, cluster: perCluster * sector, data: (reserved + fats*fatSectors) * sector}
	if fatSectors*sector > size || v.data > size {
		return nil, 0, errBad
	}
	v.fat = make([]byte, fatSectors*sector)
	if _, err := r.ReadAt(v.fat, reserved*sector); err != nil {
		return nil, 0, err
	}
	// Firmware may read any of the tables.
	for i := int64(1); i < fats; i++ {
		other := make([]byte, len(v.fat))
		if _, err := r.ReadAt(other, (reserved+i*fatSectors)*sector); err != nil {
			return nil, 0, err
		}
		if !bytes.Equal(v.fat, other) {
			return nil, 0, fmt.Errorf("%w: its file allocation tables differ", errBad)
		}
	}
	return v, uint32(u32(44)), nil
}

// chain reads at most limit bytes of clusters, from the first on.
func (v *volume) chain(first uint32, limit int64) ([]byte, error) {
	var out []byte
	for n := first; n < endOfFile; {
		if n < 2 || int64(n)*4+4 > int64(len(v.fat)) || int64(len(out)) >= limit {
			return nil, fmt.Errorf("%w: a chain of clusters leads nowhere", errBad)
		}
		b := make([]byte, v.cluster)
		if _, err := v.r.ReadAt(b, v.data+int64(n-2)*v.cluster); err != nil {
			return nil, fmt.Errorf("%w: cluster %d: %w", errBad, n, err)
		}
		out = append(out, b...)
		n = binary.LittleEndian.Uint32(v.fat[n*4:]) & 0x0fffffff
	}
	return out, nil
}

type entry struct {
	name  string
	dir   bool
	first uint32
	size  int64
}

// folder lists the entries of a folder, without labels and the entries for itself and its parent.
func (v *volume) folder(first uint32) ([]entry, error) {
	b, err := v.chain(first, maxFolder)
	if err != nil {
		return nil, err
	}
	var out []entry
	for ; len(b) >= entrySize && b[0] != 0; b = b[entrySize:] {
		e := b[:entrySize]
		if e[0] == 0xe5 { // deleted
			continue
		}
		if e[11]&attrLong == attrLong {
			return nil, fmt.Errorf("%w: a long file name", errBad)
		}
		if e[11]&attrLabel != 0 {
			continue
		}
		name := strings.TrimRight(string(e[:8]), " ")
		if ext := strings.TrimRight(string(e[8:11]), " "); ext != "" {
			name += "." + ext
		}
		if name == "." || name == ".." {
			continue
		}
		le := binary.LittleEndian
		out = append(out, entry{name, e[11]&attrDir != 0, uint32(le.Uint16(e[20:]))<<16 | uint32(le.Uint16(e[26:])), int64(le.Uint32(e[28:]))})
	}
	return out, nil
}

// OnlyFile returns the one file of a volume of size bytes, which must lie at this path. Another file or folder is an error.
func OnlyFile(r io.ReaderAt, size int64, path ...string) ([]byte, error) {
	v, at, err := open(r, size)
	if err != nil {
		return nil, err
	}
	for i, name := range path {
		list, err := v.folder(at)
		if err != nil {
			return nil, err
		}
		last := i == len(path)-1
		if len(list) != 1 || list[0].name != name || list[0].dir == last {
			var names []string
			for _, e := range list {
				names = append(names, e.name)
			}
			return nil, fmt.Errorf("%w: %s has %q, want %s alone", errBad, "/"+strings.Join(path[:i], "/"), names, name)
		}
		if !last {
			at = list[0].first
			continue
		}
		if list[0].size > maxFile {
			return nil, fmt.Errorf("%w: %s has %d bytes", errBad, name, list[0].size)
		}
		b, err := v.chain(list[0].first, list[0].size)
		if err != nil {
			return nil, err
		}
		if int64(len(b)) < list[0].size {
			return nil, fmt.Errorf("%w: %s ends after %d of %d bytes", errBad, name, len(b), list[0].size)
		}
		return b[:list[0].size], nil
	}
	return nil, errBad
}
