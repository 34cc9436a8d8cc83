package cluster

import (
	"context"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/internal/podsecurity"
)

// probed bounds how many namespaces are asked.
const probed = 50

// Privileged returns the namespaces whose labels name no Pod Security Standard, and where the API server accepts a pod that mounts its node's root folder: whoever
// may create pods there may be root on every node. No pod is created. unclear is where something else than that standard refuses the pod, with what it says.
func (c *Client) Privileged(ctx context.Context) (open []string, unclear map[string]string, err error) {
	var list corev1.NamespaceList
	if err := c.client.List(ctx, &list); err != nil {
		return nil, nil, err
	}
	unclear = map[string]string{}
	some := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1m"), corev1.ResourceMemory: resource.MustParse("1Mi")}
	asked := 0
	for _, ns := range list.Items {
		if ns.Labels[podsecurity.Label] != "" || ns.Status.Phase != corev1.NamespaceActive || podsecurity.Exempt(ns.Name) {
			continue
		}
		if asked++; asked > probed {
			break
		}
		err := c.client.Create(ctx, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: ns.Name, GenerateName: "muster-doctor-"},
			Spec: corev1.PodSpec{
				Containers: []corev1.Container{{Name: "none", Image: "none.invalid/none:v1", Resources: corev1.ResourceRequirements{Requests: some, Limits: some}}},
				Volumes:    []corev1.Volume{{Name: "node", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/"}}}},
			},
		}, client.DryRunAll)
		switch {
		case err == nil:
			open = append(open, ns.Name)
		case apierrors.IsForbidden(err) && strings.Contains(err.Error(), "violates PodSecurity"):
		case apierrors.ReasonForError(err) != metav1.StatusReasonUnknown:
			unclear[ns.Name] = err.Error()
		default:
			return nil, nil, err
		}
	}
	slices.Sort(open)
	return open, unclear, nil
}
