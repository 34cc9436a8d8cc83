package tdx

import (
	"crypto/x509"
	"encoding/binary"
	"encoding/hex"
	"fmt"

	"github.com/muster-k8s/muster/trust/attest/hardware"
)

// MaxQuote is the limit of a quote, in bytes. Cloud providers' quotes have 8,000, with padding.
const MaxQuote = 16 << 10

// Attributes of a TD (Intel TDX Module ABI, ATTRIBUTES).
type Attributes uint64

// The bits whose meaning this package knows.
const (
	AttributeDebug         Attributes = 1 << 0
	AttributeSEPTVEDisable Attributes = 1 << 28
	AttributePKS           Attributes = 1 << 30
	AttributePerfmon       Attributes = 1 << 63
)

// Quote has the content of a genuine quote. [Verify] alone makes one. Rules refuse the zero value.
type Quote struct {
	// Version of the quote: 4 or 5. BodyType: 2 for a TD of TDX 1.0, 3 of 1.5.
	Version, BodyType uint16
	// ModuleSVN is TEE_TCB_SVN: bytes 0 and 1 are the SVN and the major version of the TDX module.
	// LoadedSVN is TEE_TCB_SVN_2, of the module that was loaded since; equal without it.
	ModuleSVN, LoadedSVN [16]byte
	MRSEAM, MRSignerSEAM [48]byte
	SEAMAttributes       [8]byte
	Attributes           Attributes
	XFAM                 uint64
	MRTD                 [48]byte
	MRConfigID           [48]byte
	MROwner              [48]byte
	MROwnerConfig        [48]byte
	RTMR                 [4][48]byte
	Data                 hardware.ReportData
	// MRServiceTD is zero without service TDs, and in body type 2.
	MRServiceTD [48]byte
	// FMSPC identifies the processor's model: 12 lower-case hexadecimal digits.
	FMSPC string
	// Evaluation is the lowest TCB evaluation data number of the collateral: Intel counts it up when
	// it raises a TCB.
	Evaluation uint32
	// Levels are Intel's judgement of each part of the TCB.
	Levels []Level
}

// parsed is a quote whose signatures are not checked.
type parsed struct {
	*Quote
	signed    []byte // header and body
	signature []byte // r || s
	key       []byte // the attestation key: x || y
	qeReport  []byte
	qeSigned  []byte // signature of qeReport
	qeAuth    []byte
	chain     []*x509.Certificate // PCK, its authority, root
	platform  pckExtension        // of the PCK
}

const (
	headerSize   = 48
	bodySize10   = 584
	bodySize15   = 648
	qeReportSize = 384
)

// intelQE is the vendor of the quoting enclave.
const intelQE = "939a7233f79c4ca9940a0db3957f0607"

// reader parses little-endian structures. After the first read past the end every read returns
// zeros, and failed is set.
type reader struct {
	b      []byte
	failed bool
}

func (r *reader) take(n uint32) []byte {
	if r.failed || uint64(n) > uint64(len(r.b)) {
		r.failed = true
		return make([]byte, min(n, bodySize15))
	}
	out := r.b[:n:n]
	r.b = r.b[n:]
	return out
}

func (r *reader) u16() uint16 { return binary.LittleEndian.Uint16(r.take(2)) }
func (r *reader) u32() uint32 { return binary.LittleEndian.Uint32(r.take(4)) }

func malformed(format string, args ...any) error {
	return hardware.Refuse(hardware.Malformed, "the TDX quote "+format, args...)
}

