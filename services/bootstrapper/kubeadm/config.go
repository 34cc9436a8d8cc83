// Package kubeadm writes kubeadm's configuration (kubeadm.k8s.io/v1beta4) with the typed
// API of Kubernetes itself.
//
// Two hands write into it. The image knows its distribution: cgroup driver, image tags,
// sysctls. Muster knows what must hold for joining to mean anything: no bearer token
// exists, nobody but joinservice approves node certificates, the API server checks
// kubelets' certificates, node certificates live a day. Where the two meet, Muster wins:
// fragments come first and the hardened settings are written over them.
package kubeadm

import (
	"bytes"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubeproxyv1 "k8s.io/kube-proxy/config/v1alpha1"
	kubeletv1 "k8s.io/kubelet/config/v1beta1"
	kubeadmapi "k8s.io/kubernetes/cmd/kubeadm/app/apis/kubeadm"
	v1beta4 "k8s.io/kubernetes/cmd/kubeadm/app/apis/kubeadm/v1beta4"
	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/internal/objects/etcdencryption"
	"github.com/muster-k8s/muster/internal/objects/podsecurity"
	"github.com/muster-k8s/muster/internal/versions"
)

const (
	apiServerPort = 6443
	// AuthzFolder holds the API server's configuration of authorization and admission, on the machine and
	// in the API server's pod. It is a folder so that the file can be replaced by rename.
	AuthzFolder = "/etc/kubernetes/authz"
	// AuthzFile is what --authorization-config names.
	AuthzFile = AuthzFolder + "/config.yaml"
	// AdmissionFile is what --admission-control-config-file names. Its content is podsecurity.Config.
	AdmissionFile = AuthzFolder + "/admission.yaml"
	// PatchesFolder is where kubeadm finds what [Patches] returns, while it runs.
	PatchesFolder = "/run/muster/kubeadm-patches"
	// KubeletConf is the kubelet's kubeconfig.
	KubeletConf = "/etc/kubernetes/kubelet.conf"
	// DiscoveryConf is the kubeconfig by which a join discovers the cluster: the kubelet's certificate at the cluster's endpoint, which
	// a control plane's own kubelet does not use.
	DiscoveryConf = "/run/muster/discovery.conf"

	authzVolume = "muster-authz"
)

// AuthzConfig is the content of [AuthzFile]: what --authorization-mode=Node,RBAC means.
const AuthzConfig = `apiVersion: apiserver.config.k8s.io/v1
kind: AuthorizationConfiguration
authorizers:
- {type: Node, name: node}
- {type: RBAC, name: rbac}
`

// Image is what an image adds; package metadata reads it. The zero value adds nothing.
type Image struct {
	criSocket    string
	ignoreChecks []string
	cluster      v1beta4.ClusterConfiguration
	kubelet      kubeletv1.KubeletConfiguration
	proxy        *kubeproxyv1.KubeProxyConfiguration
}

// ParseImage reads an image's fragments (JSON, without apiVersion and kind; nil if there
// are none). Unknown fields are errors.
func ParseImage(criSocket string, ignoreChecks []string, cluster, kubelet, proxy []byte) (*Image, error) {
	img := &Image{criSocket: criSocket, ignoreChecks: ignoreChecks}
	if err := strict(cluster, &img.cluster); err != nil {
		return nil, fmt.Errorf("kubeadm.clusterConfiguration: %w", err)
	}
	if img.cluster.Etcd.External != nil {
		return nil, errors.New("kubeadm.clusterConfiguration: an external etcd is not supported: Muster's only store is the cluster's own")
	}
	if err := strict(kubelet, &img.kubelet); err != nil {
		return nil, fmt.Errorf("kubeadm.kubeletConfiguration: %w", err)
	}
	if len(proxy) > 0 {
		img.proxy = &kubeproxyv1.KubeProxyConfiguration{}
		if err := strict(proxy, img.proxy); err != nil {
			return nil, fmt.Errorf("kubeadm.kubeProxyConfiguration: %w", err)
		}
	}
	return img, nil
}

