// Package hcl verifies what the paravisor (host compatibility layer, HCL) of Azure's confidential VMs
// binds to the hardware report.
//
// There, the guest's operating system cannot choose the report's data. The paravisor runs below it,
// has the VM's TPM in its own memory, and asks for one report at boot. The report's data are the hash
// of a JSON text that names the TPM's attestation key (AK). So a report shows that this AK is in the
// TPM of this confidential VM, if its measurement is that of Microsoft's paravisor: another guest can
// write such a text too. Therefore Rules need a measurement or an ID key.
//
// The report is not fresh. Freshness comes from the AK's signature over this session's statement.
package hcl

import (
	"bytes"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math/big"
	"time"

	"github.com/muster-k8s/muster/trust/attest/hardware"
	"github.com/muster-k8s/muster/trust/attest/snp"
	"github.com/muster-k8s/muster/trust/attest/tdx"
)

// MaxReport is the limit of an HCL report, in bytes. The NV index 0x01400001 has 2,600.
const MaxReport = 8 << 10

// Kind is the kind of hardware report in an HCL report.
type Kind uint32

// The kinds. With TDX, the hardware report is a TDREPORT, which only the same machine can verify:
// Azure's metadata service makes a quote of it.
const (
	SNP Kind = 2
	TDX Kind = 4
)

// Sizes and offsets of an HCL report. All integers are little-endian.
const (
	hardwareAt   = 0x020
	runtimeAt    = 0x4C0
	runtimeSize  = 20 // of the header before the JSON text
	tdReportSize = 1024
	hashSHA256   = 1
)

// OtherKindError is the cause of the refusal of an HCL report that is well-formed, and has a hardware
// report of another kind: 1 for virtual machines with VBS, which have no report of a processor.
type OtherKindError struct{ Kind Kind }

// Error implements error.
func (e *OtherKindError) Error() string {
	return fmt.Sprintf("is of kind %d; known are 2 (SEV-SNP) and 4 (TDX)", e.Kind)
}

// Split takes an HCL report apart, as the TPM's NV index has it: the hardware report and the JSON
// text to which it is bound. Nothing is verified. The refusal is EVIDENCE_MALFORMED, with an
// [OtherKindError] for a well-formed report of another kind.
func Split(b []byte) (kind Kind, report, runtime []byte, err error) {
	refuse := func(format string, args ...any) (Kind, []byte, []byte, error) {
		return 0, nil, nil, hardware.Refuse(hardware.Malformed, "the HCL report "+format, args...)
	}
	if len(b) < runtimeAt+runtimeSize || len(b) > MaxReport {
		return refuse("has %d bytes, want %d to %d", len(b), runtimeAt+runtimeSize, MaxReport)
	}
	u32 := func(at int) uint32 { return binary.LittleEndian.Uint32(b[at:]) }
	if string(b[:4]) != "HCLA" {
		return refuse("does not begin with HCLA")
	}
	if v := u32(0x04); v != 1 && v != 2 {
		return refuse("has version %d; known are 1 and 2", v)
	}
	if v := u32(runtimeAt + 4); v != 1 {
		return refuse("has runtime data of version %d, want 1", v)
	}
	if h := u32(runtimeAt + 12); h != hashSHA256 {
		return refuse("has the hash algorithm %d, want %d (SHA-256)", h, hashSHA256)
	}
	n := u32(runtimeAt + 16)
	if uint64(n) > uint64(len(b)-runtimeAt-runtimeSize) || u32(runtimeAt) != n+runtimeSize || u32(0x08) != n+runtimeSize+runtimeAt {
		return refuse("has runtime data of other lengths than it states")
	}
	end := runtimeAt + runtimeSize + int(n)
	if !zero(b[end:]) {
		return refuse("has %d bytes after its end that are not zero", len(b)-end)
	}
	size := snp.ReportSize
	switch kind = Kind(u32(runtimeAt + 8)); kind {
	case SNP:
	case TDX:
		size = tdReportSize
	default:
		return refuse("%w", &OtherKindError{kind})
	}
	if !zero(b[hardwareAt+size : runtimeAt]) {
		return refuse("has bytes after the hardware report that are not zero")
	}
	return kind, b[hardwareAt : hardwareAt+size], b[runtimeAt+runtimeSize : end], nil
}

// Report has the content of a genuine JSON text with its hardware report. [VerifySNP] and
// [VerifyTDX] alone make one. Rules refuse the zero value.
type Report struct {
	// AK is the attestation key of the VM's TPM, at the persistent handle 0x81000003.
	AK *rsa.PublicKey
	// SecureBoot reports whether the VM's firmware has Secure Boot on.
	SecureBoot bool
	// VMID is Azure's unique ID of the VM.
	VMID string
	// UserData is what the guest has written to the NV index 0x01400002; zero by default.
	UserData [64]byte
	// SNP or TDX is the hardware report; the other is nil.
	SNP *snp.Report
	TDX *tdx.Quote
}

