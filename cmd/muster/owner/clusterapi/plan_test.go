package clusterapi

import (
	"errors"
	"slices"
	"strings"
	"testing"

	chart "helm.sh/helm/v4/pkg/chart/v2"
	releasev1 "helm.sh/helm/v4/pkg/release/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
)

func TestValuesThatNobodyNamesStay(t *testing.T) {
	last := &releasev1.Release{Config: map[string]any{
		"owner": map[string]any{"publicKeys": []any{"a"}}, "joinservice": map[string]any{"image": "old", "nodePort": 31000}, "kms": map[string]any{"image": "old"},
	}}
	got := (&Client{}).NextValues(last, Values{KMSImage: "new", More: map[string]any{"networkPolicy": map[string]any{"enabled": false}}})
	want := []Change{{Name: "kms.image", From: "old", To: "new"}, {Name: "networkPolicy.enabled", To: "false"}}
	if changed := changes("", last.Config, got); !slices.Equal(changed, want) {
		t.Errorf("%+v", changed)
	}
	if last.Config["kms"].(map[string]any)["image"] != "old" {
		t.Error("the release's own values were written to")
	}
	if (Values{More: got}).JoinPort() != 31000 {
		t.Error("the port is lost")
	}
	if changed := changes("", last.Config, (&Client{}).NextValues(last, Values{})); len(changed) > 0 {
		t.Errorf("without a change: %+v", changed)
	}
	if changed := changes("", last.Config, (&Client{}).NextValues(last, Values{OwnerKeys: []string{"a"}})); len(changed) > 0 {
		t.Errorf("with the same owner's key: %+v", changed)
	}
	changed := changes("", last.Config, (&Client{}).NextValues(last, Values{OwnerKeys: []string{"a", "b"}}))
	if want := []Change{{Name: "owner.publicKeys", From: "[a]", To: "[a b]"}}; !slices.Equal(changed, want) {
		t.Errorf("with another owner's key: %+v", changed)
	}
}

func TestChangedObjectsAreShown(t *testing.T) {
	const one, two = "---\n# Source: a\napiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {port: 1}\n", "---\napiVersion: v1\nkind: Service\nmetadata: {name: b}\n"
	same, err := manifestChanges(one+two, two+one)
	if err != nil || len(same) != 0 {
		t.Errorf("%+v, %v", same, err)
	}
	got, err := manifestChanges(one, strings.ReplaceAll(one, "port: 1", "port: 2")+two)
	if err != nil || len(got) != 2 || got[0].Object != "Service a" || !strings.Contains(got[0].Diff, "-  port: 1\n+  port: 2") || got[1].Object != "Service b" {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestAnOlderChartIsADowngrade(t *testing.T) {
	for version, want := range map[string]error{"0.0.1": nil, "0.1.0-rc.1": nil, "99.0.0": ErrDowngrade} {
		last := &releasev1.Release{Chart: &chart.Chart{Metadata: &chart.Metadata{Version: version}}}
		if err := CheckDirection(last); !errors.Is(err, want) {
			t.Errorf("from %s: %v", version, err)
		}
	}
}

func TestADefinitionThatLosesDataIsRefused(t *testing.T) {
	type (
		props = map[string]apiextensionsv1.JSONSchemaProps
		crd   = apiextensionsv1.CustomResourceDefinition
	)
	version := func(name string, p props) apiextensionsv1.CustomResourceDefinitionVersion {
		return apiextensionsv1.CustomResourceDefinitionVersion{Name: name, Served: true, Schema: &apiextensionsv1.CustomResourceValidation{
			OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{Type: "object", Properties: p},
		}}
	}
	fields := func() props {
		return props{
			"spec": {Type: "object", Properties: props{"id": {Type: "string"}}},
			"list": {Type: "array", Items: &apiextensionsv1.JSONSchemaPropsOrArray{Schema: &apiextensionsv1.JSONSchemaProps{Type: "object", Properties: props{"x": {Type: "string"}}}}},
		}
	}
	for name, tt := range map[string]struct {
		change func(*crd)
		want   string
	}{
		"the same": {func(*crd) {}, ""},
		"a new version and a new field": {func(c *crd) {
			c.Spec.Versions = append(c.Spec.Versions, version("v2", nil))
			c.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["more"] = apiextensionsv1.JSONSchemaProps{Type: "string"}
		}, ""},
		"a version that nothing is stored in": {func(c *crd) { c.Spec.Versions = c.Spec.Versions[:1] }, ""},
		"a stored version":                    {func(c *crd) { c.Spec.Versions = c.Spec.Versions[1:] }, "stored as v1"},
		"no longer served":                    {func(c *crd) { c.Spec.Versions[0].Served = false }, "no longer serves"},
		"another scope":                       {func(c *crd) { c.Spec.Scope = "Namespaced" }, "scope"},
		"a field": {func(c *crd) {
			delete(c.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["spec"].Properties, "id")
		}, "v1.spec.id is gone"},
		"a field's type": {func(c *crd) {
			c.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["spec"].Properties["id"] = apiextensionsv1.JSONSchemaProps{Type: "integer"}
		}, "of the type string"},
		"a field in a list": {func(c *crd) {
			delete(c.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["list"].Items.Schema.Properties, "x")
		}, "v1.list[].x is gone"},
	} {
		t.Run(name, func(t *testing.T) {
			old := &crd{Spec: apiextensionsv1.CustomResourceDefinitionSpec{
				Scope: "Cluster", Versions: []apiextensionsv1.CustomResourceDefinitionVersion{version("v1", fields()), version("v0", nil)},
			}, Status: apiextensionsv1.CustomResourceDefinitionStatus{StoredVersions: []string{"v1"}}}
			next := old.DeepCopy()
			tt.change(next)
			err := compatible(old, next)
			if (err == nil) != (tt.want == "") || err != nil && (!errors.Is(err, ErrIncompatible) || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("got %v", err)
			}
		})
	}
}
