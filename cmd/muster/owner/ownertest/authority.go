package ownertest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/ownerorder"
)

// Authority is a cluster's CA.
type Authority struct {
	Cert *x509.Certificate
	Key  *ecdsa.PrivateKey
}

// NewAuthority returns a new certificate authority.
func NewAuthority(t *testing.T) Authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	a := Authority{&x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kubernetes"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}, key}
	a.Cert = a.Sign(t, a.Cert, key.Public())
	return a
}

// Sign signs a certificate for a public key.
func (a Authority) Sign(t *testing.T, c *x509.Certificate, public any) *x509.Certificate {
	t.Helper()
	der, err := x509.CreateCertificate(rand.Reader, c, a.Cert, public, a.Key)
	if err != nil {
		t.Fatal(err)
	}
	out, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// Client returns a certificate for a client, valid until end.
func (a Authority) Client(t *testing.T, name pkix.Name, public any, end time.Time) *x509.Certificate {
	return a.Sign(t, &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: name, NotBefore: time.Now().Add(-time.Hour), NotAfter: end, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, public)
}

// PEMOf returns a certificate in PEM.
func PEMOf(c *x509.Certificate) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw})
}

// APIServer answers the requests of a renewal: it takes one certificate request, and has it signed or denied.
type APIServer struct {
	CA      Authority
	Answer  func(request *x509.CertificateRequest) (cert []byte, denied string)
	Accepts bool // the renewed certificate
	// Before is the authority that the folder's kubeconfig trusts and has its certificate of, cross what the server sends after its own certificate; nil: ca, and
	// nothing.
	Before  *Authority
	Cross   *x509.Certificate
	Info    []byte // the cluster's description
	Lags    bool   // it also accepts earlier certificates
	Filed   *certificatesv1.CertificateSigningRequest
	Deleted bool
}

func (s *APIServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	reply := func(code int, v any) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		_ = json.NewEncoder(w).Encode(v)
	}
	const requests = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
	switch {
	case r.Method == http.MethodGet && r.URL.Path == "/api":
		reply(http.StatusOK, metav1.APIVersions{Versions: []string{"v1"}})
	case r.Method == http.MethodGet && r.URL.Path == "/apis":
		v := metav1.GroupVersionForDiscovery{GroupVersion: "certificates.k8s.io/v1", Version: "v1"}
		reply(http.StatusOK, metav1.APIGroupList{Groups: []metav1.APIGroup{{Name: "certificates.k8s.io", Versions: []metav1.GroupVersionForDiscovery{v}, PreferredVersion: v}}})
	case r.Method == http.MethodGet && r.URL.Path == "/apis/certificates.k8s.io":
		v := metav1.GroupVersionForDiscovery{GroupVersion: "certificates.k8s.io/v1", Version: "v1"}
		reply(http.StatusOK, metav1.APIGroup{Name: "certificates.k8s.io", Versions: []metav1.GroupVersionForDiscovery{v}, PreferredVersion: v})
	case r.Method == http.MethodGet && r.URL.Path == "/apis/certificates.k8s.io/v1":
		reply(http.StatusOK, metav1.APIResourceList{GroupVersion: "certificates.k8s.io/v1", APIResources: []metav1.APIResource{{Name: "certificatesigningrequests", Kind: "CertificateSigningRequest", Verbs: []string{"create", "get", "delete"}}}})
	case r.Method == http.MethodGet && r.URL.Path == "/api/v1":
		reply(http.StatusOK, metav1.APIResourceList{GroupVersion: "v1", APIResources: []metav1.APIResource{{Name: "namespaces", Kind: "Namespace", Verbs: []string{"list"}}, {Name: "configmaps", Kind: "ConfigMap", Namespaced: true, Verbs: []string{"get"}}}})
	case r.Method == http.MethodGet && r.URL.Path == "/api/v1/namespaces/"+clusterapi.Namespace+"/configmaps/"+clusterinfo.ConfigMap && s.Info != nil:
		reply(http.StatusOK, corev1.ConfigMap{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"}, Data: map[string]string{clusterinfo.Key: string(s.Info)}})
	case r.Method == http.MethodPost && r.URL.Path == requests:
		s.Filed = &certificatesv1.CertificateSigningRequest{}
		body, err := io.ReadAll(r.Body) // in protobuf, as controller-runtime sends it
		if err == nil {
			_, _, err = scheme.Codecs.UniversalDeserializer().Decode(body, nil, s.Filed)
		}
		if err != nil {
			reply(http.StatusBadRequest, metav1.Status{})
			return
		}
		s.Filed.Name = "one"
		reply(http.StatusCreated, s.Filed)
	case r.Method == http.MethodGet && r.URL.Path == requests+"/one":
		block, _ := pem.Decode(s.Filed.Spec.Request)
		request, err := x509.ParseCertificateRequest(block.Bytes)
		if err != nil {
			reply(http.StatusBadRequest, metav1.Status{})
			return
		}
		cert, denied := s.Answer(request)
		s.Filed.Status.Certificate = cert
		if denied != "" {
			s.Filed.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{Type: certificatesv1.CertificateDenied, Status: corev1.ConditionTrue, Message: denied}}
		}
		reply(http.StatusOK, s.Filed)
	case r.Method == http.MethodDelete && r.URL.Path == requests+"/one":
		s.Deleted = true
		reply(http.StatusOK, metav1.Status{Status: metav1.StatusSuccess})
	case r.Method == http.MethodGet && r.URL.Path == "/api/v1/namespaces" && s.Accepts && (s.Lags || r.TLS.PeerCertificates[0].CheckSignatureFrom(s.CA.Cert) == nil):
		reply(http.StatusOK, corev1.NamespaceList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "NamespaceList"}})
	case r.Method == http.MethodGet && r.URL.Path == "/readyz":
		w.WriteHeader(http.StatusOK)
	default:
		reply(http.StatusForbidden, metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: metav1.StatusFailure, Reason: metav1.StatusReasonForbidden, Code: http.StatusForbidden, Message: r.URL.Path})
	}
}

