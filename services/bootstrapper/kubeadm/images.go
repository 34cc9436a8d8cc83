package kubeadm

import (
	"bytes"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/clusterca"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

// StaticPods returns the images that run as static pods on control planes, each in one container with the name of its pod.
func StaticPods() []string {
	return []string{versions.Etcd, versions.APIServer, versions.ControllerManager, versions.Scheduler}
}

// SigningArgument makes the controller manager sign with a file that has one certificate: with two, as ca.crt has while the authority is rotated, it starts no
// signer. It is the machine's own, and not in the cluster's configuration: bootstrappers of an earlier version do not write the file.
const SigningArgument = signingFlag + machine.PKIFolder + "/" + clusterca.SignerFile

const (
	signingFlag = "--cluster-signing-cert-file="
	// podPatch ends the name of a patch that is part of a pod.
	podPatch = "+strategic.yaml"
)

// Patches returns the files of [PatchesFolder], by name. They make static pods name their images by digest (B9), and the controller manager sign with
// [SigningArgument].
func Patches(images versions.Images) map[string][]byte {
	// Of two equal flags the last one counts.
	out := map[string][]byte{versions.ControllerManager + "+json.yaml": fmt.Appendf(nil, "[{op: add, path: /spec/containers/0/command/-, value: %q}]\n", SigningArgument)}
	for _, name := range StaticPods() {
		out[name+podPatch] = fmt.Appendf(nil, "spec:\n  containers:\n  - name: %s\n    image: %s\n", name, images[name])
	}
	return out
}

// WithSigner returns the command of a controller manager with [SigningArgument] instead of kubeadm's default. A command that signs with another file stays.
func WithSigner(command []string) []string {
	out := slices.DeleteFunc(slices.Clone(command), func(arg string) bool { return arg == signingFlag+machine.PKIFolder+"/ca.crt" })
	if len(out) == len(command) || slices.Contains(out, SigningArgument) {
		return out
	}
	return append(out, SigningArgument)
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
