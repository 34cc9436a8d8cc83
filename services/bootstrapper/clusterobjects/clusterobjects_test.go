package clusterobjects

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/machine/machinetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	secretPath = "/api/v1/namespaces/muster-system/secrets/muster-kms-root"
	configPath = "/api/v1/namespaces/muster-system/configmaps/muster-cluster"
)

func state() State {
	return State{
		Root: bytes.Repeat([]byte{1}, 32), Salt: bytes.Repeat([]byte{2}, 32),
		Info: clusterinfo.Info{
			ClusterID: [32]byte{3}, MeasurementSalt: [32]byte{4}, KubernetesVersion: "1.36.1", ControlPlaneEndpoint: "192.168.77.1:6443",
			APIServerSANs: []string{"api.example.com", "203.0.113.9"},
			Components:    []versions.Component{{URL: "http://mirror/kubelet", SHA256: fmt.Sprintf("%064x", 1), Path: "/usr/local/bin/kubelet", Mode: 0o755}},
			Images:        machinetest.Images().References(),
		},
		Proxy: []runtime.Object{
			&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "kube-proxy", Namespace: "kube-system"}},
			&appsv1.DaemonSet{
				ObjectMeta: metav1.ObjectMeta{Name: "kube-proxy", Namespace: "kube-system"},
				Spec:       appsv1.DaemonSetSpec{Template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "kube-proxy", Image: machinetest.Images()[versions.Proxy].String()}}}}},
			},
		},
	}
}

const proxyPath = "/apis/apps/v1/namespaces/kube-system/daemonsets/kube-proxy"

// B9: a repeated init with a corrected list replaces every other image.
func TestKubeProxyRunsTheListedImage(t *testing.T) {
	a := machinetest.NewAPIServer(t)
	for _, image := range []string{"registry.example/kube-proxy:v0@sha256:00", machinetest.Images()[versions.Proxy].String()} {
		s := state()
		s.Proxy[1].(*appsv1.DaemonSet).Spec.Template.Spec.Containers[0].Image = image
		if err := write(t, a, s); err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(a.Object(proxyPath)["spec"]); !strings.Contains(got, image+" ") && !strings.Contains(got, image+"]") {
			t.Errorf("%s, want %s", got, image)
		}
	}
}

func write(t *testing.T, a *machinetest.APIServer, s State) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	return Write(ctx, a.Kubeconfig(), s)
}

func TestTheClustersOwnObjectsAreWrittenAndFoundAgain(t *testing.T) {
	a := machinetest.NewAPIServer(t)
	a.FailNext(2) // an API server that has just started fails at first
	for range 2 {
		if err := write(t, a, state()); err != nil {
			t.Fatal(err)
		}
	}
	data := a.Object(secretPath)["data"]
	want := map[string]any{"root": base64.StdEncoding.EncodeToString(state().Root), "salt": base64.StdEncoding.EncodeToString(state().Salt)}
	if !reflect.DeepEqual(data, want) || a.Object(secretPath)["immutable"] != true {
		t.Errorf("secret %v", a.Object(secretPath))
	}
	raw := a.Object(configPath)["data"].(map[string]any)[clusterinfo.Key].(string)
	info, err := clusterinfo.Parse([]byte(raw)) // what the services read
	if err != nil || !reflect.DeepEqual(*info, state().Info) {
		t.Errorf("config map %s, %v", raw, err)
	}
	binding := a.Object("/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/kubeadm:apiserver-kubelet-client")
	if binding["roleRef"].(map[string]any)["name"] != "system:kubelet-api-admin" {
		t.Errorf("binding %v", binding)
	}
	role := a.Object("/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/roles/muster:kube-proxy-config")
	rule := role["rules"].([]any)[0].(map[string]any)
	if fmt.Sprint(rule["resourceNames"], rule["verbs"]) != "[kube-proxy] [get]" {
		t.Errorf("role %v", role)
	}
	subject := a.Object("/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/rolebindings/muster:kube-proxy-config")["subjects"].([]any)[0].(map[string]any)
	if subject["name"] != "system:nodes" {
		t.Errorf("subject %v", subject)
	}
}

func TestAnotherRootSecretIsNeverOverwritten(t *testing.T) {
	for name, change := range map[string]func(*State){
		"root": func(s *State) { s.Root = bytes.Repeat([]byte{9}, 32) },
		"salt": func(s *State) { s.Salt = bytes.Repeat([]byte{9}, 32) },
	} {
		a := machinetest.NewAPIServer(t)
		if err := write(t, a, state()); err != nil {
			t.Fatal(err)
		}
		before := fmt.Sprint(a.Object(secretPath)["data"])
		other := state()
		change(&other)
		if err := write(t, a, other); !errors.Is(err, ErrForeign) {
			t.Errorf("%s: %v", name, err)
		}
		if fmt.Sprint(a.Object(secretPath)["data"]) != before {
			t.Errorf("%s: overwritten", name)
		}
	}
}

func TestTheConfigMapFollowsARepeatedInit(t *testing.T) {
	a := machinetest.NewAPIServer(t)
	if err := write(t, a, state()); err != nil {
		t.Fatal(err)
	}
	other := state()
	other.Info.Components = nil
	if err := write(t, a, other); err != nil {
		t.Fatal(err)
	}
	info, err := clusterinfo.Parse([]byte(a.Object(configPath)["data"].(map[string]any)[clusterinfo.Key].(string)))
	if err != nil || len(info.Components) != 0 {
		t.Fatal(info, err)
	}
}

func TestAnAPIServerThatNeverAnswersEndsWithTheContext(t *testing.T) {
	a := machinetest.NewAPIServer(t)
	a.FailNext(1 << 20)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if err := Write(ctx, a.Kubeconfig(), state()); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	if err := Write(t.Context(), []byte("not a kubeconfig"), state()); err == nil {
		t.Fatal("a kubeconfig of garbage was taken")
	}
}
