package nodecert_test

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/services/joinservice/nodecert"
	"github.com/muster-k8s/muster/trust/attest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var key = must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))

// good is the template of a valid serving request of node1.
func good() *x509.CertificateRequest {
	return &x509.CertificateRequest{
		Subject:     pkix.Name{CommonName: "system:node:node1", Organization: []string{"system:nodes"}},
		DNSNames:    []string{"node1"},
		IPAddresses: []net.IP{net.IPv4(192, 0, 2, 1).To4(), net.ParseIP("2001:db8::1")},
	}
}

func client() *x509.CertificateRequest {
	return &x509.CertificateRequest{Subject: good().Subject}
}

func TestWhatANodeMayHaveIsAccepted(t *testing.T) {
	r, err := nodecert.Parse(nodecert.Client, sign(t, client(), key))
	if err != nil {
		t.Fatal(err)
	}
	if r.Node != "node1" || len(r.DNS) != 0 || len(r.Addresses) != 0 {
		t.Errorf("client request %+v", r)
	}
	der := sign(t, good(), key)
	if r, err = nodecert.Parse(nodecert.Serving, der); err != nil {
		t.Fatal(err)
	}
	want := []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}
	if r.Node != "node1" || !slices.Equal(r.DNS, []string{"node1"}) || !slices.Equal(r.Addresses, want) || !bytes.Equal(r.DER, der) {
		t.Errorf("serving request %+v", r)
	}
	p384 := must(ecdsa.GenerateKey(elliptic.P384(), rand.Reader))
	if _, err = nodecert.Parse(nodecert.Client, sign(t, client(), p384)); err != nil {
		t.Errorf("P-384: %v", err)
	}
}

