package main

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// The chart gets values for the kind of cluster: the pod security that API servers of muster init enforce, and how
// tickets of an adopted cluster let kubeadm discover it.
func TestTheChartIsToldHowTheClusterIsMade(t *testing.T) {
	digest := "@sha256:" + strings.Repeat("1", 64)
	own := filepath.Join(t.TempDir(), "values.yaml")
	if err := os.WriteFile(own, []byte("podSecurity: {default: privileged}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		adopted bool
		values  string
		want    map[string]any
	}{
		"made by muster init":              {want: map[string]any{"podSecurity": map[string]any{"default": "baseline"}}},
		"and its image allows privileged":  {values: own, want: map[string]any{"podSecurity": map[string]any{"default": "privileged"}}},
		"adopted, so by Kubernetes' rules": {adopted: true, want: map[string]any{"joinservice": map[string]any{"joinCredential": "token"}}},
	} {
		f := initFlags{images: imageFlags{joinserviceImage: "r.example/j" + digest, kmsImage: "r.example/k" + digest, chartValues: tt.values}}
		f.cluster.Adopted = tt.adopted
		v, err := f.chartValues()
		if err != nil || !reflect.DeepEqual(v.More, tt.want) {
			t.Errorf("%s: %v, %v, want %v", name, v.More, err, tt.want)
		}
	}
}
