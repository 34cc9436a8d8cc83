// Package measure predicts what a machine's TPM has recorded after it has booted an image, from the image alone.
//
// PCR 4 is extended by firmware, 9 by the kernel's own EFI loader and 11 by the unified kernel image. Each is a chain: the
// hash of the previous value and of the event's digest (TPM 2.0 Part 1, section 17.2).
package measure

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strings"
	"unicode/utf16"

	"github.com/muster-k8s/muster/internal/image/uki"
	"github.com/muster-k8s/muster/internal/policyfile"
)

// pcr is a register of the SHA-256 bank, which starts with zeros.
type pcr [sha256.Size]byte

func (p *pcr) extend(digest [sha256.Size]byte) { *p = sha256.Sum256(append(p[:], digest[:]...)) }
func (p *pcr) event(data []byte)               { p.extend(sha256.Sum256(data)) }
func (p pcr) String() string                   { return hex.EncodeToString(p[:]) }

// sections is the order in which the loader measures what it finds (systemd 252,
// src/fundamental/tpm-pcr.c, unified_sections).
var sections = []string{".linux", ".osrel", ".cmdline", ".initrd"}

// Boot is the input of a prediction.
type Boot struct {
	UKI []byte // as on the disk, signed or not
	// SecureBoot is whether firmware checks signatures. The loader then starts the kernel without firmware, which measures
	// only what it starts itself.
	SecureBoot bool
}

// Predict returns the measurements of an image of this name.
func (b Boot) Predict(name string) (policyfile.Measurements, error) {
	m := policyfile.Measurements{Version: 1, Bank: "sha256", Image: name, PCRs: map[string]string{}}
	parts, err := uki.Sections(b.UKI, sections...)
	if err != nil {
		return m, err
	}
	if len(parts) != len(sections) {
		return m, fmt.Errorf("measure: the image has %d of the sections %v", len(parts), sections)
	}
	whole, err := uki.Authenticode(b.UKI)
	if err != nil {
		return m, err
	}
	kernel, cmdline, initrd := parts[0].Data, parts[2].Data, parts[3].Data

	// TCG PC Client Platform Firmware Profile 1.06, sections 3.3.4.5 and 10.4.1: the attempt to boot,
	// the separator, and each program that firmware starts.
	var p4 pcr
	p4.event([]byte("Calling EFI Application from Boot Option"))
	p4.event(make([]byte, 4))
	p4.extend(whole)
	if !b.SecureBoot {
		inner, err := uki.Authenticode(kernel)
		if err != nil {
			return m, fmt.Errorf("measure: the kernel: %w", err)
		}
		p4.extend(inner)
	}

	// Linux 6.1, drivers/firmware/efi, its own loader: the load options, then the initial RAM disk.
	var p9 pcr
	p9.event(loadOptions(cmdline))
	p9.event(initrd)

	// What systemd's loader does, by its manual: of each section its name with a final zero, then its data.
	var p11 pcr
	for _, s := range parts {
		p11.event(append([]byte(s.Name), 0))
		p11.event(s.Data)
	}
	m.PCRs["4"], m.PCRs["9"], m.PCRs["11"] = p4.String(), p9.String(), p11.String()
	return m, nil
}

// loadOptions returns the command line as the loader passes it to the kernel: UTF-16 with a final zero, without white space
// at its end.
func loadOptions(section []byte) []byte {
	line := strings.TrimSpace(strings.TrimRight(string(section), "\x00"))
	var out []byte
	for _, c := range utf16.Encode([]rune(line)) {
		out = binary.LittleEndian.AppendUint16(out, c)
	}
	return append(out, 0, 0)
}