func strict(b []byte, into any) error {
	if len(b) == 0 {
		return nil
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	return d.Decode(into)
}

// Certificates returns how this image wants certificates renewed: their algorithm and validity period, and nothing else; what it does not
// name is kubeadm's default.
func (i *Image) Certificates() kubeadmapi.ClusterConfiguration {
	return kubeadmapi.ClusterConfiguration{
		EncryptionAlgorithm: kubeadmapi.EncryptionAlgorithmType(i.cluster.EncryptionAlgorithm), CertificateValidityPeriod: i.cluster.CertificateValidityPeriod,
	}
}

// Node is the machine that is to become a node.
type Node struct {
	// Name is the node's name.
	Name string
	// Addresses are its IP addresses, the main one first; at least one.
	Addresses []netip.Addr
}

// Cluster is what an owner asked for.
type Cluster struct {
	Name             string
	Version          string // without "v"
	Endpoint         string // HOST:PORT
	PodCIDRs         []string
	ServiceCIDRs     []string
	APIServerSANs    []string
	ControlPlaneNode Node
	Images           versions.Images
}

// The first API server of a cluster answers late and unsteadily on a small machine. kubeadm would give up after 4 minutes
// and 1 minute, and all that it has done would have to be undone. Its whole run is bounded by who runs it.
const (
	healthCheck = 8 * time.Minute
	apiCall     = 5 * time.Minute
)

// Init gives the configuration of `kubeadm init`: YAML documents.
func Init(img *Image, c Cluster) ([]byte, error) {
	init := v1beta4.InitConfiguration{
		TypeMeta: typeMeta("InitConfiguration"),
		// No bearer token: J5. Skipping the first phase alone fails.
		// Kube-proxy's image has no field: [Proxy] has its objects (B9).
		SkipPhases:       []string{"bootstrap-token", "show-join-command", "addon/kube-proxy"},
		Patches:          &v1beta4.Patches{Directory: PatchesFolder},
		LocalAPIEndpoint: localEndpoint(c.ControlPlaneNode),
		NodeRegistration: registration(img, c.ControlPlaneNode),
		Timeouts:         &v1beta4.Timeouts{ControlPlaneComponentHealthCheck: &metav1.Duration{Duration: healthCheck}, KubernetesAPICall: &metav1.Duration{Duration: apiCall}},
	}
	docs := []any{&init, clusterConfiguration(img, c), kubeletConfiguration(img)}
	if img.proxy != nil {
		p := *img.proxy
		p.TypeMeta = metav1.TypeMeta{APIVersion: kubeproxyv1.SchemeGroupVersion.String(), Kind: "KubeProxyConfiguration"}
		docs = append(docs, &p)
	}
	return marshal(docs...)
}

// TokenDiscovery is how kubeadm finds its cluster with a ticket's bootstrap token.
type TokenDiscovery struct {
	Token    string // ID.SECRET
	Endpoint string // HOST:PORT of the API server
	CA       []*x509.Certificate
}

// Join gives the configuration of `kubeadm join`, in which the kubelet's own certificate is the credential. controlPlane
// asks for a control-plane node. The cluster is discovered with that certificate too, or with a token if one is given;
// then the configuration is a secret (K3).
func Join(img *Image, n Node, controlPlane bool, token *TokenDiscovery) ([]byte, error) {
	join := v1beta4.JoinConfiguration{
		TypeMeta:         typeMeta("JoinConfiguration"),
		Discovery:        v1beta4.Discovery{File: &v1beta4.FileDiscovery{KubeConfigPath: DiscoveryConf}},
		NodeRegistration: registration(img, n),
	}
	if token != nil {
		pins := make([]string, 0, len(token.CA))
		for _, c := range token.CA {
			sum := sha256.Sum256(c.RawSubjectPublicKeyInfo)
			pins = append(pins, "sha256:"+hex.EncodeToString(sum[:]))
		}
		join.Discovery = v1beta4.Discovery{BootstrapToken: &v1beta4.BootstrapTokenDiscovery{Token: token.Token, APIServerEndpoint: token.Endpoint, CACertHashes: pins}}
	}
	// The ticket's kubeconfig is there on purpose.
	join.NodeRegistration.IgnorePreflightErrors = union(join.NodeRegistration.IgnorePreflightErrors, "FileAvailable--etc-kubernetes-kubelet.conf")
	if controlPlane {
		join.ControlPlane = &v1beta4.JoinControlPlane{LocalAPIEndpoint: localEndpoint(n)}
		join.Patches = &v1beta4.Patches{Directory: PatchesFolder}
	}
	return marshal(&join)
}

// Reset gives the arguments that clean up after an unfinished run.
func Reset(img *Image) []string {
	return []string{"reset", "--force", "--cleanup-tmp-dir", "--cri-socket", img.criSocket}
}

func typeMeta(kind string) metav1.TypeMeta {
	return metav1.TypeMeta{APIVersion: v1beta4.SchemeGroupVersion.String(), Kind: kind}
}

// LocalEndpoint returns HOST:PORT of the API server on a control plane, which its own kubelet uses.
func LocalEndpoint(n Node) string {
	e := localEndpoint(n)
	return net.JoinHostPort(e.AdvertiseAddress, strconv.Itoa(int(e.BindPort)))
}

func localEndpoint(n Node) v1beta4.APIEndpoint {
	return v1beta4.APIEndpoint{AdvertiseAddress: n.Addresses[0].String(), BindPort: apiServerPort}
}

func registration(img *Image, n Node) v1beta4.NodeRegistrationOptions {
	return v1beta4.NodeRegistrationOptions{
		Name:                  n.Name,
		CRISocket:             img.criSocket,
		ImagePullPolicy:       corev1.PullNever, // B9: kubeadm's preflight would pull by tag
		IgnorePreflightErrors: slices.Clone(img.ignoreChecks),
		KubeletExtraArgs:      []v1beta4.Arg{{Name: "node-ip", Value: nodeIP(n.Addresses)}},
	}
}

// nodeIP gives the main address, and with it the first of the other family, if any: that is
// all that the kubelet takes.
func nodeIP(addrs []netip.Addr) string {
	main := addrs[0]
	for _, a := range addrs[1:] {
		if a.Is4() != main.Is4() {
			return main.String() + "," + a.String()
		}
	}
	return main.String()
}

// APIServerSANs gives all names and addresses that the API server's certificate has beside those that
// kubeadm adds: the image's, and those asked for at init.
func APIServerSANs(img *Image, asked []string) []string {
	return union(img.cluster.APIServer.CertSANs, asked...)
}

func clusterConfiguration(img *Image, c Cluster) *v1beta4.ClusterConfiguration {
	out := img.cluster.DeepCopy()
	out.TypeMeta = typeMeta("ClusterConfiguration")
	out.ClusterName = c.Name
	out.KubernetesVersion = "v" + c.Version
	out.ControlPlaneEndpoint = c.Endpoint
	out.Networking.PodSubnet = strings.Join(c.PodCIDRs, ",")
	out.Networking.ServiceSubnet = strings.Join(c.ServiceCIDRs, ",")
	out.APIServer.CertSANs = APIServerSANs(img, c.APIServerSANs)
	// Nodes write about themselves alone (J4), and whoever may make Services in one namespace takes no address that nodes use.
	wanted := []string{"NodeRestriction", "DenyServiceExternalIPs"}
	if len(values(out.APIServer.ExtraArgs, "admission-control-config-file")) == 0 { // an image that needs another configuration brings it
		// Whoever may create pods in one namespace is not root on control planes.
		out.APIServer.ExtraArgs = set(out.APIServer.ExtraArgs, map[string]string{"admission-control-config-file": AdmissionFile})
		wanted = append(wanted, podsecurity.EventRateLimit) // it starts with that file alone
	}
	out.APIServer.ExtraArgs = set(out.APIServer.ExtraArgs, map[string]string{
		// Same as the default Node,RBAC, but in a file that the API server reloads.
		"authorization-config": AuthzFile,
		// Secrets, the root of all keys among them, don't lie in etcd in the clear. The file is read
		// again when it changes: a rotation needs no restart.
		"encryption-provider-config":                  etcdencryption.File,
		"encryption-provider-config-automatic-reload": "true",
		// J5: not even a bootstrap token that somebody creates by hand is accepted.
		"enable-bootstrap-token-auth": "false",
		// A pod's token lives for the hour that was asked for, and not for a year: what is taken from a node ends.
		"service-account-extend-token-expiration": "false",
		// Nor does a node get one for its pods that outlives its own certificate: whoever checks tokens without the API server believes it to its end.
		"service-account-max-token-expiration": "24h",
		"enable-admission-plugins":             strings.Join(admissionPlugins(out.APIServer.ExtraArgs, wanted), ","),
		// kubeadm's default doesn't check whom it talks to when it opens logs and exec.
		"kubelet-certificate-authority": "/etc/kubernetes/pki/ca.crt",
	}, "authorization-mode", "authorization-webhook-config-file")
	out.APIServer.ExtraVolumes = slices.DeleteFunc(out.APIServer.ExtraVolumes, func(v v1beta4.HostPathMount) bool {
		return v.Name == authzVolume || v.MountPath == AuthzFolder
	})
	out.APIServer.ExtraVolumes = append(out.APIServer.ExtraVolumes, v1beta4.HostPathMount{
		Name: authzVolume, HostPath: AuthzFolder, MountPath: AuthzFolder, ReadOnly: true, PathType: corev1.HostPathDirectory,
	})
	out.ControllerManager.ExtraArgs = set(out.ControllerManager.ExtraArgs, map[string]string{
		// Nobody but joinservice approves node certificates. kubeadm's default list also
		// has the two controllers for bootstrap tokens.
		"controllers": "*,-certificatesigningrequest-approving-controller",
		// The kubelet asks for no duration; without this a renewed certificate lasts a year.
		"cluster-signing-duration": "24h",
	})
	boundRewrites(out)
	dns := c.Images[versions.CoreDNS] // B9
	out.DNS.ImageRepository, out.DNS.ImageTag = path.Dir(dns.Repository), dns.Tag+"@"+dns.Digest
	return out
}

// boundRewrites bounds what large objects cost that a node or a tenant writes again and again, where the image says nothing else: docs/threat-model.md has the sums.
func boundRewrites(c *v1beta4.ClusterConfiguration) {
	// etcd keeps each version of an object until it is compacted, and takes no write any more once it has 2 GiB, a ban neither.
	c.APIServer.ExtraArgs = unlessSet(c.APIServer.ExtraArgs, map[string]string{"etcd-compaction-interval": "30s"})
	if c.Etcd.Local == nil { // no image has an external one
		c.Etcd.Local = &v1beta4.LocalEtcd{}
	}
	c.Etcd.Local.ExtraArgs = unlessSet(c.Etcd.Local.ExtraArgs, map[string]string{
		// A write has up to 1.5 MiB, and etcd keeps the last ones in memory for members that lag: by default 5,000, more than a machine has.
		"snapshot-catchup-entries": "500",
		// It keeps those since the last snapshot on the disk, and reads all of them when it starts.
		"snapshot-count": "1000",
	})
}

// unlessSet sets those arguments that args does not have.
func unlessSet(args []v1beta4.Arg, values map[string]string) []v1beta4.Arg {
	for _, a := range args {
		delete(values, a.Name)
	}
	return set(args, values)
}

// admissionPlugins returns what the image enables, and what Muster wants. An image that disables a plugin does without it, but for NodeRestriction.
func admissionPlugins(args []v1beta4.Arg, wanted []string) []string {
	disabled := values(args, "disable-admission-plugins")
	return slices.DeleteFunc(union(values(args, "enable-admission-plugins"), wanted...), func(p string) bool {
		return p != "NodeRestriction" && slices.Contains(disabled, p)
	})
}

// values returns what an argument's comma-separated lists have, in all its places.
func values(args []v1beta4.Arg, name string) (out []string) {
	for _, a := range args {
		if a.Name == name {
			out = append(out, strings.Split(a.Value, ",")...)
		}
	}
	return out
}

func kubeletConfiguration(img *Image) *kubeletv1.KubeletConfiguration {
	out := img.kubelet.DeepCopy()
	out.TypeMeta = metav1.TypeMeta{APIVersion: kubeletv1.SchemeGroupVersion.String(), Kind: "KubeletConfiguration"}
	yes, no := true, false
	out.ServerTLSBootstrap = true
	out.RotateCertificates = true
	out.Authentication.Anonymous.Enabled = &no
	out.Authentication.Webhook.Enabled = &yes
	out.Authorization.Mode = kubeletv1.KubeletAuthorizationModeWebhook
	out.ReadOnlyPort = 0
	return out
}

// set replaces arguments of those names, removes the ones to drop, and sorts what it adds.
func set(args []v1beta4.Arg, values map[string]string, drop ...string) []v1beta4.Arg {
	out := slices.DeleteFunc(slices.Clone(args), func(a v1beta4.Arg) bool {
		_, ours := values[a.Name]
		return ours || slices.Contains(drop, a.Name)
	})
	names := make([]string, 0, len(values))
	for n := range values {
		names = append(names, n)
	}
	slices.Sort(names)
	for _, n := range names {
		out = append(out, v1beta4.Arg{Name: n, Value: values[n]})
	}
	return out
}

func union(have []string, more ...string) []string {
	out := slices.Clone(have)
	for _, s := range more {
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	return out
}

func marshal(docs ...any) ([]byte, error) {
	var out bytes.Buffer
	for i, d := range docs {
		b, err := yaml.Marshal(d)
		if err != nil {
			return nil, fmt.Errorf("kubeadm configuration: %w", err)
		}
		if i > 0 {
			out.WriteString("---\n")
		}
		out.Write(b)
	}
	return out.Bytes(), nil
}
