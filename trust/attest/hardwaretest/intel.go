package hardwaretest

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/muster-k8s/muster/trust/attest/hardware"
	"github.com/muster-k8s/muster/trust/attest/tdx"
)

// FMSPC is the model of the processors of this package.
const FMSPC = "90c06f000000"

// Intel is a vendor of TDX processors.
type Intel struct {
	// Platform and Processor are the authorities for PCKs. Those of this package are below Platform.
	Root, Platform, Processor, Signing *Authority
	pck                                *Authority
}

// NewIntel makes a vendor.
func NewIntel(t testing.TB) *Intel {
	t.Helper()
	p256 := func() *ecdsa.PrivateKey { return NewECDSA(t, elliptic.P256()) }
	v := &Intel{Root: (*Authority)(nil).issue(t, ca("Intel SGX Root CA"), p256())}
	v.Platform = v.Root.issue(t, ca("Intel SGX PCK Platform CA"), p256())
	v.Processor = v.Root.issue(t, ca("Intel SGX PCK Processor CA"), p256())
	v.Signing = v.NewSigning(t, nil)
	v.pck = v.NewPCK(t, nil)
	return v
}

// PCKAuthorities returns the certificates of both authorities for PCKs.
func (v *Intel) PCKAuthorities() []*x509.Certificate {
	return []*x509.Certificate{v.Platform.Cert, v.Processor.Cert}
}

// NewRoot makes another certificate for the root's key and name.
func (v *Intel) NewRoot(t testing.TB, change func(*x509.Certificate)) *Authority {
	c := ca("Intel SGX Root CA")
	change(c)
	return (*Authority)(nil).issue(t, c, v.Root.key)
}

// NewSigning makes a certificate that signs Intel's answers. change may be nil.
func (v *Intel) NewSigning(t testing.TB, change func(*x509.Certificate)) *Authority {
	c := &x509.Certificate{Subject: pkix.Name{CommonName: "Intel SGX TCB Signing"}, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature}
	if change != nil {
		change(c)
	}
	return v.Root.issue(t, c, NewECDSA(t, elliptic.P256()))
}

// NewPlatform makes another authority for PCKs. change may be nil.
func (v *Intel) NewPlatform(t testing.TB, change func(*x509.Certificate)) *Authority {
	c := ca("Intel SGX PCK Platform CA")
	if change != nil {
		change(c)
	}
	return v.Root.issue(t, c, NewECDSA(t, elliptic.P256()))
}

// NewPCK makes the key of another processor. change may be nil.
func (v *Intel) NewPCK(t testing.TB, change func(*x509.Certificate)) *Authority {
	c := &x509.Certificate{
		Subject: pkix.Name{CommonName: "Intel SGX PCK Certificate"}, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtraExtensions: []pkix.Extension{{Id: SGX(), Value: PCKExtension(FMSPC, "0000", 5, 13)}},
	}
	if change != nil {
		change(c)
	}
	return v.Platform.issue(t, c, NewECDSA(t, elliptic.P256()))
}

// SGX returns the identifier of Intel's extension with the last numbers n.
func SGX(n ...int) asn1.ObjectIdentifier {
	return append(asn1.ObjectIdentifier{1, 2, 840, 113741, 1, 13, 1}, n...)
}

type sgxAttribute struct {
	ID    asn1.ObjectIdentifier
	Value asn1.RawValue
}

// PCKExtension makes the extension of a PCK's certificate, in which each TCB component is svn. The
// identifiers of the components in longer have one number more.
func PCKExtension(fmspc, pceID string, svn, pceSVN int, longer ...int) []byte {
	raw := func(v any) asn1.RawValue {
		b, err := asn1.Marshal(v)
		if err != nil {
			panic(err) // of the types below
		}
		return asn1.RawValue{FullBytes: b}
	}
	octets := func(s string) asn1.RawValue {
		b, err := hex.DecodeString(s)
		if err != nil {
			panic(err) // of a test's constant
		}
		return raw(b)
	}
	var tcb []sgxAttribute
	for i := range 16 {
		id := SGX(2, i+1)
		if slices.Contains(longer, i+1) {
			id = append(id, 0)
		}
		tcb = append(tcb, sgxAttribute{id, raw(svn)})
	}
	tcb = append(tcb, sgxAttribute{SGX(2, 17), raw(pceSVN)}, sgxAttribute{SGX(2, 18), raw(make([]byte, 16))})
	return raw([]sgxAttribute{{SGX(1), raw(make([]byte, 16))}, {SGX(2), raw(tcb)}, {SGX(3), octets(pceID)}, {SGX(4), octets(fmspc)}}).FullBytes
}

