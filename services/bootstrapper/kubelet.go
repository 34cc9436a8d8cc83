package bootstrapper

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/nodeaccess"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/pki"
	"github.com/muster-k8s/muster/trust/attest"
)

// The kubelet's certificates, each with its key: links to dated files, as the kubelet makes them.
const (
	clientPrefix   = "kubelet-client-"
	servingPrefix  = "kubelet-server-"
	kubeletClient  = kubeletPKI + "/" + clientPrefix + "current.pem"
	kubeletServing = kubeletPKI + "/" + servingPrefix + "current.pem"
)

// Shares of a certificate's life after which it is replaced before the kubelet starts. A running kubelet asks for the next one
// after 70 to 90 % of it, so a control plane leaves it what comes before: joinservice also lists what it hands out (J4), and what
// a control plane signs itself nobody does.
const (
	workerShare       = 2.0 / 3
	controlPlaneShare = 0.9
)

// lifeMargin is by how much a certificate may look longer than it lives: it begins before it is made.
const lifeMargin = 15 * time.Minute

// need is how much a kubelet needs other certificates than it has.
type need int

const (
	// needNone: it goes on with those that it has.
	needNone need = iota
	// needSoon: they serve it for now. Either they are near their end, or they live longer than any node's may.
	needSoon
	// needNow: it can't authenticate with what it has.
	needNow
)

// kubeletNeeds looks at the certificates on the disk, and says why they have to be replaced.
func (b *Bootstrapper) kubeletNeeds(node string, share float64) (need, string) {
	now := b.cfg.Now()
	leaf, err := kubeletCertificate(b.cfg.Root, kubeletClient)
	switch {
	case err != nil:
		return needNow, fmt.Sprintf("the kubelet's client certificate can't be used: %v", err)
	case leaf.Subject.CommonName != nodeUserPrefix+node:
		return needNow, fmt.Sprintf("the kubelet's client certificate is for %q", leaf.Subject.CommonName)
	case now.Before(leaf.NotBefore) || !now.Before(leaf.NotAfter):
		return needNow, fmt.Sprintf("the kubelet's client certificate is valid from %s to %s, and it is %s", stamp(leaf.NotBefore), stamp(leaf.NotAfter), stamp(now))
	case leaf.NotAfter.Sub(leaf.NotBefore) > nodeaccess.CertificateLife+lifeMargin: // J7
		return needSoon, fmt.Sprintf("the kubelet's client certificate lives until %s, and a node's lives %s at most", stamp(leaf.NotAfter), nodeaccess.CertificateLife)
	case late(leaf, now, share):
		return needSoon, fmt.Sprintf("the kubelet's client certificate ends at %s", stamp(leaf.NotAfter))
	}
	// Without a serving certificate the kubelet asks for one itself, if it is to have one.
	if leaf, err = kubeletCertificate(b.cfg.Root, kubeletServing); err == nil && late(leaf, now, share) {
		return needSoon, fmt.Sprintf("the kubelet's serving certificate ends at %s", stamp(leaf.NotAfter))
	}
	return needNone, ""
}

