package upgrade

import (
	"io"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"github.com/muster-k8s/muster/internal/versions"
)

func TestTheAddonsGetTheirImages(t *testing.T) {
	meta := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: "kube-system", Name: name} }
	pod := func(name string) corev1.PodTemplateSpec {
		return corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: name, Image: "registry.k8s.io/" + name + ":v1", Args: []string{"stays"}}}}}
	}
	api := fake.NewClientset(
		&appsv1.DaemonSet{ObjectMeta: meta("kube-proxy"), Spec: appsv1.DaemonSetSpec{Template: pod("kube-proxy")}},
		&appsv1.Deployment{ObjectMeta: meta("coredns"), Spec: appsv1.DeploymentSpec{Template: pod("coredns")}},
	)
	broken := 0
	api.PrependReactor("patch", "daemonsets", func(k8stesting.Action) (bool, runtime.Object, error) {
		if broken++; broken == 1 { // the API server was restarted
			return true, nil, io.ErrUnexpectedEOF
		}
		return false, nil, nil
	})
	c := cluster{api: api}
	for range 2 {
		if err := c.SetAddons(t.Context(), images(newVersion)); err != nil {
			t.Fatal(err)
		}
	}
	proxy, err := api.AppsV1().DaemonSets("kube-system").Get(t.Context(), "kube-proxy", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	dns, err := api.AppsV1().Deployments("kube-system").Get(t.Context(), "coredns", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for name, got := range map[string]corev1.Container{versions.Proxy: proxy.Spec.Template.Spec.Containers[0], versions.CoreDNS: dns.Spec.Template.Spec.Containers[0]} {
		if got.Image != images(newVersion)[name].String() || len(got.Args) != 1 { // B9
			t.Errorf("%s: %+v", name, got)
		}
	}
	if err := (cluster{api: fake.NewClientset()}).SetAddons(t.Context(), images(newVersion)); err != nil {
		t.Errorf("a cluster with its own proxy and DNS: %v", err)
	}
	other := fake.NewClientset(&appsv1.Deployment{ObjectMeta: meta("coredns"), Spec: appsv1.DeploymentSpec{Template: pod("dns")}})
	if err := (cluster{api: other}).SetAddons(t.Context(), images(newVersion)); err == nil || !strings.Contains(err.Error(), "no container coredns") {
		t.Errorf("another DNS: %v", err)
	}
}

func TestKubeadmsConfigurationGetsTheTags(t *testing.T) {
	const config = "apiVersion: kubeadm.k8s.io/v1beta4\nkind: ClusterConfiguration\nclusterName: demo\netcd: {local: {dataDir: /var/lib/etcd}}\nimageRepository: registry.example\n"
	api := fake.NewClientset(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "kubeadm-config"}, Data: map[string]string{"ClusterConfiguration": config}})
	c := cluster{api: api}
	for range 2 {
		if err := c.SetTags(t.Context(), images(newVersion)); err != nil {
			t.Fatal(err)
		}
	}
	m, err := api.CoreV1().ConfigMaps("kube-system").Get(t.Context(), "kubeadm-config", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if got := m.Data["ClusterConfiguration"]; !strings.Contains(got, "imageTag: v1.36.1\n") || !strings.Contains(got, "imageTag: v1.36.1@sha256:") || !strings.Contains(got, "clusterName: demo") || !strings.Contains(got, "dataDir: /var/lib/etcd") {
		t.Error(got)
	}
	writes := 0
	for _, a := range api.Actions() {
		if a.GetVerb() == "update" {
			writes++
		}
	}
	if writes != 1 {
		t.Errorf("%d writes", writes)
	}
}
