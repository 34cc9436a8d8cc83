package clusterapi

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/printable"
	"github.com/muster-k8s/muster/internal/versions"
)

// staticPods are the pods of a control plane, by the names of their images.
var staticPods = []string{versions.Etcd, versions.APIServer, versions.ControllerManager, versions.Scheduler}

// NodeRelease lists the versions of Kubernetes' programs on a node. It is untrusted: root on the machine can write what the
// kubelet reports.
type NodeRelease struct {
	Name         string
	ControlPlane bool
	// Enrollment is nil for a node that Muster has not admitted.
	Enrollment *v1alpha1.AttestedNode
	// Joined reports that there is a Node; if not, the following fields are zero.
	Joined bool
	Ready  bool
	// Kubelet is its version, as in v1.36.1.
	Kubelet string
	// Unschedulable reports that it takes no new pods, Returns that the command which drained it makes it schedulable again when it completes.
	Unschedulable, Returns bool
	// Images are the images of a control plane's static pods, by the pods' names.
	Images map[string]string
	// Keys is a control plane's report about the keys that it shares with the others.
	Keys clusterinfo.KeyStates
	// Unwell are the static pods that are missing or not Ready.
	Unwell []string
}

// Takes reports whether the node's machine accepts the owner's orders.
func (n *NodeRelease) Takes() bool { return n.Enrollment != nil && !n.Enrollment.ShutOut() }

// Problem returns why a node is unhealthy; empty if it is healthy.
func (n *NodeRelease) Problem() string {
	switch {
	case !n.Joined:
		return n.Name + " has no Node"
	case !n.Ready:
		return n.Name + " is not Ready"
	case len(n.Unwell) > 0:
		return "static pods of " + n.Name + " are not Ready: " + strings.Join(n.Unwell, ", ")
	}
	return ""
}

// Runs reports whether a node runs a release: its kubelet, and the images of a control plane's static pods.
func (n *NodeRelease) Runs(version string, images versions.Images) bool {
	if n.Kubelet != "v"+version {
		return false
	}
	for name, image := range n.Images {
		if !isImage(image, images[name]) {
			return false
		}
	}
	return !n.ControlPlane || len(n.Images) == len(staticPods)
}

// isImage reports whether a reference has an image's digest. It ignores tags and registries, which only locate the image.
func isImage(reference string, of versions.Image) bool {
	return of.Digest != "" && strings.HasSuffix(reference, "@"+of.Digest)
}

// Releases returns the releases of all nodes and enrollments, by name.
func (c *Client) Releases(ctx context.Context) (out []NodeRelease, err error) {
	err = once(ctx, func(ctx context.Context) error {
		out = nil
		var nodes corev1.NodeList
		if err := c.client.List(ctx, &nodes); err != nil {
			return err
		}
		var enrolled v1alpha1.AttestedNodeList
		if err := c.client.List(ctx, &enrolled); err != nil {
			return err
		}
		of := map[string]*v1alpha1.AttestedNode{}
		for i := range enrolled.Items {
			of[enrolled.Items[i].Name] = &enrolled.Items[i]
		}
		for i := range nodes.Items {
			name := nodes.Items[i].Name
			r, err := c.release(ctx, name, &nodes.Items[i], of[name])
			if err != nil {
				return err
			}
			out = append(out, r)
			delete(of, name)
		}
		for name, e := range of {
			out = append(out, NodeRelease{Name: name, ControlPlane: e.Spec.Role == v1alpha1.RoleControlPlane, Enrollment: e})
		}
		slices.SortFunc(out, func(a, b NodeRelease) int { return strings.Compare(a.Name, b.Name) })
		return nil
	})
	return out, err
}

