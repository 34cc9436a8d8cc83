package clusterapi

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/internal/objects/podsecurity"
)

// unknownKind limits how long an answering API server may report a kind as unknown: a definition that was just applied
// needs a moment, a wrong one is never known. For a slow or silent server, only the command's own limit applies.
const unknownKind = time.Minute

// kindAwaited makes the error of an unknown kind permanent after [unknownKind].
type kindAwaited struct{ since time.Time }

func (k *kindAwaited) check(err error, now time.Time) error {
	if !meta.IsNoMatchError(err) {
		k.since = time.Time{}
		return err
	}
	if k.since.IsZero() {
		k.since = now
	}
	if now.Sub(k.since) < unknownKind {
		return err
	}
	return fmt.Errorf("this kind is still unknown to the API server after %s: %v: apply its CustomResourceDefinition first, or correct apiVersion and kind", unknownKind, err) //nolint:errorlint // it lasts
}

// ParseManifests splits YAML documents into objects, and lists into their items. A document without kind or name is
// an error that contains its position.
func ParseManifests(name string, text []byte) ([]*unstructured.Unstructured, error) {
	var out []*unstructured.Unstructured
	docs := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	for i := 1; ; i++ {
		doc, err := docs.Read()
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return nil, fmt.Errorf("%s: document %d: %w", name, i, err)
		}
		o := &unstructured.Unstructured{}
		if err := yaml.UnmarshalStrict(doc, &o.Object); err != nil {
			return nil, fmt.Errorf("%s: document %d: %w", name, i, err)
		}
		if len(o.Object) == 0 {
			continue // only comments
		}
		items := []*unstructured.Unstructured{o}
		if o.IsList() {
			items = nil
			err := o.EachListItem(func(item runtime.Object) error {
				u, ok := item.(*unstructured.Unstructured)
				if !ok {
					return errors.New("an item of the list is not an object")
				}
				items = append(items, u)
				return nil
			})
			if err != nil {
				return nil, fmt.Errorf("%s: document %d: %w", name, i, err)
			}
		}
		for _, u := range items {
			if u.GetKind() == "" || u.GetAPIVersion() == "" || u.GetName() == "" {
				return nil, fmt.Errorf("%s: document %d: an object needs apiVersion, kind and metadata.name", name, i)
			}
			out = append(out, u)
		}
	}
}

// Apply applies objects in their order by server-side apply, so that a repetition changes nothing. If there are
// definitions among them, it waits until the API server serves these.
func (c *Client) Apply(ctx context.Context, objects []*unstructured.Unstructured, report func(string)) error {
	for _, o := range objects {
		name := describe(o)
		report(name)
		if err := c.apply(ctx, o); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if o.GetKind() == "CustomResourceDefinition" {
			if err := c.served(ctx, o.GetName()); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
	}
	return nil
}

func (c *Client) apply(ctx context.Context, o *unstructured.Unstructured) error {
	var awaited kindAwaited
	return once(ctx, func(ctx context.Context) error {
		// A fresh copy each time: the response is written into it.
		config := client.ApplyConfigurationFromUnstructured(o.DeepCopy())
		return awaited.check(c.client.Apply(ctx, config, client.FieldOwner(fieldManager), client.ForceOwnership), time.Now())
	})
}

// served waits until the kind of a definition can be used.
func (c *Client) served(ctx context.Context, name string) error {
	return until(ctx, func(ctx context.Context) (bool, error) {
		var crd apiextensionsv1.CustomResourceDefinition
		if err := c.client.Get(ctx, types.NamespacedName{Name: name}, &crd); err != nil {
			return false, err
		}
		for _, cond := range crd.Status.Conditions {
			if cond.Type == apiextensionsv1.Established && cond.Status == apiextensionsv1.ConditionTrue {
				return true, nil
			}
			if cond.Type == apiextensionsv1.NamesAccepted && cond.Status == apiextensionsv1.ConditionFalse {
				return false, fmt.Errorf("the API server does not serve it: %s: remove the other definition, which has the same names", cond.Message)
			}
		}
		return false, nil
	})
}

// EnsureNamespace creates the namespace of Muster's services. They mount folders of the host (attester, audit log),
// which only the level "privileged" allows.
func (c *Client) EnsureNamespace(ctx context.Context) error {
	return c.apply(ctx, object("v1", "Namespace", "", Namespace, map[string]any{
		"metadata": map[string]any{"labels": map[string]any{
			"app.kubernetes.io/part-of": "muster",
			podsecurity.Label:           "privileged",
		}},
	}))
}

// object returns an object to apply; body is merged into it.
func object(apiVersion, kind, namespace, name string, body map[string]any) *unstructured.Unstructured {
	o := &unstructured.Unstructured{Object: body}
	if o.Object["metadata"] == nil {
		o.Object["metadata"] = map[string]any{}
	}
	o.SetAPIVersion(apiVersion)
	o.SetKind(kind)
	o.SetName(name)
	if namespace != "" {
		o.SetNamespace(namespace)
	}
	return o
}

func describe(o client.Object) string {
	kind := o.GetObjectKind().GroupVersionKind().Kind
	if ns := o.GetNamespace(); ns != "" {
		return kind + " " + ns + "/" + o.GetName()
	}
	return kind + " " + o.GetName()
}