// Invariant J5.
func TestRequestsForMoreThanANodeMayHaveAreRefused(t *testing.T) {
	san := func(names ...asn1.RawValue) func(*x509.CertificateRequest) {
		return func(c *x509.CertificateRequest) {
			c.DNSNames, c.IPAddresses = nil, nil
			c.ExtraExtensions = []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 17}, Value: must(asn1.Marshal(names))}}
		}
	}
	dns := asn1.RawValue{Class: 2, Tag: 2, Bytes: []byte("node1")}
	ip := asn1.RawValue{Class: 2, Tag: 7, Bytes: []byte{192, 0, 2, 1}}
	p224 := must(ecdsa.GenerateKey(elliptic.P224(), rand.Reader))
	weak := must(rsa.GenerateKey(rand.Reader, 2048))
	_, ed, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		kind nodecert.Kind
		edit func(*x509.CertificateRequest)
		key  crypto.Signer
	}{
		"a second organisation":  {edit: func(c *x509.CertificateRequest) { c.Subject.Organization = []string{"system:nodes", "system:masters"} }},
		"another organisation":   {edit: func(c *x509.CertificateRequest) { c.Subject.Organization = []string{"system:masters"} }},
		"no organisation":        {edit: func(c *x509.CertificateRequest) { c.Subject.Organization = nil }},
		"an organisational unit": {edit: func(c *x509.CertificateRequest) { c.Subject.OrganizationalUnit = []string{"x"} }},
		"a second common name": {edit: func(c *x509.CertificateRequest) {
			c.Subject.ExtraNames = []pkix.AttributeTypeAndValue{{Type: asn1.ObjectIdentifier{2, 5, 4, 3}, Value: "admin"}}
		}},
		"a common name that is no node":       {edit: func(c *x509.CertificateRequest) { c.Subject.CommonName = "admin" }},
		"a node name in upper case":           {edit: func(c *x509.CertificateRequest) { c.Subject.CommonName = "system:node:Node1" }},
		"a node name with a dot":              {edit: func(c *x509.CertificateRequest) { c.Subject.CommonName = "system:node:node1.example" }},
		"an empty node name":                  {edit: func(c *x509.CertificateRequest) { c.Subject.CommonName = "system:node:" }},
		"a node name of 64 characters":        {edit: func(c *x509.CertificateRequest) { c.Subject.CommonName = "system:node:" + strings.Repeat("a", 64) }},
		"the name of another node in the SAN": {edit: func(c *x509.CertificateRequest) { c.DNSNames = []string{"node2"} }},
		"a second DNS name":                   {edit: func(c *x509.CertificateRequest) { c.DNSNames = []string{"node1", "kubernetes"} }},
		"the DNS name twice":                  {edit: func(c *x509.CertificateRequest) { c.DNSNames = []string{"node1", "node1"} }},
		"no DNS name":                         {edit: func(c *x509.CertificateRequest) { c.DNSNames = nil }},
		"no address":                          {edit: func(c *x509.CertificateRequest) { c.IPAddresses = nil }},
		"an address twice":                    {edit: func(c *x509.CertificateRequest) { c.IPAddresses = append(c.IPAddresses, c.IPAddresses[0]) }},
		"a loopback address":                  {edit: func(c *x509.CertificateRequest) { c.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)} }},
		"the unspecified address":             {edit: func(c *x509.CertificateRequest) { c.IPAddresses = []net.IP{net.IPv4zero} }},
		"a link-local address":                {edit: func(c *x509.CertificateRequest) { c.IPAddresses = []net.IP{net.ParseIP("fe80::1")} }},
		"IPv4 mapped into IPv6":               {edit: san(dns, asn1.RawValue{Class: 2, Tag: 7, Bytes: net.IPv4(192, 0, 2, 1).To16()})},
		"an address of five bytes":            {edit: san(dns, asn1.RawValue{Class: 2, Tag: 7, Bytes: []byte{1, 2, 3, 4, 5}})},
		"an e-mail address":                   {edit: func(c *x509.CertificateRequest) { c.EmailAddresses = []string{"a@example.com"} }},
		"a URI":                               {edit: func(c *x509.CertificateRequest) { c.URIs = []*url.URL{{Scheme: "spiffe", Host: "x"}} }},
		"an otherName, which parsers skip":    {edit: san(dns, ip, asn1.RawValue{Class: 2, Tag: 0, IsCompound: true, Bytes: must(asn1.Marshal(asn1.ObjectIdentifier{1, 2, 3}))})},
		"a directory name":                    {edit: san(dns, ip, asn1.RawValue{Class: 2, Tag: 4, IsCompound: true, Bytes: must(asn1.Marshal(pkix.RDNSequence{}))})},
		"a CA flag": {edit: func(c *x509.CertificateRequest) {
			c.ExtraExtensions = []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 19}, Critical: true, Value: []byte{0x30, 0x03, 0x01, 0x01, 0xff}}}
		}},
		"a critical SAN": {edit: func(c *x509.CertificateRequest) {
			san(dns, ip)(c)
			c.ExtraExtensions[0].Critical = true
		}},
		"17 addresses": {edit: func(c *x509.CertificateRequest) {
			c.IPAddresses = nil
			for i := range 17 {
				c.IPAddresses = append(c.IPAddresses, net.IPv4(192, 0, 2, byte(i+1)).To4())
			}
		}},
		"a client request with a SAN":  {kind: nodecert.Client, edit: func(*x509.CertificateRequest) {}},
		"an RSA key":                   {key: weak, edit: func(*x509.CertificateRequest) {}},
		"an Ed25519 key":               {key: ed, edit: func(*x509.CertificateRequest) {}},
		"a key on P-224":               {key: p224, edit: func(*x509.CertificateRequest) {}},
		"a kind that does not exist":   {kind: 7, edit: func(*x509.CertificateRequest) {}},
		"an attribute with a password": {edit: func(c *x509.CertificateRequest) { c.Attributes = challengePassword }}, //nolint:staticcheck // no other way makes such an attribute,
		"an unknown kind of extension": {edit: func(c *x509.CertificateRequest) {
			c.ExtraExtensions = []pkix.Extension{{Id: asn1.ObjectIdentifier{1, 2, 3, 4}, Value: []byte{5, 0}}}
		}},
		"key usages in the request": {edit: func(c *x509.CertificateRequest) {
			c.ExtraExtensions = []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 15}, Value: []byte{3, 2, 1, 6}}}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			template := good()
			tt.edit(template)
			kind, signer := tt.kind, tt.key
			if kind == 0 {
				kind = nodecert.Serving
			}
			if signer == nil {
				signer = key
			}
			refused(t, kind, sign(t, template, signer))
		})
	}
	t.Run("only the offending input was wrong", func(t *testing.T) {
		template := good()
		san(dns, ip)(template)
		if _, err := nodecert.Parse(nodecert.Serving, sign(t, template, key)); err != nil {
			t.Error(err)
		}
	})
}

var challengePassword = []pkix.AttributeTypeAndValueSET{{
	Type:  asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 9, 7},
	Value: [][]pkix.AttributeTypeAndValue{{{Type: asn1.ObjectIdentifier{1, 2, 3}, Value: "x"}}},
}}

