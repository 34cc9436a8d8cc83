// Package byhand writes the configurations with which kubeadm makes a cluster of a lab's machines without Muster: as
// a reference for Muster, and to test the lab.
package byhand

import (
	"bytes"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"

	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/lab/driver"
)

// Token is kubeadm's bootstrap token, which Muster's clusters do not have.
const Token = "abcdef.0123456789abcdef"

// Node is a machine that is to become a node.
type Node struct {
	Name    string
	Address string // IP
}

type object = map[string]any

// Init returns the configuration of `kubeadm init`. image is the machine's /etc/muster/image.yaml, which has the
// settings for the lab's machines.
func Init(image []byte, n Node) ([]byte, error) {
	var conf struct {
		Kubeadm struct {
			CRISocket              string
			IgnorePreflightErrors  []string
			ClusterConfiguration   object
			KubeletConfiguration   object
			KubeProxyConfiguration object
		}
	}
	if err := yaml.Unmarshal(image, &conf); err != nil {
		return nil, fmt.Errorf("image.yaml: %w", err)
	}
	k := conf.Kubeadm
	if k.ClusterConfiguration == nil || k.KubeletConfiguration == nil || k.KubeProxyConfiguration == nil {
		return nil, errors.New("image.yaml has no fragments for kubeadm")
	}
	with := func(o object, apiVersion, kind string, more object) object {
		o["apiVersion"], o["kind"] = apiVersion, kind
		for key, v := range more {
			o[key] = v
		}
		return o
	}
	return documents(
		with(object{}, "kubeadm.k8s.io/v1beta4", "InitConfiguration", object{
			"bootstrapTokens":  []object{{"token": Token}},
			"localAPIEndpoint": object{"advertiseAddress": n.Address},
			"nodeRegistration": registration(n),
			"timeouts":         timeouts(),
		}),
		with(k.ClusterConfiguration, "kubeadm.k8s.io/v1beta4", "ClusterConfiguration", object{
			"kubernetesVersion":    "v1.36.1",
			"controlPlaneEndpoint": driver.ControlPlaneEndpoint,
			"networking":           object{"podSubnet": driver.PodSubnet, "serviceSubnet": driver.ServiceSubnet},
		}),
		with(k.KubeletConfiguration, "kubelet.config.k8s.io/v1beta1", "KubeletConfiguration", nil),
		with(k.KubeProxyConfiguration, "kubeproxy.config.k8s.io/v1alpha1", "KubeProxyConfiguration", nil),
	)
}

// Join returns the configuration of `kubeadm join` with a bootstrap token. ca is the
// cluster's CA certificate, PEM.
func Join(ca []byte, n Node) ([]byte, error) {
	block, _ := pem.Decode(ca)
	if block == nil {
		return nil, errors.New("the cluster's CA is not PEM")
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("the cluster's CA: %w", err)
	}
	pin := sha256.Sum256(cert.RawSubjectPublicKeyInfo)
	return documents(object{
		"apiVersion": "kubeadm.k8s.io/v1beta4", "kind": "JoinConfiguration",
		"discovery": object{"bootstrapToken": object{
			"apiServerEndpoint": driver.ControlPlaneEndpoint, "token": Token, "caCertHashes": []string{"sha256:" + hex.EncodeToString(pin[:])},
		}},
		"nodeRegistration": registration(n),
		"timeouts":         timeouts(),
	})
}

// timeouts are long enough for a computer that does other things too.
func timeouts() object {
	const long = "20m0s"
	return object{"controlPlaneComponentHealthCheck": long, "discovery": long, "etcdAPICall": long, "kubeletHealthCheck": long, "kubernetesAPICall": long, "tlsBootstrap": long}
}

func registration(n Node) object {
	return object{
		"name": n.Name, "criSocket": "unix:///run/containerd/containerd.sock", "ignorePreflightErrors": []string{"SystemVerification"},
		"kubeletExtraArgs": []object{{"name": "node-ip", "value": n.Address}},
	}
}

func documents(objects ...object) ([]byte, error) {
	var all [][]byte
	for _, o := range objects {
		y, err := yaml.Marshal(o)
		if err != nil {
			return nil, err
		}
		all = append(all, y)
	}
	return bytes.Join(all, []byte("---\n")), nil
}
