// Package kubelet keeps the files of a node's kubelet: its two certificates with their keys, and its kubeconfig.
package kubelet

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

// These are the kubelet's certificates, each with its key: links to dated files, as the kubelet makes them.
const (
	clientPrefix  = "kubelet-client-"
	servingPrefix = "kubelet-server-"
	ClientFile    = machine.KubeletPKI + "/" + clientPrefix + "current.pem"
	ServingFile   = machine.KubeletPKI + "/" + servingPrefix + "current.pem"
)

// Certificate returns one of the two, and whether its key exists.
func Certificate(root, name string) (*x509.Certificate, error) {
	file := filepath.Join(root, name)
	if to, err := os.Readlink(file); err == nil { // an absolute link would lead out of root
		file = filepath.Join(filepath.Dir(file), filepath.Base(to))
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	defer clear(text) // K3
	pair, err := tls.X509KeyPair(text, text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return pair.Leaf, nil
}

// Place writes the kubelet's two certificates, with their keys, to the kubelet's paths, and removes the earlier ones: an attacker who finds one of them
// on the disk could use it until it expires (J7).
func Place(root string, client, serving []byte) error {
	now := time.Now().Format("2006-01-02-15-04-05.000000")
	for prefix, content := range map[string][]byte{clientPrefix: client, servingPrefix: serving} {
		// This follows the kubelet's own certificate store: a dated file, and a link to it.
		dated := prefix + now + ".pem"
		if err := machine.WriteFile(filepath.Join(root, path.Join(machine.KubeletPKI, dated)), content, 0o600, 0o700); err != nil {
			return err
		}
		current := prefix + "current.pem"
		if err := machine.Link(filepath.Join(root, path.Join(machine.KubeletPKI, current)), path.Join(machine.KubeletPKI, dated)); err != nil {
			return err
		}
		files, err := os.ReadDir(filepath.Join(root, machine.KubeletPKI))
		if err != nil {
			return err
		}
		for _, f := range files {
			if strings.HasPrefix(f.Name(), prefix) && f.Name() != dated && f.Name() != current {
				if err := os.Remove(filepath.Join(filepath.Join(root, machine.KubeletPKI), f.Name())); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// Kubeconfig returns a kubeconfig of the kubelet at endpoint (HOST:PORT). It has no secret: it names the file that has the key.
func Kubeconfig(endpoint string, ca []byte) ([]byte, error) {
	const cluster, user = "default-cluster", "default-auth"
	c := clientcmdapi.NewConfig()
	c.Clusters[cluster] = &clientcmdapi.Cluster{Server: "https://" + endpoint, CertificateAuthorityData: ca}
	c.AuthInfos[user] = &clientcmdapi.AuthInfo{ClientCertificate: ClientFile, ClientKey: ClientFile}
	c.Contexts["default-context"] = &clientcmdapi.Context{Cluster: cluster, AuthInfo: user, Namespace: "default"}
	c.CurrentContext = "default-context"
	return clientcmd.Write(*c)
}

// PointKubeconfig makes the kubelet's kubeconfig refer to the certificate at its path. A kubeconfig that kubeadm wrote has a certificate of its own
// until a kubelet changes it.
func PointKubeconfig(root string) error {
	text, err := os.ReadFile(filepath.Join(root, kubeadm.KubeletConf))
	if err != nil {
		return err
	}
	c, err := clientcmd.Load(text)
	if err != nil {
		return fmt.Errorf("%s: %w", kubeadm.KubeletConf, err)
	}
	current := c.Contexts[c.CurrentContext]
	if current == nil || c.AuthInfos[current.AuthInfo] == nil {
		return fmt.Errorf("%s: it has no current context with a user", kubeadm.KubeletConf)
	}
	if u := c.AuthInfos[current.AuthInfo]; u.ClientCertificate == ClientFile && u.ClientKey == ClientFile && len(u.ClientCertificateData)+len(u.ClientKeyData) == 0 {
		return nil
	}
	c.AuthInfos[current.AuthInfo] = &clientcmdapi.AuthInfo{ClientCertificate: ClientFile, ClientKey: ClientFile}
	if text, err = clientcmd.Write(*c); err != nil {
		return err
	}
	return machine.WriteFile(filepath.Join(root, kubeadm.KubeletConf), text, 0o600, 0o755)
}

// ClusterOf returns the cluster of a kubeconfig's current context, with its authority. The files with the user's certificate and key need not exist.
func ClusterOf(root, name string) (*clientcmdapi.Cluster, error) {
	text, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		return nil, err
	}
	c, err := clientcmd.Load(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	current := c.Contexts[c.CurrentContext]
	if current == nil || c.Clusters[current.Cluster] == nil {
		return nil, fmt.Errorf("%s: it has no current context with a cluster", name)
	}
	out := c.Clusters[current.Cluster]
	if len(out.CertificateAuthorityData) == 0 && out.CertificateAuthority != "" {
		if out.CertificateAuthorityData, err = os.ReadFile(filepath.Join(root, out.CertificateAuthority)); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	return out, nil
}

// Authorities returns the authorities of a kubeconfig's current context, in PEM; nil if it has none in it.
func Authorities(kubeconfig []byte) []byte {
	c, err := clientcmd.Load(kubeconfig)
	if err != nil || c.Contexts[c.CurrentContext] == nil || c.Clusters[c.Contexts[c.CurrentContext].Cluster] == nil {
		return nil
	}
	return c.Clusters[c.Contexts[c.CurrentContext].Cluster].CertificateAuthorityData
}

// WithAuthorities returns a kubeconfig with other authorities in its current context.
func WithAuthorities(kubeconfig, ca []byte) ([]byte, error) {
	c, err := clientcmd.Load(kubeconfig)
	if err != nil {
		return nil, errors.New("it is no kubeconfig") // the cause could contain a key
	}
	if c.Contexts[c.CurrentContext] == nil || c.Clusters[c.Contexts[c.CurrentContext].Cluster] == nil {
		return nil, errors.New("it has no current context with a cluster")
	}
	c.Clusters[c.Contexts[c.CurrentContext].Cluster].CertificateAuthorityData = ca
	return clientcmd.Write(*c)
}

// SameConnection reports whether two kubeconfigs have the same server, the same authority and the same user, and nothing else.
func SameConnection(a, b []byte) bool {
	of := func(text []byte) (*clientcmdapi.Cluster, *clientcmdapi.AuthInfo) {
		c, err := clientcmd.Load(text)
		if err != nil {
			return nil, nil
		}
		current := c.Contexts[c.CurrentContext]
		if current == nil {
			return nil, nil
		}
		cluster := c.Clusters[current.Cluster]
		if cluster != nil {
			cluster.CertificateAuthorityData = bytes.TrimSpace(cluster.CertificateAuthorityData)
		}
		return cluster, c.AuthInfos[current.AuthInfo]
	}
	clusterA, userA := of(a)
	clusterB, userB := of(b)
	return clusterA != nil && userA != nil && equality.Semantic.DeepEqual(clusterA, clusterB) && equality.Semantic.DeepEqual(userA, userB)
}
