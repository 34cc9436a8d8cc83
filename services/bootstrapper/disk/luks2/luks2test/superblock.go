package luks2test

import (
	"encoding/binary"

	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2"
)

// Superblock returns dm-integrity's superblock as Linux writes it on a new state disk of the given size in bytes, 2 MiB or
// more.
func Superblock(device int64) []byte {
	b := make([]byte, luks2.SuperblockSize)
	copy(b, "integrt\x00\x04\x0f\x20\x00")
	sections := max(1, min(131072, device/512/128)/264)
	binary.LittleEndian.PutUint32(b[12:], uint32(sections))
	// This finds the most data that fit, in blocks of 8 sectors, as the kernel does: from the highest bit down.
	room, data := (device-luks2.Size)/512-8-264*sections, int64(0)
	for bit := 62; bit >= 3; bit-- {
		if more := data | 1<<bit; more <= room && more+(more+32767)/32768*256 <= room {
			data = more
		}
	}
	binary.LittleEndian.PutUint64(b[16:], uint64(data))
	copy(b[24:], "\x08\x00\x00\x00\x03\x0c")
	return b
}
