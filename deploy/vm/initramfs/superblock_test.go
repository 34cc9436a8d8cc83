package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

const stateDisk = attestv1.Reason_REASON_STATE_DISK

// edit changes the superblock that begins at a byte of the image.
func (e ext4) edit(t *testing.T, at int64, change func(b []byte)) {
	t.Helper()
	f, err := os.OpenFile(e.image, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, superblockSize)
	if _, err := f.ReadAt(b, at); err != nil {
		t.Fatal(err)
	}
	change(b)
	if _, err := f.WriteAt(b, at); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

// sum writes the right checksum into a superblock: CRC32C without its last inversion.
func sum(b []byte) {
	const at = 0x3fc
	binary.LittleEndian.PutUint32(b[at:], ^crc32.Checksum(b[:at], crc32.MakeTable(crc32.Castagnoli)))
}

func TestAFileSystemOfTheImageIsUsed(t *testing.T) {
	for name, args := range map[string][]string{
		"a plain disk's":      nil,
		"an encrypted disk's": {"-F", "-L", "muster-state", "-m", "1", "-E", "nodiscard"},
	} {
		e := newExt4(t, nil, args...)
		if repaired, err := e.check(t); repaired || err != nil {
			t.Errorf("%s: repaired %t, %v", name, repaired, err)
		}
		e.debugfs(t, "feature needs_recovery")
		if repaired, err := e.check(t); repaired || err != nil {
			t.Errorf("%s that was not unmounted: repaired %t, %v", name, repaired, err)
		}
	}
}

// B5: an attacker who was root before the reboot has changed the superblock.
func TestAChangedSuperblockIsRefused(t *testing.T) {
	set := func(at int, bit byte) func(t *testing.T, e ext4) {
		return func(t *testing.T, e ext4) { e.edit(t, superblockAt, func(b []byte) { b[at] ^= bit; sum(b) }) }
	}
	tune := func(args ...string) func(t *testing.T, e ext4) {
		return func(t *testing.T, e ext4) { command(t, "/usr/sbin/tune2fs", append(args, e.image)...) }
	}
	for name, change := range map[string]func(t *testing.T, e ext4){
		"a journal of another inode": set(offJournalInode, 4),
		"no journal":                 set(offJournalInode, ext4Journal),
		"a journal's UUID":           set(offJournalUUID+15, 1),
		"a journal's device":         set(offJournalDevice, 1),
		"content in the journal":     tune("-o", "journal_data"),
		"fewer options":              tune("-o", "^acl"),
		"options as text":            tune("-E", "mount_opts=nobarrier"),
		"a panic at each error":      tune("-e", "panic"),
		"a read-only disk after one": tune("-e", "remount-ro"),
		"blocks for a user":          tune("-u", "1000"),
		"blocks for a group":         tune("-g", "1000"),
		"the feature orphan_file":    set(offCompat+1, 0x10),
		"the feature journal_dev":    set(offIncompat, 0x8),
		"the feature encrypt":        set(offIncompat+2, 1),
		"the feature quota":          set(offROCompat+1, 1),
		"an unknown feature":         set(offROCompat+3, 0x80),
	} {
		t.Run(name, func(t *testing.T) {
			e := newExt4(t, nil)
			var was []byte
			e.edit(t, superblockAt, func(b []byte) { was = bytes.Clone(b) })
			change(t, e)
			if repaired, err := e.check(t); attest.ReasonOf(err) != stateDisk {
				t.Errorf("repaired %t, %v", repaired, err)
			}
			e.edit(t, superblockAt, func(b []byte) { copy(b, was) })
			if _, err := e.check(t); err != nil {
				t.Errorf("changed back: %v", err)
			}
		})
	}
}

// A sector that is lost or torn is no attack: mkfs.ext4 has written backups of the superblock.
func TestALostSuperblockIsRepaired(t *testing.T) {
	for name, damage := range map[string]func(b []byte){
		"its magic": func(b []byte) { clear(b[offMagic : offMagic+2]) },
		"all of it": func(b []byte) { clear(b) },
	} {
		e := newExt4(t, map[string][]byte{"file": []byte("content")}, "-b", "1024")
		e.edit(t, superblockAt, damage)
		if repaired, err := e.check(t); !repaired || err != nil {
			t.Errorf("%s: repaired %t, %v", name, repaired, err)
		}
		if got := string(e.read(t, "file")); got != "content" {
			t.Errorf("%s: the file is %q", name, got)
		}
	}
}

// B5: the backup is one that root has written.
func TestALostSuperblockIsNotReplacedByAChangedBackup(t *testing.T) {
	e := newExt4(t, nil, "-b", "1024")
	const journalData = 0x20
	for _, backup := range []int64{1, 3} { // the groups that have one
		e.edit(t, (backup*8192+1)*1024, func(b []byte) { b[offDefaultOptions] |= journalData; sum(b) })
	}
	e.edit(t, superblockAt, func(b []byte) { clear(b) })
	if repaired, err := e.check(t); attest.ReasonOf(err) != stateDisk {
		t.Errorf("repaired %t, %v", repaired, err)
	}
}

func TestADiskWithoutASuperblockIsRefusedWithAReason(t *testing.T) {
	for name, content := range map[string][]byte{"zeros": make([]byte, 1<<20), "too short": make([]byte, superblockAt)} {
		image := filepath.Join(t.TempDir(), "disk")
		if err := os.WriteFile(image, content, 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := ext4{image: image}.check(t)
		if attest.ReasonOf(err) != stateDisk || !strings.Contains(err.Error(), "erase the first MiB of the state disk") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// B5: e2fsck replaces a superblock with a wrong checksum by its backup, which says something else.
func TestTheSuperblockIsCheckedAgain(t *testing.T) {
	e := newExt4(t, nil, "-b", "1024")
	const backup, journalData = 8193 * 1024, 0x20
	e.edit(t, backup, func(b []byte) { b[offDefaultOptions] |= journalData; sum(b) })
	e.edit(t, superblockAt, func(b []byte) { b[superblockSize-1] ^= 1 })
	if repaired, err := e.check(t); attest.ReasonOf(err) != stateDisk {
		t.Errorf("repaired %t, %v", repaired, err)
	}
}

// B5: whoever attaches a disk with the journal would read what is written, and choose what is replayed.
func TestNoJournalOnAnotherDiskIsUsed(t *testing.T) {
	file := filepath.Join(t.TempDir(), "journal")
	if err := errors.Join(os.WriteFile(file, nil, 0o600), os.Truncate(file, 8<<20)); err != nil {
		t.Fatal(err)
	}
	disk := strings.TrimSpace(command(t, "/usr/sbin/losetup", "--find", "--show", file))
	t.Cleanup(func() {
		if out, err := exec.CommandContext(context.WithoutCancel(t.Context()), "/usr/sbin/losetup", "--detach", disk).CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	})
	command(t, "/usr/sbin/mke2fs", "-q", "-b", "1024", "-O", "journal_dev", disk)
	e := newExt4(t, nil, "-b", "1024", "-J", "device="+disk)
	if repaired, err := e.check(t); attest.ReasonOf(err) != stateDisk {
		t.Errorf("repaired %t, %v", repaired, err)
	}
	// The superblock passes, and e2fsck takes its backup, since its checksum is wrong.
	e.edit(t, superblockAt, func(b []byte) {
		clear(b[offJournalUUID:offJournalInode])
		binary.LittleEndian.PutUint32(b[offJournalInode:], ext4Journal)
		binary.LittleEndian.PutUint32(b[offJournalDevice:], 0)
	})
	_, err := e.check(t)
	if _, refused := errors.AsType[*exec.ExitError](err); !refused {
		t.Errorf("e2fsck found the journal: %v", err)
	}
}
