package clusterapi

import (
	"bytes"
	"context"
	"fmt"
	"strings"

	releasev1 "helm.sh/helm/v4/pkg/release/v1"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"
)

// Backup reads everything that an upgrade changes and that cannot be created again: the definitions, their objects
// with status, the ConfigMaps of Muster's namespace, and the release's values and manifest. It returns files by name,
// which kubectl can restore.
//
// They contain no Secret (K3): the root secret is in the owner's folder, and the chart has no Secrets.
func (c *Client) Backup(ctx context.Context, last *releasev1.Release, definitions []*unstructured.Unstructured) (map[string][]byte, error) {
	var defined, objects, disks []unstructured.Unstructured
	for _, d := range definitions {
		var crd unstructured.Unstructured
		crd.SetGroupVersionKind(d.GroupVersionKind())
		if err := c.client.Get(ctx, client.ObjectKeyFromObject(d), &crd); err != nil {
			if Absent(err) {
				continue
			}
			return nil, fmt.Errorf("back up %s: %w", describe(d), err)
		}
		gvk, err := storedAs(&crd)
		if err != nil {
			return nil, err
		}
		// The API server sets its status.
		unstructured.RemoveNestedField(crd.Object, "status")
		defined = append(defined, crd)
		found, err := c.all(ctx, gvk)
		if err != nil {
			return nil, err
		}
		if gvk.Kind == "AttestedDisk" { // kubectl restores status for every object of a file, and these have none
			disks = found
			continue
		}
		objects = append(objects, found...)
	}
	maps, err := c.all(ctx, corev1.SchemeGroupVersion.WithKind("ConfigMap"), client.InNamespace(Namespace))
	if err != nil {
		return nil, err
	}
	files := map[string][]byte{"manifest.yaml": []byte(last.Manifest)}
	if files["values.yaml"], err = yaml.Marshal(last.Config); err != nil {
		return nil, err
	}
	for name, list := range map[string][]unstructured.Unstructured{"definitions.yaml": defined, "objects.yaml": objects, "disks.yaml": disks, "configmaps.yaml": maps} {
		if files[name], err = documents(list); err != nil {
			return nil, err
		}
	}
	files["release.yaml"], err = yaml.Marshal(map[string]any{
		"name": last.Name, "revision": last.Version, "status": string(last.Info.Status), "chart": last.Chart.Metadata.Version,
	})
	return files, err
}

// storedAs returns the kind of a definition's objects, in the storage version.
func storedAs(crd *unstructured.Unstructured) (schema.GroupVersionKind, error) {
	b, err := crd.MarshalJSON()
	if err != nil {
		return schema.GroupVersionKind{}, err
	}
	var d apiextensionsv1.CustomResourceDefinition
	if err := yaml.Unmarshal(b, &d); err != nil {
		return schema.GroupVersionKind{}, err
	}
	for _, v := range d.Spec.Versions {
		if v.Storage {
			return schema.GroupVersionKind{Group: d.Spec.Group, Version: v.Name, Kind: d.Spec.Names.Kind}, nil
		}
	}
	return schema.GroupVersionKind{}, fmt.Errorf("%s has no storage version", describe(crd))
}

func (c *Client) all(ctx context.Context, gvk schema.GroupVersionKind, opts ...client.ListOption) ([]unstructured.Unstructured, error) {
	var list unstructured.UnstructuredList
	list.SetGroupVersionKind(gvk.GroupVersion().WithKind(gvk.Kind + "List"))
	if err := c.client.List(ctx, &list, opts...); err != nil {
		return nil, fmt.Errorf("back up the objects of kind %s: %w", gvk.Kind, err)
	}
	return list.Items, nil
}

// documents writes objects without the fields that the API server sets, so that kubectl can create them.
func documents(list []unstructured.Unstructured) ([]byte, error) {
	var out bytes.Buffer
	for i := range list {
		o := list[i].DeepCopy()
		if o.GetKind() == "ConfigMap" && strings.HasPrefix(o.GetName(), "kube-root-ca") {
			continue // every namespace gets one automatically
		}
		for _, f := range []string{"uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "ownerReferences", "selfLink"} {
			unstructured.RemoveNestedField(o.Object, "metadata", f)
		}
		text, err := yaml.Marshal(o.Object)
		if err != nil {
			return nil, err
		}
		out.WriteString("---\n")
		out.Write(text)
	}
	return out.Bytes(), nil
}
