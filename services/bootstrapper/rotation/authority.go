package rotation

import (
	"crypto"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	certutil "k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
	kubeadmapi "k8s.io/kubernetes/cmd/kubeadm/app/apis/kubeadm"
	kubeadmconstants "k8s.io/kubernetes/cmd/kubeadm/app/constants"
	"k8s.io/kubernetes/cmd/kubeadm/app/util/pkiutil"

	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	files "github.com/muster-k8s/muster/services/bootstrapper/clusterca"
)

// authority is a certificate authority of the control planes: its key has issued their certificates, and all certificates of its own file verify these.
// The first one belongs to the key: kubeadm and the renewal take no other. A staged key is the certificate and its private key, in PEM.
type authority struct {
	// file is the path below pki, with .crt and .key. name is the subject, as kubeadm has it.
	file, name string
	// issued are the certificates that it has issued to this control plane, by their paths below pki.
	issued []string
}

var (
	// frontProxy issues the certificate with which API servers authenticate to aggregated ones.
	frontProxy = authority{"front-proxy-ca", "front-proxy-ca", []string{"front-proxy-client.crt"}}
	// etcdAuthority issues the certificates of etcd's members, and of their clients.
	etcdAuthority = authority{"etcd/ca", "etcd-ca", []string{"etcd/server.crt", "etcd/peer.crt", "etcd/healthcheck-client.crt", "apiserver-etcd-client.crt"}}
	// clusterAuthority issues the certificates of API servers and their clients, which are everywhere.
	clusterAuthority = cluster{authority{"ca", "kubernetes", []string{"apiserver.crt", "apiserver-kubelet-client.crt"}}}
)

// path returns the authority's file below pki, without .crt.
func (a authority) path() string { return a.file }

func (a authority) create(cfg kubeadmapi.ClusterConfiguration, now time.Time) ([]byte, error) {
	cert, key, err := pkiutil.NewCertificateAuthority(&pkiutil.CertConfig{
		Config:   certutil.Config{CommonName: a.name, NotBefore: now.UTC().Add(-kubeadmconstants.CertificateBackdate)},
		NotAfter: now.UTC().Add(kubeadmconstants.CACertificateValidityPeriod), EncryptionAlgorithm: cfg.EncryptionAlgorithmType(),
	})
	if err != nil {
		return nil, err
	}
	text, err := keyutil.MarshalPrivateKeyToPEM(key)
	return append(pkiutil.EncodeCertPEM(cert), text...), err
}

// parse splits a staged key.
func (a authority) parse(staged []byte) (*x509.Certificate, []byte, error) {
	block, private := pem.Decode(staged)
	if block == nil {
		return nil, nil, errors.New("it is no authority in PEM")
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil || !cert.IsCA || cert.Subject.CommonName != a.name {
		return nil, nil, fmt.Errorf("its certificate is not that of an authority %s", a.name)
	}
	key, _, err := public(private)
	if err != nil {
		return nil, nil, err
	}
	if own, ok := cert.PublicKey.(interface{ Equal(crypto.PublicKey) bool }); !ok || !own.Equal(key) {
		return nil, nil, errors.New("its certificate is not that of its key")
	}
	return cert, private, nil
}

func (a authority) identify(staged []byte) (string, []byte, error) {
	cert, _, err := a.parse(staged)
	if err != nil {
		return "", nil, err
	}
	return sum(cert.Raw), pkiutil.EncodeCertPEM(cert), nil
}

func (a authority) list(pki string) ([]*x509.Certificate, error) {
	text, err := os.ReadFile(filepath.Join(pki, a.file+".crt"))
	if err != nil {
		return nil, err
	}
	list, err := certutil.ParseCertsPEM(text)
	if err != nil {
		return nil, fmt.Errorf("%s.crt: %w", a.file, err)
	}
	return list, nil
}

// signs reports whether ca has the private key on the disk, and has issued all certificates that are this authority's to issue.
func (a authority) signs(pki string, ca *x509.Certificate) (bool, error) {
	private, err := os.ReadFile(filepath.Join(pki, a.file+".key"))
	if err != nil {
		return false, err
	}
	defer clear(private)
	key, _, err := public(private)
	if err != nil {
		return false, fmt.Errorf("%s.key: %w", a.file, err)
	}
	if own, ok := ca.PublicKey.(interface{ Equal(crypto.PublicKey) bool }); !ok || !own.Equal(key) {
		return false, nil
	}
	for _, name := range a.issued {
		leaf, err := certutil.CertsFromFile(filepath.Join(pki, name))
		if err != nil || leaf[0].CheckSignatureFrom(ca) != nil {
			return false, err
		}
	}
	return true, nil
}

func (a authority) state(pki string) (out clusterinfo.KeyState, err error) {
	list, err := a.list(pki)
	if err != nil {
		return out, err
	}
	for _, ca := range list {
		out.Accepts = append(out.Accepts, sum(ca.Raw))
	}
	signs, err := a.signs(pki, list[0])
	if signs {
		out.Uses = out.Accepts[0]
	}
	return out, err
}

func (a authority) write(pki string, list []*x509.Certificate) error {
	var text []byte
	for _, ca := range list {
		text = append(text, pkiutil.EncodeCertPEM(ca)...)
	}
	return put(filepath.Join(pki, a.file+".crt"), text, 0o644)
}

func (a authority) accept(pki string, staged []byte) error {
	list, err := a.list(pki)
	if err != nil {
		return err
	}
	cert, _, err := a.parse(staged)
	if err != nil || slices.ContainsFunc(list, cert.Equal) {
		return err
	}
	return a.write(pki, append(list, cert))
}

// use replaces the authority. Its caller issues the certificates with it. If the machine goes down between the two files, it issues nothing until
// this call is repeated, because the renewal refuses certificates of another authority than the one on the disk.
func (a authority) use(pki string, staged []byte) error {
	list, err := a.list(pki)
	if err != nil {
		return err
	}
	cert, private, err := a.parse(staged)
	if err != nil {
		return err
	}
	if err := a.write(pki, front(list, cert.Equal)); err != nil {
		return err
	}
	return put(filepath.Join(pki, a.file+".key"), private, 0o600)
}

func (a authority) only(pki string) error {
	list, err := a.list(pki)
	if err != nil {
		return err
	}
	return a.write(pki, list[:1])
}

// cluster is the cluster's authority. Machines that are off, and pods, trust only the old one for days: until the last phase, a cross certificate leads from
// the new authority to it. Each control plane signs one with the old key while it still has that.
type cluster struct{ authority }

func (c cluster) accept(pki string, staged []byte) error {
	next, _, err := c.parse(staged)
	if err != nil {
		return err
	}
	if err := files.MayCross(pki, next); err != nil { // before anything is changed: no later phase can be undone
		return err
	}
	if err := files.WriteSigner(pki); err != nil { // before ca.crt has two certificates
		return err
	}
	return c.authority.accept(pki, staged)
}

func (c cluster) use(pki string, staged []byte) error {
	next, _, err := c.parse(staged)
	if err != nil {
		return err
	}
	if err := files.WriteCross(pki, next); err != nil { // before its key is replaced
		return err
	}
	if err := c.authority.use(pki, staged); err != nil {
		return err
	}
	return files.WriteSigner(pki)
}

func (c cluster) only(pki string) error {
	if err := c.authority.only(pki); err != nil {
		return err
	}
	// Without the old authority the cross certificate is not used, so it does no harm if a crash leaves it.
	if err := os.Remove(filepath.Join(pki, files.CrossFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
