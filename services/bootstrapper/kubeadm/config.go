// Package kubeadm writes kubeadm's configuration (kubeadm.k8s.io/v1beta4) with the typed API of Kubernetes itself.
//
// The configuration has two sources. The image sets what depends on its distribution: cgroup driver, image tags, sysctls. Muster sets what admission
// relies on: no bearer token exists, only joinservice approves node certificates, the API server verifies kubelets' certificates, and node certificates
// are valid for a day. Where both set a value, Muster's wins: the hardened settings are written over the image's fragments.
package kubeadm

import (
	"bytes"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
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
	kubeadmconstants "k8s.io/kubernetes/cmd/kubeadm/app/constants"
	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/internal/objects/etcdencryption"
	"github.com/muster-k8s/muster/internal/objects/podsecurity"
	"github.com/muster-k8s/muster/internal/versions"
)

const (
	apiServerPort = 6443
	kubeletPort   = 10250
	// AuthzFolder holds the API server's configuration of authorization and admission, on the machine and in the API server's pod. It is a folder so
	// that a file in it can be replaced by rename.
	AuthzFolder = "/etc/kubernetes/authz"
	// AuthzFile is the value of --authorization-config.
	AuthzFile = AuthzFolder + "/config.yaml"
	// AdmissionFile is the value of --admission-control-config-file. Its content is podsecurity.Config.
	AdmissionFile = AuthzFolder + "/admission.yaml"
	// PatchesFolder is where kubeadm reads the files of [Patches] while it runs.
	PatchesFolder = "/run/muster/kubeadm-patches"
	// KubeletConf is the kubelet's kubeconfig.
	KubeletConf = "/etc/kubernetes/kubelet.conf"
	// DiscoveryConf is the kubeconfig by which a join discovers the cluster: it has the kubelet's certificate and the cluster's endpoint, which a
	// control plane's own kubelet does not use.
	DiscoveryConf = "/run/muster/discovery.conf"

	authzVolume = "muster-authz"
)

// AuthzConfig is the content of [AuthzFile]; it has the meaning of --authorization-mode=Node,RBAC.
const AuthzConfig = `apiVersion: apiserver.config.k8s.io/v1
kind: AuthorizationConfiguration
authorizers:
- {type: Node, name: node}
- {type: RBAC, name: rbac}
`

// Image is the image's part of the configuration; package metadata reads it. The zero value adds nothing.
type Image struct {
	criSocket    string
	ignoreChecks []string
	cluster      v1beta4.ClusterConfiguration
	kubelet      kubeletv1.KubeletConfiguration
	proxy        *kubeproxyv1.KubeProxyConfiguration
}

