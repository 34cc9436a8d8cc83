package clusterapi

import (
	"context"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/internal/objects/podsecurity"
)

// probed limits the number of namespaces that are probed.
const probed = 50

// PodSecurity lists the namespaces whose pods may be root on their node.
type PodSecurity struct {
	// Open are namespaces without a label for a Pod Security Standard in which the API server accepts a pod that
	// mounts its node's root folder.
	Open []string
	// Allowed are those with the label for it.
	Allowed []string
	// Unclear are those in which another check than that standard refuses the pod, with the error.
	Unclear map[string]string
	// Unasked is the number of namespaces without a label that were not probed.
	Unasked int
}

// PodSecurity probes all namespaces except kube-system and Muster's own, and creates no pod. A user who may create
// pods in the namespaces of Open and Allowed can become root on every node.
func (c *Client) PodSecurity(ctx context.Context) (PodSecurity, error) {
	out := PodSecurity{Unclear: map[string]string{}}
	var list corev1.NamespaceList
	if err := c.client.List(ctx, &list); err != nil {
		return out, err
	}
	some := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1m"), corev1.ResourceMemory: resource.MustParse("1Mi")}
	asked := 0
	for _, ns := range list.Items {
		standard := ns.Labels[podsecurity.Label]
		if ns.Status.Phase != corev1.NamespaceActive || podsecurity.Exempt(ns.Name) || standard != "" && standard != "privileged" {
			continue
		}
		if standard != "" {
			out.Allowed = append(out.Allowed, ns.Name)
			continue
		}
		if asked++; asked > probed {
			out.Unasked++
			continue
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
			out.Open = append(out.Open, ns.Name)
		case apierrors.IsForbidden(err) && strings.Contains(err.Error(), "violates PodSecurity"):
		case apierrors.ReasonForError(err) != metav1.StatusReasonUnknown:
			out.Unclear[ns.Name] = err.Error()
		default:
			return out, err
		}
	}
	slices.Sort(out.Open)
	slices.Sort(out.Allowed)
	return out, nil
}
