// Package nodecert decides which certificates a node's requests may contain.
//
// A kubelet needs two certificates: one to authenticate as its node, one to serve. Kubernetes' signers copy the contents of
// a request, so this package reads a request byte by byte, and refuses everything that is not known to be harmless
// (CSR_INVALID): it ignores nothing for lack of a field in a parser. The result is a node name, DNS names and addresses,
// which the caller compares with the node's enrollment.
package nodecert

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/crypto/cryptobyte"
	cbasn1 "golang.org/x/crypto/cryptobyte/asn1"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/trust/attest"
)

// MaxSize is the limit of a request in DER, in bytes.
const MaxSize = 8 << 10

// MaxAddresses is the limit of IP addresses in one request.
const MaxAddresses = 16

// Subject of every node's certificates.
const (
	UserPrefix   = clusterinfo.NodeUserPrefix
	Organization = clusterinfo.NodeGroup
)

// Kind is one of the two certificates of a node.
type Kind int

// The kinds. The zero value is none of them and is refused.
const (
	// Client certificates authenticate the kubelet at the API server.
	Client Kind = iota + 1
	// Serving certificates are for the kubelet's own endpoint.
	Serving
)

func (k Kind) String() string {
	switch k {
	case Client:
		return "client"
	case Serving:
		return "serving"
	}
	return "unknown"
}

// Request is a checked request, which asks only for the contents of a node's certificate.
type Request struct {
	// Kind is the kind for which it was checked.
	Kind Kind
	// Node is the name after system:node: in the common name, a DNS label.
	Node string
	// DNS lists the names in the SAN; for a serving request it is exactly the node's.
	DNS []string
	// Addresses lists the IP addresses in the SAN, without duplicates; at least one in a serving request.
	Addresses []netip.Addr
	// DER is the request as it was received.
	DER []byte
}

// Parse reads a PKCS#10 request (RFC 2986) in DER. Every error is a refusal with CSR_INVALID.
//
// It accepts only an ECDSA key on P-256 or P-384 with a signature by it (SHA-2), a subject of exactly O=system:nodes and
// CN=system:node:NAME, and for a serving request exactly one attribute with exactly one extension, the SAN with DNS:NAME
// and 1 to 16 IP addresses.
func Parse(kind Kind, der []byte) (*Request, error) {
	r, err := parse(kind, der)
	if err != nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_CSR_INVALID, "%s certificate request: %w", kind, err)
	}
	return r, nil
}

func parse(kind Kind, der []byte) (*Request, error) {
	if kind != Client && kind != Serving {
		return nil, errors.New("unknown kind")
	}
	if len(der) == 0 || len(der) > MaxSize {
		return nil, fmt.Errorf("it has %d bytes, want 1 to %d", len(der), MaxSize)
	}
	csr, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return nil, err
	}
	if err := checkKey(csr); err != nil {
		return nil, err
	}
	node, err := nodeOf(csr.RawSubject)
	if err != nil {
		return nil, err
	}
	san, err := extensionsOf(csr.RawTBSCertificateRequest)
	if err != nil {
		return nil, err
	}
	r := &Request{Kind: kind, Node: node, DER: slices.Clone(der)}
	if kind == Client {
		if san != nil {
			return nil, errors.New("a client certificate has no extensions")
		}
		return r, nil
	}
	if san == nil {
		return nil, errors.New("a serving certificate needs a SAN")
	}
	return r, r.readSAN(*san)
}

func checkKey(csr *x509.CertificateRequest) error {
	key, ok := csr.PublicKey.(*ecdsa.PublicKey)
	if !ok || (key.Curve != elliptic.P256() && key.Curve != elliptic.P384()) {
		return errors.New("want an ECDSA key on P-256 or P-384")
	}
	switch csr.SignatureAlgorithm {
	case x509.ECDSAWithSHA256, x509.ECDSAWithSHA384, x509.ECDSAWithSHA512:
	default:
		return fmt.Errorf("signature algorithm %s: want ECDSA with SHA-2", csr.SignatureAlgorithm)
	}
	if err := csr.CheckSignature(); err != nil {
		return fmt.Errorf("the signature is not by the requested key: %w", err)
	}
	return nil
}

var (
	oidCommonName   = asn1.ObjectIdentifier{2, 5, 4, 3}
	oidOrganization = asn1.ObjectIdentifier{2, 5, 4, 10}
	oidExtensions   = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 9, 14} // extensionRequest, RFC 2985, section 5.4.2
	oidSAN          = asn1.ObjectIdentifier{2, 5, 29, 17}
)

// nodeOf reads the subject from its bytes, since pkix.Name loses the order and repetition of attributes.
func nodeOf(rawSubject []byte) (string, error) {
	var rdns pkix.RDNSequence
	if rest, err := asn1.Unmarshal(rawSubject, &rdns); err != nil || len(rest) > 0 {
		return "", errors.New("the subject does not parse")
	}
	const want = "want the subject O=" + Organization + ", CN=" + UserPrefix + "NAME and nothing else"
	var node string
	var org bool
	for _, rdn := range rdns {
		if len(rdn) != 1 {
			return "", errors.New(want)
		}
		value, ok := rdn[0].Value.(string)
		switch {
		case !ok:
			return "", errors.New(want)
		case rdn[0].Type.Equal(oidOrganization) && !org && value == Organization:
			org = true
		case rdn[0].Type.Equal(oidCommonName) && node == "" && strings.HasPrefix(value, UserPrefix):
			node = strings.TrimPrefix(value, UserPrefix)
			if !IsName(node) {
				return "", fmt.Errorf("node name %q is not a DNS label", node)
			}
		default:
			return "", errors.New(want)
		}
	}
	if node == "" || !org {
		return "", errors.New(want)
	}
	return node, nil
}

