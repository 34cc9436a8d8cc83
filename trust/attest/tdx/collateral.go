package tdx

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/sha256"
	"crypto/x509"
	_ "embed" // Intel's root
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"strings"
	"time"

	"github.com/muster-k8s/muster/trust/attest/hardware"
)

// Collateral is what Intel publishes about its processors (Intel Provisioning Certification
// Service, API version 4). Everything is needed (A3).
type Collateral struct {
	// TCBInfo has the answers of /tdx/certification/v4/tcb, one for each FMSPC, as received.
	TCBInfo [][]byte
	// QEIdentity is the answer of /tdx/certification/v4/qe/identity, as received.
	QEIdentity []byte
	// TCBInfoChain and QEIdentityChain have the certificate that signs them and the root, in PEM:
	// the headers TCB-Info-Issuer-Chain and SGX-Enclave-Identity-Issuer-Chain, decoded.
	TCBInfoChain, QEIdentityChain []byte
	// CRLs has the revocation lists of the root and of the authorities for PCKs, in DER.
	CRLs [][]byte
}

//go:embed intel.pem
var intelPEM []byte

// Intel returns the Intel SGX Root CA (certificates.trustedservices.intel.com; google/go-tdx-guest,
// 91f9a52f36c7a6ce140d5f13a2fb4ca03b61349c, verify/trusted_root.pem).
func Intel() []*x509.Certificate {
	c, err := hardware.ParsePEM(intelPEM, 1)
	if err != nil {
		panic(err) // of the constant above
	}
	return c
}

//go:embed pck.pem
var pckPEM []byte

// PCKAuthorities returns Intel's authorities for PCKs: Intel SGX PCK Platform CA, of platforms with
// several processors, and Intel SGX PCK Processor CA. The root has issued both, until 2033
// (Phala-Network/dcap-qvl, field pck_crl_issuer_chain of sample/tdx_quote_collateral.json in
// 9bffe30b4da53acc05f2e3a36fafc0f6418973b8 and of sample/sgx_quote_collateral.json in
// 18e8e5ef7219c4b71430a34385ba380695cf435b). Only [Collateral.Check] needs them: a quote has the
// certificate of its authority.
func PCKAuthorities() []*x509.Certificate {
	c, err := hardware.ParsePEM(pckPEM, 2)
	if err != nil {
		panic(err) // of the constant above
	}
	return c
}

func refuseCollateral(format string, args ...any) error {
	return hardware.Refuse(hardware.Collateral, format, args...)
}

// rootOf returns the pinned root that equals c; nil if there is none, which CheckIssued refuses.
func rootOf(c *x509.Certificate, roots []*x509.Certificate) *x509.Certificate {
	for _, r := range roots {
		if r.Equal(c) {
			return r
		}
	}
	return nil
}

// signedBody checks the signature of one of Intel's answers, {"NAME": {…}, "signature": "…"}, and
// returns the bytes of the inner object, which are what is signed.
func (c Collateral) signedBody(answer []byte, name string, chain []byte, roots []*x509.Certificate, now time.Time) ([]byte, error) {
	body, signature, err := split(answer, name)
	if err != nil {
		return nil, refuseCollateral("Intel's %s: %w", name, err)
	}
	certs, err := hardware.ParsePEM(chain, 2)
	if err != nil {
		return nil, refuseCollateral("the chain of Intel's %s: %w", name, err)
	}
	signer, root := certs[0], rootOf(certs[1], roots)
	for _, step := range [][2]*x509.Certificate{{root, root}, {signer, root}} {
		if err := hardware.CheckIssued(step[0], step[1], now); err != nil {
			return nil, refuseCollateral("the chain of Intel's %s: %w", name, err)
		}
	}
	// The root certifies authorities for PCKs too. The signer must be no authority, and not of a
	// processor.
	if _, err := readPCK(signer); signer.IsCA || err == nil || signer.Subject.CommonName != "Intel SGX TCB Signing" {
		return nil, refuseCollateral("%q may not sign Intel's %s", signer.Subject, name)
	}
	if err := hardware.CheckRevoked(hardware.ListsOf(root, c.CRLs), root, now, signer); err != nil {
		return nil, err
	}
	if !verifyP256(signer.PublicKey, body, signature) {
		return nil, refuseCollateral("Intel's %s is not signed by %q", name, signer.Subject)
	}
	return body, nil
}

// split returns the signed object of an answer and its signature.
func split(answer []byte, name string) (body, signature []byte, err error) {
	if len(answer) == 0 {
		return nil, nil, errors.New("is missing")
	}
	fields := map[string]json.RawMessage{}
	if err := json.Unmarshal(answer, &fields); err != nil {
		return nil, nil, err
	}
	var s string
	if err := json.Unmarshal(fields["signature"], &s); err != nil {
		return nil, nil, errors.New("has no signature")
	}
	if signature, err = hex.DecodeString(s); err != nil || len(signature) != 64 {
		return nil, nil, errors.New("has a signature that is not 64 bytes in hexadecimal digits")
	}
	if body = fields[name]; len(body) == 0 {
		return nil, nil, fmt.Errorf("lacks the object %s", name)
	}
	return body, signature, nil
}

// verifyP256 checks an ECDSA signature r || s over SHA-256 of data.
func verifyP256(key any, data, signature []byte) bool {
	k, ok := key.(*ecdsa.PublicKey)
	digest := sha256.Sum256(data)
	return ok && k.Curve == elliptic.P256() && len(signature) == 64 &&
		ecdsa.Verify(k, digest[:], new(big.Int).SetBytes(signature[:32]), new(big.Int).SetBytes(signature[32:]))
}

