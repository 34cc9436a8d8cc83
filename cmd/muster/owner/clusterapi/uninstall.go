package clusterapi

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"helm.sh/helm/v4/pkg/action"
	"helm.sh/helm/v4/pkg/kube"
	appsv1 "k8s.io/api/apps/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/internal/printable"
)

// partOf selects the objects of the chart.
var partOf = client.MatchingLabels{"app.kubernetes.io/part-of": "muster"}

// ownPrefix is the prefix of Muster's annotations and labels on Nodes.
const ownPrefix = "muster.dev/"

// present reads an object that may be gone, perhaps with its kind. [once] would wait for a missing kind.
func present(ctx context.Context, read func(context.Context) error) (there bool, err error) {
	err = once(ctx, func(ctx context.Context) error {
		err := read(ctx)
		there = err == nil
		if Absent(err) {
			return nil
		}
		return err
	})
	return there, err
}

// refusedStill makes the refusal by a just deleted admission policy a temporary error: an API server observes the deletion a moment later.
func refusedStill(err error) error {
	if err != nil && (apierrors.IsInvalid(err) || apierrors.IsForbidden(err)) && strings.Contains(err.Error(), "ValidatingAdmissionPolicy") {
		return fmt.Errorf("%w: %w", errPending, err)
	}
	return err
}

// remove deletes an object that may already be gone, perhaps with its kind.
func (c *Client) remove(ctx context.Context, o client.Object, options ...client.DeleteOption) error {
	err := once(ctx, func(ctx context.Context) error {
		err := c.client.Delete(ctx, o, options...)
		if Absent(err) {
			return nil
		}
		return refusedStill(err)
	})
	if err != nil {
		return fmt.Errorf("delete %s: %w", describe(o), err)
	}
	return nil
}

// gone waits until an object that is being deleted is gone.
func (c *Client) gone(ctx context.Context, o client.Object) error {
	name := describe(o)
	err := until(ctx, func(ctx context.Context) (bool, error) {
		err := c.client.Get(ctx, client.ObjectKeyFromObject(o), o)
		if Absent(err) {
			return true, nil
		}
		return false, err
	})
	if err != nil {
		return fmt.Errorf("%s is being deleted, but still there: %w", name, err)
	}
	return nil
}

// admissionKinds are the kinds of the chart's admission policies: without its binding, a policy has no effect.
var admissionKinds = []string{"ValidatingAdmissionPolicyBinding", "ValidatingAdmissionPolicy"}

// AdmissionPolicies returns how many of the chart's admission policies and bindings there are.
func (c *Client) AdmissionPolicies(ctx context.Context) (n int, err error) {
	for _, kind := range admissionKinds {
		l := &unstructured.UnstructuredList{}
		l.SetAPIVersion("admissionregistration.k8s.io/v1")
		l.SetKind(kind + "List")
		if err := once(ctx, func(ctx context.Context) error { return c.client.List(ctx, l, partOf) }); err != nil {
			return n, err
		}
		n += len(l.Items)
	}
	return n, nil
}

// RemoveAdmissionPolicies deletes the chart's admission policies. It must run before the rest of the chart is removed: without the permission
// muster:node-access, a remaining policy refuses every write of every node.
func (c *Client) RemoveAdmissionPolicies(ctx context.Context) error {
	for _, kind := range admissionKinds {
		o := &unstructured.Unstructured{}
		o.SetAPIVersion("admissionregistration.k8s.io/v1")
		o.SetKind(kind)
		if err := once(ctx, func(ctx context.Context) error { return c.client.DeleteAllOf(ctx, o, partOf) }); err != nil {
			return fmt.Errorf("delete each %s of Muster: %w", kind, err)
		}
	}
	return nil
}

// Workloads returns the DaemonSets of Muster's services, and their remaining pods with their nodes.
func (c *Client) Workloads(ctx context.Context) (sets, pods []string, err error) {
	err = once(ctx, func(ctx context.Context) error {
		sets, pods = nil, nil
		var d appsv1.DaemonSetList
		if err := c.client.List(ctx, &d, client.InNamespace(Namespace), partOf); err != nil {
			return err
		}
		for _, o := range d.Items {
			sets = append(sets, o.Name)
		}
		var p corev1.PodList
		if err := c.client.List(ctx, &p, client.InNamespace(Namespace), partOf); err != nil {
			return err
		}
		for _, o := range p.Items {
			pods = append(pods, o.Name+" on "+o.Spec.NodeName)
		}
		return nil
	})
	return sets, pods, err
}