// Administrator is the subject of kubeadm's administrator.
var Administrator = pkix.Name{CommonName: "kubernetes-admin", Organization: []string{ownerorder.Group}}

// Administered creates the folder of a cluster whose API server is api, with a kubeconfig for the holder that ends
// then.
func Administered(t *testing.T, api *APIServer, holder pkix.Name, end time.Time, policy []byte) *Owned {
	t.Helper()
	server := httptest.NewUnstartedServer(api)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	leaf := api.CA.Sign(t, &x509.Certificate{SerialNumber: big.NewInt(2), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}, key.Public())
	chain, trusted := [][]byte{leaf.Raw}, api.CA
	if api.Cross != nil {
		chain = append(chain, api.Cross.Raw)
	}
	if api.Before != nil {
		trusted = *api.Before
	}
	server.TLS = &tls.Config{Certificates: []tls.Certificate{{Certificate: chain, PrivateKey: key}}, ClientAuth: tls.RequireAnyClientCert, MinVersion: tls.VersionTLS13}
	server.StartTLS()
	t.Cleanup(server.Close)
	private, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	conf := clientcmdapi.NewConfig()
	conf.Clusters["c"] = &clientcmdapi.Cluster{Server: server.URL, CertificateAuthorityData: PEMOf(trusted.Cert)}
	conf.AuthInfos["u"] = &clientcmdapi.AuthInfo{ClientCertificateData: PEMOf(trusted.Client(t, holder, key.Public(), end)), ClientKeyData: pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: private})}
	conf.Contexts["x"], conf.CurrentContext = &clientcmdapi.Context{Cluster: "c", AuthInfo: "u"}, "x"
	text, err := clientcmd.Write(*conf)
	if err != nil {
		t.Fatal(err)
	}
	o := Own(t, &FirstMachine{Addr: "192.0.2.1:9000"}, strings.TrimPrefix(server.URL, "https://"), policy)
	if err := o.Write(ownerdir.AdminConf, text); err != nil {
		t.Fatal(err)
	}
	return o
}

// Cross returns the cross certificate of another authority.
func (a Authority) Cross(t *testing.T, next Authority) *x509.Certificate {
	t.Helper()
	return a.Sign(t, &x509.Certificate{
		SerialNumber: big.NewInt(9), RawSubject: next.Cert.RawSubject, NotBefore: a.Cert.NotBefore, NotAfter: a.Cert.NotAfter, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
		SubjectKeyId: next.Cert.SubjectKeyId, AuthorityKeyId: a.Cert.SubjectKeyId,
	}, next.Key.Public())
}
