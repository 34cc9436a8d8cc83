package clusterapi

import (
	"context"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/internal/kubetest"
)

func TestMain(m *testing.M) {
	kubetest.Verify(m, func(context.Context) (stop func() error, err error) {
		return func() error {
			if running == nil {
				return nil
			}
			return running.Stop()
		}, nil
	})
}

// running is the cluster of [start], once there is one.
var running *kubetest.Cluster

// start returns the control plane of all tests, with a garbage collector and the namespace of Muster's services.
func start(t *testing.T) *kubetest.Cluster {
	t.Helper()
	if running == nil {
		api, err := kubetest.Start(t.Context(), "garbage-collector-controller")
		if err != nil {
			t.Fatal(err)
		}
		running = api
	}
	if err := running.Namespace(t.Context(), Namespace); err != nil {
		t.Fatal(err)
	}
	return running
}

func TestParseManifests(t *testing.T) {
	got, err := ParseManifests("x.yaml", []byte(`
# comments alone are no document
---
apiVersion: v1
kind: Namespace
metadata: {name: a}
---
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: ConfigMap, metadata: {name: b, namespace: a}, data: {k: "1"}}
- {apiVersion: v1, kind: ConfigMap, metadata: {name: c, namespace: a}}
`))
	if err != nil || len(got) != 3 || describe(got[1]) != "ConfigMap a/b" || describe(got[0]) != "Namespace a" {
		t.Errorf("%v, %v", got, err)
	}
	for name, text := range map[string]string{
		"no kind":     "apiVersion: v1\nmetadata: {name: a}\n",
		"no name":     "apiVersion: v1\nkind: ConfigMap\n",
		"a key twice": "apiVersion: v1\nkind: ConfigMap\nkind: Secret\nmetadata: {name: a}\n",
		"no object":   "- a\n- b\n",
		"no YAML":     "\tx",
	} {
		if _, err := ParseManifests("x.yaml", []byte(text)); err == nil || !strings.Contains(err.Error(), "x.yaml: document 1") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestValues(t *testing.T) {
	digest := "@sha256:" + strings.Repeat("0", 64)
	good := Values{JoinserviceImage: "r.example/j" + digest, KMSImage: "r.example/k" + digest}
	if err := CheckValues(good); err != nil {
		t.Error(err)
	}
	more := good
	more.More = map[string]any{"joinservice": map[string]any{"nodePort": float64(30091), "image": "r.example/other:tag"}}
	if err := CheckValues(more); err != nil {
		t.Errorf("the images of the flags win: %v", err)
	}
	if good.JoinPort() != 30090 || more.JoinPort() != 30091 {
		t.Errorf("ports %d and %d", good.JoinPort(), more.JoinPort())
	}
	for name, v := range map[string]Values{
		"an image by tag":  {JoinserviceImage: "r.example/j:v1", KMSImage: good.KMSImage},
		"no image":         {KMSImage: good.KMSImage},
		"an unknown value": {JoinserviceImage: good.JoinserviceImage, KMSImage: good.KMSImage, More: map[string]any{"secret": "x"}},
	} {
		if err := CheckValues(v); err == nil {
			t.Errorf("%s is accepted", name)
		}
	}
}