// UninstallChart uninstalls the release, if there is one, and waits until no pod of Muster's services is left: a joinservice that sees an enrollment being
// deleted deletes its Node.
func (c *Client) UninstallChart(ctx context.Context, log *slog.Logger) error {
	cfg, err := c.helm(log)
	if err != nil {
		return err
	}
	uninstall := action.NewUninstall(cfg)
	uninstall.IgnoreNotFound, uninstall.WaitStrategy, uninstall.Timeout = true, kube.HookOnlyStrategy, hookTimeout
	if err := once(ctx, func(context.Context) error { _, err := uninstall.Run(release); return err }); err != nil {
		return fmt.Errorf("helm: %w", err)
	}
	var left []string
	err = until(ctx, func(ctx context.Context) (bool, error) {
		sets, pods, err := c.Workloads(ctx)
		left = slices.Concat(sets, pods)
		return err == nil && len(left) == 0, err
	})
	if err != nil && len(left) > 0 {
		err = fmt.Errorf("still there: %s: %w", strings.Join(left, ", "), err)
	}
	return err
}

// Enrolled returns all AttestedNodes; none if the cluster has no such kind (any more).
func (c *Client) Enrolled(ctx context.Context) ([]v1alpha1.AttestedNode, error) {
	var l v1alpha1.AttestedNodeList
	_, err := present(ctx, func(ctx context.Context) error {
		l.Items = nil
		return c.client.List(ctx, &l)
	})
	return l.Items, err
}

// Unfinalize removes the finalizers of joinservice, which no longer runs, from all AttestedNodes. A finalizer of another program is an error:
// the definition's deletion would wait for it.
func (c *Client) Unfinalize(ctx context.Context) error {
	all, err := c.Enrolled(ctx)
	if err != nil {
		return err
	}
	for i := range all {
		err := once(ctx, func(ctx context.Context) error {
			n := &v1alpha1.AttestedNode{}
			if err := c.client.Get(ctx, client.ObjectKeyFromObject(&all[i]), n); err != nil {
				return client.IgnoreNotFound(err)
			}
			others := slices.DeleteFunc(slices.Clone(n.Finalizers), func(f string) bool { return f == v1alpha1.RevokeCertificates })
			if len(others) > 0 {
				return fmt.Errorf("it has the finalizer %s of another program", printable.ASCII(strings.Join(others, ", "), maxWhy))
			}
			if len(n.Finalizers) == 0 {
				return nil
			}
			n.Finalizers = nil
			return refusedStill(client.IgnoreNotFound(c.client.Update(ctx, n))) // a conflict is tried again
		})
		if err != nil {
			return fmt.Errorf("AttestedNode %s: %w", all[i].Name, err)
		}
	}
	return nil
}

// Defined returns which of these definitions the cluster has.
func (c *Client) Defined(ctx context.Context, names ...string) (out []string, err error) {
	for _, name := range names {
		there, err := present(ctx, func(ctx context.Context) error {
			return c.client.Get(ctx, types.NamespacedName{Name: name}, &apiextensionsv1.CustomResourceDefinition{})
		})
		if err != nil {
			return out, err
		}
		if there {
			out = append(out, name)
		}
	}
	return out, nil
}

// RemoveDefinitions deletes definitions with all their objects, and waits until they are gone.
func (c *Client) RemoveDefinitions(ctx context.Context, names ...string) error {
	for _, name := range names {
		o := &apiextensionsv1.CustomResourceDefinition{TypeMeta: metav1.TypeMeta{Kind: "CustomResourceDefinition"}, ObjectMeta: metav1.ObjectMeta{Name: name}}
		if err := c.remove(ctx, o); err != nil {
			return err
		}
		if err := c.gone(ctx, o); err != nil {
			return err
		}
	}
	return nil
}

// HasNamespace reports whether the namespace of Muster's services exists.
func (c *Client) HasNamespace(ctx context.Context) (bool, error) {
	return present(ctx, func(ctx context.Context) error {
		return c.client.Get(ctx, types.NamespacedName{Name: Namespace}, &corev1.Namespace{})
	})
}

// RemoveNamespace deletes the namespace of Muster's services with its content, including the root secret, and waits until it is gone.
func (c *Client) RemoveNamespace(ctx context.Context) error {
	o := &corev1.Namespace{TypeMeta: metav1.TypeMeta{Kind: "Namespace"}, ObjectMeta: metav1.ObjectMeta{Name: Namespace}}
	if err := c.remove(ctx, o); err != nil {
		return err
	}
	return c.gone(ctx, o)
}

