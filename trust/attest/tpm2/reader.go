package tpm2

import "encoding/binary"

// reader parses marshaled TPM structures: big-endian integers, and buffers with a length of two
// bytes before them. After the first read past the end every read returns zero, and done returns
// false.
type reader struct {
	b      []byte
	failed bool
}

func (r *reader) take(n int) []byte {
	if r.failed || n > len(r.b) {
		r.failed = true
		return make([]byte, min(n, 8))
	}
	out := r.b[:n:n]
	r.b = r.b[n:]
	return out
}

func (r *reader) u8() uint8   { return r.take(1)[0] }
func (r *reader) u16() uint16 { return binary.BigEndian.Uint16(r.take(2)) }
func (r *reader) u32() uint32 { return binary.BigEndian.Uint32(r.take(4)) }
func (r *reader) u64() uint64 { return binary.BigEndian.Uint64(r.take(8)) }

// sized reads a TPM2B.
func (r *reader) sized() []byte {
	n := int(r.u16())
	if r.failed || n > len(r.b) {
		r.failed = true
		return nil
	}
	return r.take(n)
}

// done reports whether all bytes were read and no read went past the end.
func (r *reader) done() bool { return !r.failed && len(r.b) == 0 }
