// Package gpt writes and reads disk images with a GUID partition table (UEFI 2.10, section 5.3), of fixed
// GUIDs, so that the same partitions give the same bytes.
package gpt

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash/crc32"
	"io"
	"strings"
	"unicode/utf16"
)

const (
	sector  = 512  // bytes
	align   = 2048 // sectors: partitions begin at multiples of 1 MiB
	entries = 128
	entry   = 128                      // bytes
	table   = entries * entry / sector // sectors
	maxName = (entry - 56) / 2         // UTF-16 code units
	header  = 92                       // bytes
	last    = table + 1                // sectors at the disk's end: the second table and header
	oneMiB  = int64(align) * sector    // bytes
)

// Partition is a partition of a disk. Its size is that of its content, rounded up to a whole MiB.
type Partition struct {
	Type, GUID string // 8-4-4-4-12 hexadecimal digits
	Name       string // at most 36 UTF-16 code units
	Content    io.Reader
	Size       int64 // of Content, in bytes
}

// Write writes the disk to w, which must be empty, and returns its size in bytes.
func Write(w io.WriterAt, disk string, parts []Partition) (int64, error) {
	if len(parts) == 0 || len(parts) > entries {
		return 0, fmt.Errorf("gpt: %d partitions, want 1 to %d", len(parts), entries)
	}
	id, err := guid(disk)
	if err != nil {
		return 0, err
	}
	list := make([]byte, entries*entry)
	at := int64(align)
	for i, p := range parts {
		if err := describe(list[i*entry:(i+1)*entry], p, at); err != nil {
			return 0, err
		}
		n, err := io.Copy(io.NewOffsetWriter(w, at*sector), io.LimitReader(p.Content, p.Size+1))
		if err != nil {
			return 0, fmt.Errorf("gpt: partition %s: %w", p.Name, err)
		}
		if n != p.Size {
			return 0, fmt.Errorf("gpt: partition %s has not the %d bytes that were announced", p.Name, p.Size)
		}
		at += (p.Size + oneMiB - 1) / oneMiB * align
	}
	total := at + align // the second table is in the last MiB
	for _, x := range []struct {
		lba  int64
		data []byte
	}{
		{0, protective(total)}, {1, head(id, 1, total-1, 2, total, list)}, {2, list},
		{total - last, list}, {total - 1, head(id, total-1, 1, total-last, total, list)},
	} {
		if _, err := w.WriteAt(x.data, x.lba*sector); err != nil {
			return 0, fmt.Errorf("gpt: %w", err)
		}
	}
	return total * sector, nil
}

// head returns the header in the sector own, of a table that begins at the sector table (UEFI 2.10, table 5.5).
func head(id []byte, own, other, table, total int64, list []byte) []byte {
	b := make([]byte, sector)
	le := binary.LittleEndian
	copy(b, "EFI PART")
	le.PutUint32(b[8:], 0x00010000)
	le.PutUint32(b[12:], header)
	le.PutUint64(b[24:], uint64(own))
	le.PutUint64(b[32:], uint64(other))
	le.PutUint64(b[40:], 2+uint64(entries*entry/sector))
	le.PutUint64(b[48:], uint64(total-last-1))
	copy(b[56:], id)
	le.PutUint64(b[72:], uint64(table))
	le.PutUint32(b[80:], entries)
	le.PutUint32(b[84:], entry)
	le.PutUint32(b[88:], crc32.ChecksumIEEE(list))
	le.PutUint32(b[16:], crc32.ChecksumIEEE(b[:header]))
	return b
}

// describe fills a partition entry (UEFI 2.10, table 5.7).
func describe(e []byte, p Partition, at int64) error {
	kind, err := guid(p.Type)
	if err != nil {
		return err
	}
	id, err := guid(p.GUID)
	if err != nil {
		return err
	}
	name := utf16.Encode([]rune(p.Name))
	if len(name) == 0 || len(name) > maxName || p.Size <= 0 {
		return fmt.Errorf("gpt: partition %q of %d bytes: want a name of at most %d characters, and content", p.Name, p.Size, maxName)
	}
	copy(e, kind)
	copy(e[16:], id)
	binary.LittleEndian.PutUint64(e[32:], uint64(at))
	binary.LittleEndian.PutUint64(e[40:], uint64(at+(p.Size+sector-1)/sector-1))
	for i, c := range name {
		binary.LittleEndian.PutUint16(e[56+2*i:], c)
	}
	return nil
}

// protective returns the first sector, which keeps programs that do not support GPT from writing the disk (UEFI 2.10,
// section 5.2.3).
func protective(total int64) []byte {
	b := make([]byte, sector)
	r := b[446:]
	copy(r, []byte{0, 0, 2, 0, 0xee, 0xff, 0xff, 0xff, 1})
	binary.LittleEndian.PutUint32(r[12:], uint32(min(total-1, 0xffffffff)))
	b[510], b[511] = 0x55, 0xaa
	return b
}

// guid returns the mixed-endian bytes (UEFI 2.10, appendix A).
func guid(s string) ([]byte, error) {
	b, err := hex.DecodeString(strings.ReplaceAll(s, "-", ""))
	if err != nil || len(b) != 16 || len(s) != 36 {
		return nil, fmt.Errorf("gpt: %q is no GUID", s)
	}
	return []byte{b[3], b[2], b[1], b[0], b[5], b[4], b[7], b[6], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]}, nil
}
