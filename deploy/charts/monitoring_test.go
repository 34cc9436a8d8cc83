package charts_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// monitored are the values with all monitoring switched on.
func monitored() map[string]any {
	on := func() map[string]any {
		return map[string]any{"enabled": true, "labels": map[string]any{"release": "prometheus"}}
	}
	v := values()
	v["monitoring"] = map[string]any{"podMonitor": on(), "rules": on(), "dashboards": on()}
	return v
}

// monitoring decodes, strictly, the objects of a kind that are rendered if monitoring is on.
func monitoring[T any](t *testing.T, kind string) []T {
	t.Helper()
	out, err := render(t, monitored())
	if err != nil {
		t.Fatal(err)
	}
	var found []T
	for _, d := range strings.Split("\n"+out["muster/templates/monitoring.yaml"], "\n---\n") {
		var head struct {
			Kind     string `json:"kind"`
			Metadata struct {
				Labels map[string]string `json:"labels"`
			} `json:"metadata"`
		}
		if err := yaml.Unmarshal([]byte(d), &head); err != nil {
			t.Fatal(err)
		}
		if head.Kind != kind {
			continue
		}
		if head.Metadata.Labels["release"] != "prometheus" {
			t.Errorf("%s lacks the label that it is selected by", kind)
		}
		var o T
		if err := yaml.UnmarshalStrict([]byte(d), &o); err != nil {
			t.Fatalf("%s: %v", kind, err)
		}
		found = append(found, o)
	}
	if len(found) == 0 {
		t.Fatalf("no %s", kind)
	}
	return found
}

func TestMonitoringIsOffUnlessAskedFor(t *testing.T) {
	if text, ok := mustRender(t)["muster/templates/monitoring.yaml"]; ok {
		t.Errorf("rendered by default, and most clusters have no such kinds: %s", text)
	}
}

func TestPodsAreScrapedUnderTheNamesThatAlertsAskFor(t *testing.T) {
	m := monitoring[monitoringv1.PodMonitor](t, "PodMonitor")[0]
	if m.Spec.JobLabel != "app.kubernetes.io/name" || len(m.Spec.PodMetricsEndpoints) != 1 || *m.Spec.PodMetricsEndpoints[0].Port != "metrics" {
		t.Errorf("%+v", m.Spec)
	}
	for _, ds := range documents(t) {
		if ds["kind"] != "DaemonSet" {
			continue
		}
		labels := ds["spec"].(map[string]any)["template"].(map[string]any)["metadata"].(map[string]any)["labels"].(map[string]any)
		for k, v := range m.Spec.Selector.MatchLabels {
			if labels[k] != v {
				t.Errorf("the PodMonitor does not select %v", labels)
			}
		}
	}
}

func TestTheChartsRulesAreTheFile(t *testing.T) {
	b, err := os.ReadFile(filepath.Join("muster", "files", "muster.rules.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var want monitoringv1.PrometheusRuleSpec
	if err := yaml.UnmarshalStrict(b, &want); err != nil {
		t.Fatal(err)
	}
	got := monitoring[monitoringv1.PrometheusRule](t, "PrometheusRule")[0].Spec
	if a, b := asJSON(t, got), asJSON(t, want); a != b || len(want.Groups) < 4 {
		t.Errorf("the chart has %s\nthe file %s", a, b)
	}
}

func TestTheChartsDashboardsAreTheFiles(t *testing.T) {
	maps := monitoring[corev1.ConfigMap](t, "ConfigMap")
	files, err := filepath.Glob(filepath.Join("muster", "files", "*.json"))
	if err != nil || len(files) != len(maps) {
		t.Fatalf("%d ConfigMaps of %v: %v", len(maps), files, err)
	}
	for _, f := range files {
		want, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		found := false
		for _, m := range maps {
			got, ok := m.Data[filepath.Base(f)]
			found = found || ok && strings.TrimSpace(got) == strings.TrimSpace(string(want))
		}
		if !found {
			t.Errorf("no ConfigMap has %s", f)
		}
	}
}

func asJSON(t *testing.T, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