// ParseImage parses an image's fragments (JSON, without apiVersion and kind; nil if there is none). Unknown fields are errors.
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
	if p := img.kubelet.Port; p != 0 && p != kubeletPort {
		return nil, fmt.Errorf("kubeadm.kubeletConfiguration: port: leave it out, or set %d: admission refuses Nodes of kubelets with another port", kubeletPort)
	}
	if d := time.Duration(img.kubelet.NodeLeaseDurationSeconds) * time.Second; d > MaxNodeLease {
		return nil, fmt.Errorf("kubeadm.kubeletConfiguration: nodeLeaseDurationSeconds: want at most %.0f: with a longer one, a copy of a machine would get its key while it runs", MaxNodeLease.Seconds())
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

// Certificates returns the image's settings for renewed certificates: algorithm and validity period, and nothing else. Settings that the image leaves
// out are kubeadm's defaults.
func (i *Image) Certificates() kubeadmapi.ClusterConfiguration {
	return kubeadmapi.ClusterConfiguration{
		EncryptionAlgorithm: kubeadmapi.EncryptionAlgorithmType(i.cluster.EncryptionAlgorithm), CertificateValidityPeriod: i.cluster.CertificateValidityPeriod,
	}
}

// Node is the machine that becomes a node.
type Node struct {
	// Name is the node's name.
	Name string
	// Addresses are its IP addresses, the main one first; at least one.
	Addresses []netip.Addr
	// ProviderID, Labels and Taints are those of its Node when the kubelet registers it. Package metadata has checked them: they are flags of the kubelet.
	ProviderID string
	Labels     map[string]string
	Taints     []corev1.Taint
}

// Cluster is the owner's configuration of a new cluster.
type Cluster struct {
	Name             string
	Version          string // without "v"
	Endpoint         string // HOST:PORT
	PodCIDRs         []string
	ServiceCIDRs     []string
	APIServerSANs    []string
	ControlPlaneNode Node
	Images           versions.Images
	// Restored means that etcd has data already, with an older cluster's CoreDNS.
	Restored bool
}

// The first API server of a cluster answers late and irregularly on a small machine. kubeadm would give up after 4 minutes and 1 minute, and all its
// work would have to be undone. The caller bounds its whole run.
const (
	healthCheck = 8 * time.Minute
	apiCall     = 5 * time.Minute
)

// Init returns the configuration of `kubeadm init`: YAML documents.
func Init(img *Image, c Cluster) ([]byte, error) {
	init := v1beta4.InitConfiguration{
		TypeMeta: typeMeta("InitConfiguration"),
		// J5: no bearer token. Skipping only the first phase fails.
		// Kube-proxy's image has no field in the configuration: [Proxy] returns its objects (B9).
		SkipPhases:       []string{"bootstrap-token", "show-join-command", "addon/kube-proxy"},
		Patches:          &v1beta4.Patches{Directory: PatchesFolder},
		LocalAPIEndpoint: localEndpoint(c.ControlPlaneNode),
		NodeRegistration: registration(img, c.ControlPlaneNode, true),
		Timeouts:         &v1beta4.Timeouts{ControlPlaneComponentHealthCheck: &metav1.Duration{Duration: healthCheck}, KubernetesAPICall: &metav1.Duration{Duration: apiCall}},
	}
	if c.Restored {
		init.NodeRegistration.IgnorePreflightErrors = union(init.NodeRegistration.IgnorePreflightErrors, "DirAvailable--var-lib-etcd")
		init.SkipPhases = append(init.SkipPhases, "addon/coredns") // kubeadm would migrate its configuration
	}
	docs := []any{&init, clusterConfiguration(img, c), kubeletConfiguration(img)}
	if img.proxy != nil {
		p := *img.proxy
		p.TypeMeta = metav1.TypeMeta{APIVersion: kubeproxyv1.SchemeGroupVersion.String(), Kind: "KubeProxyConfiguration"}
		docs = append(docs, &p)
	}
	return marshal(docs...)
}

// TokenDiscovery is the data by which kubeadm discovers its cluster with a ticket's bootstrap token.
type TokenDiscovery struct {
	Token    string // ID.SECRET
	Endpoint string // HOST:PORT of the API server
	CA       []*x509.Certificate
}

// Join returns the configuration of `kubeadm join`, with the kubelet's own certificate as credential. controlPlane selects a control-plane node. The
// cluster is discovered with that certificate too, or with a token if one is given; then the configuration is a secret (K3).
func Join(img *Image, n Node, controlPlane bool, token *TokenDiscovery) ([]byte, error) {
	join := v1beta4.JoinConfiguration{
		TypeMeta:         typeMeta("JoinConfiguration"),
		Discovery:        v1beta4.Discovery{File: &v1beta4.FileDiscovery{KubeConfigPath: DiscoveryConf}},
		NodeRegistration: registration(img, n, controlPlane),
	}
	if token != nil {
		pins := make([]string, 0, len(token.CA))
		for _, c := range token.CA {
			sum := sha256.Sum256(c.RawSubjectPublicKeyInfo)
			pins = append(pins, "sha256:"+hex.EncodeToString(sum[:]))
		}
		join.Discovery = v1beta4.Discovery{BootstrapToken: &v1beta4.BootstrapTokenDiscovery{Token: token.Token, APIServerEndpoint: token.Endpoint, CACertHashes: pins}}
	}
	// The ticket's kubeconfig exists before kubeadm runs.
	join.NodeRegistration.IgnorePreflightErrors = union(join.NodeRegistration.IgnorePreflightErrors, "FileAvailable--etc-kubernetes-kubelet.conf")
	if controlPlane {
		join.ControlPlane = &v1beta4.JoinControlPlane{LocalAPIEndpoint: localEndpoint(n)}
		join.Patches = &v1beta4.Patches{Directory: PatchesFolder}
	}
	return marshal(&join)
}

// Reset returns the arguments that clean up after an unfinished run.
func Reset(img *Image) []string {
	return []string{"reset", "--force", "--cleanup-tmp-dir", "--cri-socket", img.criSocket}
}

func typeMeta(kind string) metav1.TypeMeta {
	return metav1.TypeMeta{APIVersion: v1beta4.SchemeGroupVersion.String(), Kind: kind}
}

// LocalEndpoint returns HOST:PORT of a control plane's API server, which its own kubelet uses.
func LocalEndpoint(n Node) string {
	e := localEndpoint(n)
	return net.JoinHostPort(e.AdvertiseAddress, strconv.Itoa(int(e.BindPort)))
}

func localEndpoint(n Node) v1beta4.APIEndpoint {
	return v1beta4.APIEndpoint{AdvertiseAddress: n.Addresses[0].String(), BindPort: apiServerPort}
}

func registration(img *Image, n Node, controlPlane bool) v1beta4.NodeRegistrationOptions {
	taints := slices.Clone(n.Taints)
	if controlPlane && len(taints) > 0 { // a list replaces kubeadm's own, without which pods of users come to control planes
		taints = append(taints, kubeadmconstants.ControlPlaneTaint)
	}
	return v1beta4.NodeRegistrationOptions{
		Taints:                taints,
		Name:                  n.Name,
		CRISocket:             img.criSocket,
		ImagePullPolicy:       corev1.PullNever, // B9: kubeadm's preflight would pull by tag
		IgnorePreflightErrors: slices.Clone(img.ignoreChecks),
		KubeletExtraArgs:      kubeletArgs(n),
	}
}

// kubeletArgs returns the kubelet's flags that describe its Node.
func kubeletArgs(n Node) []v1beta4.Arg {
	args := []v1beta4.Arg{{Name: "node-ip", Value: nodeIP(n.Addresses)}}
	if len(n.Labels) > 0 {
		var labels []string
		for _, k := range slices.Sorted(maps.Keys(n.Labels)) {
			labels = append(labels, k+"="+n.Labels[k])
		}
		args = append(args, v1beta4.Arg{Name: "node-labels", Value: strings.Join(labels, ",")})
	}
	if n.ProviderID != "" {
		args = append(args, v1beta4.Arg{Name: "provider-id", Value: n.ProviderID})
	}
	return args
}

// nodeIP returns the main address, and the first address of the other family, if any: the kubelet takes no more.
func nodeIP(addrs []netip.Addr) string {
	main := addrs[0]
	for _, a := range addrs[1:] {
		if a.Is4() != main.Is4() {
			return main.String() + "," + a.String()
		}
	}
	return main.String()
}

// APIServerSANs returns all names and addresses that the API server's certificate has beside those that kubeadm adds: the image's, and those of the init
// request.
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
	// A node may write only its own objects (J4), and a user who may create Services in one namespace can't take an address that nodes use.
	wanted := []string{"NodeRestriction", "DenyServiceExternalIPs"}
	if len(values(out.APIServer.ExtraArgs, "admission-control-config-file")) == 0 { // an image that needs another configuration has its own
		// A user who may create pods in one namespace does not become root on control planes.
		out.APIServer.ExtraArgs = set(out.APIServer.ExtraArgs, map[string]string{"admission-control-config-file": AdmissionFile})
		wanted = append(wanted, podsecurity.EventRateLimit) // it only starts with that file
	}
	out.APIServer.ExtraArgs = set(out.APIServer.ExtraArgs, map[string]string{
		// It has the meaning of the default Node,RBAC, but in a file that the API server reloads.
		"authorization-config": AuthzFile,
		// Secrets, also the one with the root of all keys, are encrypted in etcd. The file is read again when it changes: a rotation needs no restart.
		"encryption-provider-config":                  etcdencryption.File,
		"encryption-provider-config-automatic-reload": "true",
		// J5: a bootstrap token is not accepted, even if an administrator creates one.
		"enable-bootstrap-token-auth": "false",
		// A pod's token is valid for the requested hour, not for a year: a token stolen from a node expires.
		"service-account-extend-token-expiration": "false",
		// A node also gets no token for its pods that is valid longer than its own certificate: a service that verifies tokens without the API server
		// accepts it until it expires.
		"service-account-max-token-expiration": "24h",
		"enable-admission-plugins":             strings.Join(admissionPlugins(out.APIServer.ExtraArgs, wanted), ","),
		// kubeadm's default does not verify the kubelet's certificate for logs and exec.
		"kubelet-certificate-authority": "/etc/kubernetes/pki/ca.crt",
	}, "authorization-mode", "authorization-webhook-config-file")
	out.APIServer.ExtraVolumes = slices.DeleteFunc(out.APIServer.ExtraVolumes, func(v v1beta4.HostPathMount) bool {
		return v.Name == authzVolume || v.MountPath == AuthzFolder
	})
	out.APIServer.ExtraVolumes = append(out.APIServer.ExtraVolumes, v1beta4.HostPathMount{
		Name: authzVolume, HostPath: AuthzFolder, MountPath: AuthzFolder, ReadOnly: true, PathType: corev1.HostPathDirectory,
	})
	out.ControllerManager.ExtraArgs = set(out.ControllerManager.ExtraArgs, map[string]string{
		// Only joinservice approves node certificates. kubeadm's default list also has the two controllers for bootstrap tokens.
		"controllers": "*,-certificatesigningrequest-approving-controller",
		// The kubelet requests no duration; without this a renewed certificate is valid for a year.
		"cluster-signing-duration": "24h",
	})
	boundRewrites(out)
	dns := c.Images[versions.CoreDNS] // B9
	out.DNS.ImageRepository, out.DNS.ImageTag = path.Dir(dns.Repository), dns.Tag+"@"+dns.Digest
	return out
}

