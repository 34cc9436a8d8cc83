// Package ukitest makes small programs in the form that firmware starts, for tests.
package ukitest

import "encoding/binary"

// Offsets of the programs that [Program] makes, in bytes.
const (
	PE       = 0x80            // of the signature "PE\0\0"
	Optional = PE + 24         // of the optional header
	Table    = Optional + 0xf0 // of the section table
)

// Program makes a PE32+ program: headers of this size (a multiple of 512), and the sections .text and
// .data of 512 bytes, which hold ones and twos.
func Program(headers uint32) []byte {
	b := make([]byte, headers+1024)
	le := binary.LittleEndian
	copy(b, "MZ")
	le.PutUint32(b[0x3c:], PE)
	copy(b[PE:], "PE\x00\x00")
	le.PutUint16(b[PE+4:], 0x8664) // x86-64
	le.PutUint16(b[PE+6:], 2)
	le.PutUint32(b[PE+8:], 0x12345678) // a date
	le.PutUint16(b[PE+20:], Table-Optional)
	le.PutUint16(b[PE+22:], 0x22e)
	for at, v := range map[int]uint32{0: 0x20b, 16: 0x1000, 20: 0x1000, 32: 0x1000, 36: 512, 56: 0x3000, 60: headers, 68: 10, 108: 16} {
		le.PutUint32(b[Optional+at:], v)
	}
	for i, name := range []string{".text", ".data"} {
		o := b[Table+i*40:]
		copy(o, name)
		le.PutUint32(o[8:], 512)
		le.PutUint32(o[12:], uint32(0x1000*(i+1)))
		le.PutUint32(o[16:], 512)
		le.PutUint32(o[20:], headers+uint32(i)*512)
		le.PutUint32(o[36:], 0x60000020)
		for j := range 512 {
			b[int(headers)+i*512+j] = byte(i + 1)
		}
	}
	return b
}
