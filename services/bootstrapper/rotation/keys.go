package rotation

import (
	"bytes"
	"crypto"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"k8s.io/client-go/util/keyutil"
	kubeadmapi "k8s.io/kubernetes/cmd/kubeadm/app/apis/kubeadm"
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
	// state returns the state of the files below pki. It returns an error that wraps [fs.ErrNotExist] if the cluster has no
	// such key.
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
	clusterinfo.FrontProxyCA:      frontProxy,
	clusterinfo.EtcdCA:            etcdAuthority,
	clusterinfo.ClusterCA:         clusterAuthority,
}

// components are the static pods that read the files, each before those that depend on it.
var components = map[clusterinfo.RotatedKey][]string{
	clusterinfo.ServiceAccountKey: {"kube-apiserver", "kube-controller-manager"},
	clusterinfo.EncryptionKey:     {"kube-apiserver"},
	clusterinfo.FrontProxyCA:      {"kube-apiserver", "kube-controller-manager"},
	clusterinfo.EtcdCA:            {"etcd", "kube-apiserver"},
	clusterinfo.ClusterCA:         {"kube-apiserver", "kube-controller-manager", "kube-scheduler"},
}

// Files returns the files below /etc/kubernetes/pki that a static pod reads at its start, and that a rotation replaces.
func Files(component string) []string {
	switch component {
	case "etcd":
		return []string{"etcd/ca.crt"}
	case "kube-apiserver":
		return []string{"sa.pub", "sa.key", "front-proxy-ca.crt", etcdencryption.Name, "etcd/ca.crt", "ca.crt"}
	case "kube-controller-manager":
		return []string{"sa.key", "front-proxy-ca.crt", "ca.crt"}
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
