// Package layout holds the constants shared by the tool that builds an image and the init program inside it: the partitions
// of the disk, and the root's name on the kernel's command line.
package layout

import (
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
)

// Names of the image's partitions (UEFI 2.10, section 5.3.3) and their GUIDs. They are fixed: a
// disk's GUIDs go into PCR 5, and two builds have to be the same bytes.
const (
	DiskGUID = "a6f2e0c1-7d5b-4c39-9e11-6d7573746572"

	ESPName = "muster-esp"
	ESPType = "c12a7328-f81f-11d2-ba4b-00a0c93ec93b"
	ESPGUID = "a6f2e0c1-7d5b-4c39-9e12-6d7573746572"

	// The types of root and hash tree are those of the Discoverable Partitions Specification, x86-64.
	RootName = "muster-root"
	RootType = "4f68bce3-e8cd-4db1-96e7-fbcaf984b709"
	RootGUID = "a6f2e0c1-7d5b-4c39-9e13-6d7573746572"

	TreeName = "muster-tree"
	TreeType = "2c7357ed-ebd2-46d9-aec1-23d437ec2bf5"
	TreeGUID = "a6f2e0c1-7d5b-4c39-9e14-6d7573746572"
)

// The machine's devices beside the image.
const (
	// ConfigLabel is the label of the vfat volume that holds [MetadataFile] and, if the network isn't DHCP's,
	// [NetworkFile]. It is not authenticated.
	ConfigLabel  = "MUSTER-META"
	MetadataFile = "metadata.yaml"
	NetworkFile  = "network.yaml"
	// StateSerial is the serial number of the disk that keeps state; virtio disks have one.
	StateSerial = "muster-state"
	// StateDevice is the link to that disk, which udev makes too.
	StateDevice = "/dev/disk/by-id/virtio-" + StateSerial
)

// Paths inside the image, and on the tmpfs of /run, which stays mounted after the initramfs.
const (
	RunMetadata = "/run/muster/metadata.yaml"
	RunHosts    = "/run/muster/hosts"
	RunResolv   = "/run/muster/resolv.conf"
	RunMachine  = "/run/muster/machine-id"
	// RunClock is systemd-timesyncd's drop-in with the time servers of the site; the unit's condition names it too.
	RunClock = "/run/systemd/timesyncd.conf.d/10-muster.conf"
)

// BlockSize is the size of data and hash blocks of dm-verity, in bytes.
const BlockSize = 4096

// VerityKey is the parameter of the kernel's command line that names the root. It is not one of systemd's: its generators
// would wait for partitions that they detect themselves.
const VerityKey = "muster.verity="

// Root is all that dm-verity needs; none of it is read from the disk. The tree has no superblock and no salt.
type Root struct {
	Hash   [32]byte // SHA-256 of the tree's top block
	Blocks uint64   // of data, [BlockSize] bytes each
}

// String returns the value of [VerityKey].
func (r Root) String() string { return fmt.Sprintf("sha256:%x:%d", r.Hash, r.Blocks) }

// ParseRoot reads a value of [VerityKey].
func ParseRoot(s string) (Root, error) {
	var r Root
	bad := fmt.Errorf("%s%q: want sha256:HASH:BLOCKS", VerityKey, s)
	parts := strings.Split(s, ":")
	if len(parts) != 3 || parts[0] != "sha256" {
		return r, bad
	}
	h, err := hex.DecodeString(parts[1])
	if err != nil || len(h) != len(r.Hash) {
		return r, bad
	}
	copy(r.Hash[:], h)
	// 2⁴⁰ blocks are 4 PiB.
	if r.Blocks, err = strconv.ParseUint(parts[2], 10, 40); err != nil || r.Blocks < 2 {
		return Root{}, bad
	}
	if r.String() != s {
		return Root{}, bad
	}
	return r, nil
}

// RootOf finds the root in the kernel's command line: exactly one.
func RootOf(cmdline string) (Root, error) {
	var found []string
	for w := range strings.FieldsSeq(cmdline) {
		if v, ok := strings.CutPrefix(w, VerityKey); ok {
			found = append(found, v)
		}
	}
	if len(found) != 1 {
		return Root{}, fmt.Errorf("the kernel's command line has %s %d times, want once", VerityKey, len(found))
	}
	return ParseRoot(found[0])
}
