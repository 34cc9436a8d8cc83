package main

import (
	"encoding/binary"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/muster-k8s/muster/internal/image/layout"
)

// The kernel's device mapper (Linux, include/uapi/linux/dm-ioctl.h).
const (
	dmControl = "/dev/mapper/control"
	dmMajor   = 4 // of the interface

	dmDevCreate  = 3
	dmDevSuspend = 6 // resumes, without the flag to suspend
	dmTableLoad  = 9

	dmReadOnly = 1

	dmHeader = 312 // bytes of struct dm_ioctl
	dmSpec   = 40  // bytes of struct dm_target_spec

	offSize, offStart, offTargets, offFlags, offDev, offName = 12, 16, 20, 28, 40, 48
)

// dmRequest returns the bytes of one command about a read-only device, with room for its answer.
func dmRequest(name, target, params string, sectors uint64) []byte {
	b := make([]byte, dmHeader+dmSpec+(len(params)+8)&^7)
	le := binary.LittleEndian
	le.PutUint32(b, dmMajor)
	le.PutUint32(b[offSize:], uint32(len(b)))
	le.PutUint32(b[offStart:], dmHeader)
	le.PutUint32(b[offFlags:], dmReadOnly)
	copy(b[offName:offName+127], name)
	if target != "" {
		le.PutUint32(b[offTargets:], 1)
		s := b[dmHeader:]
		le.PutUint64(s[8:], sectors)
		le.PutUint32(s[20:], uint32(len(s)))
		copy(s[24:39], target)
		copy(s[dmSpec:], params)
	}
	return b
}

// verityTable returns the parameters of the target (Linux, Documentation/admin-guide/device-mapper/verity.rst). A block
// with a wrong hash stops the machine when it is read. A block that the disk cannot read is an error for its reader, as
// on any disk: the machine may continue without the block, but never with a different one. Stopping the machine then
// needs panic_on_error, which Linux 6.1 does not have.
func verityTable(r layout.Root, data, tree string) string {
	return fmt.Sprintf("1 %s %s %d %d %d 0 sha256 %x - 1 panic_on_corruption", data, tree, layout.BlockSize, layout.BlockSize, r.Blocks, r.Hash)
}

// openVerity makes the device of this name, and returns its path. data and tree are MAJOR:MINOR.
func openVerity(name string, r layout.Root, data, tree string) (string, error) {
	f, err := os.OpenFile(dmControl, os.O_RDWR, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	var dev uint64
	for _, c := range []struct {
		what    string
		nr      uintptr
		request []byte
	}{
		{"make the device", dmDevCreate, dmRequest(name, "", "", 0)},
		{"load its table", dmTableLoad, dmRequest(name, "verity", verityTable(r, data, tree), r.Blocks*layout.BlockSize/512)},
		{"start it", dmDevSuspend, dmRequest(name, "", "", 0)},
	} {
		// _IOWR(0xfd, nr, struct dm_ioctl)
		code := 3<<30 | dmHeader<<16 | 0xfd<<8 | c.nr
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), code, uintptr(unsafe.Pointer(&c.request[0]))); errno != 0 { //nolint:gosec // G103: there is no other way to this interface
			return "", fmt.Errorf("dm-verity: %s: %w", c.what, errno)
		}
		dev = binary.LittleEndian.Uint64(c.request[offDev:])
	}
	return fmt.Sprintf("/dev/dm-%d", unix.Minor(dev)), nil
}
