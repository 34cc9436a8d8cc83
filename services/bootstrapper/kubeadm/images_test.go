package kubeadm

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/kubernetes/cmd/kubeadm/app/util/patches"

	"github.com/muster-k8s/muster/internal/versions"
)

// B9: kubeadm's own code applies the patches to static pods.
func TestStaticPodsNameTheListedDigest(t *testing.T) {
	dir := t.TempDir()
	for name, content := range Patches(images()) {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	manager, err := patches.GetPatchManagerForPath(dir, patches.KnownTargets(), io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range StaticPods() {
		target := &patches.PatchTarget{Name: name, StrategicMergePatchObject: corev1.Pod{}, Data: []byte(`{"apiVersion":"v1","kind":"Pod","spec":{"containers":[{"name":"` + name + `","image":"registry.k8s.io/` + name + `:v1","command":["` + name + `","--cluster-signing-cert-file=/etc/kubernetes/pki/ca.crt"]}]}}`)}
		if err := manager.ApplyPatchesToTarget(target); err != nil {
			t.Fatal(err)
		}
		if !bytes.Contains(target.Data, []byte(images()[name].String())) || bytes.Contains(target.Data, []byte("registry.k8s.io")) {
			t.Errorf("%s: %s", name, target.Data)
		}
		// Of two equal flags the last one counts.
		if signs := bytes.Contains(target.Data, []byte(`pki/ca.crt","--cluster-signing-cert-file=/etc/kubernetes/pki/muster-signing.crt"]`)); signs != (name == versions.ControllerManager) {
			t.Errorf("%s: %s", name, target.Data)
		}
	}
}

const printed = `I1124 16:00:00.000000    1234 version.go:261] remote version is much newer
[addons] some words
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: kube-proxy, namespace: kube-system}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: kube-proxy, namespace: kube-system}
spec:
  selector: {matchLabels: {k8s-app: kube-proxy}}
  template:
    metadata: {labels: {k8s-app: kube-proxy}}
    spec:
      containers:
      - {name: kube-proxy, image: "registry.k8s.io/kube-proxy:v1.36.1"}`

// B9: kubeadm has no field for kube-proxy's image.
func TestKubeProxyNamesTheListedDigest(t *testing.T) {
	objects, err := Proxy(strings.Split(printed, "\n"), images()[versions.Proxy])
	if err != nil || len(objects) != 2 {
		t.Fatal(objects, err)
	}
	d, ok := objects[1].(*appsv1.DaemonSet)
	if !ok || d.Spec.Template.Spec.Containers[0].Image != images()[versions.Proxy].String() {
		t.Errorf("%+v", objects[1])
	}
	for name, text := range map[string]string{
		"no DaemonSet":        strings.Split(printed, "---\napiVersion: apps/v1")[0],
		"a second container":  printed + "\n      - {name: other, image: other}",
		"an init container":   printed + "\n      initContainers: [{name: other, image: other}]",
		"a second DaemonSet":  printed + "\n---" + strings.SplitN(printed, "---", 3)[2],
		"an object that runs": printed + "\n---\napiVersion: v1\nkind: Pod\nmetadata: {name: x}",
		"what is no manifest": printed + "\n---\nkind: [",
		"an unknown kind":     printed + "\n---\napiVersion: x/v1\nkind: X",
		"nothing":             "",
		"a line of kubeadm's": "[addons] Applied essential addon: kube-proxy",
	} {
		if got, err := Proxy(strings.Split(text, "\n"), images()[versions.Proxy]); err == nil {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// A cluster that was made by an earlier Muster has kubeadm's default. A cluster whose owner signs with another authority keeps that.
func TestAControllerManagerSignsWithOneCertificate(t *testing.T) {
	const kubeadms, other = "--cluster-signing-cert-file=/etc/kubernetes/pki/ca.crt", "--cluster-signing-cert-file=/etc/other/ca.crt"
	for name, tt := range map[string]struct{ command, want []string }{
		"kubeadm's default":   {[]string{"c", kubeadms, "--x"}, []string{"c", "--x", SigningArgument}},
		"with the patch":      {[]string{"c", kubeadms, "--x", SigningArgument}, []string{"c", "--x", SigningArgument}},
		"Muster's":            {[]string{"c", "--x", SigningArgument}, []string{"c", "--x", SigningArgument}},
		"another authority":   {[]string{"c", other}, []string{"c", other}},
		"without a signer":    {[]string{"c", "--x"}, []string{"c", "--x"}},
		"without an argument": {nil, nil},
	} {
		if got := WithSigner(tt.command); !slices.Equal(got, tt.want) {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
	}
}

// B8: the manifests of both forms are kubeadm's.
func TestBothFormsOfTheSignersArgumentAreListed(t *testing.T) {
	for _, command := range []string{`"--cluster-signing-cert-file=/etc/kubernetes/pki/ca.crt"`, `"` + SigningArgument + `"`, `"--cluster-signing-cert-file=/etc/kubernetes/pki/ca.crt", "` + SigningArgument + `"`} {
		manifest := strings.NewReplacer("name: etcd", "name: kube-controller-manager", images()[versions.Etcd].String(), images()[versions.ControllerManager].String(), "[etcd, --data-dir=/var/lib/etcd]", "[kube-controller-manager, "+command+"]").Replace(etcdPod())
		if err := image(t, "").CheckStaticPod("/", versions.ControllerManager, []byte(manifest), images()); err != nil {
			t.Errorf("%s: %v", command, err)
		}
	}
}