func late(c *x509.Certificate, now time.Time, share float64) bool {
	life := c.NotAfter.Sub(c.NotBefore)
	return now.After(c.NotBefore.Add(time.Duration(float64(life) * share)))
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// kubeletCertificate reads one of the two, and whether its key is there.
func kubeletCertificate(root, name string) (*x509.Certificate, error) {
	file := filepath.Join(root, name)
	if to, err := os.Readlink(file); err == nil { // absolute, so it would lead out of Root
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

// placeKubelet puts the kubelet's two certificates, with their keys, where it looks for them, and removes those of before: whoever finds one of
// them on the disk could use it for as long as it lives (J7).
func (b *Bootstrapper) placeKubelet(client, serving []byte) error {
	now := time.Now().Format("2006-01-02-15-04-05.000000")
	for prefix, content := range map[string][]byte{clientPrefix: client, servingPrefix: serving} {
		// As the kubelet's own certificate store does it: a dated file, and a link to it.
		dated := prefix + now + ".pem"
		if err := machine.WriteFile(b.on(path.Join(kubeletPKI, dated)), content, 0o600, 0o700); err != nil {
			return err
		}
		current := prefix + "current.pem"
		if err := machine.Link(b.on(path.Join(kubeletPKI, current)), path.Join(kubeletPKI, dated)); err != nil {
			return err
		}
		files, err := os.ReadDir(b.on(kubeletPKI))
		if err != nil {
			return err
		}
		for _, f := range files {
			if strings.HasPrefix(f.Name(), prefix) && f.Name() != dated && f.Name() != current {
				if err := os.Remove(filepath.Join(b.on(kubeletPKI), f.Name())); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// kubeletConf returns a kubeconfig of the kubelet at endpoint (HOST:PORT). It has no secret: it names the file that has one.
func kubeletConf(endpoint string, ca []byte) ([]byte, error) {
	const cluster, user = "default-cluster", "default-auth"
	c := clientcmdapi.NewConfig()
	c.Clusters[cluster] = &clientcmdapi.Cluster{Server: "https://" + endpoint, CertificateAuthorityData: ca}
	c.AuthInfos[user] = &clientcmdapi.AuthInfo{ClientCertificate: kubeletClient, ClientKey: kubeletClient}
	c.Contexts["default-context"] = &clientcmdapi.Context{Cluster: cluster, AuthInfo: user, Namespace: "default"}
	c.CurrentContext = "default-context"
	return clientcmd.Write(*c)
}

// pointKubeletConf has the kubelet's kubeconfig name the certificate in its place, and hold none of its own, as one that kubeadm
// wrote and no kubelet has changed since.
func (b *Bootstrapper) pointKubeletConf() error {
	text, err := os.ReadFile(b.on(kubeadm.KubeletConf))
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
	if u := c.AuthInfos[current.AuthInfo]; u.ClientCertificate == kubeletClient && u.ClientKey == kubeletClient && len(u.ClientCertificateData)+len(u.ClientKeyData) == 0 {
		return nil
	}
	c.AuthInfos[current.AuthInfo] = &clientcmdapi.AuthInfo{ClientCertificate: kubeletClient, ClientKey: kubeletClient}
	if text, err = clientcmd.Write(*c); err != nil {
		return err
	}
	return machine.WriteFile(b.on(kubeadm.KubeletConf), text, 0o600, 0o755)
}

// firstKubelet makes the first machine's authority and its kubelet's certificates, before the rest of kubeadm runs: it takes
// what is there, and would write a client certificate that is good for a year (J7).
func (b *Bootstrapper) firstKubelet(ctx context.Context, o *initOrder, config []byte) error {
	if err := machine.WriteFile(b.on(configFile), config, 0o600, 0o755); err != nil {
		return err
	}
	run, cancel := context.WithTimeout(ctx, b.cfg.Timing.Kubeadm)
	defer cancel()
	var tail kubeadm.Tail
	if err := b.cfg.Machine.Kubeadm(run, b.output(ctx, "kubeadm init phase certs ca", &tail), "init", "phase", "certs", "ca", "--config", b.on(configFile)); err != nil {
		return attest.Refuse(attestv1.Reason_REASON_KUBEADM_FAILED, "kubeadm init phase certs ca: %w\n%s", err, tail.String())
	}
	authority, err := pki.Load(b.on(pkiFolder))
	if err != nil {
		return err
	}
	conf, err := kubeletConf(kubeadm.LocalEndpoint(kubeadm.Node{Name: o.meta.Name, Addresses: o.meta.Addresses}), authority.PEM()) // as kubeadm has it
	if err != nil {
		return err
	}
	if err := machine.WriteFile(b.on(kubeadm.KubeletConf), conf, 0o600, 0o755); err != nil {
		return err
	}
	client, serving, err := b.signKubelet(authority, o.meta.Name, o.meta.Addresses)
	if err != nil {
		return err
	}
	return b.placeKubelet(client, serving)
}

// checkKubeconfig writes the kubelet's kubeconfig anew if it is not as a ticket would have it: another server, or another authority, would give the kubelet its pods, and a
// user can name a program to run (B8).
func (b *Bootstrapper) checkKubeconfig(ctx context.Context, meta *metadata.Machine, d *component.Desired) error {
	text, err := os.ReadFile(b.on(kubeadm.KubeletConf))
	if errors.Is(err, fs.ErrNotExist) {
		return nil // it is no node yet
	}
	if err != nil {
		return err
	}
	endpoint := d.Endpoint
	if meta.Role == metadata.RoleControlPlane {
		endpoint = kubeadm.LocalEndpoint(nodeOf(meta))
	}
	right, err := kubeletConf(endpoint, d.Authorities[component.CA])
	if err != nil {
		return err
	}
	if sameConnection(text, right) {
		return nil
	}
	if err := machine.WriteFile(b.on(kubeadm.KubeletConf), right, 0o600, 0o755); err != nil {
		return err
	}
	b.found(ctx, kubeadm.KubeletConf, "written anew")
	return nil
}

// sameConnection says whether two kubeconfigs lead to the same server, by the same authority, as the same user, and do nothing else.
func sameConnection(a, b []byte) bool {
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
