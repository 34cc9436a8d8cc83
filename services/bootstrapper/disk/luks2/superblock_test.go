package luks2_test

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"math"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2"
	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2/luks2test"
)

// written is the superblock that Linux 6.1 and cryptsetup 2.6.1 wrote on a disk of 100 MiB; zeros follow.
const (
	written     = "696e746567727400040f200006000000c80a03000000000008000000030c0000"
	writtenSize = 100 << 20
)

func writtenSuperblock(t testing.TB) []byte {
	t.Helper()
	b, err := hex.DecodeString(written)
	if err != nil {
		t.Fatal(err)
	}
	return append(b, make([]byte, luks2.SuperblockSize-len(b))...)
}

func TestASuperblockAsLinuxWritesItIsAccepted(t *testing.T) {
	if !bytes.Equal(luks2test.Superblock(writtenSize), writtenSuperblock(t)) {
		t.Error("luks2test writes another one than Linux")
	}
	for _, size := range []int64{2 << 20, 3 << 20, 16 << 20, 32<<20 + 512, 40 << 20, writtenSize, 1 << 30, 10<<30 + 4096*7, 1 << 40, 1 << 50} {
		b := luks2test.Superblock(size)
		if err := luks2.CheckSuperblock(b, size); err != nil {
			t.Errorf("%d bytes: %v", size, err)
		}
		if err := luks2.CheckSuperblock(b, 2*size); err != nil {
			t.Errorf("%d bytes, which have grown: %v", size, err)
		}
		if err := luks2.CheckSuperblock(b, size-4096); err == nil {
			t.Errorf("%d bytes, which have shrunk", size)
		}
	}
}

// Invariant B5.
func TestAHostileSuperblockIsRefused(t *testing.T) {
	put32 := func(at int, v uint32) func([]byte) {
		return func(b []byte) { binary.LittleEndian.PutUint32(b[at:], v) }
	}
	put64 := func(at int, v uint64) func([]byte) {
		return func(b []byte) { binary.LittleEndian.PutUint64(b[at:], v) }
	}
	put8 := func(at int, v byte) func([]byte) { return func(b []byte) { b[at] = v } }
	for name, tt := range map[string]struct {
		change func([]byte)
		want   string
	}{
		"erased, so that the kernel makes a new one": {func(b []byte) { clear(b) }, "none of dm-integrity's"},
		"another magic":                                 {put8(6, 'T'), "none of dm-integrity's"},
		"version 1":                                     {put8(8, 1), "version: 1"},
		"version 5":                                     {put8(8, 5), "version: 5"},
		"MACs close together":                           {put8(9, 3), "between MACs"},
		"MACs far apart, so that a sector wraps":        {put8(9, 255), "between MACs"},
		"MACs of no bytes":                              {put8(10, 0), "size of MACs: 0"},
		"MACs of 8 KiB":                                 {put8(11, 0x20), "size of MACs: 8224"},
		"no journal":                                    {put32(12, 0), "0 sections of journal"},
		"a section of journal more":                     {put32(12, 7), "7 sections of journal"},
		"a journal that wraps":                          {put32(12, math.MaxUint32), "sections of journal"},
		"no data":                                       {put64(16, 0), "0 sectors of data"},
		"a sector of data more":                         {put64(16, 199369), "199369 sectors"},
		"a block of data more":                          {put64(16, 199376), "do not fit"},
		"data as large as the device":                   {put64(16, writtenSize/512), "do not fit"},
		"data that wrap":                                {put64(16, math.MaxUint64-7), "do not fit"},
		"data that wrap with their MACs":                {put64(16, math.MaxInt64-7), "do not fit"},
		"a journal with a MAC":                          {put32(24, 9), "flags: 9"},
		"MACs to be made anew":                          {put32(24, 10), "flags: 10"},
		"a bitmap that says that nothing is journalled": {put32(24, 12), "flags: 12"},
		"MACs without their place":                      {put32(24, 24), "flags: 24"},
		"MACs elsewhere":                                {put32(24, 40), "flags: 40"},
		"MACs at their old places":                      {put32(24, 0), "flags: 0"},
		"an unknown flag":                               {put32(24, 1<<31|8), "flags: "},
		"sectors of 512 bytes":                          {put8(28, 0), "sectors in a block, log2: 0"},
		"a bitmap of single blocks":                     {put8(29, 0), "blocks of a bit, log2: 0"},
		"something in the padding":                      {put8(30, 1), "follows its last field"},
		"where to go on with new MACs":                  {put64(32, 8), "follows its last field"},
		"a salt":                                        {put8(48, 1), "follows its last field"},
		"something at the end":                          {put8(luks2.SuperblockSize-1, 1), "follows its last field"},
	} {
		b := writtenSuperblock(t)
		tt.change(b)
		if err := luks2.CheckSuperblock(b, writtenSize); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %s", name, err, tt.want)
		}
	}
	b := writtenSuperblock(t)
	for _, n := range []int{0, 512, luks2.SuperblockSize - 1} {
		if err := luks2.CheckSuperblock(b[:n], writtenSize); err == nil {
			t.Errorf("%d bytes were enough", n)
		}
	}
	for _, size := range []int64{math.MinInt64, -1, 0, luks2.Size - 1, luks2.Size, luks2.Size + luks2.SuperblockSize} {
		if err := luks2.CheckSuperblock(b, size); err == nil {
			t.Errorf("on a device of %d bytes", size)
		}
	}
}
