package clusterapi

import (
	"context"
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/printable"
)

// Services are the DaemonSets that the chart installs.
var Services = []string{"muster-joinservice", "muster-kms"}

// ServicesReady waits until Muster's pods are ready on every control plane. Meanwhile it reports what they wait for.
func (c *Client) ServicesReady(ctx context.Context, report func(string)) error {
	var last string
	err := until(ctx, func(ctx context.Context) (bool, error) {
		waiting := make([]string, 0, len(Services))
		for _, name := range Services {
			text, err := c.serviceWaits(ctx, name)
			if err != nil {
				return false, err
			}
			if text != "" {
				waiting = append(waiting, text)
			}
		}
		if len(waiting) > 0 {
			last = strings.Join(waiting, "; ")
			report(last)
		}
		return len(waiting) == 0, nil
	})
	if err != nil && last != "" {
		return fmt.Errorf("services of Muster: %s: %w", last, err)
	}
	if err != nil {
		return fmt.Errorf("services of Muster: %w", err)
	}
	return nil
}

// unknownBoot is the value of [v1alpha1.Returns] if the Node did not report its boot when it was drained; earlier versions always wrote it.
const unknownBoot = "true"

// Boot identifies the current boot of a Node's machine, as the kubelet reports it.
type Boot struct {
	// ID is the kernel's ID of the boot that the Node was registered or updated in.
	ID    string
	Ready bool
	// Held reports that a command drained it and has not made it schedulable again. In is the boot at that time; empty if it is not known.
	Held bool
	In   string
}

// Restarted reports whether the machine has restarted since it was drained.
func (b Boot) Restarted() bool { return b.Held && b.In != "" && b.In != b.ID }

// BootOf returns a Node's boot.
func BootOf(n *corev1.Node) Boot {
	note := n.Annotations[v1alpha1.Returns]
	b := Boot{ID: n.Status.NodeInfo.BootID, Ready: IsReady(n), Held: n.Spec.Unschedulable && note != ""}
	if b.Held && note != unknownBoot {
		b.In = note
	}
	return b
}

// Boot returns the boot of a node's machine.
func (c *Client) Boot(ctx context.Context, name string) (Boot, error) {
	n := &corev1.Node{}
	err := once(ctx, func(ctx context.Context) error { return c.client.Get(ctx, types.NamespacedName{Name: name}, n) })
	return BootOf(n), err
}

// ServicesElsewhere returns the problems of Muster's services on nodes other than the named one.
func (c *Client) ServicesElsewhere(ctx context.Context, than string) (problems []string, err error) {
	err = once(ctx, func(ctx context.Context) error {
		problems = nil
		for _, name := range Services {
			var ds appsv1.DaemonSet
			if err := c.client.Get(ctx, types.NamespacedName{Namespace: Namespace, Name: name}, &ds); err != nil {
				return err
			}
			var pods corev1.PodList
			if err := c.client.List(ctx, &pods, client.InNamespace(Namespace), client.MatchingLabels(ds.Spec.Selector.MatchLabels)); err != nil {
				return err
			}
			want, ready := ds.Status.DesiredNumberScheduled, ds.Status.NumberReady // of nodes
			if want == 0 {
				problems = append(problems, name+" finds no control plane")
			}
			own := slices.DeleteFunc(pods.Items, func(p corev1.Pod) bool { return p.Spec.NodeName != than })
			if len(own) > 0 {
				want--
			}
			if slices.ContainsFunc(own, func(p corev1.Pod) bool { return podReady(&p) }) {
				ready--
			}
			if ready < want {
				problems = append(problems, fmt.Sprintf("%s is ready on %d of %d control planes", name, ready, want))
			}
		}
		return nil
	})
	return problems, err
}

// ControlPlanesReady waits until all enrolled control planes are healthy. Meanwhile it reports their problems.
func (c *Client) ControlPlanesReady(ctx context.Context, report func(string)) error {
	var last string
	err := until(ctx, func(ctx context.Context) (bool, error) {
		_, problems, err := c.OtherControlPlanes(ctx, "")
		if last = strings.Join(problems, "; "); last != "" {
			report(last)
		}
		return err == nil && last == "", err
	})
	if err != nil && last != "" {
		err = fmt.Errorf("%s: %w", last, err)
	}
	return err
}

