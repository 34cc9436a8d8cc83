// Package measure predicts what a machine's TPM has recorded after it has booted an image, from the image alone.
//
// PCR 4 is extended by firmware, 9 by the kernel's own EFI loader and 11 by the unified kernel image. Each is a chain: the
// hash of the previous value and of the event's digest (TPM 2.0 Part 1, section 17.2).
package measure

import (
	"crypto"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf16"

	"github.com/muster-k8s/muster/internal/explain"
	"github.com/muster-k8s/muster/internal/image/uki"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
)

// sections is the order in which the loader measures what it finds (systemd 252,
// src/fundamental/tpm-pcr.c, unified_sections).
var sections = []string{".linux", ".osrel", ".cmdline", ".initrd"}

// Boot is the input of a prediction.
type Boot struct {
	UKI []byte // as on the disk, signed or not
	// SecureBoot is whether firmware checks signatures. The loader then starts the kernel without firmware, which measures
	// only what it starts itself.
	SecureBoot bool
	// Bank is the hash of the TPM's bank that machines quote.
	Bank crypto.Hash
}

// Predict returns the measurements of an image of this name.
func (b Boot) Predict(name string) (policyfile.Measurements, error) {
	m := policyfile.Measurements{Version: 1, Image: name, PCRs: map[string]string{}}
	steps, err := b.Steps()
	if err != nil {
		return m, err
	}
	m.Bank, err = b.bank()
	if err != nil {
		return m, err
	}
	for i, v := range explain.Values(b.Bank, steps) {
		m.PCRs[strconv.Itoa(i)] = hex.EncodeToString(v)
	}
	return m, nil
}

// bank returns the name of the bank in a policy.
func (b Boot) bank() (string, error) {
	for name, h := range attest.Banks {
		if h == b.Bank {
			return name, nil
		}
	}
	return "", fmt.Errorf("measure: %s is no bank that machines quote; does the policy have tpm2.bank?", b.Bank)
}

// Steps returns the single measurements of which [Boot.Predict] returns the results: PCR 4, 9 and 11.
func (b Boot) Steps() ([]explain.Step, error) {
	if _, err := b.bank(); err != nil {
		return nil, err
	}
	parts, err := uki.Sections(b.UKI, sections...)
	if err != nil {
		return nil, err
	}
	if len(parts) != len(sections) {
		return nil, fmt.Errorf("measure: the image has %d of the sections %v", len(parts), sections)
	}
	whole, err := uki.Authenticode(b.UKI, b.Bank)
	if err != nil {
		return nil, err
	}
	kernel, cmdline, initrd := parts[0].Data, parts[2].Data, parts[3].Data
	var out []explain.Step
	digest := func(pcr int, d []byte, what string) { out = append(out, explain.Step{PCR: pcr, Digest: d, What: what}) }
	event := func(pcr int, data []byte, what string) {
		h := b.Bank.New()
		h.Write(data)
		digest(pcr, h.Sum(nil), what)
	}

	// TCG PC Client Platform Firmware Profile 1.06, sections 3.3.4.5 and 10.4.1: the attempt to boot,
	// the separator, and each program that firmware starts.
	event(4, []byte("Calling EFI Application from Boot Option"), "the attempt to boot")
	event(4, make([]byte, 4), "the separator")
	digest(4, whole, "the unified kernel image, a file of the EFI system partition")
	if !b.SecureBoot {
		inner, err := uki.Authenticode(kernel, b.Bank)
		if err != nil {
			return nil, fmt.Errorf("measure: the kernel: %w", err)
		}
		digest(4, inner, "the kernel in it")
	}

	// Linux 6.1, drivers/firmware/efi, its own loader: the load options, then the initial RAM disk.
	line := strings.TrimSpace(strings.TrimRight(string(cmdline), "\x00"))
	event(9, loadOptions(cmdline), fmt.Sprintf("the kernel command line %q", line))
	event(9, initrd, "the initial RAM disk")

	// What systemd's loader does, by its manual: of each section its name with a final zero, then its data.
	for _, s := range parts {
		what := fmt.Sprintf("the content of section %s", s.Name)
		if s.Name == ".cmdline" {
			what = fmt.Sprintf("the content of section %s, %q", s.Name, line)
		}
		event(11, append([]byte(s.Name), 0), "the name of section "+s.Name)
		event(11, s.Data, what)
	}
	return out, nil
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
