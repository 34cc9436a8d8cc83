package kubeadm

import (
	"bytes"
	"crypto/x509"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	certutil "k8s.io/client-go/util/cert"
	kubeadmapi "k8s.io/kubernetes/cmd/kubeadm/app/apis/kubeadm"
	v1beta4 "k8s.io/kubernetes/cmd/kubeadm/app/apis/kubeadm/v1beta4"
	kubeadmconstants "k8s.io/kubernetes/cmd/kubeadm/app/constants"
	kubeadmimages "k8s.io/kubernetes/cmd/kubeadm/app/images"
	kubeadmconfig "k8s.io/kubernetes/cmd/kubeadm/app/util/config"
	"k8s.io/kubernetes/cmd/kubeadm/app/util/pkiutil"
	"k8s.io/kubernetes/cmd/kubeadm/app/util/pubkeypin"
	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/internal/versions"
)

var update = flag.Bool("update", false, "write the golden files anew")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(file, got, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s differs; run with -update and read the diff:\n%s", file, got)
	}
}

func image(t *testing.T, cluster string) *Image {
	t.Helper()
	img, err := ParseImage("unix:///run/containerd/containerd.sock", []string{"SystemVerification"}, []byte(cluster),
		[]byte(`{"cgroupDriver":"cgroupfs","failCgroupV1":false,"evictionHard":{"memory.available":"100Mi"},"authentication":{"anonymous":{"enabled":true}},"readOnlyPort":10255}`),
		[]byte(`{"mode":"nftables","conntrack":{"maxPerCore":0,"min":0}}`))
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func first() Cluster {
	return Cluster{
		Name: "demo", Version: "1.36.1", Endpoint: "192.168.77.1:6443", PodCIDRs: []string{"10.244.0.0/16"}, ServiceCIDRs: []string{"10.96.0.0/16"},
		APIServerSANs:    []string{"api.example"},
		ControlPlaneNode: Node{Name: "node1", Addresses: []netip.Addr{netip.MustParseAddr("192.168.77.11")}}, Images: images(),
	}
}

// images returns the images that an owner lists.
func images() versions.Images {
	out := versions.Images{}
	for i, name := range versions.ImageNames() {
		out[name] = versions.Image{Repository: "registry.example/mirror/" + name, Tag: "v1.2.3", Digest: fmt.Sprintf("sha256:%064x", i+1)}
	}
	return out
}

// hostile is an image's configuration that sets the opposite of each hardened setting.
const hostile = `{
 "kubernetesVersion":"v1.0.0","clusterName":"other","controlPlaneEndpoint":"evil:1","networking":{"podSubnet":"1.0.0.0/8"},
 "dns":{"imageTag":"v1.14.7"},"etcd":{"local":{"imageTag":"3.6.16-0","extraArgs":[{"name":"unsafe-no-fsync","value":"true"},{"name":"snapshot-count","value":"5000"}]}},
 "apiServer":{"certSANs":["from.image","api.example"],
  "extraArgs":[{"name":"authorization-mode","value":"AlwaysAllow"},{"name":"authorization-config","value":"/x"},{"name":"enable-bootstrap-token-auth","value":"true"},{"name":"enable-bootstrap-token-auth","value":"true"},{"name":"encryption-provider-config","value":"/x"},{"name":"service-account-extend-token-expiration","value":"true"},{"name":"service-account-max-token-expiration","value":"87600h"},{"name":"enable-admission-plugins","value":"AlwaysPullImages"},{"name":"audit-log-path","value":"/var/log/audit/audit.log"}],
  "extraVolumes":[{"name":"muster-authz","hostPath":"/x","mountPath":"/x"},{"name":"other","hostPath":"/x","mountPath":"/etc/kubernetes/authz"},{"name":"audit","hostPath":"/var/log/audit","mountPath":"/var/log/audit"}]},
 "controllerManager":{"extraArgs":[{"name":"controllers","value":"*"},{"name":"cluster-signing-duration","value":"87600h"},{"name":"flex-volume-plugin-dir","value":"/v"}]}}`

func arg(args []kubeadmapi.Arg, name string) []string {
	var out []string
	for _, a := range args {
		if a.Name == name {
			out = append(out, a.Value)
		}
	}
	return out
}

// Invariant J5.
func TestInitGoldenAndReadByKubeadmItself(t *testing.T) {
	for name, fragment := range map[string]string{"init.yaml": `{"etcd":{"local":{"imageTag":"3.6.16-0"}}}`, "init-hostile.yaml": hostile} {
		b, err := Init(image(t, fragment), first())
		if err != nil {
			t.Fatal(err)
		}
		golden(t, name, b)
		// Strict: an unknown or duplicate field is an error.
		if err := kubeadmconfig.ValidateConfig(b, false, false); err != nil {
			t.Fatalf("%s: kubeadm refuses it: %v", name, err)
		}
		cfg, err := kubeadmconfig.BytesToInitConfiguration(b, true)
		if err != nil {
			t.Fatal(err)
		}
		api, ctl := cfg.APIServer.ExtraArgs, cfg.ControllerManager.ExtraArgs
		for what, got := range map[string]bool{
			"no bootstrap token":    strings.HasPrefix(strings.Join(cfg.SkipPhases, " "), "bootstrap-token show-join-command"),
			"kube-proxy's image":    slices.Contains(cfg.SkipPhases, "addon/kube-proxy"),
			"CoreDNS's image":       kubeadmimages.GetDNSImage(&cfg.ClusterConfiguration) == images()[versions.CoreDNS].String(),
			"static pods' images":   cfg.Patches != nil && cfg.Patches.Directory == PatchesFolder,
			"nothing pulled by tag": cfg.NodeRegistration.ImagePullPolicy == "Never",
			"authorization":         strings.Join(arg(api, "authorization-config"), " ") == AuthzFile && len(arg(api, "authorization-mode")) == 0,
			"encryption":            strings.Join(arg(api, "encryption-provider-config"), " ") == "/etc/kubernetes/pki/encryption.yaml",
			"token authentication":  strings.Join(arg(api, "enable-bootstrap-token-auth"), " ") == "false",
			"kubelet's CA":          strings.Join(arg(api, "kubelet-certificate-authority"), " ") == "/etc/kubernetes/pki/ca.crt",
			"pods' tokens":          strings.Join(arg(api, "service-account-extend-token-expiration"), " ") == "false",
			"tokens' lives":         strings.Join(arg(api, "service-account-max-token-expiration"), " ") == "24h",
			"admission plugins":     strings.TrimPrefix(strings.Join(arg(api, "enable-admission-plugins"), " "), "AlwaysPullImages,") == "NodeRestriction,DenyServiceExternalIPs,EventRateLimit",
			"pods":                  strings.Join(arg(api, "admission-control-config-file"), " ") == AdmissionFile,
			"controllers":           strings.Join(arg(ctl, "controllers"), " ") == "*,-certificatesigningrequest-approving-controller",
			"signing duration":      strings.Join(arg(ctl, "cluster-signing-duration"), " ") == "24h",
			"version":               cfg.KubernetesVersion == "v1.36.1",
			"endpoint":              cfg.ControlPlaneEndpoint == "192.168.77.1:6443",
			"image's etcd":          cfg.Etcd.Local.ImageTag == "3.6.16-0",
			"default taint":         len(cfg.NodeRegistration.Taints) == 1,
		} {
			if !got {
				t.Errorf("%s: %s", name, what)
			}
		}
		for _, v := range cfg.APIServer.ExtraVolumes {
			if v.MountPath == AuthzFolder && (v.HostPath != AuthzFolder || !v.ReadOnly) {
				t.Errorf("%s: %+v", name, v)
			}
		}
	}
}

// An owner who needs Services with externalIPs configures that in the image.
func TestAnImageMayDoWithoutAPlugin(t *testing.T) {
	b, err := Init(image(t, `{"apiServer":{"extraArgs":[{"name":"disable-admission-plugins","value":"DenyServiceExternalIPs"}]}}`), first())
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := kubeadmconfig.BytesToInitConfiguration(b, true)
	if err != nil {
		t.Fatal(err)
	}
	if got := arg(cfg.APIServer.ExtraArgs, "enable-admission-plugins"); strings.Join(got, " ") != "NodeRestriction,EventRateLimit" {
		t.Errorf("enabled: %q", got)
	}
}

// An owner who needs another configuration of admission puts it into the image.
func TestAnImageMayBringItsConfigurationOfAdmission(t *testing.T) {
	b, err := Init(image(t, `{"apiServer":{"extraArgs":[{"name":"admission-control-config-file","value":"/etc/image/admission.yaml"}]}}`), first())
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := kubeadmconfig.BytesToInitConfiguration(b, true)
	if err != nil {
		t.Fatal(err)
	}
	if got := arg(cfg.APIServer.ExtraArgs, "admission-control-config-file"); strings.Join(got, " ") != "/etc/image/admission.yaml" {
		t.Errorf("names %q", got)
	}
}

func TestTheSecondAddressFamilyIsTold(t *testing.T) {
	c := first()
	c.ControlPlaneNode.Addresses = append(c.ControlPlaneNode.Addresses, netip.MustParseAddr("192.168.78.11"), netip.MustParseAddr("fd00::11"))
	c.PodCIDRs = append(c.PodCIDRs, "fd01::/48")
	c.ServiceCIDRs = append(c.ServiceCIDRs, "fd02::/112")
	b, err := Init(image(t, ""), c)
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := kubeadmconfig.BytesToInitConfiguration(b, true)
	if err != nil {
		t.Fatal(err)
	}
	if got := arg(cfg.NodeRegistration.KubeletExtraArgs, "node-ip"); strings.Join(got, " ") != "192.168.77.11,fd00::11" {
		t.Error(got)
	}
	if cfg.Networking.PodSubnet != "10.244.0.0/16,fd01::/48" {
		t.Error(cfg.Networking)
	}
}

func TestJoinGoldenAndReadByKubeadmItself(t *testing.T) {
	n := Node{Name: "node2", Addresses: []netip.Addr{netip.MustParseAddr("192.168.77.12")}}
	for name, controlPlane := range map[string]bool{"join-worker.yaml": false, "join-control-plane.yaml": true} {
		b, err := Join(image(t, ""), n, controlPlane, nil)
		if err != nil {
			t.Fatal(err)
		}
		golden(t, name, b)
		// kubeadm checks that the kubeconfig exists.
		conf := filepath.Join(t.TempDir(), "discovery.conf")
		if err := os.WriteFile(conf, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := kubeadmconfig.ValidateConfig(bytes.Replace(b, []byte(DiscoveryConf), []byte(conf), 1), false, false); err != nil {
			t.Fatalf("%s: kubeadm refuses it: %v", name, err)
		}
	}
}

// labeled is a node with all that metadata can say of it.
func labeled() Node {
	return Node{
		Name: "node2", Addresses: []netip.Addr{netip.MustParseAddr("192.168.77.12")}, ProviderID: "aws:///eu-west-1a/i-0123",
		Labels: map[string]string{"topology.kubernetes.io/zone": "eu-west-1a", "muster.dev/pool": "gpu", "a": ""},
		Taints: []corev1.Taint{{Key: "example.org/gpu", Value: "yes", Effect: corev1.TaintEffectNoSchedule}},
	}
}

func TestANodesLabelsAndTaintsAreReadByKubeadmItself(t *testing.T) {
	conf := filepath.Join(t.TempDir(), "discovery.conf")
	if err := os.WriteFile(conf, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	c := first()
	c.ControlPlaneNode = labeled()
	for name, config := range map[string]func() ([]byte, error){
		"worker":        func() ([]byte, error) { return Join(image(t, ""), labeled(), false, nil) },
		"control plane": func() ([]byte, error) { return Join(image(t, ""), labeled(), true, nil) },
		"init":          func() ([]byte, error) { return Init(image(t, ""), c) },
	} {
		b, err := config()
		if err != nil {
			t.Fatal(err)
		}
		if err := kubeadmconfig.ValidateConfig(bytes.Replace(b, []byte(DiscoveryConf), []byte(conf), 1), false, false); err != nil {
			t.Errorf("%s: kubeadm refuses it: %v", name, err)
		}
		var doc struct {
			NodeRegistration v1beta4.NodeRegistrationOptions `json:"nodeRegistration"`
		}
		head, _, _ := bytes.Cut(b, []byte("---\n"))
		if err := yaml.Unmarshal(head, &doc); err != nil {
			t.Fatal(err)
		}
		want := []v1beta4.Arg{{Name: "node-ip", Value: "192.168.77.12"}, {Name: "node-labels", Value: "a=,muster.dev/pool=gpu,topology.kubernetes.io/zone=eu-west-1a"}, {Name: "provider-id", Value: "aws:///eu-west-1a/i-0123"}}
		if got := doc.NodeRegistration; !slices.Equal(got.KubeletExtraArgs, want) || len(got.Taints) == 0 || got.Taints[0] != labeled().Taints[0] {
			t.Errorf("%s: %+v", name, got)
		}
		// A control plane keeps the taint that keeps users' pods away.
		if got := slices.Contains(doc.NodeRegistration.Taints, kubeadmconstants.ControlPlaneTaint); got != (name != "worker") {
			t.Errorf("%s: %+v", name, doc.NodeRegistration.Taints)
		}
	}
}

// kubeadm discovers the cluster with the ticket's token and the pinned CA. The kubelet still uses its existing certificate.
func TestJoinWithATokenIsReadByKubeadmItself(t *testing.T) {
	n := Node{Name: "node2", Addresses: []netip.Addr{netip.MustParseAddr("192.168.77.12")}}
	b, err := Join(image(t, ""), n, false, &TokenDiscovery{
		Token: "abcdef.0123456789abcdef", Endpoint: "192.168.77.1:6443", CA: []*x509.Certificate{{RawSubjectPublicKeyInfo: []byte("key")}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := kubeadmconfig.ValidateConfig(b, false, false); err != nil {
		t.Fatalf("kubeadm refuses it: %v\n%s", err, b)
	}
	for _, want := range []string{"token: abcdef.0123456789abcdef", "apiServerEndpoint: 192.168.77.1:6443", "- sha256:2c70e12b7a0646f92279f427c7b38e7334d8e5389cff167a1dc30e73f826b683", "FileAvailable--etc-kubernetes-kubelet.conf"} {
		if !strings.Contains(string(b), want) {
			t.Errorf("no %q in\n%s", want, b)
		}
	}
}

func TestAnotherPortOfKubeletsIsRefused(t *testing.T) {
	for port, ok := range map[string]bool{"10250": true, "0": true, "10260": false, "6443": false} {
		if _, err := ParseImage("unix:///x", nil, nil, []byte(`{"port":`+port+`}`), nil); (err == nil) != ok {
			t.Errorf("port %s: %v", port, err)
		}
	}
}

// J11
func TestALeaseIsRenewedOftenEnough(t *testing.T) {
	for seconds, ok := range map[string]bool{"0": true, "40": true, "120": true, "121": false} {
		if _, err := ParseImage("unix:///x", nil, nil, []byte(`{"nodeLeaseDurationSeconds":`+seconds+`}`), nil); (err == nil) != ok {
			t.Errorf("%s seconds: %v", seconds, err)
		}
	}
}

func TestAFragmentIsRefused(t *testing.T) {
	for name, f := range map[string]string{
		"an unknown field":  `{"apiServerr":{}}`,
		"an unknown nested": `{"apiServer":{"token":"x"}}`,
		"another type":      `{"clusterName":[]}`,
		"an external etcd":  `{"etcd":{"external":{"endpoints":["https://x"],"caFile":"","certFile":"","keyFile":""}}}`,
	} {
		if _, err := ParseImage("unix:///x", nil, []byte(f), nil, nil); err == nil || !strings.Contains(err.Error(), "clusterConfiguration") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := ParseImage("unix:///x", nil, nil, []byte(`{"x":1}`), nil); err == nil {
		t.Error("an unknown field of the kubelet's was taken")
	}
	if _, err := ParseImage("unix:///x", nil, nil, nil, []byte(`{"x":1}`)); err == nil {
		t.Error("an unknown field of kube-proxy's was taken")
	}
}

// Invariant K3.
func TestTailKeepsTheEndWithoutSecrets(t *testing.T) {
	var tail Tail
	for range 50 {
		tail.Add("early")
	}
	for _, l := range []string{
		"token abcdef.0123456789abcdef here", "certificate key " + strings.Repeat("0a", 32), "-----BEGIN RSA PRIVATE KEY-----", "c2VjcmV0",
		"-----END RSA PRIVATE KEY-----", "https://user:hunter2@host/", "key " + strings.Repeat("Ab1+", 20) + "==", "", strings.Repeat("long ", 100), "\x1b[0;31merror\x1b[0m: it failed",
	} {
		tail.Add(l)
	}
	got := tail.String()
	for _, secret := range []string{"0123456789abcdef", "0a0a", "c2VjcmV0", "hunter2", "Ab1+Ab1+"} {
		if strings.Contains(got, secret) {
			t.Errorf("%q is still in\n%s", secret, got)
		}
	}
	if !strings.HasSuffix(got, "error: it failed") || strings.Count(got, "\n") != tailLines-1 || strings.Contains(got, "\n\n") {
		t.Errorf("got\n%s", got)
	}
}

// The image's names count too: no machine may have such a name.
func TestTheImagesNamesOfTheAPIServerCountToo(t *testing.T) {
	if got := APIServerSANs(image(t, hostile), []string{"asked.example"}); !slices.Equal(got, []string{"from.image", "api.example", "asked.example"}) {
		t.Errorf("names %v", got)
	}
}

// kubeadm discovers the cluster by a token if one of the pins is that of an authority in cluster-info, which may still have the old one alone.
func TestAJoinPinsEachAuthority(t *testing.T) {
	var list []*x509.Certificate
	var want []string
	for range 2 {
		ca, _, err := pkiutil.NewCertificateAuthority(&pkiutil.CertConfig{Config: certutil.Config{CommonName: "kubernetes"}, EncryptionAlgorithm: "ECDSA-P256"})
		if err != nil {
			t.Fatal(err)
		}
		list, want = append(list, ca), append(want, pubkeypin.Hash(ca))
	}
	b, err := Join(image(t, ""), Node{Name: "node2", Addresses: []netip.Addr{netip.MustParseAddr("192.168.77.12")}}, false, &TokenDiscovery{Token: "abcdef.0123456789abcdef", Endpoint: "192.168.77.1:6443", CA: list})
	if err != nil {
		t.Fatal(err)
	}
	for _, pin := range want {
		if !strings.Contains(string(b), pin) {
			t.Errorf("%s is not among the pins of %s", pin, b)
		}
	}
	pins := pubkeypin.NewSet()
	if err := pins.Allow(want...); err != nil {
		t.Fatal(err)
	}
	for _, ca := range list {
		if err := pins.CheckAny([]*x509.Certificate{ca}); err != nil {
			t.Error(err)
		}
	}
}
