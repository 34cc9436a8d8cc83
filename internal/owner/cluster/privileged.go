package cluster

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/internal/podsecurity"
)

// Privileged returns the namespaces whose labels name no Pod Security Standard, if the API server accepts a pod there that mounts its node's root folder:
// whoever may create pods in one of them may be root on every node. No pod is created.
func (c *Client) Privileged(ctx context.Context) ([]string, error) {
	var list corev1.NamespaceList
	if err := c.client.List(ctx, &list); err != nil {
		return nil, err
	}
	var open []string
	for _, ns := range list.Items {
		if ns.Labels[podsecurity.Label] == "" && ns.Status.Phase == corev1.NamespaceActive && !podsecurity.Exempt(ns.Name) {
			open = append(open, ns.Name)
		}
	}
	if len(open) == 0 {
		return nil, nil
	}
	slices.Sort(open)
	err := c.client.Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: open[0], GenerateName: "muster-doctor-"},
		Spec: corev1.PodSpec{
			Containers: []corev1.Container{{Name: "none", Image: "none.invalid/none:v1"}},
			Volumes:    []corev1.Volume{{Name: "node", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/"}}}},
		},
	}, client.DryRunAll)
	if apierrors.IsForbidden(err) {
		return nil, nil
	}
	return open, err
}
