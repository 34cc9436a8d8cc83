// Package uki combines a kernel, its command line and its initial RAM disk into one program that firmware boots: a unified
// kernel image (UAPI Group, specification of that name).
//
// The program is systemd's small EFI loader, to which each part is added as a section; the rest of it does not change.
// Firmware measures the whole, and the loader measures each section.
package uki

import (
	"bytes"
	"crypto"
	_ "crypto/sha256" // the banks of TPMs
	_ "crypto/sha512"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
)

// Section is one part.
type Section struct {
	Name string // with its dot, at most 8 bytes
	Data []byte
}

// Offsets in a PE32+ file (Microsoft, PE Format, "COFF File Header" and "Optional Header").
const (
	offPE       = 0x3c // of the offset of "PE\0\0"
	fileHeader  = 24   // bytes, with the signature
	sectionSize = 40   // bytes of a section header

	magicPlus = 0x20b

	optInitialized  = 8
	optSectionAlign = 32
	optFileAlign    = 36
	optImageSize    = 56
	optHeadersSize  = 60
	optCheckSum     = 64
	optDirectories  = 112
	certificateDir  = optDirectories + 4*8 // IMAGE_DIRECTORY_ENTRY_SECURITY
	optLeast        = certificateDir + 8   // bytes

	initializedRead = 0x40000040 // IMAGE_SCN_CNT_INITIALIZED_DATA | IMAGE_SCN_MEM_READ
)

// errShort is the error for a program that ends too early.
var errShort = errors.New("it is no PE32+ program")

// program is a PE32+ file whose headers were checked to lie inside it.
type program struct {
	b                  []byte
	pe, opt, tab       int // offsets of the PE signature, the optional header and the section table
	sections           int
	headers            uint32 // bytes of all headers
	fileAlign, sectAln uint32
}

func parse(b []byte) (*program, error) {
	p := &program{b: b}
	if len(b) < offPE+4 || b[0] != 'M' || b[1] != 'Z' {
		return nil, errShort
	}
	p.pe = int(p.u32(offPE))
	p.opt = p.pe + fileHeader
	if p.pe > len(b)-fileHeader-optLeast || string(b[p.pe:p.pe+4]) != "PE\x00\x00" || p.u16(p.opt) != magicPlus {
		return nil, errShort
	}
	p.sections = int(p.u16(p.pe + 6))
	p.tab = p.opt + int(p.u16(p.pe+20))
	p.headers, p.fileAlign, p.sectAln = p.u32(p.opt+optHeadersSize), p.u32(p.opt+optFileAlign), p.u32(p.opt+optSectionAlign)
	if p.tab+p.sections*sectionSize > len(b) || p.tab < p.opt+optLeast || int64(p.headers) > int64(len(b)) || p.tab+p.sections*sectionSize > int(p.headers) || p.sections == 0 {
		return nil, errShort
	}
	if p.fileAlign == 0 || p.sectAln == 0 || p.fileAlign > 1<<16 || p.sectAln > 1<<20 {
		return nil, fmt.Errorf("%w: it is aligned to %d and %d bytes", errShort, p.fileAlign, p.sectAln)
	}
	for _, s := range p.list() {
		if int64(s.raw)+int64(s.rawSize) > int64(len(b)) || s.rawSize > 0 && s.raw < p.headers {
			return nil, fmt.Errorf("%w: the section %s is not between headers and end", errShort, s.name)
		}
		if int64(s.address)+int64(s.size) > 1<<30 {
			return nil, fmt.Errorf("%w: the section %s lies beyond 1 GiB", errShort, s.name)
		}
	}
	return p, nil
}

func (p *program) u16(o int) uint16       { return binary.LittleEndian.Uint16(p.b[o:]) }
func (p *program) u32(o int) uint32       { return binary.LittleEndian.Uint32(p.b[o:]) }
func (p *program) put32(o int, v uint32)  { binary.LittleEndian.PutUint32(p.b[o:], v) }
func up(v, to uint32) uint32              { return (v + to - 1) / to * to }
func (p *program) header(i int) (off int) { return p.tab + i*sectionSize }

type section struct {
	name                        string
	size, address, rawSize, raw uint32
}

func (p *program) list() []section {
	var out []section
	for i := range p.sections {
		o := p.header(i)
		out = append(out, section{string(bytes.TrimRight(p.b[o:o+8], "\x00")), p.u32(o + 8), p.u32(o + 12), p.u32(o + 16), p.u32(o + 20)})
	}
	return out
}

