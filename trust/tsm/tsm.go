// Package tsm asks the processor below a confidential virtual machine for hardware reports, by Linux's
// interface for them (Documentation/ABI/testing/configfs-tsm-report; Linux 6.7 and later).
//
// A report is a folder: the caller makes it, writes the report data into inblob, and reads the report
// from outblob. The kernel makes the report while outblob is read. This package makes a folder for each
// report, so processes do not share any, and checks that nobody has written to it meanwhile. It does
// not verify reports.
package tsm

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest/hardware"
	"github.com/muster-k8s/muster/trust/attest/snp"
	"github.com/muster-k8s/muster/trust/attest/tdx"
)

// Dir is the folder of the interface.
const Dir = "/sys/kernel/config/tsm/report"

// maxBlob is the largest content of outblob and auxblob, in bytes: TSM_REPORT_OUTBLOB_MAX of Linux.
const maxBlob = 32 << 10

// Providers of reports, as the attribute provider names them.
const (
	providerSNP = "sev_guest"
	providerTDX = "tdx_guest"
)

// filesystem is the part of configfs that this package uses. Attributes are files of an entry, which is
// a folder.
type filesystem interface {
	mkdir(entry string) error
	rmdir(entry string) error
	read(entry, attribute string) ([]byte, error)
	write(entry, attribute string, data []byte) error
}

// Reports makes hardware reports. It is safe for concurrent use.
type Reports struct{ fs filesystem }

// New returns the Reports of the interface in dir, usually [Dir].
func New(dir string) *Reports { return &Reports{folder(dir)} }

// Report returns a report over data. It returns nil if the kernel has no interface for reports, or no
// driver that makes them: then the machine is no confidential one. The kernel may take seconds, and does
// not stop when ctx ends.
func (r *Reports) Report(ctx context.Context, data hardware.ReportData) (out *attestv1.HardwareReport, err error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	var random [8]byte
	_, _ = rand.Read(random[:]) // never fails
	e := entry{r.fs, "muster-" + hex.EncodeToString(random[:])}
	switch err := r.fs.mkdir(e.name); {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENXIO): // no interface; no driver
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("make a folder for it: %w", err)
	}
	defer func() { err = errors.Join(err, r.fs.rmdir(e.name)) }()
	provider, err := e.text("provider")
	if err != nil {
		return nil, err
	}
	if provider != providerSNP && provider != providerTDX {
		return nil, fmt.Errorf("the kernel's driver %q makes reports of an unknown kind; known are %s and %s", provider, providerSNP, providerTDX)
	}
	report, aux, err := e.make(data)
	if err != nil {
		return nil, fmt.Errorf("of the driver %s: %w", provider, err)
	}
	if provider == providerTDX {
		if len(report) == 0 || len(report) > tdx.MaxQuote {
			return nil, fmt.Errorf("the TDX quote has %d bytes, want 1 to %d", len(report), tdx.MaxQuote)
		}
		return &attestv1.HardwareReport{Report: &attestv1.HardwareReport_Tdx{Tdx: &attestv1.TdxQuote{Quote: report}}}, nil
	}
	if len(report) != snp.ReportSize {
		return nil, fmt.Errorf("the SEV-SNP report has %d bytes, want %d", len(report), snp.ReportSize)
	}
	certificate, err := keyCertificate(report, aux)
	if err != nil {
		return nil, err
	}
	return &attestv1.HardwareReport{Report: &attestv1.HardwareReport_SevSnp{SevSnp: &attestv1.SevSnpReport{Report: report, Certificate: certificate}}}, nil
}

// entry is the folder of one report.
type entry struct {
	fs   filesystem
	name string
}

func (e entry) text(attribute string) (string, error) {
	b, err := e.fs.read(e.name, attribute)
	return strings.TrimSpace(string(b)), err
}

func (e entry) number(attribute string) (uint64, error) {
	s, err := e.text(attribute)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", attribute, err)
	}
	return n, nil
}

// make returns the report over data, and the data beside it.
func (e entry) make(data hardware.ReportData) (report, aux []byte, err error) {
	before, err := e.number("generation")
	if err != nil {
		return nil, nil, err
	}
	writes := uint64(1)
	// SEV-SNP: the privilege level of this guest. Below another one, as with an SVSM, the level 0 that
	// the kernel asks for by default is refused.
	floor, err := e.text("privlevel_floor")
	if err == nil {
		writes++
		err = e.fs.write(e.name, "privlevel", []byte(floor))
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, err
	}
	if err := e.fs.write(e.name, "inblob", data[:]); err != nil {
		return nil, nil, err
	}
	if report, err = e.fs.read(e.name, "outblob"); err != nil {
		return nil, nil, err
	}
	if aux, err = e.fs.read(e.name, "auxblob"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, err
	}
	after, err := e.number("generation")
	if err != nil {
		return nil, nil, err
	}
	if after != before+writes {
		return nil, nil, fmt.Errorf("another program has written to %s meanwhile: generation %d, want %d", e.name, after, before+writes)
	}
	return report, aux, nil
}

// The identifiers of the chip's and the provider's key in the host's table of certificates
// (GHCB specification, AMD 56421, section 4.1.8.1; the bytes in the order of RFC 9562).
var tableKeys = map[snp.Key]string{snp.VCEK: "63da758de6644564adc5f4b93be8accd", snp.VLEK: "a8074bc2a25a483eaae639c045a0b8a1"}

// keyCertificate returns the certificate of the key that signed the report, VCEK or VLEK, from the table
// that the host gives to the guest: it can have both. It is empty if the table lacks it, or if no such key
// signed the report, which a policy without rules for such reports accepts. The table has entries of an
// identifier of 16 bytes, offset and length; the last is zero.
func keyCertificate(report, table []byte) ([]byte, error) {
	key, _ := snp.SigningKey(report) // none: no entry has its identifier, and the verifier refuses with the reason
	for at := 0; at+24 <= len(table); at += 24 {
		id := hex.EncodeToString(table[at : at+16])
		offset, length := uint64(binary.LittleEndian.Uint32(table[at+16:])), uint64(binary.LittleEndian.Uint32(table[at+20:]))
		if id == strings.Repeat("0", 32) {
			break
		}
		if id != tableKeys[key] {
			continue
		}
		if length == 0 || length > snp.MaxCertificate || offset+length > uint64(len(table)) {
			return nil, fmt.Errorf("the host's table of certificates has %d bytes, and an entry for the SEV-SNP key at %d with %d", len(table), offset, length)
		}
		return table[offset : offset+length], nil
	}
	return nil, nil
}

// folder is configfs itself.
type folder string

func (f folder) mkdir(entry string) error { return os.Mkdir(filepath.Join(string(f), entry), 0o700) }

// rmdir removes the entry. The kernel removes its attributes.
func (f folder) rmdir(entry string) error { return syscall.Rmdir(filepath.Join(string(f), entry)) }

func (f folder) read(entry, attribute string) ([]byte, error) {
	b, err := os.ReadFile(filepath.Join(string(f), entry, attribute))
	if err == nil && len(b) > maxBlob {
		return nil, fmt.Errorf("%s has %d bytes, more than %d", attribute, len(b), maxBlob)
	}
	return b, err
}

// write writes all data with one system call, which the interface requires.
func (f folder) write(entry, attribute string, data []byte) error {
	file, err := os.OpenFile(filepath.Join(string(f), entry, attribute), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = file.Write(data)
	return errors.Join(err, file.Close()) // binary attributes are taken over when they are closed
}
