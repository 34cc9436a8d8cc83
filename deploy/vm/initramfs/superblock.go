package main

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// The superblock of ext4 and the offsets of its fields, in bytes (Linux, Documentation/filesystems/ext4/super.rst).
const (
	superblockAt, superblockSize = 1024, 1024

	offMagic, offErrors                                = 0x38, 0x3c
	offReservedUser, offReservedGroup                  = 0x50, 0x52
	offCompat, offIncompat, offROCompat                = 0x5c, 0x60, 0x64
	offJournalUUID, offJournalInode, offJournalDevice  = 0xd0, 0xe0, 0xe4
	offDefaultOptions, offMountOptions, endMountOption = 0x100, 0x200, 0x240
)

// These are the values that mkfs.ext4 of the image writes, by Debian 12's mke2fs.conf. While the file system is mounted, the kernel adds needs_recovery.
const (
	ext4Magic    = 0xef53
	ext4Compat   = 0x3c        // has_journal, ext_attr, resize_inode, dir_index
	ext4Incompat = 0x2c2 | 0x4 // filetype, extent, 64bit, flex_bg; needs_recovery
	ext4ROCompat = 0x46b       // sparse_super, large_file, huge_file, dir_nlink, extra_isize, metadata_csum
	ext4Options  = 0xc         // user_xattr, acl
	ext4Errors   = 1           // continue after an error: with a panic or a read-only disk, an attacker who damages one bit could stop the machine
	ext4Journal  = 8           // the inode of a journal that is inside of the file system
)

// errMagic means that the superblock is that of no ext4.
var errMagic = errors.New("is not ext4")

// checkSuperblock refuses a file system with a journal elsewhere, with mount options, or with features that mkfs.ext4 of the image does not write. An
// attacker who was root before the reboot could otherwise have e2fsck and the kernel use a journal on a disk that is not encrypted: whoever has that
// disk reads what is written, and chooses what is replayed (B5).
func checkSuperblock(device string) error {
	b, err := readSuperblock(device)
	if err != nil {
		return attest.Refuse(attestv1.Reason_REASON_STATE_DISK, "the superblock of the file system in %s can't be read: %w: replace the disk; if nothing on it is needed, erase the first MiB of the state disk (docs/state-disk.md)", device, err)
	}
	half := func(at int) uint16 { return binary.LittleEndian.Uint16(b[at:]) }
	word := func(at int) uint32 { return binary.LittleEndian.Uint32(b[at:]) }
	zero := func(from, to int) bool { return bytes.Equal(b[from:to], make([]byte, to-from)) }
	compat, incompat, roCompat := word(offCompat)&^ext4Compat, word(offIncompat)&^ext4Incompat, word(offROCompat)&^ext4ROCompat
	var wrong error
	switch {
	case half(offMagic) != ext4Magic:
		wrong = errMagic
	case word(offJournalInode) != ext4Journal || word(offJournalDevice) != 0 || !zero(offJournalUUID, offJournalInode):
		wrong = errors.New("has its journal elsewhere")
	case word(offDefaultOptions) != ext4Options || half(offErrors) != ext4Errors || half(offReservedUser) != 0 || half(offReservedGroup) != 0 || !zero(offMountOptions, endMountOption):
		wrong = errors.New("has mount options of its own")
	case compat|incompat|roCompat != 0:
		wrong = fmt.Errorf("has the features %#x, %#x, %#x (compat, incompat, ro_compat)", compat, incompat, roCompat)
	default:
		return nil
	}
	return attest.Refuse(attestv1.Reason_REASON_STATE_DISK, "the file system in %s %w, which this image has not made: find out who changed it; if nothing on the disk is needed, erase the first MiB of the state disk (docs/state-disk.md)", device, wrong)
}

func readSuperblock(device string) ([]byte, error) {
	f, err := os.Open(device)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b := make([]byte, superblockSize)
	_, err = f.ReadAt(b, superblockAt)
	return b, err
}