// IsName reports whether s can be a node's name: a DNS label (RFC 1123, section 2.1) in lower case, at most 63 characters.
func IsName(s string) bool {
	if s == "" || len(s) > 63 || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	for i := range len(s) {
		if c := s[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
			return false
		}
	}
	return true
}

// extensionsOf reads the attributes of a CertificationRequestInfo (RFC 2986, section 4.1): none, or one extensionRequest
// with only a SAN, whose content it returns.
func extensionsOf(tbs []byte) (*cryptobyte.String, error) {
	malformed := errors.New("the attributes do not parse")
	in := cryptobyte.String(tbs)
	var info, attributes, attribute, values, extensions, extension, san cryptobyte.String
	var present bool
	if !in.ReadASN1(&info, cbasn1.SEQUENCE) || !in.Empty() ||
		!info.SkipASN1(cbasn1.INTEGER) || !info.SkipASN1(cbasn1.SEQUENCE) || !info.SkipASN1(cbasn1.SEQUENCE) ||
		!info.ReadOptionalASN1(&attributes, &present, cbasn1.Tag(0).ContextSpecific().Constructed()) || !info.Empty() {
		return nil, malformed
	}
	if attributes.Empty() {
		return nil, nil
	}
	var id asn1.ObjectIdentifier
	if !attributes.ReadASN1(&attribute, cbasn1.SEQUENCE) || !attribute.ReadASN1ObjectIdentifier(&id) {
		return nil, malformed
	}
	if !attributes.Empty() || !id.Equal(oidExtensions) {
		return nil, errors.New("only one attribute, an extension request, is allowed")
	}
	if !attribute.ReadASN1(&values, cbasn1.SET) || !attribute.Empty() ||
		!values.ReadASN1(&extensions, cbasn1.SEQUENCE) || !values.Empty() ||
		!extensions.ReadASN1(&extension, cbasn1.SEQUENCE) || !extension.ReadASN1ObjectIdentifier(&id) {
		return nil, malformed
	}
	if !extensions.Empty() || !id.Equal(oidSAN) {
		return nil, errors.New("only one extension, a SAN, is allowed")
	}
	// No BOOLEAN follows: a SAN beside a subject is not critical (RFC 5280, section 4.2.1.6).
	if !extension.ReadASN1(&san, cbasn1.OCTET_STRING) || !extension.Empty() {
		return nil, errors.New("the SAN does not parse, or is critical")
	}
	return &san, nil
}

// readSAN reads GeneralNames (RFC 5280, section 4.2.1.6). It accepts dNSName and iPAddress, and refuses all other kinds of
// names, also those that crypto/x509 skips.
func (r *Request) readSAN(san cryptobyte.String) error {
	var names cryptobyte.String
	if !san.ReadASN1(&names, cbasn1.SEQUENCE) || !san.Empty() {
		return errors.New("the SAN does not parse")
	}
	for !names.Empty() {
		var value cryptobyte.String
		var tag cbasn1.Tag
		if !names.ReadAnyASN1(&value, &tag) {
			return errors.New("the SAN does not parse")
		}
		switch tag {
		case cbasn1.Tag(2).ContextSpecific():
			if string(value) != r.Node || len(r.DNS) > 0 {
				return fmt.Errorf("DNS name %q in the SAN: want %q once, and no other", value, r.Node)
			}
			r.DNS = append(r.DNS, r.Node)
		case cbasn1.Tag(7).ContextSpecific():
			a, ok := netip.AddrFromSlice(value)
			if !ok || !usable(a) {
				return fmt.Errorf("IP address %x in the SAN is no address of a node", []byte(value))
			}
			if slices.Contains(r.Addresses, a) {
				return fmt.Errorf("IP address %s is twice in the SAN", a)
			}
			r.Addresses = append(r.Addresses, a)
		default:
			return errors.New("the SAN has a name that is neither a DNS name nor an IP address")
		}
	}
	if len(r.DNS) != 1 || len(r.Addresses) == 0 || len(r.Addresses) > MaxAddresses {
		return fmt.Errorf("the SAN has %d DNS names and %d IP addresses: want the node's name and 1 to %d addresses", len(r.DNS), len(r.Addresses), MaxAddresses)
	}
	return nil
}

// usable refuses addresses that cannot belong to one node, and IPv4-mapped IPv6 addresses, which would give one address two
// spellings.
func usable(a netip.Addr) bool {
	return !a.Is4In6() && !a.IsUnspecified() && !a.IsLoopback() && !a.IsMulticast() && !a.IsLinkLocalUnicast()
}