// Object is JSON of Intel that tests change.
type Object = map[string]any

// Level returns a TCB level: of a platform whose SGX and TDX components have all these SVNs.
func Level(sgx, pceSVN, tdx int, status tdx.Status) Object {
	list := func(n int) (out []any) {
		for range 16 {
			out = append(out, Object{"svn": n})
		}
		return out
	}
	return Object{"tcb": Object{"sgxtcbcomponents": list(sgx), "pcesvn": pceSVN, "tdxtcbcomponents": list(tdx)}, "tcbDate": "2024-11-13T00:00:00Z", "tcbStatus": status, "advisoryIDs": []string{"INTEL-SA-00001"}}
}

// ISVLevel returns a level of a module or an enclave.
func ISVLevel(svn int, status tdx.Status) Object {
	return Object{"tcb": Object{"isvsvn": svn}, "tcbDate": "2024-11-13T00:00:00Z", "tcbStatus": status}
}

// TCBInfo returns a TCB info by which quotes of this package are up to date.
func TCBInfo() Object {
	module := func(id string, levels ...Object) Object {
		return Object{"id": id, "mrsigner": hex.EncodeToString(make([]byte, 48)), "attributes": "0000000000000000", "attributesMask": "FFFFFFFFFFFFFFFF", "tcbLevels": levels}
	}
	return Object{
		"id": "TDX", "version": 3, "issueDate": Now.Add(-day), "nextUpdate": Now.Add(day), "fmspc": FMSPC, "pceId": "0000", "tcbType": 0, "tcbEvaluationDataNumber": 18,
		"tdxModule":           module(""),
		"tdxModuleIdentities": []Object{module("TDX_01", ISVLevel(6, tdx.UpToDate), ISVLevel(4, tdx.OutOfDate)), module("TDX_03", ISVLevel(3, tdx.UpToDate))},
		"tcbLevels":           []Object{Level(5, 13, 3, tdx.UpToDate), Level(4, 13, 3, tdx.OutOfDate), Level(3, 11, 3, tdx.Revoked)},
	}
}

// QEIdentity returns the identity of the quoting enclave of this package.
func QEIdentity() Object {
	return Object{
		"id": "TD_QE", "version": 2, "issueDate": Now.Add(-day), "nextUpdate": Now.Add(day), "tcbEvaluationDataNumber": 18,
		"miscselect": "00000000", "miscselectMask": "FFFFFFFF", "attributes": "11000000000000000000000000000000", "attributesMask": "FBFFFFFFFFFFFFFF0000000000000000",
		"mrsigner": hex.EncodeToString(bytes.Repeat([]byte{0x5A}, 32)), "isvprodid": 2, "tcbLevels": []Object{ISVLevel(4, tdx.UpToDate), ISVLevel(3, tdx.OutOfDate)},
	}
}

// Answer returns an answer of Intel's service with body under name, signed by a.
func (a *Authority) Answer(t testing.TB, name string, body any) []byte {
	t.Helper()
	inner, ok := body.([]byte)
	if !ok {
		var err error
		if inner, err = json.Marshal(body); err != nil {
			t.Fatal(err)
		}
	}
	return fmt.Appendf(nil, `{"%s":%s,"signature":"%x"}`, name, inner, a.sign(t, inner))
}

// sign returns r || s over SHA-256 of b.
func (a *Authority) sign(t testing.TB, b []byte) []byte {
	t.Helper()
	digest := sha256.Sum256(b)
	r, s, err := ecdsa.Sign(rand.Reader, a.key.(*ecdsa.PrivateKey), digest[:])
	if err != nil {
		t.Fatal(err)
	}
	return append(r.FillBytes(make([]byte, 32)), s.FillBytes(make([]byte, 32))...)
}

// PEM returns certificates in PEM.
func PEM(list ...*x509.Certificate) (out []byte) {
	for _, c := range list {
		out = append(out, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw})...)
	}
	return out
}

// Collateral returns what the vendor publishes: with these bodies, signed by v.Signing.
func (v *Intel) Collateral(t testing.TB, tcbInfo, qeIdentity any) tdx.Collateral {
	chain := PEM(v.Signing.Cert, v.Root.Cert)
	return tdx.Collateral{
		TCBInfo: [][]byte{v.Signing.Answer(t, "tcbInfo", tcbInfo)}, QEIdentity: v.Signing.Answer(t, "enclaveIdentity", qeIdentity),
		TCBInfoChain: chain, QEIdentityChain: chain, CRLs: [][]byte{v.Root.CRL(t, nil), v.Platform.CRL(t, nil), v.Processor.CRL(t, nil)},
	}
}

