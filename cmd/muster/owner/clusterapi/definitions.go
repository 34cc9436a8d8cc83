package clusterapi

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// ErrIncompatible is returned if a new definition would lose data that the cluster has stored.
var ErrIncompatible = errors.New("the new definition would lose data")

// tryDefinition returns the current spec of a definition, and the spec after applying d. It changes nothing.
func (c *Client) tryDefinition(ctx context.Context, d *unstructured.Unstructured) (live, next map[string]any, err error) {
	var have unstructured.Unstructured
	have.SetGroupVersionKind(d.GroupVersionKind())
	if err := c.client.Get(ctx, client.ObjectKeyFromObject(d), &have); err != nil {
		if !Absent(err) {
			return nil, nil, err
		}
		spec, _, err := unstructured.NestedMap(d.Object, "spec")
		return nil, spec, err
	}
	// The response of a dry run is written into the copy, with the server's defaults.
	want := d.DeepCopy()
	err = c.client.Apply(ctx, client.ApplyConfigurationFromUnstructured(want), client.FieldOwner(fieldManager), client.ForceOwnership, client.DryRunAll)
	if err != nil {
		return nil, nil, err
	}
	var old, made apiextensionsv1.CustomResourceDefinition
	convert := runtime.DefaultUnstructuredConverter
	if err := errors.Join(convert.FromUnstructured(have.Object, &old), convert.FromUnstructured(want.Object, &made)); err != nil {
		return nil, nil, err
	}
	if err := compatible(&old, &made); err != nil {
		return nil, nil, err
	}
	if live, _, err = unstructured.NestedMap(have.Object, "spec"); err != nil {
		return nil, nil, err
	}
	next, _, err = unstructured.NestedMap(want.Object, "spec")
	return live, next, err
}

// compatible refuses a definition that makes stored objects unreadable or loses data: it lacks a version in which
// objects may be stored, or a field that they may have.
func compatible(old, next *apiextensionsv1.CustomResourceDefinition) error {
	if old.Spec.Group != next.Spec.Group || old.Spec.Scope != next.Spec.Scope || old.Spec.Names.Kind != next.Spec.Names.Kind {
		return fmt.Errorf("%w: it is of another group, scope or kind", ErrIncompatible)
	}
	versions := map[string]*apiextensionsv1.CustomResourceDefinitionVersion{}
	for i := range next.Spec.Versions {
		versions[next.Spec.Versions[i].Name] = &next.Spec.Versions[i]
	}
	for _, v := range old.Status.StoredVersions {
		if versions[v] == nil {
			return fmt.Errorf("%w: objects may be stored as %s, which it drops; migrate them and remove %s from status.storedVersions first", ErrIncompatible, v, v)
		}
	}
	for _, v := range old.Spec.Versions {
		n := versions[v.Name]
		if n == nil || v.Schema == nil || n.Schema == nil {
			continue
		}
		if v.Served && !n.Served {
			return fmt.Errorf("%w: the running services use %s, which it no longer serves", ErrIncompatible, v.Name)
		}
		if err := keepsFields(v.Name, v.Schema.OpenAPIV3Schema, n.Schema.OpenAPIV3Schema); err != nil {
			return err
		}
	}
	return nil
}

// keepsFields walks the fields of the old schema: when an object is written, the API server removes each field that
// the new schema does not have.
func keepsFields(path string, old, next *apiextensionsv1.JSONSchemaProps) error {
	if old == nil {
		return nil
	}
	if next == nil {
		return fmt.Errorf("%w: it has no schema of %s", ErrIncompatible, path)
	}
	if old.Type != next.Type {
		return fmt.Errorf("%w: %s was of the type %s and would be %s", ErrIncompatible, path, old.Type, next.Type)
	}
	for _, name := range slices.Sorted(maps.Keys(old.Properties)) {
		was, will := old.Properties[name], next.Properties[name]
		if _, ok := next.Properties[name]; !ok {
			return fmt.Errorf("%w: the field %s.%s is gone", ErrIncompatible, path, name)
		}
		if err := keepsFields(path+"."+name, &was, &will); err != nil {
			return err
		}
	}
	if old.Items != nil && old.Items.Schema != nil && next.Items != nil {
		return keepsFields(path+"[]", old.Items.Schema, next.Items.Schema)
	}
	return nil
}
