package ownertest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"net"
	"strings"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/keys"
)

func hexOf(b []byte) []byte { return hex.AppendEncode(nil, b) }

// Succeed acts as a machine: it locks itself to the cluster and returns its result, which change may make wrong.
func Succeed(m *attesttest.Machine, kubeconfig []byte, change func(*initv1.InitResult)) Answer {
	return func(req *initv1.InitRequest, send func(*initv1.InitResponse) error) error {
		id := ClusterIDOf(req)
		if !locked(m) {
			m.LockTo(id)
		}
		err := send(&initv1.InitResponse{Message: &initv1.InitResponse_Progress{Progress: &initv1.Progress{Phase: initv1.Phase_PHASE_KUBEADM, Text: "kubeadm init"}}})
		if err != nil {
			return err
		}
		machine := m.ID()
		r := &initv1.InitResult{
			Kubeconfig: kubeconfig, ClusterId: id[:], MachineId: machine[:], NodeName: "node1",
			DiskId: "0191e0a8-7b1c-7000-8000-0123456789ab", Addresses: []string{"192.168.77.11"},
		}
		if change != nil {
			change(r)
		}
		return send(&initv1.InitResponse{Message: &initv1.InitResponse_Result{Result: r}})
	}
}

// ClusterIDOf returns the cluster ID that follows from the secrets of a request.
func ClusterIDOf(req *initv1.InitRequest) keys.ClusterID {
	root, err := keys.ParseRoot(keys.FirstVersion, req.GetRootSecret(), req.GetSalt())
	if err != nil {
		return keys.ClusterID{}
	}
	return root.ClusterID([32]byte(req.GetMeasurementSalt()))
}

func locked(m *attesttest.Machine) bool {
	for _, b := range m.PCRs()[attest.LockPCR] {
		if b != 0 {
			return true
		}
	}
	return false
}

// CSROf is a signed request for a certificate with the subject of a node, in PEM.
func CSROf(t *testing.T, node string, change func(*x509.CertificateRequest)) []byte {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	r := &x509.CertificateRequest{Subject: pkix.Name{CommonName: "system:node:" + node, Organization: []string{"system:nodes"}}}
	change(r)
	der, err := x509.CreateCertificateRequest(rand.Reader, r, k)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
}

// ServingCSR is the request that a kubelet files.
func ServingCSR(t *testing.T, node string) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	return &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "csr-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request: CSROf(t, node, func(r *x509.CertificateRequest) {
				r.DNSNames, r.IPAddresses = []string{node}, []net.IP{net.IPv4(192, 168, 77, 11)}
			}), SignerName: certificatesv1.KubeletServingSignerName,
			Usages: []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth},
		},
	}
}

// ImageOf returns an image by a digest of one digit.
func ImageOf(name, digit string) string {
	return "registry.example/muster/" + name + "@sha256:" + strings.Repeat(digit, 64)
}