// boundRewrites bounds the cost of large objects that a node or a tenant rewrites again and again, unless the image sets these values:
// docs/threat-model.md has the calculation.
func boundRewrites(c *v1beta4.ClusterConfiguration) {
	// etcd keeps each version of an object until compaction, and takes no more writes at 2 GiB, not even a ban.
	c.APIServer.ExtraArgs = unlessSet(c.APIServer.ExtraArgs, map[string]string{"etcd-compaction-interval": "30s"})
	if c.Etcd.Local == nil { // no image has an external etcd
		c.Etcd.Local = &v1beta4.LocalEtcd{}
	}
	c.Etcd.Local.ExtraArgs = unlessSet(c.Etcd.Local.ExtraArgs, map[string]string{
		// A write has up to 1.5 MiB, and etcd keeps the last ones in memory for members that lag: by default 5,000, which no machine can hold.
		"snapshot-catchup-entries": "500",
		// etcd keeps the writes since the last snapshot on the disk, and reads all of them when it starts.
		"snapshot-count": "1000",
	})
}

// unlessSet sets the arguments that args does not have.
func unlessSet(args []v1beta4.Arg, values map[string]string) []v1beta4.Arg {
	for _, a := range args {
		delete(values, a.Name)
	}
	return set(args, values)
}

// admissionPlugins returns the plugins that the image enables, and those of wanted. A plugin that the image disables is left out, except
// NodeRestriction.
func admissionPlugins(args []v1beta4.Arg, wanted []string) []string {
	disabled := values(args, "disable-admission-plugins")
	return slices.DeleteFunc(union(values(args, "enable-admission-plugins"), wanted...), func(p string) bool {
		return p != "NodeRestriction" && slices.Contains(disabled, p)
	})
}

// values returns the comma-separated values of an argument, from all its occurrences.
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

// set replaces arguments with those names, removes those in drop, and sorts the added ones.
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