// parse reads a quote (Intel TDX DCAP Quoting Library API, appendix A.3 and A.4).
func parse(b []byte) (*parsed, error) {
	if len(b) > MaxQuote {
		return nil, malformed("has %d bytes, more than %d", len(b), MaxQuote)
	}
	r := &reader{b: b}
	header := r.take(headerSize)
	if r.failed {
		return nil, malformed("has %d bytes, less than a header", len(b))
	}
	p := &parsed{Quote: &Quote{Version: binary.LittleEndian.Uint16(header), BodyType: 2}}
	switch keyType, tee, qe := binary.LittleEndian.Uint16(header[2:]), binary.LittleEndian.Uint32(header[4:]), hex.EncodeToString(header[12:28]); {
	case p.Version != 4 && p.Version != 5:
		return nil, malformed("has version %d; known are 4 and 5", p.Version)
	case tee != 0x81:
		return nil, malformed("is for a TEE of type %#x, want 0x81 (TDX); 0 is SGX", tee)
	case keyType != 2:
		return nil, malformed("has an attestation key of type %d, want 2 (ECDSA P-256)", keyType)
	case qe != intelQE:
		return nil, malformed("is from a quoting enclave of vendor %s, want Intel's", qe)
	}
	size := uint32(bodySize10)
	if p.Version == 5 {
		p.BodyType = r.u16()
		want := map[uint16]uint32{2: bodySize10, 3: bodySize15}[p.BodyType]
		if size = r.u32(); want == 0 || size != want {
			return nil, malformed("has a body of type %d with %d bytes; known are 2 with %d and 3 with %d", p.BodyType, size, bodySize10, bodySize15)
		}
	}
	p.setBody(r.take(size))
	p.signed = b[:len(b)-len(r.b)]
	data := &reader{b: r.take(r.u32())} // empty if the quote is cut off, which setSignature refuses
	// Some drivers return a buffer of fixed size, with zeros after the quote. No signature covers
	// them, and anything else there is refused.
	for _, c := range r.b {
		if c != 0 {
			return nil, malformed("has %d bytes after its end that are not zero", len(r.b))
		}
	}
	return p, p.setSignature(data)
}

func (q *Quote) setBody(b []byte) {
	q.ModuleSVN, q.MRSEAM, q.MRSignerSEAM = [16]byte(b), [48]byte(b[0x010:]), [48]byte(b[0x040:])
	q.SEAMAttributes, q.Attributes, q.XFAM = [8]byte(b[0x070:]), Attributes(binary.LittleEndian.Uint64(b[0x078:])), binary.LittleEndian.Uint64(b[0x080:])
	q.MRTD, q.MRConfigID, q.MROwner, q.MROwnerConfig = [48]byte(b[0x088:]), [48]byte(b[0x0B8:]), [48]byte(b[0x0E8:]), [48]byte(b[0x118:])
	for i := range q.RTMR {
		q.RTMR[i] = [48]byte(b[0x148+48*i:])
	}
	q.Data, q.LoadedSVN = [64]byte(b[0x208:]), q.ModuleSVN
	if q.BodyType == 3 {
		q.LoadedSVN, q.MRServiceTD = [16]byte(b[0x248:]), [48]byte(b[0x258:])
	}
}

// setSignature reads the signature data: that of the attestation key, and the certification of
// that key by the quoting enclave and the processor's PCK.
func (p *parsed) setSignature(r *reader) error {
	p.signature, p.key = r.take(64), r.take(64)
	if t := r.u16(); t != 6 && !r.failed {
		return malformed("has certification data of type %d, want 6 (the quoting enclave's report)", t)
	}
	c := &reader{b: r.take(r.u32())}
	p.qeReport, p.qeSigned = c.take(qeReportSize), c.take(64)
	p.qeAuth = c.take(uint32(c.u16()))
	if t := c.u16(); t != 5 && !c.failed {
		return malformed("has certification data of type %d, want 5 (certificates in PEM)", t)
	}
	pem := c.take(c.u32())
	if c.failed || len(r.b) > 0 || len(c.b) > 0 {
		return malformed("has signature data of other lengths than they state")
	}
	var err error
	if p.chain, err = hardware.ParsePEM(pem, 3); err != nil {
		return malformed("has certificates that cannot be read: %w", err)
	}
	return nil
}

// svn formats the two bytes of TEE_TCB_SVN that identify a module.
func svn(v [16]byte) string { return fmt.Sprintf("%d.%d", v[1], v[0]) }
