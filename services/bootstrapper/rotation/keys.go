package rotation

import (
	"bytes"
	"crypto"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
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
	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/objects/etcdencryption"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

// kind is one kind of key. All of its methods write by rename, and change nothing that is right already.
type kind interface {
	// create returns a new key, in the form of a staged file.
	create(cfg kubeadmapi.ClusterConfiguration, now time.Time) ([]byte, error)
	// identify returns the ID and the public part of a staged key. It refuses one that is damaged. Its errors contain no key (K3).
	identify(staged []byte) (id string, public []byte, err error)
	// state returns what the files below pki say; an error that wraps [fs.ErrNotExist]: the cluster has no such key.
	state(pki string) (clusterinfo.KeyState, error)
	// accept writes the files that accept the new key as the last one. use writes those that use it, and accept it as the first one. only writes those
	// that accept no other key than the one in use.
	accept(pki string, staged []byte) error
	use(pki string, staged []byte) error
	only(pki string) error
}

var kinds = map[clusterinfo.RotatedKey]kind{
	clusterinfo.ServiceAccountKey: serviceAccount{},
	clusterinfo.EncryptionKey:     encryption{},
	clusterinfo.FrontProxyCA:      frontProxy{},
}

// components are the static pods that read the files.
var components = map[clusterinfo.RotatedKey][]string{
	clusterinfo.ServiceAccountKey: {"kube-apiserver", "kube-controller-manager"},
	clusterinfo.EncryptionKey:     {"kube-apiserver"},
	clusterinfo.FrontProxyCA:      {"kube-apiserver", "kube-controller-manager"},
}

// Files returns the files below /etc/kubernetes/pki that a static pod reads at its start, and that a rotation replaces.
func Files(component string) []string {
	switch component {
	case "kube-apiserver":
		return []string{"sa.pub", "sa.key", "front-proxy-ca.crt", etcdencryption.Name}
	case "kube-controller-manager":
		return []string{"sa.key", "front-proxy-ca.crt"}
	}
	return nil
}

func sum(b []byte) string {
	s := sha256.Sum256(b)
	return hex.EncodeToString(s[:])
}

// put writes a file if its content differs.
func put(path string, content []byte, mode fs.FileMode) error {
	if is, err := os.ReadFile(path); err == nil && bytes.Equal(is, content) {
		return nil
	}
	return machine.WriteFile(path, content, mode, 0o755)
}

// front returns the list with the element at its front, last with the element at its end; neither changes the order of the others.
func front[T any](list []T, of func(T) bool) []T {
	i := slices.IndexFunc(list, of)
	if i < 0 {
		return list
	}
	return slices.Concat(list[i:i+1], list[:i], list[i+1:])
}

// serviceAccount is the key of service accounts' tokens: sa.key signs, all keys of sa.pub verify. A staged key is a private key in PEM.
//
// kubeadm takes the first key of sa.pub for that of sa.key when another control plane joins, and fails if their algorithms differ.
type serviceAccount struct{}

func (serviceAccount) create(cfg kubeadmapi.ClusterConfiguration, _ time.Time) ([]byte, error) {
	key, err := pkiutil.NewPrivateKey(cfg.EncryptionAlgorithmType())
	if err != nil {
		return nil, err
	}
	return keyutil.MarshalPrivateKeyToPEM(key)
}

// public returns the public half of a private key in PEM, with its ID.
func public(private []byte) (crypto.PublicKey, string, error) {
	parsed, err := keyutil.ParsePrivateKeyPEM(private)
	signer, ok := parsed.(crypto.Signer)
	if err != nil || !ok {
		return nil, "", errors.New("it is no private key in PEM") // the cause could contain the key
	}
	id, err := idOf(signer.Public())
	return signer.Public(), id, err
}

func idOf(key crypto.PublicKey) (string, error) {
	der, err := x509.MarshalPKIXPublicKey(key)
	return sum(der), err
}

func (serviceAccount) identify(staged []byte) (string, []byte, error) {
	key, id, err := public(staged)
	if err != nil {
		return "", nil, err
	}
	text, err := pkiutil.EncodePublicKeyPEM(key)
	return id, text, err
}

// verifiers returns the keys of sa.pub.
func (serviceAccount) verifiers(pki string) ([]crypto.PublicKey, []string, error) {
	text, err := os.ReadFile(filepath.Join(pki, "sa.pub"))
	if err != nil {
		return nil, nil, err
	}
	parsed, err := keyutil.ParsePublicKeysPEM(text)
	if err != nil {
		return nil, nil, fmt.Errorf("sa.pub: %w", err)
	}
	var list []crypto.PublicKey
	var ids []string
	for _, key := range parsed {
		id, err := idOf(key)
		if err != nil {
			return nil, nil, fmt.Errorf("sa.pub: %w", err)
		}
		if !slices.Contains(ids, id) {
			list, ids = append(list, key), append(ids, id)
		}
	}
	return list, ids, nil
}

func (s serviceAccount) state(pki string) (out clusterinfo.KeyState, err error) {
	if _, out.Accepts, err = s.verifiers(pki); err != nil {
		return out, err
	}
	text, err := os.ReadFile(filepath.Join(pki, "sa.key"))
	if err != nil {
		return out, err
	}
	defer clear(text)
	_, out.Uses, err = public(text)
	if err != nil {
		err = fmt.Errorf("sa.key: %w", err)
	}
	return out, err
}

func (serviceAccount) write(pki string, list []crypto.PublicKey) error {
	var text []byte
	for _, key := range list {
		block, err := pkiutil.EncodePublicKeyPEM(key)
		if err != nil {
			return err
		}
		text = append(text, block...)
	}
	return put(filepath.Join(pki, "sa.pub"), text, 0o644)
}

func (s serviceAccount) accept(pki string, staged []byte) error {
	list, ids, err := s.verifiers(pki)
	if err != nil {
		return err
	}
	key, id, err := public(staged)
	if err != nil || slices.Contains(ids, id) {
		return err
	}
	return s.write(pki, append(list, key))
}

func (s serviceAccount) use(pki string, staged []byte) error {
	list, _, err := s.verifiers(pki)
	if err != nil {
		return err
	}
	_, id, err := public(staged)
	if err != nil {
		return err
	}
	is := func(key crypto.PublicKey) bool { own, err := idOf(key); return err == nil && own == id }
	if err := s.write(pki, front(list, is)); err != nil {
		return err
	}
	return put(filepath.Join(pki, "sa.key"), staged, 0o600)
}

func (s serviceAccount) only(pki string) error {
	text, err := os.ReadFile(filepath.Join(pki, "sa.key"))
	if err != nil {
		return err
	}
	defer clear(text)
	key, _, err := public(text)
	if err != nil {
		return err
	}
	return s.write(pki, []crypto.PublicKey{key})
}

// encryption is the key of Secrets in etcd: API servers encrypt with the first key of encryption.yaml, and decrypt with all. A staged key is one of them, in
// YAML.
type encryption struct{}

func (encryption) create(kubeadmapi.ClusterConfiguration, time.Time) ([]byte, error) {
	return yaml.Marshal(etcdencryption.NewKey()) //nolint:gosec // it is written to the folder of keys
}

func (encryption) parse(staged []byte) (k etcdencryption.Key, id string, err error) {
	if err := yaml.UnmarshalStrict(staged, &k); err != nil {
		return k, "", errors.New("it is no key for the encryption configuration") // the cause could contain the key
	}
	id, err = k.ID()
	return k, id, err
}

func (e encryption) identify(staged []byte) (string, []byte, error) {
	_, id, err := e.parse(staged)
	return id, nil, err
}

func (encryption) list(pki string) ([]etcdencryption.Key, error) {
	text, err := os.ReadFile(filepath.Join(pki, etcdencryption.Name))
	if err != nil {
		return nil, err
	}
	defer clear(text)
	return etcdencryption.Parse(text)
}

func (e encryption) state(pki string) (out clusterinfo.KeyState, err error) {
	list, err := e.list(pki)
	if err != nil {
		return out, err
	}
	for _, k := range list {
		id, err := k.ID()
		if err != nil {
			return out, err
		}
		out.Accepts = append(out.Accepts, id)
	}
	out.Uses = out.Accepts[0]
	return out, nil
}

func (encryption) write(pki string, list []etcdencryption.Key) error {
	return put(filepath.Join(pki, etcdencryption.Name), etcdencryption.Format(list), 0o600)
}

func (e encryption) accept(pki string, staged []byte) error {
	list, err := e.list(pki)
	if err != nil {
		return err
	}
	k, _, err := e.parse(staged)
	if err != nil || slices.Contains(list, k) {
		return err
	}
	return e.write(pki, append(list, k))
}

func (e encryption) use(pki string, staged []byte) error {
	list, err := e.list(pki)
	if err != nil {
		return err
	}
	k, _, err := e.parse(staged)
	if err != nil {
		return err
	}
	return e.write(pki, front(list, func(other etcdencryption.Key) bool { return other == k }))
}

func (e encryption) only(pki string) error {
	list, err := e.list(pki)
	if err != nil {
		return err
	}
	return e.write(pki, list[:1])
}

// frontProxy is the authority of the certificate with which API servers authenticate to aggregated ones: front-proxy-ca.key has signed that
// certificate, all certificates of front-proxy-ca.crt verify it. The first one belongs to the key: kubeadm and the renewal take no other. A staged key is
// the certificate and its private key, in PEM.
type frontProxy struct{}

func (frontProxy) create(cfg kubeadmapi.ClusterConfiguration, now time.Time) ([]byte, error) {
	cert, key, err := pkiutil.NewCertificateAuthority(&pkiutil.CertConfig{
		Config:   certutil.Config{CommonName: "front-proxy-ca", NotBefore: now.UTC().Add(-kubeadmconstants.CertificateBackdate)},
		NotAfter: now.UTC().Add(kubeadmconstants.CACertificateValidityPeriod), EncryptionAlgorithm: cfg.EncryptionAlgorithmType(),
	})
	if err != nil {
		return nil, err
	}
	text, err := keyutil.MarshalPrivateKeyToPEM(key)
	return append(pkiutil.EncodeCertPEM(cert), text...), err
}

// parse splits a staged key.
func (frontProxy) parse(staged []byte) (*x509.Certificate, []byte, error) {
	block, private := pem.Decode(staged)
	if block == nil {
		return nil, nil, errors.New("it is no authority in PEM")
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil || !cert.IsCA {
		return nil, nil, errors.New("its certificate is not that of an authority")
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

func (p frontProxy) identify(staged []byte) (string, []byte, error) {
	cert, _, err := p.parse(staged)
	if err != nil {
		return "", nil, err
	}
	return sum(cert.Raw), pkiutil.EncodeCertPEM(cert), nil
}

func (frontProxy) list(pki string) ([]*x509.Certificate, error) {
	text, err := os.ReadFile(filepath.Join(pki, "front-proxy-ca.crt"))
	if err != nil {
		return nil, err
	}
	list, err := certutil.ParseCertsPEM(text)
	if err != nil {
		return nil, fmt.Errorf("front-proxy-ca.crt: %w", err)
	}
	return list, nil
}

// signs reports whether an authority has the private key on the disk, and has signed the API server's certificate.
func (frontProxy) signs(pki string, ca *x509.Certificate) (bool, error) {
	private, err := os.ReadFile(filepath.Join(pki, "front-proxy-ca.key"))
	if err != nil {
		return false, err
	}
	defer clear(private)
	key, _, err := public(private)
	if err != nil {
		return false, fmt.Errorf("front-proxy-ca.key: %w", err)
	}
	client, err := certutil.CertsFromFile(filepath.Join(pki, "front-proxy-client.crt"))
	if err != nil {
		return false, err
	}
	own, ok := ca.PublicKey.(interface{ Equal(crypto.PublicKey) bool })
	return ok && own.Equal(key) && client[0].CheckSignatureFrom(ca) == nil, nil
}

func (p frontProxy) state(pki string) (out clusterinfo.KeyState, err error) {
	list, err := p.list(pki)
	if err != nil {
		return out, err
	}
	for _, ca := range list {
		out.Accepts = append(out.Accepts, sum(ca.Raw))
	}
	signs, err := p.signs(pki, list[0])
	if signs {
		out.Uses = out.Accepts[0]
	}
	return out, err
}

func (frontProxy) write(pki string, list []*x509.Certificate) error {
	var text []byte
	for _, ca := range list {
		text = append(text, pkiutil.EncodeCertPEM(ca)...)
	}
	return put(filepath.Join(pki, "front-proxy-ca.crt"), text, 0o644)
}

func (p frontProxy) accept(pki string, staged []byte) error {
	list, err := p.list(pki)
	if err != nil {
		return err
	}
	cert, _, err := p.parse(staged)
	if err != nil || slices.ContainsFunc(list, cert.Equal) {
		return err
	}
	return p.write(pki, append(list, cert))
}

// use replaces the authority. Its caller issues the API server's certificate with it. A machine that goes down between the two files issues nothing until
// this was repeated: the renewal refuses a certificate whose authority is not the one on the disk.
func (p frontProxy) use(pki string, staged []byte) error {
	list, err := p.list(pki)
	if err != nil {
		return err
	}
	cert, private, err := p.parse(staged)
	if err != nil {
		return err
	}
	if err := p.write(pki, front(list, cert.Equal)); err != nil {
		return err
	}
	return put(filepath.Join(pki, "front-proxy-ca.key"), private, 0o600)
}

func (p frontProxy) only(pki string) error {
	list, err := p.list(pki)
	if err != nil {
		return err
	}
	return p.write(pki, list[:1])
}
