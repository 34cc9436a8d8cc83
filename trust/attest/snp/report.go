package snp

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/muster-k8s/muster/trust/attest/hardware"
)

// ReportSize is the size of a report (SEV-SNP ABI, table ATTESTATION_REPORT), in bytes.
const ReportSize = 1184

// Product is a line of processors, by AMD's name.
type Product string

// The products whose reports can be verified.
const (
	Milan Product = "Milan"
	Genoa Product = "Genoa" // also Bergamo and Siena
	Turin Product = "Turin"
)

// Products lists them.
var Products = []Product{Milan, Genoa, Turin}

// Key is the kind of key that signed a report.
type Key string

// The two kinds.
const (
	// VCEK is the key of one chip.
	VCEK Key = "vcek"
	// VLEK is a key that AMD gave to a cloud provider, for any of its chips.
	VLEK Key = "vlek"
)

// TCB has the security version numbers of the firmware below a guest (SEV-SNP ABI, TCB_VERSION).
type TCB struct {
	FMC, BootLoader, TEE, SNP, Microcode uint8 // FMC: Turin only, else 0
}

// AtLeast reports whether no part of t is below that of least. TCBs have no order as numbers: a high
// boot loader does not make up for an old microcode.
func (t TCB) AtLeast(least TCB) bool {
	return t.FMC >= least.FMC && t.BootLoader >= least.BootLoader && t.TEE >= least.TEE && t.SNP >= least.SNP && t.Microcode >= least.Microcode
}

// String returns the parts with their names.
func (t TCB) String() string {
	s := fmt.Sprintf("boot loader %d, TEE %d, SNP %d, microcode %d", t.BootLoader, t.TEE, t.SNP, t.Microcode)
	if t.FMC > 0 {
		s = fmt.Sprintf("FMC %d, ", t.FMC) + s
	}
	return s
}

// GuestPolicy is the policy that the guest was launched with (SEV-SNP ABI, section "Guest Policy").
type GuestPolicy uint64

// The bits of a GuestPolicy. Bits 0 to 7 and 8 to 15 are the lowest ABI, minor and major.
const (
	PolicySMT              GuestPolicy = 1 << 16
	policyReserved         GuestPolicy = 1 << 17 // always 1
	PolicyMigrationAgent   GuestPolicy = 1 << 18
	PolicyDebug            GuestPolicy = 1 << 19
	PolicySingleSocket     GuestPolicy = 1 << 20
	PolicyCXL              GuestPolicy = 1 << 21
	PolicyAES256XTS        GuestPolicy = 1 << 22
	PolicyRAPLDisabled     GuestPolicy = 1 << 23
	PolicyCiphertextHiding GuestPolicy = 1 << 24
	PolicyNoPageSwap       GuestPolicy = 1 << 25
)

// policyWeak are the bits that allow the host more, policyStrong those that allow it less.
const (
	policyABI    GuestPolicy = 0xFFFF
	policyWeak               = PolicySMT | PolicyMigrationAgent | PolicyDebug | PolicyCXL
	policyStrong             = PolicySingleSocket | PolicyAES256XTS | PolicyRAPLDisabled | PolicyCiphertextHiding | PolicyNoPageSwap
)

var policyNames = map[GuestPolicy]string{
	PolicySMT: "SMT", PolicyMigrationAgent: "MIGRATE_MA", PolicyDebug: "DEBUG", PolicySingleSocket: "SINGLE_SOCKET", PolicyCXL: "CXL",
	PolicyAES256XTS: "MEM_AES_256_XTS", PolicyRAPLDisabled: "RAPL_DIS", PolicyCiphertextHiding: "CIPHERTEXT_HIDING", PolicyNoPageSwap: "PAGE_SWAP_DISABLE",
}