// period is when an answer is valid.
type period struct {
	IssueDate  time.Time `json:"issueDate"`
	NextUpdate time.Time `json:"nextUpdate"`
}

func (p period) valid(name string, now time.Time) error {
	if now.Before(p.IssueDate) || now.After(p.NextUpdate) { // of an absent date: year 1
		return refuseCollateral("Intel's %s is valid from %s to %s, now it is %s", name, p.IssueDate, p.NextUpdate, now.UTC())
	}
	return nil
}

// tcbInfo is a TCB info of version 3.
type tcbInfo struct {
	ID      string `json:"id"`
	Version int    `json:"version"`
	period
	FMSPC      string           `json:"fmspc"`
	PCEID      string           `json:"pceId"`
	Type       *int             `json:"tcbType"`
	Evaluation uint32           `json:"tcbEvaluationDataNumber"`
	Module     moduleIdentity   `json:"tdxModule"`
	Modules    []moduleIdentity `json:"tdxModuleIdentities"`
	Levels     []tcbLevel       `json:"tcbLevels"`
}

type moduleIdentity struct {
	ID             string     `json:"id"`
	Signer         hexBytes   `json:"mrsigner"`
	Attributes     hexBytes   `json:"attributes"`
	AttributesMask hexBytes   `json:"attributesMask"`
	Levels         []tcbLevel `json:"tcbLevels"`
}

// tcbLevel is a level of a platform, a TDX module or a quoting enclave; the latter two have ISVSVN.
type tcbLevel struct {
	TCB struct {
		SGX    []component `json:"sgxtcbcomponents"`
		PCESVN *uint16     `json:"pcesvn"`
		TDX    []component `json:"tdxtcbcomponents"`
		ISVSVN *uint16     `json:"isvsvn"`
	} `json:"tcb"`
	Date       time.Time `json:"tcbDate"`
	Status     Status    `json:"tcbStatus"`
	Advisories []string  `json:"advisoryIDs"`
}

type component struct {
	SVN *uint8 `json:"svn"`
}

// qeIdentity is an enclave identity of version 2.
type qeIdentity struct {
	ID      string `json:"id"`
	Version int    `json:"version"`
	period
	Evaluation     uint32     `json:"tcbEvaluationDataNumber"`
	MiscSelect     hexBytes   `json:"miscselect"`
	MiscSelectMask hexBytes   `json:"miscselectMask"`
	Attributes     hexBytes   `json:"attributes"`
	AttributesMask hexBytes   `json:"attributesMask"`
	Signer         hexBytes   `json:"mrsigner"`
	ProductID      *uint16    `json:"isvprodid"`
	Levels         []tcbLevel `json:"tcbLevels"`
}

// hexBytes is a string of hexadecimal digits.
type hexBytes []byte

// UnmarshalText implements [encoding.TextUnmarshaler].
func (h *hexBytes) UnmarshalText(b []byte) (err error) {
	*h, err = hex.DecodeString(string(b))
	return err
}

// equalUnder reports whether got equals want in the bits of mask. All must have one length.
func equalUnder(got, want, mask []byte) bool {
	if len(got) != len(want) || len(got) != len(mask) {
		return false
	}
	for i := range got {
		if (got[i]^want[i])&mask[i] != 0 {
			return false
		}
	}
	return true
}

// check checks that a signed TCB info is one for TDX that is valid at now.
func (i tcbInfo) check(now time.Time) error {
	if i.ID != "TDX" || i.Version != 3 || i.Type == nil || *i.Type != 0 {
		return refuseCollateral("Intel's tcbInfo is %q, version %d; want TDX, version 3, tcbType 0", i.ID, i.Version)
	}
	return i.valid("tcbInfo", now)
}

// tcbInfo returns the TCB info of a platform.
func (c Collateral) tcbInfo(p pckExtension, roots []*x509.Certificate, now time.Time) (*tcbInfo, error) {
	for _, answer := range c.TCBInfo {
		var i tcbInfo
		if body, _, err := split(answer, "tcbInfo"); err != nil || json.Unmarshal(body, &i) != nil || !strings.EqualFold(i.FMSPC, p.fmspc) {
			continue
		}
		if _, err := c.signedBody(answer, "tcbInfo", c.TCBInfoChain, roots, now); err != nil {
			return nil, err
		}
		if !strings.EqualFold(i.PCEID, p.pceID) {
			return nil, refuseCollateral("Intel's tcbInfo is for PCE %s, and the platform has %s", i.PCEID, p.pceID)
		}
		return &i, i.check(now)
	}
	return nil, refuseCollateral("Intel's tcbInfo of the FMSPC %s is missing", p.fmspc)
}

// qeIdentity returns the identity of Intel's quoting enclave.
func (c Collateral) qeIdentity(roots []*x509.Certificate, now time.Time) (*qeIdentity, error) {
	body, err := c.signedBody(c.QEIdentity, "enclaveIdentity", c.QEIdentityChain, roots, now)
	if err != nil {
		return nil, err
	}
	var i qeIdentity
	if err := json.Unmarshal(body, &i); err != nil {
		return nil, refuseCollateral("Intel's enclaveIdentity: %w", err)
	}
	if i.ID != "TD_QE" || i.Version != 2 || i.ProductID == nil {
		return nil, refuseCollateral("Intel's enclaveIdentity is %q, version %d; want TD_QE, version 2", i.ID, i.Version)
	}
	return &i, i.valid("enclaveIdentity", now)
}