// VerifySNP checks that a report is genuine and bound to the JSON text, and that the paravisor asked
// for it: VMPL 0. Refusals are those of [snp.Verify].
func VerifySNP(e snp.Evidence, runtime []byte, authorities snp.Authorities, now time.Time) (*Report, error) {
	r, err := snp.Verify(e, reportData(runtime), authorities, now)
	if err != nil {
		return nil, err
	}
	if r.VMPL != 0 {
		return nil, hardware.Refuse(hardware.Binding, "the report was asked for at VMPL %d, so not by the paravisor", r.VMPL)
	}
	out, err := parse(runtime)
	if err != nil {
		return nil, err
	}
	out.SNP = r
	return out, nil
}

// VerifyTDX checks that a quote is genuine and bound to the JSON text. Refusals are those of
// [tdx.Verify].
func VerifyTDX(quote, runtime []byte, c tdx.Collateral, roots []*x509.Certificate, now time.Time) (*Report, error) {
	q, err := tdx.Verify(quote, reportData(runtime), c, roots, now)
	if err != nil {
		return nil, err
	}
	out, err := parse(runtime)
	if err != nil {
		return nil, err
	}
	out.TDX = q
	return out, nil
}

// reportData returns SHA-256 of the text, then 32 zero bytes.
func reportData(runtime []byte) (out hardware.ReportData) {
	h := sha256.Sum256(runtime)
	copy(out[:], h[:])
	return out
}

// runtimeClaims is the JSON text.
type runtimeClaims struct {
	Keys []struct {
		ID       string `json:"kid"`
		Type     string `json:"kty"`
		Modulus  string `json:"n"`
		Exponent string `json:"e"`
	} `json:"keys"`
	Configuration struct {
		SecureBoot bool   `json:"secure-boot"`
		VMID       string `json:"vmUniqueId"`
	} `json:"vm-configuration"`
	UserData string `json:"user-data"`
}

// parse reads a JSON text whose hash a hardware report has.
func parse(runtime []byte) (*Report, error) {
	refuse := func(format string, args ...any) (*Report, error) {
		return nil, hardware.Refuse(hardware.Malformed, "the HCL report's JSON text "+format, args...)
	}
	var c runtimeClaims
	if err := json.Unmarshal(runtime, &c); err != nil {
		return refuse("cannot be read: %w", err)
	}
	out := &Report{SecureBoot: c.Configuration.SecureBoot, VMID: c.Configuration.VMID}
	for _, k := range c.Keys {
		if k.ID != "HCLAkPub" {
			continue
		}
		n, err1 := base64.RawURLEncoding.DecodeString(k.Modulus)
		e, err2 := base64.RawURLEncoding.DecodeString(k.Exponent)
		if err1 != nil || err2 != nil || k.Type != "RSA" || new(big.Int).SetBytes(n).BitLen() != 2048 || string(e) != "\x01\x00\x01" {
			return refuse("has an attestation key that is not RSA with 2048 bits and exponent 65537")
		}
		if out.AK != nil {
			return refuse("has two attestation keys")
		}
		out.AK = &rsa.PublicKey{N: new(big.Int).SetBytes(n), E: 65537}
	}
	if out.AK == nil {
		return refuse("has no attestation key HCLAkPub")
	}
	if c.UserData != "" { // absent in 2023
		b, err := hex.DecodeString(c.UserData)
		if err != nil || len(b) != len(out.UserData) {
			return refuse("has user data that are not %d bytes", len(out.UserData))
		}
		copy(out.UserData[:], b)
	}
	return out, nil
}

// Rules decide which reports are acceptable. The zero value accepts none (A3).
type Rules struct {
	// SNP and TDX are the rules for the hardware report. AnyMeasurement and AnyMRTD are refused.
	SNP snp.Rules
	TDX tdx.Rules
	// AllowNoSecureBoot accepts VMs whose Secure Boot is off.
	AllowNoSecureBoot bool
}

// Check checks that a verified report is acceptable. Refusals are those of [snp.Rules.Check] and
// [tdx.Rules.Check].
func (p Rules) Check(r *Report) error {
	switch {
	case r == nil:
		return hardware.Refuse(hardware.Policy, "there is no HCL report")
	case p.SNP.AnyMeasurement || p.TDX.AnyMRTD:
		return hardware.Refuse(hardware.Policy, "the rules for HCL reports accept any measurement: any guest could then name any TPM's key as its own. List the paravisor's measurements, or for SEV-SNP its ID key")
	case !r.SecureBoot && !p.AllowNoSecureBoot:
		return hardware.Refuse(hardware.Policy, "Secure Boot is off, and azureAllowNoSecureBoot of the policy does not allow that")
	case r.SNP != nil:
		return p.SNP.Check(r.SNP)
	}
	return p.TDX.Check(r.TDX)
}

func zero(b []byte) bool { return bytes.Equal(b, make([]byte, len(b))) }