func TestBrokenRequestsAreRefused(t *testing.T) {
	der := sign(t, good(), key)
	for name, b := range map[string][]byte{
		"nothing":         nil,
		"cut off":         der[:len(der)-1],
		"something after": append(slices.Clone(der), 0),
		"too long":        make([]byte, nodecert.MaxSize+1),
		"PEM":             []byte("-----BEGIN CERTIFICATE REQUEST-----"),
	} {
		t.Run(name, func(t *testing.T) { refused(t, nodecert.Serving, b) })
	}
	t.Run("signed by another key", func(t *testing.T) {
		forged := slices.Clone(der)
		spki := must(x509.MarshalPKIXPublicKey(key.Public()))
		other := must(x509.MarshalPKIXPublicKey(must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader)).Public()))
		refused(t, nodecert.Serving, bytes.Replace(forged, spki, other, 1))
	})
}

func TestARequestReadBackNeverAsksForMore(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.StringMatching(`[a-zA-Z0-9.-]{0,20}`).Draw(t, "name")
		template := &x509.CertificateRequest{
			Subject: pkix.Name{
				CommonName:   rapid.SampledFrom([]string{"system:node:", "system:", ""}).Draw(t, "prefix") + name,
				Organization: rapid.SliceOfN(rapid.SampledFrom([]string{"system:nodes", "system:masters"}), 0, 2).Draw(t, "organization"),
			},
			DNSNames: rapid.SliceOfN(rapid.SampledFrom([]string{name, "other"}), 0, 2).Draw(t, "dns"),
		}
		for _, b := range rapid.SliceOfN(rapid.SliceOfN(rapid.Byte(), 4, 4), 0, 3).Draw(t, "addresses") {
			template.IPAddresses = append(template.IPAddresses, net.IP(b))
		}
		der, err := x509.CreateCertificateRequest(rand.Reader, template, key)
		if err != nil {
			return // crypto/x509 cannot make it
		}
		for _, kind := range []nodecert.Kind{nodecert.Client, nodecert.Serving} {
			r, err := nodecert.Parse(kind, der)
			if err != nil {
				if attest.ReasonOf(err) != attestv1.Reason_REASON_CSR_INVALID {
					t.Fatalf("reason of %v", err)
				}
				continue
			}
			if r.Node != name || !nodecert.IsName(name) || template.Subject.CommonName != "system:node:"+name || !slices.Equal(template.Subject.Organization, []string{"system:nodes"}) {
				t.Fatalf("accepted %+v", template.Subject)
			}
			if kind == nodecert.Client && len(template.DNSNames)+len(template.IPAddresses) > 0 {
				t.Fatalf("a client request with a SAN was accepted")
			}
			if kind == nodecert.Serving && (!slices.Equal(template.DNSNames, []string{name}) || len(r.Addresses) != len(template.IPAddresses)) {
				t.Fatalf("accepted %v %v as %+v", template.DNSNames, template.IPAddresses, r)
			}
		}
	})
}

// crypto/x509, with which Kubernetes' signers read a request, must agree on what Parse accepts.
func FuzzParse(f *testing.F) {
	f.Add(must(x509.CreateCertificateRequest(rand.Reader, good(), key)))
	f.Add(must(x509.CreateCertificateRequest(rand.Reader, client(), key)))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, der []byte) {
		for _, kind := range []nodecert.Kind{nodecert.Client, nodecert.Serving} {
			r, err := nodecert.Parse(kind, der)
			if err != nil {
				continue
			}
			csr, err := x509.ParseCertificateRequest(der)
			if err != nil {
				t.Fatalf("accepted what crypto/x509 refuses: %v", err)
			}
			if csr.Subject.CommonName != "system:node:"+r.Node || !slices.Equal(csr.Subject.Organization, []string{"system:nodes"}) || len(csr.Subject.Names) != 2 {
				t.Errorf("subject %s", csr.Subject)
			}
			if !slices.Equal(csr.DNSNames, r.DNS) || len(csr.IPAddresses) != len(r.Addresses) || len(csr.EmailAddresses)+len(csr.URIs) > 0 {
				t.Errorf("SAN %v %v %v %v", csr.DNSNames, csr.IPAddresses, csr.EmailAddresses, csr.URIs)
			}
		}
	})
}

func refused(t *testing.T, kind nodecert.Kind, der []byte) {
	t.Helper()
	r, err := nodecert.Parse(kind, der)
	if err == nil {
		t.Fatalf("accepted: %+v", r)
	}
	if got := attest.ReasonOf(err); got != attestv1.Reason_REASON_CSR_INVALID {
		t.Errorf("reason %s, want CSR_INVALID", got)
	}
}

func sign(t *testing.T, template *x509.CertificateRequest, signer crypto.Signer) []byte {
	t.Helper()
	der, err := x509.CreateCertificateRequest(rand.Reader, template, signer)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
