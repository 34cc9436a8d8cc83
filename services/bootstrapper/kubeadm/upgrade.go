package kubeadm

import (
	"bytes"
	"errors"
	"fmt"
	"path"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubeletv1 "k8s.io/kubelet/config/v1beta1"
	v1beta4 "k8s.io/kubernetes/cmd/kubeadm/app/apis/kubeadm/v1beta4"
	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/internal/versions"
)

// UpgradeTime bounds a run of `kubeadm upgrade`: it replaces four static pods, and waits up to manifestTime, twice, for each of them. A killed one can be
// run again.
const (
	UpgradeTime  = 35 * time.Minute
	manifestTime = 4 * time.Minute
)

// addons are the phases of kube-proxy and CoreDNS: kubeadm names their images by tag (B9), and refuses to migrate the configuration of a CoreDNS that it
// does not know.
var addons = []string{"addon/coredns", "addon/kube-proxy"}

// Upgrade returns the configuration of `kubeadm upgrade` to a version without "v".
func Upgrade(img *Image, version string) ([]byte, error) {
	no := false
	// CreateJob starts a pod whose image has a tag (B9). The others are about CoreDNS, which kubeadm does not upgrade.
	ignore := union(img.ignoreChecks, "CreateJob", "CoreDNSUnsupportedPlugins", "CoreDNSMigration")
	patches := &v1beta4.Patches{Directory: PatchesFolder}
	return marshal(&v1beta4.UpgradeConfiguration{
		TypeMeta: typeMeta("UpgradeConfiguration"),
		Apply: v1beta4.UpgradeApplyConfiguration{
			KubernetesVersion: "v" + version, CertificateRenewal: &no, IgnorePreflightErrors: ignore, Patches: patches, ImagePullPolicy: corev1.PullNever, // B9
			SkipPhases: union([]string{"bootstrap-token"}, addons...), // J5
		},
		Node: v1beta4.UpgradeNodeConfiguration{CertificateRenewal: &no, IgnorePreflightErrors: ignore, Patches: patches, ImagePullPolicy: corev1.PullNever, SkipPhases: addons},
		Timeouts: &v1beta4.Timeouts{
			ControlPlaneComponentHealthCheck: &metav1.Duration{Duration: healthCheck}, KubernetesAPICall: &metav1.Duration{Duration: apiCall}, UpgradeManifests: &metav1.Duration{Duration: manifestTime},
		},
	})
}

// UpgradeArgs returns the arguments by which kubeadm upgrades this node. With apply, it also upgrades the cluster's own
// objects.
func UpgradeArgs(apply bool, config string) []string {
	if apply {
		return []string{"upgrade", "apply", "--yes", "--config", config}
	}
	return []string{"upgrade", "node", "--config", config}
}

// SetImages returns the cluster's ClusterConfiguration, as kubeadm keeps it, with the tags of the listed etcd and CoreDNS. Without them kubeadm takes
// its own versions, and refuses an etcd that is newer. The digests of static pods come from [Patches]: kubeadm has to compare etcd's tag.
func SetImages(config []byte, images versions.Images) ([]byte, error) {
	var have map[string]any
	if err := yaml.UnmarshalStrict(config, &have); err != nil {
		return nil, fmt.Errorf("kubeadm's ClusterConfiguration: %w", err)
	}
	if have["kind"] != "ClusterConfiguration" {
		return nil, errors.New("kubeadm's ClusterConfiguration: it is another object")
	}
	dns := images[versions.CoreDNS]
	force(have, []string{"etcd", "local", "imageTag"}, images[versions.Etcd].Tag, nil)
	force(have, []string{"dns", "imageRepository"}, path.Dir(dns.Repository), nil)
	force(have, []string{"dns", "imageTag"}, dns.Tag+"@"+dns.Digest, nil)
	return yaml.Marshal(have)
}

// InstanceConfig is the kubelet's instance configuration, which kubeadm merges into the kubelet's configuration.
func (i *Image) InstanceConfig() []byte {
	return fmt.Appendf(nil, "containerRuntimeEndpoint: %q\n", i.criSocket)
}

// CheckInstanceConfig reports whether the file has nothing but the image's container runtime (B8).
func (i *Image) CheckInstanceConfig(file []byte) bool {
	var is kubeletv1.KubeletConfiguration
	if err := asTheKubelet(file, &is); err != nil {
		return false
	}
	have, err := yaml.Marshal(is)
	if err != nil {
		return false
	}
	want, err := yaml.Marshal(kubeletv1.KubeletConfiguration{ContainerRuntimeEndpoint: i.criSocket})
	return err == nil && bytes.Equal(have, want)
}

// ListedPod returns nil if a manifest is what [Image.CheckStaticPod] accepts with the images of one of the lists.
func (i *Image) ListedPod(root, name string, manifest []byte, lists ...versions.Images) error {
	err := errors.New("no list of images is known")
	for _, images := range lists {
		if err = i.CheckStaticPod(root, name, manifest, images); err == nil {
			return nil
		}
	}
	return err
}

// WithAnnotation returns the patch of this name with one more annotation of the static pod. Of a patch that is a list of operations it adds none: the pod has
// another patch.
func WithAnnotation(file string, patch []byte, name, value string) []byte {
	if !strings.HasSuffix(file, podPatch) {
		return patch
	}
	return append(fmt.Appendf(nil, "metadata:\n  annotations:\n    %q: %q\n", name, strings.ToValidUTF8(value, "")), patch...)
}
