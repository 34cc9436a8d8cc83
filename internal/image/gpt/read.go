package gpt

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"unicode/utf16"
)

// Found is a partition of a disk.
type Found struct {
	Type, GUID string // bytes of the GUID, in the table's order
	Name       string
	*io.SectionReader
}

// errBad is the error for a disk that [Write] has not written.
var errBad = errors.New("it is no disk image of ours, or not all of it")

// Read returns the partitions of a disk of size bytes that [Write] has written: both tables must exist, complete and equal.
func Read(r io.ReaderAt, size int64) (disk string, parts []Found, err error) {
	total := size / sector
	if size%oneMiB != 0 || total < 3*align {
		return "", nil, fmt.Errorf("%w: it has %d bytes", errBad, size)
	}
	first := make([]byte, sector)
	if _, err := r.ReadAt(first, 0); err != nil {
		return "", nil, err
	}
	if !bytes.Equal(first, protective(total)) {
		return "", nil, fmt.Errorf("%w: its first sector protects no disk of %d bytes", errBad, size)
	}
	id, list, err := readTable(r, total, 1, total-1, 2)
	if err != nil {
		return "", nil, err
	}
	id2, list2, err := readTable(r, total, total-1, 1, total-last)
	if err != nil {
		return "", nil, err
	}
	if id != id2 || !bytes.Equal(list, list2) {
		return "", nil, fmt.Errorf("%w: its two partition tables differ", errBad)
	}
	end := int64(align)
	for e := list; len(e) > 0 && !zero(e[:entry]); e = e[entry:] {
		from, to := int64(binary.LittleEndian.Uint64(e[32:])), int64(binary.LittleEndian.Uint64(e[40:]))
		if from < end || to < from || to >= total-align || from%align != 0 {
			return "", nil, fmt.Errorf("%w: partition %d lies at sectors %d to %d", errBad, len(parts)+1, from, to)
		}
		end = to + 1
		var name []uint16
		for i := 56; i < entry && (e[i] != 0 || e[i+1] != 0); i += 2 {
			name = append(name, binary.LittleEndian.Uint16(e[i:]))
		}
		parts = append(parts, Found{text(e[:16]), text(e[16:32]), string(utf16.Decode(name)), io.NewSectionReader(r, from*sector, (to-from+1)*sector)})
		list = e[entry:]
	}
	if !zero(list) {
		return "", nil, fmt.Errorf("%w: its partition table has a gap", errBad)
	}
	return id, parts, nil
}

func readTable(r io.ReaderAt, total, own, other, table int64) (disk string, list []byte, err error) {
	b := make([]byte, sector)
	if _, err := r.ReadAt(b, own*sector); err != nil {
		return "", nil, err
	}
	list = make([]byte, entries*entry)
	if _, err := r.ReadAt(list, table*sector); err != nil {
		return "", nil, err
	}
	disk = text(b[56:72])
	id, err := guid(disk)
	if err != nil {
		return "", nil, err
	}
	if want := head(id, own, other, table, total, list); !bytes.Equal(b, want) {
		return "", nil, fmt.Errorf("%w: the partition table's header in sector %d of %d is damaged, or its table is", errBad, own, total)
	}
	return disk, list, nil
}

func zero(b []byte) bool { return len(bytes.Trim(b, "\x00")) == 0 }

// text is the inverse of guid.
func text(b []byte) string {
	return fmt.Sprintf("%x-%x-%x-%x-%x", []byte{b[3], b[2], b[1], b[0]}, []byte{b[5], b[4]}, []byte{b[7], b[6]}, b[8:10], b[10:16])
}