// AwaitReady waits until a Node is Ready in another boot. The boot has to differ, because a restarted node looks Ready until
// its lease has expired.
func (c *Client) AwaitReady(ctx context.Context, name, notBoot string) error {
	return until(ctx, func(ctx context.Context) (bool, error) {
		n := &corev1.Node{}
		err := client.IgnoreNotFound(c.client.Get(ctx, types.NamespacedName{Name: name}, n))
		return err == nil && IsReady(n) && n.Status.NodeInfo.BootID != notBoot, err
	})
}

// Service returns what a DaemonSet of [Services] waits for, empty if it is ready, and its images.
func (c *Client) Service(ctx context.Context, name string) (waits string, images []string, err error) {
	var ds appsv1.DaemonSet
	if err := c.client.Get(ctx, types.NamespacedName{Namespace: Namespace, Name: name}, &ds); err != nil {
		return "", nil, err
	}
	for _, container := range ds.Spec.Template.Spec.Containers {
		images = append(images, container.Image)
	}
	waits, err = c.serviceWaits(ctx, name)
	return waits, images, err
}

// serviceWaits returns what a DaemonSet waits for; empty if it is ready.
func (c *Client) serviceWaits(ctx context.Context, name string) (string, error) {
	var ds appsv1.DaemonSet
	if err := c.client.Get(ctx, types.NamespacedName{Namespace: Namespace, Name: name}, &ds); err != nil {
		return "", err
	}
	s := ds.Status
	if s.ObservedGeneration < ds.Generation {
		return name + " is not yet seen by its controller", nil
	}
	if s.DesiredNumberScheduled == 0 {
		return name + " finds no control plane", nil
	}
	if s.UpdatedNumberScheduled == s.DesiredNumberScheduled && s.NumberReady == s.DesiredNumberScheduled {
		return "", nil
	}
	text := fmt.Sprintf("%s %d/%d ready", name, s.NumberReady, s.DesiredNumberScheduled)
	if s.UpdatedNumberScheduled < s.DesiredNumberScheduled {
		text += fmt.Sprintf(", %d/%d of them new", s.UpdatedNumberScheduled, s.DesiredNumberScheduled)
	}
	var pods corev1.PodList
	if err := c.client.List(ctx, &pods, client.InNamespace(Namespace), client.MatchingLabels(ds.Spec.Selector.MatchLabels)); err != nil {
		return "", err
	}
	for i := range pods.Items {
		if why := podWaits(&pods.Items[i]); why != "" {
			return text + ": " + why, nil
		}
	}
	return text, nil
}

// maxWhy limits the length of a reason that is shown, in bytes.
const maxWhy = 200

// podWaits returns the first reason in the order of a pod's start, as printable text ([printable.ASCII]).
func podWaits(p *corev1.Pod) string { return printable.ASCII(firstWait(p), maxWhy) }

func firstWait(p *corev1.Pod) string {
	for _, cond := range p.Status.Conditions {
		if cond.Type == corev1.PodScheduled && cond.Status == corev1.ConditionFalse {
			return cond.Message
		}
	}
	for _, s := range p.Status.ContainerStatuses {
		switch {
		case s.State.Waiting != nil && s.LastTerminationState.Terminated != nil:
			return fmt.Sprintf("%s, exit code %d; see kubectl -n %s logs %s -p", s.State.Waiting.Reason, s.LastTerminationState.Terminated.ExitCode, p.Namespace, p.Name)
		case s.State.Waiting != nil:
			return strings.TrimSpace(s.State.Waiting.Reason + " " + s.State.Waiting.Message)
		case s.State.Terminated != nil:
			return fmt.Sprintf("ended with exit code %d; see kubectl -n %s logs %s", s.State.Terminated.ExitCode, p.Namespace, p.Name)
		}
	}
	return ""
}
