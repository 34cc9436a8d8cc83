package machine

// These are the paths on a machine.
const (
	KubernetesFolder = "/etc/kubernetes"
	AdminConf        = KubernetesFolder + "/admin.conf"
	PKIFolder        = KubernetesFolder + "/pki"
	KubeletFolder    = "/var/lib/kubelet"
	KubeletPKI       = KubeletFolder + "/pki"
	EtcdFolder       = "/var/lib/etcd"
	KubeadmConfig    = "/run/muster/kubeadm.yaml"
)