// Build adds sections to the loader. It returns a program without signature.
func Build(loader []byte, add []Section) ([]byte, error) {
	p, err := parse(bytes.Clone(loader))
	if err != nil {
		return nil, fmt.Errorf("unified kernel image: the loader: %w", err)
	}
	end, rawEnd := uint32(0), p.headers
	first := ^uint32(0)
	for _, s := range p.list() {
		end, rawEnd = max(end, s.address+s.size), max(rawEnd, s.raw+s.rawSize)
		first = min(first, s.address)
	}
	for _, a := range add {
		if len(a.Name) < 2 || len(a.Name) > 8 || a.Name[0] != '.' || len(a.Data) == 0 || len(a.Data) > 1<<30 {
			return nil, fmt.Errorf("unified kernel image: section %q of %d bytes", a.Name, len(a.Data))
		}
		if slices.ContainsFunc(p.list(), func(s section) bool { return s.name == a.Name }) {
			return nil, fmt.Errorf("unified kernel image: the loader has a section %s already", a.Name)
		}
	}
	p.b = p.b[:rawEnd:rawEnd] // symbols for debuggers may follow
	p.put32(p.pe+8, 0)        // when the loader was linked
	p.put32(p.pe+12, 0)       // where the symbols were
	p.put32(p.pe+16, 0)
	if err := p.makeRoom(len(add), first); err != nil {
		return nil, err
	}
	p.b = append(p.b, make([]byte, up(uint32(len(p.b)), p.fileAlign)-uint32(len(p.b)))...)
	// The kernel requires an address that is a multiple of a page.
	page := max(p.sectAln, 4096)
	at, added := up(end, page), uint32(0)
	for _, a := range add {
		o := p.header(p.sections)
		p.sections++
		clear(p.b[o : o+sectionSize])
		copy(p.b[o:], a.Name)
		size := uint32(len(a.Data))
		raw := up(size, p.fileAlign)
		p.put32(o+8, size)
		p.put32(o+12, at)
		p.put32(o+16, raw)
		p.put32(o+20, uint32(len(p.b)))
		p.put32(o+36, initializedRead)
		p.b = append(append(p.b, a.Data...), make([]byte, raw-size)...)
		at = up(at+size, page)
		added += raw
	}
	binary.LittleEndian.PutUint16(p.b[p.pe+6:], uint16(p.sections))
	p.put32(p.opt+optInitialized, p.u32(p.opt+optInitialized)+added)
	p.put32(p.opt+optImageSize, at)
	p.put32(p.opt+optCheckSum, 0) // firmware does not check it
	return p.b, nil
}

// makeRoom extends the headers by n sections, up to the address of the first section in memory.
func (p *program) makeRoom(n int, first uint32) error {
	need := uint32(p.header(p.sections + n))
	if need <= p.headers {
		return nil
	}
	grow := up(need-p.headers, p.fileAlign)
	if p.headers+grow > first {
		return fmt.Errorf("unified kernel image: the loader has no room for %d more sections", n)
	}
	p.b = slices.Insert(p.b, int(p.headers), make([]byte, grow)...)
	for i := range p.sections {
		if o := p.header(i) + 20; p.u32(o) != 0 {
			p.put32(o, p.u32(o)+grow)
		}
	}
	p.headers += grow
	p.put32(p.opt+optHeadersSize, p.headers)
	return nil
}

// Authenticode returns the hash by which firmware measures a program, and with SHA-256 signatures name it (Microsoft, Windows
// Authenticode Portable Executable Signature Format, "Calculating the PE Image Hash"): of all bytes except checksum and
// signature. Which hash it is depends on the bank of the TPM.
func Authenticode(b []byte, bank crypto.Hash) ([]byte, error) {
	p, err := parse(b)
	if err != nil {
		return nil, fmt.Errorf("authenticode: %w", err)
	}
	h := bank.New()
	sum, cert := p.opt+optCheckSum, p.opt+certificateDir
	h.Write(b[:sum])
	h.Write(b[sum+4 : cert])
	h.Write(b[cert+8 : p.headers])
	hashed := int64(p.headers)
	list := slices.DeleteFunc(p.list(), func(s section) bool { return s.rawSize == 0 })
	slices.SortFunc(list, func(a, b section) int { return int(int64(a.raw) - int64(b.raw)) })
	for _, s := range list {
		h.Write(b[s.raw : s.raw+s.rawSize])
		hashed += int64(s.rawSize)
	}
	certificates := int64(p.u32(cert + 4))
	rest := int64(len(b)) - certificates
	if rest < hashed {
		return nil, fmt.Errorf("authenticode: %w: its sections overlap", errShort)
	}
	h.Write(b[hashed:rest])
	return h.Sum(nil), nil
}

// Sections returns a program's sections of these names, as the loader finds them.
func Sections(b []byte, names ...string) ([]Section, error) {
	p, err := parse(b)
	if err != nil {
		return nil, err
	}
	var out []Section
	for _, want := range names {
		for _, s := range p.list() {
			if s.name != want {
				continue
			}
			if s.size > s.rawSize {
				return nil, fmt.Errorf("%w: the section %s has %d bytes in memory and %d in the file", errShort, s.name, s.size, s.rawSize)
			}
			out = append(out, Section{s.name, b[s.raw : s.raw+s.size]})
		}
	}
	return out, nil
}
