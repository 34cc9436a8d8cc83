package bootstrapper

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
	"path"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/trust/attest"
)

// apiServerPod is where kubeadm places a control plane's API server.
const apiServerPod = "/etc/kubernetes/manifests/kube-apiserver.yaml"

// isControlPlane says whether this machine is a control plane as kubeadm makes one, under the name of its metadata, and
// whether kubelet and administrator belong to the same cluster. It keeps an owner from adopting the wrong machine; it
// proves nothing of the cluster, which nobody attested who made it.
func (b *Bootstrapper) isControlPlane(o *initOrder) error {
	refuse := func(format string, args ...any) error {
		return attest.Refuse(attestv1.Reason_REASON_INIT_NOT_ALLOWED, "this machine is no control plane that could be adopted: "+format, args...)
	}
	if _, err := os.Stat(b.on(apiServerPod)); err != nil {
		return refuse("%w", err)
	}
	admin, err := b.kubeconfig(adminConf)
	if err != nil {
		return refuse("%w", err)
	}
	kubelet, err := b.kubeconfig(kubeadm.KubeletConf)
	if err != nil {
		return refuse("%w", err)
	}
	if len(admin.CAData) == 0 || !bytes.Equal(bytes.TrimSpace(admin.CAData), bytes.TrimSpace(kubelet.CAData)) {
		return refuse("%s and %s name different authorities", adminConf, kubeadm.KubeletConf)
	}
	if want := "https://" + o.request.GetControlPlaneEndpoint(); admin.Host != want {
		return refuse("%s leads to %s, not to %s", adminConf, admin.Host, want)
	}
	current := path.Join(kubeletPKI, "kubelet-client-current.pem")
	text, err := os.ReadFile(b.on(current))
	if err != nil {
		return refuse("%w", err)
	}
	pair, err := tls.X509KeyPair(text, text)
	if err != nil {
		return refuse("%s: %w", current, err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(admin.CAData)
	if _, err := pair.Leaf.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
		return refuse("%s: %w", current, err)
	}
	if have, want := pair.Leaf.Subject.CommonName, "system:node:"+o.meta.Name; have != want {
		return refuse("its kubelet is %s, and its metadata say %s", have, want)
	}
	return nil
}

func (b *Bootstrapper) kubeconfig(name string) (*rest.Config, error) {
	text, err := os.ReadFile(b.on(name))
	if err != nil {
		return nil, err
	}
	c, err := clientcmd.RESTConfigFromKubeConfig(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return c, nil
}
