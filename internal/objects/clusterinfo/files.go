package clusterinfo

import "github.com/muster-k8s/muster/internal/objects/etcdencryption"

// ControlPlaneFiles returns, in order, the files of /etc/kubernetes/pki that all control planes have in common: what kubeadm makes the
// rest from, and the key that encrypts Secrets in etcd, which may be missing in a cluster that Muster has adopted. A ticket
// of a control plane has no others (J6, B4), and a backup has them.
func ControlPlaneFiles() []string {
	return []string{"ca.crt", "ca.key", etcdencryption.Name, "etcd/ca.crt", "etcd/ca.key", "front-proxy-ca.crt", "front-proxy-ca.key", "sa.key", "sa.pub"}
}
