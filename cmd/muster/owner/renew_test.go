package owner

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
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
	"github.com/muster-k8s/muster/cmd/muster/owner/progress"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/ownerorder"
)

// authority is a cluster's CA.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	a := authority{&x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kubernetes"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}, key}
	a.cert = a.sign(t, a.cert, key.Public())
	return a
}

func (a authority) sign(t *testing.T, c *x509.Certificate, public any) *x509.Certificate {
	t.Helper()
	der, err := x509.CreateCertificate(rand.Reader, c, a.cert, public, a.key)
	if err != nil {
		t.Fatal(err)
	}
	out, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func (a authority) client(t *testing.T, name pkix.Name, public any, end time.Time) *x509.Certificate {
	return a.sign(t, &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: name, NotBefore: time.Now().Add(-time.Hour), NotAfter: end, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, public)
}

func pemOf(c *x509.Certificate) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw})
}

// apiServer answers the requests of a renewal: it takes one certificate request, and has it signed or denied.
type apiServer struct {
	ca      authority
	answer  func(request *x509.CertificateRequest) (cert []byte, denied string)
	accepts bool // the renewed certificate
	// before is the authority that the folder's kubeconfig trusts and has its certificate of, cross what the server sends after its own certificate; nil: ca, and
	// nothing.
	before  *authority
	cross   *x509.Certificate
	info    []byte // the cluster's description
	lags    bool   // it accepts certificates of before, too
	filed   *certificatesv1.CertificateSigningRequest
	deleted bool
}

func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
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
	case r.Method == http.MethodGet && r.URL.Path == "/api/v1/namespaces/"+clusterapi.Namespace+"/configmaps/"+clusterinfo.ConfigMap && s.info != nil:
		reply(http.StatusOK, corev1.ConfigMap{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"}, Data: map[string]string{clusterinfo.Key: string(s.info)}})
	case r.Method == http.MethodPost && r.URL.Path == requests:
		s.filed = &certificatesv1.CertificateSigningRequest{}
		body, err := io.ReadAll(r.Body) // in protobuf, as controller-runtime sends it
		if err == nil {
			_, _, err = scheme.Codecs.UniversalDeserializer().Decode(body, nil, s.filed)
		}
		if err != nil {
			reply(http.StatusBadRequest, metav1.Status{})
			return
		}
		s.filed.Name = "one"
		reply(http.StatusCreated, s.filed)
	case r.Method == http.MethodGet && r.URL.Path == requests+"/one":
		block, _ := pem.Decode(s.filed.Spec.Request)
		request, err := x509.ParseCertificateRequest(block.Bytes)
		if err != nil {
			reply(http.StatusBadRequest, metav1.Status{})
			return
		}
		cert, denied := s.answer(request)
		s.filed.Status.Certificate = cert
		if denied != "" {
			s.filed.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{Type: certificatesv1.CertificateDenied, Status: corev1.ConditionTrue, Message: denied}}
		}
		reply(http.StatusOK, s.filed)
	case r.Method == http.MethodDelete && r.URL.Path == requests+"/one":
		s.deleted = true
		reply(http.StatusOK, metav1.Status{Status: metav1.StatusSuccess})
	case r.Method == http.MethodGet && r.URL.Path == "/api/v1/namespaces" && s.accepts && (s.lags || r.TLS.PeerCertificates[0].CheckSignatureFrom(s.ca.cert) == nil):
		reply(http.StatusOK, corev1.NamespaceList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "NamespaceList"}})
	default:
		reply(http.StatusForbidden, metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: metav1.StatusFailure, Reason: metav1.StatusReasonForbidden, Code: http.StatusForbidden, Message: r.URL.Path})
	}
}

var administrator = pkix.Name{CommonName: "kubernetes-admin", Organization: []string{ownerorder.Group}}

// administered creates the folder of a cluster whose API server is api, with a kubeconfig for the holder that ends
// then.
func administered(t *testing.T, api *apiServer, holder pkix.Name, end time.Time, policy []byte) *owned {
	t.Helper()
	server := httptest.NewUnstartedServer(api)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	leaf := api.ca.sign(t, &x509.Certificate{SerialNumber: big.NewInt(2), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}, key.Public())
	chain, trusted := [][]byte{leaf.Raw}, api.ca
	if api.cross != nil {
		chain = append(chain, api.cross.Raw)
	}
	if api.before != nil {
		trusted = *api.before
	}
	server.TLS = &tls.Config{Certificates: []tls.Certificate{{Certificate: chain, PrivateKey: key}}, ClientAuth: tls.RequireAnyClientCert, MinVersion: tls.VersionTLS13}
	server.StartTLS()
	t.Cleanup(server.Close)
	private, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	conf := clientcmdapi.NewConfig()
	conf.Clusters["c"] = &clientcmdapi.Cluster{Server: server.URL, CertificateAuthorityData: pemOf(trusted.cert)}
	conf.AuthInfos["u"] = &clientcmdapi.AuthInfo{ClientCertificateData: pemOf(trusted.client(t, holder, key.Public(), end)), ClientKeyData: pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: private})}
	conf.Contexts["x"], conf.CurrentContext = &clientcmdapi.Context{Cluster: "c", AuthInfo: "u"}, "x"
	text, err := clientcmd.Write(*conf)
	if err != nil {
		t.Fatal(err)
	}
	o := own(t, &firstMachine{addr: "192.0.2.1:9000"}, strings.TrimPrefix(server.URL, "https://"), policy)
	if err := o.Write(ownerdir.AdminConf, text); err != nil {
		t.Fatal(err)
	}
	return o
}

// adminConf reads the folder's kubeconfig, and the private key in it.
func (o *owned) adminConf(t *testing.T) (text, private string) {
	t.Helper()
	b, err := o.Read(ownerdir.AdminConf)
	if err != nil {
		t.Fatal(err)
	}
	conf, err := clientcmd.Load(b)
	if err != nil {
		t.Fatal(err)
	}
	return string(b), base64.StdEncoding.EncodeToString(conf.AuthInfos["u"].ClientKeyData)
}

func (o *owned) report(steps int) progress.Reporter {
	return progress.New(progress.Config{Out: io.Writer(o.out), Format: progress.Plain, Steps: steps})
}

// While the cluster's authority is rotated, admin.conf trusts two of one name.
func TestAKubeconfigIsRenewedByEitherOfTwoAuthorities(t *testing.T) {
	a, b := newAuthority(t), newAuthority(t)
	key := a.key
	old := a.client(t, administrator, key.Public(), time.Now().Add(time.Hour))
	for _, by := range []authority{a, b} {
		next := pemOf(by.client(t, administrator, key.Public(), time.Now().Add(2*time.Hour)))
		for _, both := range [][]byte{slices.Concat(pemOf(a.cert), pemOf(b.cert)), slices.Concat(pemOf(b.cert), pemOf(a.cert))} {
			if _, err := renewed(next, key, old, both, time.Now()); err != nil {
				t.Error(err)
			}
		}
	}
	if _, err := renewed(pemOf(newAuthority(t).client(t, administrator, key.Public(), time.Now().Add(2*time.Hour))), key, old, slices.Concat(pemOf(a.cert), pemOf(b.cert)), time.Now()); err == nil {
		t.Error("a third authority renews it")
	}
}

func TestAKubeconfigIsRenewedOnlyByItsLike(t *testing.T) {
	soon, later := time.Now().Add(time.Hour).Truncate(time.Second), time.Now().Add(20*time.Hour).Truncate(time.Second)
	for name, tt := range map[string]struct {
		holder  pkix.Name
		answer  func(t *testing.T, ca authority, r *x509.CertificateRequest) ([]byte, string)
		refuses bool   // the API server refuses the renewed certificate
		says    string // "": it is renewed
	}{
		"by the cluster": {answer: func(t *testing.T, ca authority, r *x509.CertificateRequest) ([]byte, string) {
			return pemOf(ca.client(t, r.Subject, r.PublicKey, later)), ""
		}},
		"denied": {says: "not today", answer: func(*testing.T, authority, *x509.CertificateRequest) ([]byte, string) { return nil, "not today" }},
		"another authority's": {says: "not the renewed certificate", answer: func(t *testing.T, _ authority, r *x509.CertificateRequest) ([]byte, string) {
			return pemOf(newAuthority(t).client(t, r.Subject, r.PublicKey, later)), ""
		}},
		"for another key": {says: "another key", answer: func(t *testing.T, ca authority, r *x509.CertificateRequest) ([]byte, string) {
			return pemOf(ca.client(t, r.Subject, newAuthority(t).key.Public(), later)), ""
		}},
		"for somebody else": {says: "it is for", answer: func(t *testing.T, ca authority, r *x509.CertificateRequest) ([]byte, string) {
			return pemOf(ca.client(t, pkix.Name{CommonName: "nobody"}, r.PublicKey, later)), ""
		}},
		"one that ends earlier": {says: "no later", answer: func(t *testing.T, ca authority, r *x509.CertificateRequest) ([]byte, string) {
			return pemOf(ca.client(t, r.Subject, r.PublicKey, soon.Add(-time.Minute))), ""
		}},
		"one that the API server refuses": {refuses: true, says: "the old one stays", answer: func(t *testing.T, ca authority, r *x509.CertificateRequest) ([]byte, string) {
			return pemOf(ca.client(t, r.Subject, r.PublicKey, later)), ""
		}},
		"of another group's user": {holder: pkix.Name{CommonName: "kubernetes-admin", Organization: []string{"system:masters"}}, says: "kubeadm:cluster-admins"},
	} {
		t.Run(name, func(t *testing.T) {
			holder := tt.holder
			if holder.CommonName == "" {
				holder = administrator
			}
			ca := newAuthority(t)
			api := &apiServer{ca: ca, accepts: !tt.refuses, answer: func(r *x509.CertificateRequest) ([]byte, string) { return tt.answer(t, ca, r) }}
			dir := administered(t, api, holder, soon, []byte("policy\n"))
			before, private := dir.adminConf(t)
			got, err := RenewKubeconfig(t.Context(), RenewConfig{Dir: dir.Dir, Now: time.Now, Report: dir.report(RenewSteps)})
			after, _ := dir.adminConf(t)
			if tt.says != "" {
				if err == nil || !strings.Contains(err.Error(), tt.says) {
					t.Errorf("error %v, want one with %q", err, tt.says)
				}
				if after != before {
					t.Error("the old kubeconfig is gone")
				}
				return
			}
			if err != nil || !got.Equal(later) || after == before {
				t.Fatalf("ends at %s, %v", got, err)
			}
			if api.filed.Spec.SignerName != clusterinfo.AdministratorSigner || !api.deleted {
				t.Errorf("filed %+v, removed: %v", api.filed.Spec, api.deleted)
			}
			if strings.Contains(after, private) || checkKubeconfig([]byte(after), dir.Cluster().ControlPlaneEndpoint) != nil {
				t.Error("the renewed kubeconfig is not as it should be")
			}
		})
	}
}
