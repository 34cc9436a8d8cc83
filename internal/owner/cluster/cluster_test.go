package cluster

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"net"
	"net/url"
	"strings"
	"testing"

	"go.uber.org/goleak"
	certificatesv1 "k8s.io/api/certificates/v1"
)

func TestMain(m *testing.M) {
	// klog starts its flusher with the process.
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("k8s.io/klog/v2.(*flushDaemon).run.func1"))
}

func TestCheckRequestGivesANodeNoMoreThanItsOwn(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	type change func(*x509.CertificateRequest, *certificatesv1.CertificateSigningRequestSpec)
	client := func(r *x509.CertificateRequest, s *certificatesv1.CertificateSigningRequestSpec) {
		s.SignerName, r.DNSNames, r.IPAddresses = certificatesv1.KubeAPIServerClientKubeletSignerName, nil, nil
		s.Usages[1] = certificatesv1.UsageClientAuth
	}
	for name, tt := range map[string]struct {
		change change
		ok     bool
	}{
		"its serving certificate": {func(*x509.CertificateRequest, *certificatesv1.CertificateSigningRequestSpec) {}, true},
		"its client certificate":  {client, true},
		"another node's subject": {func(r *x509.CertificateRequest, _ *certificatesv1.CertificateSigningRequestSpec) {
			r.Subject.CommonName = "system:node:node2"
		}, false},
		"administrators": {func(r *x509.CertificateRequest, _ *certificatesv1.CertificateSigningRequestSpec) {
			r.Subject.Organization = []string{"system:masters"}
		}, false},
		"another group beside": {func(r *x509.CertificateRequest, _ *certificatesv1.CertificateSigningRequestSpec) {
			r.Subject.Organization = []string{"system:nodes", "system:masters"}
		}, false},
		"a further part of the subject": {func(r *x509.CertificateRequest, _ *certificatesv1.CertificateSigningRequestSpec) {
			r.Subject.ExtraNames = []pkix.AttributeTypeAndValue{{Type: asn1.ObjectIdentifier{2, 5, 4, 11}, Value: "x"}}
		}, false},
		"another name": {func(r *x509.CertificateRequest, _ *certificatesv1.CertificateSigningRequestSpec) {
			r.DNSNames = []string{"node1", "kubernetes"}
		}, false},
		"another's address": {func(r *x509.CertificateRequest, _ *certificatesv1.CertificateSigningRequestSpec) {
			r.IPAddresses = append(r.IPAddresses, net.IPv4(192, 168, 77, 1))
		}, false},
		"no name at all": {func(r *x509.CertificateRequest, _ *certificatesv1.CertificateSigningRequestSpec) {
			r.DNSNames, r.IPAddresses = nil, nil
		}, false},
		"a URI": {func(r *x509.CertificateRequest, _ *certificatesv1.CertificateSigningRequestSpec) {
			r.URIs = []*url.URL{{Scheme: "spiffe", Host: "x"}}
		}, false},
		"an e-mail address": {func(r *x509.CertificateRequest, _ *certificatesv1.CertificateSigningRequestSpec) {
			r.EmailAddresses = []string{"a@example.org"}
		}, false},
		"a client with a name": {func(r *x509.CertificateRequest, s *certificatesv1.CertificateSigningRequestSpec) {
			client(r, s)
			r.DNSNames = []string{"node1"}
		}, false},
		"serving and client": {func(_ *x509.CertificateRequest, s *certificatesv1.CertificateSigningRequestSpec) {
			s.Usages = append(s.Usages, certificatesv1.UsageClientAuth)
		}, false},
		"a certificate to sign": {func(_ *x509.CertificateRequest, s *certificatesv1.CertificateSigningRequestSpec) {
			s.Usages = append(s.Usages, certificatesv1.UsageCertSign)
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			r := &x509.CertificateRequest{
				Subject:  pkix.Name{CommonName: "system:node:node1", Organization: []string{"system:nodes"}},
				DNSNames: []string{"node1"}, IPAddresses: []net.IP{net.IPv4(192, 168, 77, 11), net.ParseIP("2001:db8::1")},
			}
			spec := certificatesv1.CertificateSigningRequestSpec{
				SignerName: certificatesv1.KubeletServingSignerName, Usages: []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth},
			}
			tt.change(r, &spec)
			der, err := x509.CreateCertificateRequest(rand.Reader, r, key)
			if err != nil {
				t.Fatal(err)
			}
			spec.Request = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
			csr := &certificatesv1.CertificateSigningRequest{Spec: spec}
			if err := checkRequest(csr, "node1", []string{"192.168.77.11", "2001:db8::1"}); (err == nil) != tt.ok {
				t.Errorf("got %v", err)
			}
			der[len(der)-1] ^= 1 // the signature's last byte
			csr.Spec.Request = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
			if err := checkRequest(csr, "node1", []string{"192.168.77.11", "2001:db8::1"}); err == nil {
				t.Error("a request that its key did not sign was accepted")
			}
		})
	}
}