// String returns the names of the set bits, without the ABI.
func (p GuestPolicy) String() string {
	var on []string
	for bit := PolicySMT; bit <= PolicyNoPageSwap; bit <<= 1 {
		if name := policyNames[bit]; p&bit != 0 && name != "" {
			on = append(on, name)
		}
	}
	return strings.Join(on, " ")
}

// Report has the content of a genuine report. [Verify] alone makes one. Rules refuse the zero value.
type Report struct {
	Product Product
	// Version of the report's layout: 2 to 5.
	Version uint32
	Key     Key
	// ChipID identifies the chip: 64 bytes, 8 for Turin; nil with a VLEK.
	ChipID []byte
	// Provider is the cloud provider of the VLEK; empty with a VCEK.
	Provider string
	GuestSVN uint32
	Policy   GuestPolicy
	// VMPL is the privilege level that asked for the report: 0, the highest, to 3.
	VMPL uint32
	// Reported is the TCB from which the key was derived. The host can set it below Current, which is
	// the running one, and the firmware cannot go below Committed. Launch is that of the guest's
	// start.
	Reported, Current, Committed, Launch TCB
	// Platform is PLATFORM_INFO: bit 0 SMT on, 5 check for aliased memory complete, and others.
	Platform    uint64
	Data        hardware.ReportData
	Measurement [48]byte
	HostData    [32]byte
	// IDKeyDigest and AuthorKeyDigest are zero without an ID block.
	IDKeyDigest, AuthorKeyDigest [48]byte

	cpu  [3]byte   // family, model, stepping; zero in version 2
	tcbs [4]uint64 // Reported, Current, Committed, Launch, before the product is known
	chip [64]byte
}

const signedSize = 0x2A0

// parse reads a report's fields and checks what does not depend on a certificate.
func parse(b []byte) (*Report, error) {
	if len(b) != ReportSize {
		return nil, hardware.Refuse(hardware.Malformed, "the SEV-SNP report has %d bytes, want %d", len(b), ReportSize)
	}
	u32 := func(at int) uint32 { return binary.LittleEndian.Uint32(b[at:]) }
	u64 := func(at int) uint64 { return binary.LittleEndian.Uint64(b[at:]) }
	r := &Report{
		Version: u32(0x000), GuestSVN: u32(0x004), Policy: GuestPolicy(u64(0x008)), VMPL: u32(0x030), Platform: u64(0x040),
		Data: [64]byte(b[0x050:]), Measurement: [48]byte(b[0x090:]), HostData: [32]byte(b[0x0C0:]),
		IDKeyDigest: [48]byte(b[0x0E0:]), AuthorKeyDigest: [48]byte(b[0x110:]),
		cpu: [3]byte(b[0x188:]), chip: [64]byte(b[0x1A0:]),
		tcbs: [4]uint64{u64(0x180), u64(0x038), u64(0x1E0), u64(0x1F0)},
	}
	if r.Version < 2 || r.Version > 5 {
		return nil, hardware.Refuse(hardware.Malformed, "the SEV-SNP report has version %d; known are 2 to 5", r.Version)
	}
	if algorithm := u32(0x034); algorithm != 1 {
		return nil, hardware.Refuse(hardware.Malformed, "the SEV-SNP report has signature algorithm %d, want 1 (ECDSA P-384 with SHA-384)", algorithm)
	}
	// Reserved fields, and what the two halves of the signature have beyond 48 bytes each.
	for _, f := range [][2]int{{0x04C, 0x050}, {0x18B, 0x1A0}, {0x1EB, 0x1EC}, {0x1EF, 0x1F0}, {0x208, signedSize}, {sigR + 48, sigS}, {sigS + 48, ReportSize}} {
		if !zero(b[f[0]:f[1]]) {
			return nil, hardware.Refuse(hardware.Malformed, "the SEV-SNP report's reserved bytes from %#x to %#x are not zero", f[0], f[1])
		}
	}
	if r.Policy&policyReserved == 0 || r.Policy&^(policyABI|policyWeak|policyStrong|policyReserved) != 0 {
		return nil, hardware.Refuse(hardware.Malformed, "the SEV-SNP report's guest policy %#x has unknown bits", uint64(r.Policy))
	}
	var err error
	if r.Key, err = SigningKey(b); err != nil {
		return nil, err
	}
	// The host can ask for reports too, with data of its choice; their VMPL is 0xFFFFFFFF.
	if r.VMPL > 3 {
		return nil, hardware.Refuse(hardware.Binding, "the SEV-SNP report was asked for by the host, not by the guest (VMPL %#x)", r.VMPL)
	}
	return r, nil
}

