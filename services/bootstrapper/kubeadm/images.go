package kubeadm

import (
	"bytes"
	"errors"
	"fmt"
	"regexp"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/muster-k8s/muster/internal/versions"
)

// StaticPods returns the images that run as static pods on control planes, each in one container with the name of its pod.
func StaticPods() []string {
	return []string{versions.Etcd, versions.APIServer, versions.ControllerManager, versions.Scheduler}
}

// Patches returns the files of [PatchesFolder], by name. They make static pods name their images by digest (B9).
func Patches(images versions.Images) map[string][]byte {
	out := map[string][]byte{}
	for _, name := range StaticPods() {
		out[name+"+strategic.yaml"] = fmt.Appendf(nil, "spec:\n  containers:\n  - name: %s\n    image: %s\n", name, images[name])
	}
	return out
}

// WantsProxy reports whether the image lets kubeadm install kube-proxy, which is the default.
func (i *Image) WantsProxy() bool { return !i.cluster.Proxy.Disabled }

// ProxyManifest returns the arguments by which kubeadm prints the objects of kube-proxy without creating them.
func ProxyManifest(config string) []string {
	return []string{"init", "phase", "addon", "kube-proxy", "--print-manifest", "--config", config}
}

// logged matches lines that kubeadm and its libraries print beside the manifest.
var logged = regexp.MustCompile(`^(?:\[|[IWEF][0-9]{4} )`)

// Proxy parses the output of [ProxyManifest], and returns its objects with kube-proxy's image by digest (B9).
func Proxy(printed []string, image versions.Image) ([]runtime.Object, error) {
	var text bytes.Buffer
	for _, line := range printed {
		if !logged.MatchString(line) {
			text.WriteString(line + "\n")
		}
	}
	var out []runtime.Object
	found := false
	for doc := range strings.SplitSeq("\n"+text.String(), "\n---\n") {
		if strings.TrimSpace(doc) == "" {
			continue
		}
		o, _, err := scheme.Codecs.UniversalDeserializer().Decode([]byte(doc), nil, nil)
		if err != nil {
			return nil, fmt.Errorf("kubeadm's manifest of kube-proxy: %w", err)
		}
		switch o := o.(type) {
		case *corev1.ServiceAccount, *corev1.ConfigMap, *rbacv1.ClusterRoleBinding, *rbacv1.Role, *rbacv1.RoleBinding:
		case *appsv1.DaemonSet:
			pod := &o.Spec.Template.Spec
			if found || len(pod.Containers) != 1 || len(pod.InitContainers) > 0 {
				return nil, errors.New("kubeadm's manifest of kube-proxy has not exactly one container")
			}
			found, pod.Containers[0].Image = true, image.String() // B9
		default:
			return nil, fmt.Errorf("kubeadm's manifest of kube-proxy has a %T", o)
		}
		out = append(out, o)
	}
	if !found {
		return nil, errors.New("kubeadm's manifest of kube-proxy has no DaemonSet")
	}
	return out, nil
}
