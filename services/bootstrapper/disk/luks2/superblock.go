package luks2

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
)

// SuperblockSize is the size of dm-integrity's superblock, in bytes. It is at [Size].
const SuperblockSize = 8 * sectorSize

// These are the values that Linux writes when cryptsetup 2.6.1 formats a state disk (drivers/md/dm-integrity.c, initialize_superblock).
const (
	sectorSize     = 512 // the unit of all of device-mapper's numbers
	blockSectors   = SectorSize / sectorSize
	integrityMagic = "integrt\x00"
	// fixedPadding is the only flag that cryptsetup sets: SB_FLAG_FIXED_PADDING, which requires version 4.
	fixedPadding, integrityVersion = 8, 4
	tagSize                        = 32
	log2Interleave                 = 15
	log2BlockSectors               = 3
	// log2BitmapBlocks is always written, but only used in a mode other than Muster's.
	log2BitmapBlocks = 12
	// A section of the journal is 32 entries of 104 bytes, four in a sector, and their 32 blocks.
	sectionSectors = 8 + 32*blockSectors
	// The journal takes 1/128 of the device, at most 64 MiB, and at least one section.
	journalShare, maxJournalSectors = 128, 131072
	// MACs for 2^log2Interleave sectors precede these sectors.
	macSectors = tagSize << (log2Interleave - log2BlockSectors) / sectorSize
)

// superblock is struct superblock of drivers/md/dm-integrity.c, little endian.
type superblock struct {
	Magic            [8]byte
	Version          uint8
	Log2Interleave   uint8
	TagSize          uint16
	JournalSections  uint32
	DataSectors      uint64
	Flags            uint32
	Log2BlockSectors uint8
	Log2BitmapBlocks uint8
}

// superblockEnd is where the fields end.
const superblockEnd = 30

// CheckSuperblock checks dm-integrity's superblock, the [SuperblockSize] bytes at [Size] of a device with the given size in bytes, against Muster's
// own format. The error names the field that differs. Only the sizes of the journal and the data may differ, since a device may have grown. They must
// fit.
//
// The kernel reads the superblock again when the disk is opened. So this protects against an attacker who had the disk, but not against a disk that
// returns other data the second time.
func CheckSuperblock(b []byte, device int64) error {
	if len(b) != SuperblockSize || device < Size {
		return fmt.Errorf("want %d bytes of a device of more than %d, not %d of %d", SuperblockSize, Size, len(b), device)
	}
	var s superblock
	if err := binary.Read(bytes.NewReader(b), binary.LittleEndian, &s); err != nil {
		return err
	}
	if string(s.Magic[:]) != integrityMagic {
		// The kernel would replace a superblock of zeros by a new one, and lose the journal's content.
		return errors.New("it is none of dm-integrity's")
	}
	for _, f := range []struct {
		name      string
		got, want int
	}{
		{"version", int(s.Version), integrityVersion},
		{"flags", int(s.Flags), fixedPadding},
		{"size of MACs", int(s.TagSize), tagSize},
		{"sectors in a block, log2", int(s.Log2BlockSectors), log2BlockSectors},
		{"sectors between MACs, log2", int(s.Log2Interleave), log2Interleave},
		{"blocks of a bit, log2", int(s.Log2BitmapBlocks), log2BitmapBlocks},
	} {
		if f.got != f.want {
			return fmt.Errorf("%s: %d, want %d", f.name, f.got, f.want)
		}
	}
	if !zero(b[superblockEnd:]) {
		return errors.New("something follows its last field")
	}
	sectors := uint64(device) / sectorSize
	if most := max(1, min(maxJournalSectors, sectors/journalShare)/sectionSectors); s.JournalSections == 0 || uint64(s.JournalSections) > most {
		return fmt.Errorf("%d sections of journal, want 1 to %d", s.JournalSections, most)
	}
	// No sum overflows: the data size is compared before anything is added to it.
	room := sectors - Size/sectorSize
	if n := s.DataSectors; n == 0 || n%blockSectors != 0 || n > room || integrityEnd(s.JournalSections, n) > room {
		return fmt.Errorf("%d sectors of data, which do not fit into a device of %d", n, sectors)
	}
	return nil
}

// integrityEnd returns the sectors that dm-integrity needs for the given sectors of data: calculate_device_limits in the kernel.
func integrityEnd(journalSections uint32, data uint64) uint64 {
	runs := (data + 1<<log2Interleave - 1) >> log2Interleave
	return SuperblockSize/sectorSize + uint64(journalSections)*sectionSectors + runs*macSectors + data
}
