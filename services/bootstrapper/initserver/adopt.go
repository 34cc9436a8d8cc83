package initserver

import (
	"bytes"
	"context"
	"crypto/x509"
	"os"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/kubelet"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/trust/attest"
)

// apiServerPod is the manifest of a control plane's API server, as kubeadm writes it.
const apiServerPod = "/etc/kubernetes/manifests/kube-apiserver.yaml"

// isControlPlane checks that this machine is a control plane as kubeadm makes one, under the name in its metadata, and that kubelet and administrator
// belong to the same cluster. It protects an owner from adopting the wrong machine. It proves nothing about the cluster, whose maker was not attested.
func (s *Server) isControlPlane(o *initOrder) error {
	refuse := func(format string, args ...any) error {
		return attest.Refuse(attestv1.Reason_REASON_INIT_NOT_ALLOWED, "this machine is no control plane that could be adopted: "+format, args...)
	}
	if _, err := os.Stat(s.node.On(apiServerPod)); err != nil {
		return refuse("%w", err)
	}
	admin, err := kubelet.ClusterOf(s.node.Root, machine.AdminConf)
	if err != nil {
		return refuse("%w", err)
	}
	node, err := kubelet.ClusterOf(s.node.Root, kubeadm.KubeletConf)
	if err != nil {
		return refuse("%w", err)
	}
	if len(admin.CertificateAuthorityData) == 0 || !bytes.Equal(bytes.TrimSpace(admin.CertificateAuthorityData), bytes.TrimSpace(node.CertificateAuthorityData)) {
		return refuse("%s and %s name different authorities", machine.AdminConf, kubeadm.KubeletConf)
	}
	if want := "https://" + o.request.GetControlPlaneEndpoint(); admin.Server != want {
		return refuse("%s leads to %s, not to %s", machine.AdminConf, admin.Server, want)
	}
	leaf, err := kubelet.Certificate(s.node.Root, kubelet.ClientFile)
	if err != nil {
		return refuse("%w", err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(admin.CertificateAuthorityData)
	at := s.node.Now()
	if s.node.Lock.Record().Locked() && at.After(leaf.NotAfter) {
		at = leaf.NotAfter // B3: an interrupted adoption may have signed it for a day, and the machine been off for longer: ServeAgain signs the next
	}
	if _, err := leaf.Verify(x509.VerifyOptions{Roots: roots, CurrentTime: at, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
		return refuse("%s: %w", kubelet.ClientFile, err)
	}
	if have, want := leaf.Subject.CommonName, clusterinfo.NodeUserPrefix+o.meta.Name; have != want {
		return refuse("its kubelet is %s, but its metadata have %s", have, want)
	}
	return nil
}

// serveAdopted starts the API server of an adopted control plane. The machine had no record of the cluster's epoch before: from now on, an older copy of
// its disk is detected (B7).
func (s *Server) serveAdopted(ctx context.Context) error {
	if err := s.node.BeginEpoch(ctx); err != nil {
		return err
	}
	return s.node.ServeAgain(ctx)
}
