package renewal

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/cert"

	"github.com/muster-k8s/muster/internal/clusterinfo"
)

const admins = "kubeadm:cluster-admins"

func request(t *testing.T, r *x509.CertificateRequest) (*ecdsa.PrivateKey, *certificatesv1.CertificateSigningRequest) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, r, key)
	if err != nil {
		t.Fatal(err)
	}
	return key, &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{Name: "r"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}),
			SignerName: clusterinfo.AdministratorSigner, Usages: []certificatesv1.KeyUsage{certificatesv1.UsageClientAuth},
			Username: "kubernetes-admin", Groups: []string{admins, "system:authenticated"},
		},
	}
}

// oneRequest is a cluster's only request.
type oneRequest struct {
	r certificatesv1.CertificateSigningRequest
}

func (k *oneRequest) List(context.Context, metav1.ListOptions) (*certificatesv1.CertificateSigningRequestList, error) {
	return &certificatesv1.CertificateSigningRequestList{Items: []certificatesv1.CertificateSigningRequest{*k.r.DeepCopy()}}, nil
}

func (k *oneRequest) UpdateApproval(_ context.Context, _ string, r *certificatesv1.CertificateSigningRequest, _ metav1.UpdateOptions) (*certificatesv1.CertificateSigningRequest, error) {
	k.r.Status.Conditions = r.Status.Conditions
	return k.r.DeepCopy(), nil
}

func (k *oneRequest) UpdateStatus(_ context.Context, r *certificatesv1.CertificateSigningRequest, _ metav1.UpdateOptions) (*certificatesv1.CertificateSigningRequest, error) {
	k.r.Status.Certificate = r.Status.Certificate
	return k.r.DeepCopy(), nil
}

func TestAnAdministratorsCertificateIsRenewedForItsHolder(t *testing.T) {
	own := pkix.Name{CommonName: "kubernetes-admin", Organization: []string{admins}}
	for name, tt := range map[string]struct {
		ask    x509.CertificateRequest
		change func(*certificatesv1.CertificateSigningRequest)
		want   bool
	}{
		"its holder asks": {ask: x509.CertificateRequest{Subject: own}, want: true},
		"a node asks": {ask: x509.CertificateRequest{Subject: own}, change: func(r *certificatesv1.CertificateSigningRequest) {
			r.Spec.Username, r.Spec.Groups = "system:node:node2", []string{"system:nodes", "system:authenticated"}
		}},
		"a node asks for itself as administrator": {ask: x509.CertificateRequest{Subject: pkix.Name{CommonName: "system:node:node2", Organization: []string{admins}}}, change: func(r *certificatesv1.CertificateSigningRequest) {
			r.Spec.Username, r.Spec.Groups = "system:node:node2", []string{"system:nodes", "system:authenticated"}
		}},
		"for another name":       {ask: x509.CertificateRequest{Subject: pkix.Name{CommonName: "system:node:node2", Organization: []string{admins}}}},
		"for a stronger group":   {ask: x509.CertificateRequest{Subject: pkix.Name{CommonName: "kubernetes-admin", Organization: []string{"system:masters"}}}},
		"for one more group":     {ask: x509.CertificateRequest{Subject: pkix.Name{CommonName: "kubernetes-admin", Organization: []string{admins, "system:masters"}}}},
		"for no group":           {ask: x509.CertificateRequest{Subject: pkix.Name{CommonName: "kubernetes-admin"}}},
		"with a further subject": {ask: x509.CertificateRequest{Subject: pkix.Name{CommonName: "kubernetes-admin", Organization: []string{admins}, OrganizationalUnit: []string{"x"}}}},
		"with a server's name":   {ask: x509.CertificateRequest{Subject: own, DNSNames: []string{"kubernetes"}}},
		"for servers too": {ask: x509.CertificateRequest{Subject: own}, change: func(r *certificatesv1.CertificateSigningRequest) {
			r.Spec.Usages = append(r.Spec.Usages, certificatesv1.UsageServerAuth)
		}},
		"of another key": {ask: x509.CertificateRequest{Subject: own}, change: func(r *certificatesv1.CertificateSigningRequest) {
			block, _ := pem.Decode(r.Spec.Request)
			block.Bytes[len(block.Bytes)-1] ^= 1
			r.Spec.Request = pem.EncodeToMemory(block)
		}},
		"with something behind it": {ask: x509.CertificateRequest{Subject: own}, change: func(r *certificatesv1.CertificateSigningRequest) {
			r.Spec.Request = append(r.Spec.Request, r.Spec.Request...)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			root := newControlPlane(t)
			now := at(t, root, 0.5)
			key, r := request(t, &tt.ask)
			if tt.change != nil {
				tt.change(r)
			}
			k := &oneRequest{*r}
			a := administrators{k, root, image, func() time.Time { return now }, slog.New(slog.DiscardHandler)}
			for range 2 { // decided once, and left alone then
				if err := a.sign(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			r = &k.r
			if len(r.Status.Conditions) != 1 {
				t.Fatalf("conditions %v", r.Status.Conditions)
			}
			if !tt.want {
				if len(r.Status.Certificate) > 0 || r.Status.Conditions[0].Type != certificatesv1.CertificateDenied {
					t.Errorf("issued: %v", r.Status.Conditions)
				}
				return
			}
			list, err := cert.ParseCertsPEM(r.Status.Certificate)
			if err != nil {
				t.Fatal(err)
			}
			ca, err := load(filepath.Join(root, folder, clusterCA))
			if err != nil {
				t.Fatal(err)
			}
			c := list[0]
			if err := c.CheckSignatureFrom(ca); err != nil || !key.PublicKey.Equal(c.PublicKey) || c.IsCA || !c.NotAfter.Equal(now.UTC().Add(life).Truncate(time.Second)) {
				t.Errorf("%v: %s, %s, %s", err, c.Subject, c.NotAfter, now)
			}
		})
	}
}
