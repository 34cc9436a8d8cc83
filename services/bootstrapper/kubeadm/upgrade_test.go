package kubeadm

import (
	"errors"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/kubernetes/cmd/kubeadm/app/apis/kubeadm/v1beta4"
	kubeadmconfig "k8s.io/kubernetes/cmd/kubeadm/app/util/config"
	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/internal/kubetest"
	"github.com/muster-k8s/muster/internal/versions"
)

// kubeadm's own program reads the configuration, and has every command and phase that is named.
func TestUpgradeIsWhatKubeadmTakes(t *testing.T) {
	text, err := Upgrade(image(t, ""), "1.36.1")
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "upgrade.yaml", text)
	if err := kubeadmconfig.ValidateConfig(text, true, false); err != nil {
		t.Fatal(err)
	}
	var c v1beta4.UpgradeConfiguration
	if err := yaml.UnmarshalStrict(text, &c); err != nil {
		t.Fatal(err)
	}
	bin, err := kubetest.Binaries()
	if err != nil {
		t.Fatal(err)
	}
	for verb, skipped := range map[string][]string{"apply": c.Apply.SkipPhases, "node": c.Node.SkipPhases} {
		args := UpgradeArgs(verb == "apply", filepath.Join(t.TempDir(), "config.yaml"))
		if args[1] != verb {
			t.Errorf("%q", args)
		}
		// It reads no cluster: an unknown flag is an error before.
		if out, err := exec.CommandContext(t.Context(), filepath.Join(bin, "kubeadm"), append(args, "--help")...).CombinedOutput(); err != nil {
			t.Errorf("%q: %v\n%s", args, err, out)
		}
		for _, phase := range skipped {
			out, err := exec.CommandContext(t.Context(), filepath.Join(bin, "kubeadm"), slices.Concat([]string{"upgrade", verb, "phase"}, strings.Split(phase, "/"), []string{"--help"})...).CombinedOutput()
			if err != nil || !strings.Contains(string(out), "phase "+strings.ReplaceAll(phase, "/", " ")+" [flags]") {
				t.Errorf("kubeadm upgrade %s has no phase %s: %v\n%s", verb, phase, err, out)
			}
		}
	}
	// B9: no phase that names an image by tag, and no pull. J5: no bearer token.
	if !slices.Contains(c.Apply.SkipPhases, "bootstrap-token") || c.Apply.ImagePullPolicy != "Never" || c.Node.ImagePullPolicy != "Never" || !slices.Contains(c.Apply.IgnorePreflightErrors, "CreateJob") {
		t.Errorf("%+v", c)
	}
	for _, phases := range [][]string{c.Apply.SkipPhases, c.Node.SkipPhases} {
		if !slices.Contains(phases, "addon/coredns") || !slices.Contains(phases, "addon/kube-proxy") {
			t.Errorf("add-ons are not skipped: %q", phases)
		}
	}
	if *c.Apply.CertificateRenewal || *c.Node.CertificateRenewal {
		t.Error("kubeadm renews certificates, as Muster does")
	}
}

func TestSetImagesIsComparable(t *testing.T) {
	list := images()
	etcd := list[versions.Etcd]
	etcd.Tag = "3.6.6-0"
	list[versions.Etcd] = etcd
	got, err := SetImages([]byte("apiVersion: kubeadm.k8s.io/v1beta4\nkind: ClusterConfiguration\netcd:\n  local:\n    imageTag: 3.5.0-0\n"), list)
	if err != nil {
		t.Fatal(err)
	}
	var c v1beta4.ClusterConfiguration
	if err := yaml.UnmarshalStrict(got, &c); err != nil {
		t.Fatal(err)
	}
	if _, err := version.ParseSemantic(c.Etcd.Local.ImageTag); err != nil || c.Etcd.Local.ImageTag != "3.6.6-0" { // kubeadm compares it
		t.Errorf("%q: %v", c.Etcd.Local.ImageTag, err)
	}
	for _, text := range []string{"", "{", "kind: Other"} {
		if got, err := SetImages([]byte(text), list); err == nil {
			t.Errorf("%q becomes %s", text, got)
		}
	}
}

// B8: kubeadm merges the instance's configuration into the kubelet's.
func TestAnInstanceConfigurationHasTheRuntimeOnly(t *testing.T) {
	img := image(t, "")
	for text, want := range map[string]bool{
		string(img.InstanceConfig()): true,
		"apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n" + string(img.InstanceConfig()): false,
		"containerRuntimeEndpoint: unix:///run/containerd/containerd.sock\n":                                     true,
		"containerRuntimeEndpoint: unix:///evil.sock\n":                                                          false,
		string(img.InstanceConfig()) + "staticPodURL: http://evil\n":                                             false,
		string(img.InstanceConfig()) + "staticPodPath: /var/evil\n":                                              false,
		string(img.InstanceConfig()) + "unknown: 1\n":                                                            false,
		"": false, "{": false,
	} {
		if got := img.CheckInstanceConfig([]byte(text)); got != want {
			t.Errorf("%q: %t", text, got)
		}
	}
}

// A power cut can leave an empty configuration: that is an error, and no panic at each boot.
func TestAnEmptyKubeletConfigurationIsAnError(t *testing.T) {
	for _, text := range []string{"", "\n", "null\n", "# nothing\n"} {
		if _, _, err := image(t, "").CheckKubelet([]byte(text)); err == nil {
			t.Errorf("%q is accepted", text)
		}
	}
	if right, _, err := image(t, "").CheckKubelet([]byte("authentication: null\n")); err != nil || !strings.Contains(string(right), "clientCAFile") {
		t.Errorf("%s, %v", right, err)
	}
}

func TestAPodOfOneOfTheListsIsListed(t *testing.T) {
	img, other := image(t, ""), images()
	etcd := other[versions.Etcd]
	etcd.Digest = "sha256:" + strings.Repeat("a", 64)
	other[versions.Etcd] = etcd
	if err := errors.Join(img.ListedPod("/", "etcd", []byte(etcdPod()), images()), img.ListedPod("/", "etcd", []byte(etcdPod()), other, images())); err != nil {
		t.Error(err)
	}
	if img.ListedPod("/", "etcd", []byte(etcdPod()), other) == nil || img.ListedPod("/", "etcd", []byte(etcdPod())) == nil {
		t.Error("a pod of no list is accepted")
	}
}
