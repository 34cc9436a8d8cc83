// Package renewal renews the certificates of a control plane: those that kubeadm issues for a year to the API server, etcd and their clients, and those
// in the kubeconfigs of the administrator, the controller manager and the scheduler.
//
// A machine renews its own certificates with the authorities on its disk and with kubeadm's code, after two thirds of their life. New certificates are
// prepared beside the old ones, and one rename makes them the machine's. A crash at any step leaves the old ones, or new ones that the next start puts
// in place. Then the static pods restart one after another, on one control plane after another: the machine holds the lease for joining control planes
// meanwhile (J8). Expired certificates are renewed without the lease, since a cluster whose control planes were all off has no API server for it.
package renewal

import (
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/tools/clientcmd"
)

// Where a control plane's files are.
const (
	folder    = "/etc/kubernetes"
	pki       = folder + "/pki"
	manifests = folder + "/manifests"
	// Folder holds renewed certificates and keys until they are in place and in use.
	Folder = folder + "/muster-renewal"
)

// file is one certificate of a control plane. Its name is kubeadm's.
type file struct {
	name string
	// certificate and key are relative to [folder]; a kubeconfig contains both, so its key is empty.
	certificate, key string
	// ca is the authority's certificate.
	ca string
	// component is the static pod that has to restart to use it; empty if there is none.
	component string
}

const (
	clusterCA    = "pki/ca.crt"
	etcdCA       = "pki/etcd/ca.crt"
	frontProxyCA = "pki/front-proxy-ca.crt"
)

// files lists the certificates of a control plane that its machine renews.
var files = []file{
	{"etcd-server", "pki/etcd/server.crt", "pki/etcd/server.key", etcdCA, "etcd"},
	{"etcd-peer", "pki/etcd/peer.crt", "pki/etcd/peer.key", etcdCA, "etcd"},
	{"etcd-healthcheck-client", "pki/etcd/healthcheck-client.crt", "pki/etcd/healthcheck-client.key", etcdCA, "etcd"},
	{"apiserver", "pki/apiserver.crt", "pki/apiserver.key", clusterCA, "kube-apiserver"},
	{"apiserver-kubelet-client", "pki/apiserver-kubelet-client.crt", "pki/apiserver-kubelet-client.key", clusterCA, "kube-apiserver"},
	{"apiserver-etcd-client", "pki/apiserver-etcd-client.crt", "pki/apiserver-etcd-client.key", etcdCA, "kube-apiserver"},
	{"front-proxy-client", "pki/front-proxy-client.crt", "pki/front-proxy-client.key", frontProxyCA, "kube-apiserver"},
	{"controller-manager.conf", "controller-manager.conf", "", clusterCA, "kube-controller-manager"},
	{"scheduler.conf", "scheduler.conf", "", clusterCA, "kube-scheduler"},
	{"admin.conf", "admin.conf", "", clusterCA, ""},
	{"super-admin.conf", "super-admin.conf", "", clusterCA, ""},
}

// components lists the static pods in the order in which they restart: each before those that depend on it.
var components = []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"}

// Certificate is one certificate of this control plane.
type Certificate struct {
	Name      string    `json:"name"`
	NotBefore time.Time `json:"notBefore"`
	NotAfter  time.Time `json:"notAfter"`
	// Unreadable is why the certificate can't be read; the times are zero then.
	Unreadable string `json:"unreadable,omitempty"`
}

// Due reports whether two thirds of the certificate's life have passed, or it is invalid now.
func (c Certificate) Due(now time.Time) bool {
	return c.invalid(now) || !now.Before(c.DueAt())
}

// DueAt returns the time when two thirds of the certificate's life have passed.
func (c Certificate) DueAt() time.Time { return c.NotBefore.Add(c.NotAfter.Sub(c.NotBefore) / 3 * 2) }

// slack is by how much a certificate may begin later than this machine's clock.
const slack = time.Hour

// invalid reports whether the certificate has expired, or begins more than an hour from now: it was issued while the clock was far ahead.
func (c Certificate) invalid(now time.Time) bool {
	return c.Unreadable == "" && (now.After(c.NotAfter) || now.Before(c.NotBefore.Add(-slack)))
}

// IsControlPlane reports whether the machine below root has the key of the cluster's authority. If the disk can't be read, it returns an error
// instead of false, because a worker does not make a control plane's checks (B7).
func IsControlPlane(root string) (bool, error) {
	_, err := os.Stat(filepath.Join(root, pki, "ca.key"))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// Read returns the certificates of the control plane below root. It leaves out missing files: super-admin.conf on all control planes but the first, and
// all files on a worker.
func Read(root string) []Certificate {
	var out []Certificate
	for _, f := range files {
		leaf, err := load(filepath.Join(root, folder, f.certificate))
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			out = append(out, Certificate{Name: f.name, Unreadable: err.Error()})
		default:
			out = append(out, Certificate{Name: f.name, NotBefore: leaf.NotBefore, NotAfter: leaf.NotAfter})
		}
	}
	return out
}

// load reads the first certificate of a PEM file, or that of the user of a kubeconfig's current context. Its errors contain no text of the file, which
// may have a key (K3).
func load(path string) (*x509.Certificate, error) {
	chain, err := loadChain(path)
	if err != nil {
		return nil, err
	}
	return chain[0], nil
}

// loadChain is load with the certificates that follow the first one.
func loadChain(path string) (chain []*x509.Certificate, err error) {
	text, err := os.ReadFile(filepath.Clean(path))
	if err != nil {
		return nil, err
	}
	defer clear(text)
	if filepath.Ext(path) == ".conf" {
		c, err := clientcmd.Load(text)
		if err != nil {
			return nil, fmt.Errorf("%s is no kubeconfig", filepath.Base(path))
		}
		current := c.Contexts[c.CurrentContext]
		if current == nil || c.AuthInfos[current.AuthInfo] == nil {
			return nil, fmt.Errorf("%s has no user", filepath.Base(path))
		}
		text = c.AuthInfos[current.AuthInfo].ClientCertificateData
	}
	for {
		block, rest := pem.Decode(text)
		if block == nil || block.Type != "CERTIFICATE" {
			break
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", filepath.Base(path), err)
		}
		chain, text = append(chain, c), rest
	}
	if len(chain) == 0 {
		return nil, fmt.Errorf("%s has no certificate", filepath.Base(path))
	}
	return chain, nil
}