// strays returns Muster's objects outside its namespace that neither the chart nor a definition removes, and the Nodes that have its annotations or labels.
func (c *Client) strays(ctx context.Context) (objects []client.Object, nodes []corev1.Node, err error) {
	err = once(ctx, func(ctx context.Context) error {
		objects, nodes = nil, nil
		for _, kind := range []string{"RoleBinding", "Role"} { // nodes' permission to read kube-proxy's configuration, for joins by a ticket
			o := object(rbacv1.SchemeGroupVersion.String(), kind, metav1.NamespaceSystem, "muster:kube-proxy-config", map[string]any{})
			if err := c.client.Get(ctx, client.ObjectKeyFromObject(o), o.DeepCopy()); err == nil {
				objects = append(objects, o)
			} else if !Absent(err) {
				return err
			}
		}
		var requests certificatesv1.CertificateSigningRequestList
		if err := c.client.List(ctx, &requests); err != nil {
			return err
		}
		for i := range requests.Items {
			r := &requests.Items[i]
			r.Kind = "CertificateSigningRequest" // a list's items have none
			if r.Spec.SignerName == clusterinfo.AdministratorSigner || r.Spec.Username == "system:serviceaccount:"+Namespace+":joinservice" {
				objects = append(objects, r)
			}
		}
		var all corev1.NodeList
		if err := c.client.List(ctx, &all); err != nil {
			return err
		}
		for _, n := range all.Items {
			if len(own(n.Annotations)) > 0 || len(own(n.Labels)) > 0 {
				nodes = append(nodes, n)
			}
		}
		return nil
	})
	return objects, nodes, err
}

// own returns a JSON merge patch that removes Muster's keys.
func own(keys map[string]string) map[string]any {
	out := map[string]any{}
	for k := range keys {
		if strings.HasPrefix(k, ownPrefix) {
			out[k] = nil
		}
	}
	return out
}

// Strays returns the names of the objects that [Client.RemoveStrays] would delete or change.
func (c *Client) Strays(ctx context.Context) (names []string, err error) {
	objects, nodes, err := c.strays(ctx)
	for _, o := range objects {
		names = append(names, describe(o))
	}
	for _, n := range nodes {
		names = append(names, "annotations of Node "+n.Name)
	}
	return names, err
}

// RemoveStrays deletes Muster's objects outside its namespace, and its annotations and labels on Nodes.
func (c *Client) RemoveStrays(ctx context.Context) error {
	objects, nodes, err := c.strays(ctx)
	if err != nil {
		return err
	}
	for _, o := range objects {
		if err := c.remove(ctx, o); err != nil {
			return err
		}
	}
	for i := range nodes {
		patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": own(nodes[i].Annotations), "labels": own(nodes[i].Labels)}})
		if err != nil {
			return err
		}
		if err := once(ctx, func(ctx context.Context) error {
			return refusedStill(client.IgnoreNotFound(c.client.Patch(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodes[i].Name}}, client.RawPatch(types.MergePatchType, patch))))
		}); err != nil {
			return fmt.Errorf("annotations of Node %s: %w", nodes[i].Name, err)
		}
	}
	return nil
}

// Nodes returns all Nodes, sorted by name.
func (c *Client) Nodes(ctx context.Context) ([]corev1.Node, error) {
	var l corev1.NodeList
	err := once(ctx, func(ctx context.Context) error { return c.client.List(ctx, &l) })
	return l.Items, err
}

// Access returns the list of nodes that may not write; a missing one is empty.
func (c *Client) Access(ctx context.Context) (l *nodeaccess.List, err error) {
	err = once(ctx, func(ctx context.Context) error {
		l, err = c.access(ctx)
		return err
	})
	return l, err
}

// JoinLeaseHolder returns the control plane that holds the join lease, by the API server's clock; empty if there is none.
func (c *Client) JoinLeaseHolder(ctx context.Context) (holder string, err error) {
	now, err := c.serverTime(ctx)
	if err != nil {
		return "", err
	}
	l := &coordinationv1.Lease{}
	if _, err := present(ctx, func(ctx context.Context) error {
		return c.client.Get(ctx, types.NamespacedName{Namespace: Namespace, Name: clusterinfo.ControlPlaneLease}, l)
	}); err != nil {
		return "", err
	}
	if held := holderOf(l, now); held != nil {
		holder = held.By
	}
	return holder, nil
}