func TestOwnRequestIsThatOfTheNodeItself(t *testing.T) {
	csr := &certificatesv1.CertificateSigningRequest{Spec: certificatesv1.CertificateSigningRequestSpec{
		Username: "system:node:node1", Groups: []string{"system:nodes", "system:authenticated"}, SignerName: certificatesv1.KubeletServingSignerName,
	}}
	if !ownRequest(csr, "node1") {
		t.Error("its own request")
	}
	for name, change := range map[string]func(*certificatesv1.CertificateSigningRequestSpec){
		"another user":         func(s *certificatesv1.CertificateSigningRequestSpec) { s.Username = "system:node:node2" },
		"a user outside nodes": func(s *certificatesv1.CertificateSigningRequestSpec) { s.Groups = []string{"system:authenticated"} },
		"a signer of any client": func(s *certificatesv1.CertificateSigningRequestSpec) {
			s.SignerName = certificatesv1.KubeAPIServerClientSignerName
		},
	} {
		c := csr.DeepCopy()
		change(&c.Spec)
		if ownRequest(c, "node1") {
			t.Error(name)
		}
	}
}

func TestParseManifests(t *testing.T) {
	got, err := ParseManifests("x.yaml", []byte(`
# comments alone are no document
---
apiVersion: v1
kind: Namespace
metadata: {name: a}
---
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: ConfigMap, metadata: {name: b, namespace: a}, data: {k: "1"}}
- {apiVersion: v1, kind: ConfigMap, metadata: {name: c, namespace: a}}
`))
	if err != nil || len(got) != 3 || describe(got[1]) != "ConfigMap a/b" || describe(got[0]) != "Namespace a" {
		t.Errorf("%v, %v", got, err)
	}
	for name, text := range map[string]string{
		"no kind":     "apiVersion: v1\nmetadata: {name: a}\n",
		"no name":     "apiVersion: v1\nkind: ConfigMap\n",
		"a key twice": "apiVersion: v1\nkind: ConfigMap\nkind: Secret\nmetadata: {name: a}\n",
		"no object":   "- a\n- b\n",
		"no YAML":     "\tx",
	} {
		if _, err := ParseManifests("x.yaml", []byte(text)); err == nil || !strings.Contains(err.Error(), "x.yaml: document 1") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestValues(t *testing.T) {
	digest := "@sha256:" + strings.Repeat("0", 64)
	good := Values{JoinserviceImage: "r.example/j" + digest, KMSImage: "r.example/k" + digest}
	if err := CheckValues(good); err != nil {
		t.Error(err)
	}
	more := good
	more.More = map[string]any{"joinservice": map[string]any{"nodePort": float64(30091), "image": "r.example/other:tag"}}
	if err := CheckValues(more); err != nil {
		t.Errorf("the images of the flags win: %v", err)
	}
	if good.JoinPort() != 30090 || more.JoinPort() != 30091 {
		t.Errorf("ports %d and %d", good.JoinPort(), more.JoinPort())
	}
	for name, v := range map[string]Values{
		"an image by tag":  {JoinserviceImage: "r.example/j:v1", KMSImage: good.KMSImage},
		"no image":         {KMSImage: good.KMSImage},
		"an unknown value": {JoinserviceImage: good.JoinserviceImage, KMSImage: good.KMSImage, More: map[string]any{"secret": "x"}},
	} {
		if err := CheckValues(v); err == nil {
			t.Errorf("%s is accepted", name)
		}
	}
}