// productOf returns the product of a processor; empty if it is unknown.
func productOf(family, model byte) Product {
	switch {
	case family == 0x19 && model < 0x10:
		return Milan
	case family == 0x19 && (model < 0x20 || model >= 0xA0 && model < 0xB0):
		return Genoa
	case family == 0x1A && model < 0x12:
		return Turin
	}
	return ""
}

// setProduct fills in what depends on the product.
func (r *Report) setProduct(p Product) error {
	if cpu := productOf(r.cpu[0], r.cpu[1]); r.Version >= 3 && cpu != p {
		return hardware.Refuse(hardware.Untrusted, "the report is from a processor of family %#x, model %#x, and the certificate for one of %s", r.cpu[0], r.cpu[1], p)
	}
	r.Product = p
	for i, to := range []*TCB{&r.Reported, &r.Current, &r.Committed, &r.Launch} {
		var b [8]byte
		binary.LittleEndian.PutUint64(b[:], r.tcbs[i])
		reserved := b[2:6]
		if *to = (TCB{BootLoader: b[0], TEE: b[1], SNP: b[6], Microcode: b[7]}); p == Turin {
			*to = TCB{FMC: b[0], BootLoader: b[1], TEE: b[2], SNP: b[3], Microcode: b[7]}
			reserved = b[4:7]
		}
		if !zero(reserved) {
			return hardware.Refuse(hardware.Malformed, "the TCB version %x has reserved bytes that are not zero", b)
		}
	}
	return nil
}

// chipID returns the bytes of CHIP_ID that are in use.
func (r *Report) chipID() ([]byte, error) {
	n := len(r.chip)
	if r.Product == Turin {
		n = 8
	}
	if zero(r.chip[:]) {
		return nil, hardware.Refuse(hardware.Untrusted, "the host has masked the chip's ID (MASK_CHIP_ID), so the VCEK cannot be shown to be this chip's")
	}
	if !zero(r.chip[n:]) {
		return nil, hardware.Refuse(hardware.Malformed, "the chip's ID has more than the %d bytes of %s", n, r.Product)
	}
	return r.chip[:n], nil
}

func zero(b []byte) bool { return bytes.Equal(b, make([]byte, len(b))) }

// SigningKey returns the kind of key that signed a report of [ReportSize] bytes, by MASK_CHIP_KEY and
// SIGNING_KEY of its key information. Nothing is verified. It refuses reports that no VCEK or VLEK has
// signed with HARDWARE_UNTRUSTED, and those of another size with EVIDENCE_MALFORMED.
func SigningKey(report []byte) (Key, error) {
	if len(report) != ReportSize {
		return "", hardware.Refuse(hardware.Malformed, "the SEV-SNP report has %d bytes, want %d", len(report), ReportSize)
	}
	switch info := binary.LittleEndian.Uint32(report[0x048:]); {
	case info&2 != 0: // such a report has no signature
		return "", hardware.Refuse(hardware.Untrusted, "the host has masked the chip's key (MASK_CHIP_KEY), so no key signs reports")
	case info>>2 == 0:
		return VCEK, nil
	case info>>2 == 1:
		return VLEK, nil
	default:
		return "", hardware.Refuse(hardware.Untrusted, "the SEV-SNP report is signed by no VCEK or VLEK (key information %#x)", info)
	}
}