func (c *Client) release(ctx context.Context, name string, n *corev1.Node, e *v1alpha1.AttestedNode) (NodeRelease, error) {
	_, control := n.Labels[clusterinfo.ControlPlaneLabel]
	out := NodeRelease{
		Name: name, ControlPlane: control || e != nil && e.Spec.Role == v1alpha1.RoleControlPlane, Enrollment: e, Joined: true, Ready: IsReady(n), Kubelet: n.Status.NodeInfo.KubeletVersion,
		Unschedulable: n.Spec.Unschedulable, Returns: n.Annotations[v1alpha1.Returns] != "",
	}
	if !out.ControlPlane {
		return out, nil
	}
	out.Keys = clusterinfo.ParseKeyStates(n.Annotations[clusterinfo.KeysAnnotation])
	out.Images = map[string]string{}
	for _, pod := range staticPods {
		p := &corev1.Pod{}
		if err := client.IgnoreNotFound(c.client.Get(ctx, types.NamespacedName{Namespace: metav1.NamespaceSystem, Name: pod + "-" + name}, p)); err != nil {
			return out, err
		}
		for _, container := range p.Spec.Containers {
			if container.Name == pod {
				out.Images[pod] = container.Image
			}
		}
		if !podReady(p) {
			out.Unwell = append(out.Unwell, pod)
		}
	}
	return out, nil
}

func podReady(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue })
}

// AwaitRelease waits until a node runs a release, and has been healthy for a while without interruption.
func (c *Client) AwaitRelease(ctx context.Context, name, version string, images versions.Images, stable time.Duration) error {
	var since time.Time
	last := ""
	err := until(ctx, func(ctx context.Context) (bool, error) {
		n := &corev1.Node{}
		if err := c.client.Get(ctx, types.NamespacedName{Name: name}, n); err != nil {
			since = time.Time{}
			if Absent(err) {
				err = fmt.Errorf("%s has no Node: %w", name, errPending)
			}
			return false, err
		}
		r, err := c.release(ctx, name, n, nil)
		if err != nil {
			since = time.Time{}
			return false, err
		}
		switch last = r.Problem(); {
		case last == "" && !r.Runs(version, images):
			last = fmt.Sprintf("%s does not run %s completely: its kubelet is %s", name, version, printable.ASCII(r.Kubelet, maxVersion))
			since = time.Time{}
			return false, nil
		case last != "":
			since = time.Time{}
			return false, nil
		case since.IsZero():
			since = time.Now()
		}
		last = name + " is healthy only since " + since.Local().Format(time.TimeOnly)
		return time.Since(since) >= stable, nil
	})
	if err != nil && last != "" {
		err = fmt.Errorf("%s: %w", last, err)
	}
	return err
}

// Description reads the cluster's description.
func (c *Client) Description(ctx context.Context) (info *clusterinfo.Info, err error) {
	err = once(ctx, func(ctx context.Context) error {
		info, _, err = c.description(ctx)
		return err
	})
	return info, err
}

func (c *Client) description(ctx context.Context) (*clusterinfo.Info, *corev1.ConfigMap, error) {
	m := &corev1.ConfigMap{}
	if err := c.client.Get(ctx, types.NamespacedName{Namespace: Namespace, Name: clusterinfo.ConfigMap}, m); err != nil {
		return nil, nil, err
	}
	info, err := clusterinfo.Parse([]byte(m.Data[clusterinfo.Key]))
	if err != nil {
		err = fmt.Errorf("ConfigMap %s/%s: %w", Namespace, clusterinfo.ConfigMap, err)
	}
	return info, m, err
}

// Describe changes the cluster's description. If another program has written meanwhile, change is called again with the new description. If change
// returns an error, or its result is refused by [clusterinfo.Parse], nothing is written.
func (c *Client) Describe(ctx context.Context, change func(*clusterinfo.Info) error) error {
	return once(ctx, func(ctx context.Context) error {
		info, m, err := c.description(ctx)
		if err != nil {
			return err
		}
		if err := change(info); err != nil {
			return err
		}
		text, err := info.Marshal()
		if err != nil || string(text) == m.Data[clusterinfo.Key] {
			return err
		}
		if _, err := clusterinfo.Parse(text); err != nil { // every service and joining machine reads it
			return err
		}
		m.Data[clusterinfo.Key] = string(text)
		return c.client.Update(ctx, m) // a conflict is tried again
	})
}

