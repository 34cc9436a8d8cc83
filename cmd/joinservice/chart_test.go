package main

import (
	"bytes"
	"errors"
	"io"
	"os"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// The API server knows every field of what the chart renders.
func TestTheAPIServerTakesTheWholeChart(t *testing.T) {
	b, err := os.ReadFile("../../deploy/charts/testdata/rendered.yaml")
	if err != nil {
		t.Fatal(err)
	}
	shared.Reset(t)
	strict := client.WithFieldValidation(shared.Client, metav1.FieldValidationStrict)
	kinds := map[string]int{}
	for dec := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(b), 4096); ; {
		o := &unstructured.Unstructured{}
		if err := dec.Decode(&o.Object); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if len(o.Object) == 0 {
			continue
		}
		kinds[o.GetKind()]++
		if err := strict.Create(t.Context(), o, client.DryRunAll); err != nil && !apierrors.IsAlreadyExists(err) {
			t.Errorf("%s %s: %v", o.GetKind(), o.GetName(), err)
		}
	}
	if kinds["DaemonSet"] != 2 || kinds["NetworkPolicy"] != 2 {
		t.Errorf("rendered: %v", kinds)
	}
}