// TD is a trust domain on a processor. Without changes, its quote verifies.
type TD struct {
	// Version is 5 with a body of type 3, unless it is 4; Body10 takes a body of type 2 into 5.
	Version uint16
	Body10  bool
	// Header, Body and QE change what is signed: the header of 48 bytes, the body, the quoting
	// enclave's report before the attestation key is put into it.
	Header, Body, QE func([]byte)
	// Certified changes the quoting enclave's report after that, SignatureData what follows the body.
	Certified, SignatureData func([]byte)
	// Platform and PCK, if not nil, are the keys instead of those of the vendor.
	Platform, PCK *Authority
}

// Quote makes a quote over data: module 1.6, attributes SEPT_VE_DISABLE, MRTD of bytes 0x4D.
func (v *Intel) Quote(t testing.TB, td TD, data hardware.ReportData) []byte {
	t.Helper()
	change := func(f func([]byte), b []byte) {
		if f != nil {
			f(b)
		}
	}
	pck, platform := v.pck, v.Platform
	if td.PCK != nil {
		pck = td.PCK
	}
	if td.Platform != nil {
		platform = td.Platform
	}
	le := binary.LittleEndian
	header := make([]byte, 48)
	le.PutUint16(header, 5)
	if td.Version == 4 {
		le.PutUint16(header, 4)
	}
	le.PutUint16(header[2:], 2)
	le.PutUint32(header[4:], 0x81)
	copy(header[12:], []byte{0x93, 0x9a, 0x72, 0x33, 0xf7, 0x9c, 0x4c, 0xa9, 0x94, 0x0a, 0x0d, 0xb3, 0x95, 0x7f, 0x06, 0x07})
	body := make([]byte, 648)
	tee := append([]byte{6, 1}, bytes.Repeat([]byte{3}, 14)...)
	copy(body, tee)
	copy(body[0x248:], tee)
	le.PutUint64(body[0x078:], 1<<28)
	copy(body[0x088:], bytes.Repeat([]byte{0x4D}, 48))
	copy(body[0x208:], data[:])
	kind := []byte{3, 0, 0x88, 2, 0, 0}
	if td.Version == 4 || td.Body10 {
		body, kind = body[:584], []byte{2, 0, 0x48, 2, 0, 0}
	}
	if td.Version == 4 {
		kind = nil
	}
	change(td.Header, header)
	change(td.Body, body)
	signed := slices.Concat(header, kind, body)

	attestation := &Authority{key: NewECDSA(t, elliptic.P256())}
	key, err := attestation.key.(*ecdsa.PrivateKey).PublicKey.Bytes()
	if err != nil {
		t.Fatal(err)
	}
	auth := bytes.Repeat([]byte{7}, 32)
	qe := make([]byte, 384)
	copy(qe[0x30:], []byte{0x15, 0, 0, 0, 0, 0, 0, 0, 0xE7})
	copy(qe[0x80:], bytes.Repeat([]byte{0x5A}, 32))
	le.PutUint16(qe[0x100:], 2)
	le.PutUint16(qe[0x102:], 4)
	change(td.QE, qe)
	hash := sha256.Sum256(slices.Concat(key[1:], auth))
	copy(qe[0x140:], hash[:])
	change(td.Certified, qe)
	certs := PEM(pck.Cert, platform.Cert, v.Root.Cert)
	certification := slices.Concat(qe, pck.sign(t, qe), sized16(auth), []byte{5, 0}, sized32(certs))
	data6 := slices.Concat(attestation.sign(t, signed), key[1:], []byte{6, 0}, sized32(certification))
	change(td.SignatureData, data6)
	return slices.Concat(signed, sized32(data6))
}

func sized16(b []byte) []byte {
	return append(binary.LittleEndian.AppendUint16(nil, uint16(len(b))), b...)
}

func sized32(b []byte) []byte {
	return append(binary.LittleEndian.AppendUint32(nil, uint32(len(b))), b...)
}

// Expired changes a certificate to one that ended an hour ago.
func Expired(c *x509.Certificate) {
	c.NotBefore, c.NotAfter = Now.Add(-2*time.Hour), Now.Add(-time.Hour)
}

// Early changes a certificate to one that begins in an hour.
func Early(c *x509.Certificate) {
	c.NotBefore, c.NotAfter = Now.Add(time.Hour), Now.Add(2*time.Hour)
}