// Addons returns which of kube-proxy and CoreDNS have another image than the release's, and what the others wait for. An add-on that the cluster does
// not have is in neither result.
func (c *Client) Addons(ctx context.Context, images versions.Images) (old, waits []string, err error) {
	err = once(ctx, func(ctx context.Context) error {
		old, waits = nil, nil
		see := func(name string, pod corev1.PodSpec, rolled bool) {
			uses := func(c corev1.Container) bool { return isImage(c.Image, images[name]) }
			switch {
			case !slices.ContainsFunc(pod.Containers, uses):
				old = append(old, name)
			case !rolled:
				waits = append(waits, name)
			}
		}
		ds := &appsv1.DaemonSet{}
		if err := c.client.Get(ctx, types.NamespacedName{Namespace: metav1.NamespaceSystem, Name: versions.Proxy}, ds); err == nil {
			s := ds.Status
			see(versions.Proxy, ds.Spec.Template.Spec, s.ObservedGeneration >= ds.Generation && s.UpdatedNumberScheduled >= s.DesiredNumberScheduled && s.NumberAvailable >= s.DesiredNumberScheduled)
		} else if !Absent(err) {
			return err
		}
		d := &appsv1.Deployment{}
		if err := c.client.Get(ctx, types.NamespacedName{Namespace: metav1.NamespaceSystem, Name: versions.CoreDNS}, d); err == nil {
			s := d.Status
			see(versions.CoreDNS, d.Spec.Template.Spec, s.ObservedGeneration >= d.Generation && s.UpdatedReplicas >= s.Replicas && s.AvailableReplicas >= s.Replicas)
		} else if !Absent(err) {
			return err
		}
		return nil
	})
	return old, waits, err
}

// AwaitAddons waits until the pods of kube-proxy and CoreDNS run a release's images.
func (c *Client) AwaitAddons(ctx context.Context, images versions.Images) error {
	last := ""
	err := until(ctx, func(ctx context.Context) (bool, error) {
		old, waits, err := c.Addons(ctx, images)
		last = strings.Join(slices.Concat(old, waits), ", ")
		return err == nil && last == "", err
	})
	if err != nil && last != "" {
		err = errors.Join(fmt.Errorf("not all pods of %s are Ready with the new image", last), err)
	}
	return err
}

// upgrading sets the upgrade of Kubernetes, and the rotation of a key, that are in progress. muster doctor reports a description that can't be read.
func (c *Client) upgrading(ctx context.Context, s *Status, _ time.Time) error {
	info, m, err := c.description(ctx)
	switch {
	case Absent(err) || info == nil && !passes(err):
		return nil
	case err != nil:
		return err
	}
	s.Rotation = info.Rotation
	switch {
	case info.Other() == nil:
		return nil
	case info.Next != nil:
		s.Upgrade = &KubernetesUpgrade{From: info.KubernetesVersion, To: info.Next.KubernetesVersion, Stage: StageControlPlanes}
	default:
		s.Upgrade = &KubernetesUpgrade{From: info.Previous.KubernetesVersion, To: info.KubernetesVersion, Stage: StageWorkers}
	}
	for _, f := range m.ManagedFields { // the stage started with the description's last change
		if f.Time != nil && f.Time.After(s.Upgrade.Since) {
			s.Upgrade.Since = f.Time.Time
		}
	}
	for _, n := range s.Nodes {
		if n.Joined {
			s.Upgrade.Nodes++
			if n.Kubelet == "v"+s.Upgrade.To {
				s.Upgrade.Upgraded++
			}
		}
	}
	return nil
}
