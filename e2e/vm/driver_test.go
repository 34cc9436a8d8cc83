//go:build vm

package vm

import (
	"bytes"
	"encoding/binary"
	"slices"
)

// driverText is what the driver of [efiDriver] prints when it runs.
const driverText = "a driver runs below the image"

// efiDriver returns a boot-service driver for x86-64 UEFI firmware (UEFI 2.10, section 2.1.3): it writes driverText to the first serial port and returns EFI_SUCCESS.
func efiDriver() []byte {
	const (
		fileAlign, base = 0x200, 0x1000 // of the one section: in the file, and in memory
		optional        = 240
	)
	code := []byte{
		0x56,                   // push rsi
		0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8: the first serial port, since there is no console yet
		0x48, 0x8d, 0x35, 12, 0, 0, 0, // lea rsi, [rip+12]: the text
		0xac,       // lodsb
		0x84, 0xc0, // test al, al
		0x74, 3, // jz +3
		0xee,       // out dx, al
		0xeb, 0xf8, // jmp -8
		0x31, 0xc0, // xor eax, eax: EFI_SUCCESS
		0x5e, // pop rsi
		0xc3, // ret
	}
	section := slices.Concat(code, []byte("\r\n"+driverText+"\r\n\x00"))
	raw := (len(section) + fileAlign - 1) / fileAlign * fileAlign

	var b bytes.Buffer
	put := func(values ...any) {
		for _, v := range values {
			_ = binary.Write(&b, binary.LittleEndian, v) // a buffer takes all
		}
	}
	// Microsoft's PE format: MS-DOS header, COFF header, optional header, section table.
	put([]byte("MZ"), make([]byte, 58), uint32(64))
	put([]byte("PE\x00\x00"), uint16(0x8664), uint16(1), uint32(0), uint32(0), uint32(0), uint16(optional), uint16(0x0022))
	const bootServiceDriver = 11
	put(uint16(0x20b), uint16(0), uint32(raw), uint32(0), uint32(0), uint32(base), uint32(base))
	put(uint64(0), uint32(base), uint32(fileAlign), uint32(0), uint32(0), uint32(0), uint32(0), uint32(2*base), uint32(fileAlign), uint32(0))
	put(uint16(bootServiceDriver), uint16(0), uint64(0), uint64(0), uint64(0), uint64(0), uint32(0), uint32(16), make([]byte, 16*8))
	put([]byte(".text\x00\x00\x00"), uint32(len(section)), uint32(base), uint32(raw), uint32(fileAlign), uint32(0), uint32(0), uint32(0), uint32(0x60000020))
	out := append(b.Bytes(), make([]byte, fileAlign-b.Len())...)
	return append(out, append(section, make([]byte, raw-len(section))...)...)
}

// optionROM returns a PCI expansion ROM of QEMU's random-number device with a driver (PCI Firmware Specification 3.3, section 5; UEFI 2.10, section 14.4.2).
func optionROM(driver []byte) []byte {
	const unit, header, data = 512, 64, 28
	size := (header + len(driver) + unit - 1) / unit
	rom := make([]byte, 64<<10) // OVMF reads none of 2 KiB
	put := binary.LittleEndian
	put.PutUint16(rom, 0xaa55)
	put.PutUint16(rom[2:], uint16(size)) // InitializationSize
	put.PutUint32(rom[4:], 0x0ef1)       // EfiSignature
	put.PutUint16(rom[8:], 11)           // EfiSubsystem: a boot-service driver
	put.PutUint16(rom[10:], 0x8664)      // EfiMachineType
	put.PutUint16(rom[12:], 0)           // CompressionType: none
	put.PutUint16(rom[22:], header)      // EfiImageHeaderOffset
	put.PutUint16(rom[24:], data)        // PcirOffset
	pcir := rom[data:]
	copy(pcir, "PCIR")
	put.PutUint16(pcir[4:], 0x1af4) // vendor: Red Hat, virtio
	put.PutUint16(pcir[6:], 0x1005) // device: entropy source
	put.PutUint16(pcir[10:], 24)    // length of this structure
	pcir[12] = 3                    // revision
	put.PutUint16(pcir[16:], uint16(size))
	pcir[20] = 3    // code type: EFI
	pcir[21] = 0x80 // the last image
	copy(rom[header:], driver)
	return rom
}
