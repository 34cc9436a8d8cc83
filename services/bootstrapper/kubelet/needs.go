package kubelet

import (
	"crypto/x509"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"k8s.io/client-go/util/cert"

	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

// These are the shares of a certificate's life after which it is replaced before the kubelet starts. A running kubelet requests the next one after 70 to
// 90 % of it, and a control plane leaves that to it: joinservice also lists the certificates that it issues (J4), and those that a control plane signs
// itself are not listed.
const (
	WorkerShare       = 2.0 / 3
	ControlPlaneShare = 0.9
)

// lifeMargin is by how much a certificate's validity may exceed its life: it begins before it is made.
const lifeMargin = 15 * time.Minute

// Need is how urgently a kubelet needs other certificates.
type Need int

const (
	// NeedNone means that its certificates are good.
	NeedNone Need = iota
	// NeedSoon means that it can still use them; they are near their end, or valid for longer than a node's may be.
	NeedSoon
	// NeedNow means that it can't authenticate with them.
	NeedNow
)

// Needs checks the certificates on the disk, and returns why they have to be replaced.
func Needs(root, node string, share float64, now time.Time) (Need, string) {
	leaf, err := Certificate(root, ClientFile)
	switch {
	case err != nil:
		return NeedNow, fmt.Sprintf("the kubelet's client certificate can't be used: %v", err)
	case leaf.Subject.CommonName != clusterinfo.NodeUserPrefix+node:
		return NeedNow, fmt.Sprintf("the kubelet's client certificate is for %q", leaf.Subject.CommonName)
	case now.Before(leaf.NotBefore) || !now.Before(leaf.NotAfter):
		return NeedNow, fmt.Sprintf("the kubelet's client certificate is valid from %s to %s, and it is %s", stamp(leaf.NotBefore), stamp(leaf.NotAfter), stamp(now))
	case !trusted(root, leaf):
		return NeedNow, "the kubelet's client certificate is of an authority that the cluster does not trust any more"
	case leaf.NotAfter.Sub(leaf.NotBefore) > nodeaccess.CertificateLife+lifeMargin: // J7
		return NeedSoon, fmt.Sprintf("the kubelet's client certificate lives until %s, and a node's lives %s at most", stamp(leaf.NotAfter), nodeaccess.CertificateLife)
	case late(leaf, now, share):
		return NeedSoon, fmt.Sprintf("the kubelet's client certificate ends at %s", stamp(leaf.NotAfter))
	}
	// Without a serving certificate, a kubelet that is configured to have one requests it itself.
	if leaf, err = Certificate(root, ServingFile); err == nil && late(leaf, now, share) {
		return NeedSoon, fmt.Sprintf("the kubelet's serving certificate ends at %s", stamp(leaf.NotAfter))
	}
	return NeedNone, ""
}

// trusted reports whether an authority of this node has issued a certificate: after a rotation that the node was off for, its disk's comparison has given it
// the new authority (B8). A file that can't be read decides nothing.
func trusted(root string, leaf *x509.Certificate) bool {
	list, err := cert.CertsFromFile(filepath.Join(root, machine.PKIFolder, "ca.crt"))
	return err != nil || slices.ContainsFunc(list, func(ca *x509.Certificate) bool { return leaf.CheckSignatureFrom(ca) == nil })
}

func late(c *x509.Certificate, now time.Time, share float64) bool {
	life := c.NotAfter.Sub(c.NotBefore)
	return now.After(c.NotBefore.Add(time.Duration(float64(life) * share)))
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }
