package bootstrapper

import (
	"bytes"
	"context"
	"crypto/x509"
	"fmt"
	"os"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

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
	admin, err := b.clusterOf(adminConf)
	if err != nil {
		return refuse("%w", err)
	}
	kubelet, err := b.clusterOf(kubeadm.KubeletConf)
	if err != nil {
		return refuse("%w", err)
	}
	if len(admin.CertificateAuthorityData) == 0 || !bytes.Equal(bytes.TrimSpace(admin.CertificateAuthorityData), bytes.TrimSpace(kubelet.CertificateAuthorityData)) {
		return refuse("%s and %s name different authorities", adminConf, kubeadm.KubeletConf)
	}
	if want := "https://" + o.request.GetControlPlaneEndpoint(); admin.Server != want {
		return refuse("%s leads to %s, not to %s", adminConf, admin.Server, want)
	}
	leaf, err := kubeletCertificate(b.cfg.Root, kubeletClient)
	if err != nil {
		return refuse("%w", err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(admin.CertificateAuthorityData)
	at := b.cfg.Now()
	if b.lock.record().Locked() && at.After(leaf.NotAfter) {
		at = leaf.NotAfter // B3: an adoption that was cut off may have signed it, for a day, and been off for longer: serveAgain signs the next
	}
	if _, err := leaf.Verify(x509.VerifyOptions{Roots: roots, CurrentTime: at, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
		return refuse("%s: %w", kubeletClient, err)
	}
	if have, want := leaf.Subject.CommonName, "system:node:"+o.meta.Name; have != want {
		return refuse("its kubelet is %s, and its metadata say %s", have, want)
	}
	return nil
}

// serveAdopted has the API server of an adopted control plane run. The machine was one before, without a record of the cluster's epoch: an
// older copy of its disk is found from here on (B7).
func (b *Bootstrapper) serveAdopted(ctx context.Context) error {
	if err := b.beginEpoch(ctx); err != nil {
		return err
	}
	return b.serveAgain(ctx)
}

// clusterOf returns the cluster that a kubeconfig's current context leads to, with its authority. The files that the user's certificate
// and key are in need not be there.
func (b *Bootstrapper) clusterOf(name string) (*clientcmdapi.Cluster, error) {
	text, err := os.ReadFile(b.on(name))
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
		if out.CertificateAuthorityData, err = os.ReadFile(b.on(out.CertificateAuthority)); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	return out, nil
}
