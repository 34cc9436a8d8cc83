package clusterapi

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// BudgetError is returned if PodDisruptionBudgets refuse the eviction of pods.
type BudgetError struct {
	// Budgets are their namespaces and names, each with a pod and the reason.
	Budgets []string
	// Never reports that they allow no eviction unless they are changed; then nothing was changed. Otherwise they allowed none within the time limit.
	Never bool
}

func (e *BudgetError) Error() string {
	if e.Never {
		return "PodDisruptionBudgets that never allow an eviction: " + strings.Join(e.Budgets, ", ")
	}
	return "PodDisruptionBudgets that allowed no eviction in time: " + strings.Join(e.Budgets, ", ")
}

// budgets returns a [BudgetError] if the eviction of one of the pods is refused now or, with never, at any time; otherwise nil.
func (c *Client) budgets(ctx context.Context, pods []corev1.Pod, never bool) error {
	if len(pods) == 0 {
		return nil
	}
	var all policyv1.PodDisruptionBudgetList
	if err := once(ctx, func(ctx context.Context) error { return c.client.List(ctx, &all) }); err != nil {
		return err
	}
	out := &BudgetError{Never: never}
	for i := range all.Items {
		b := &all.Items[i]
		why := refuses(b)
		if never {
			why = refusesAlways(b)
		}
		selector, err := metav1.LabelSelectorAsSelector(b.Spec.Selector)
		if why == "" || err != nil {
			continue // the API server refuses an invalid selector
		}
		// The budget does not apply to other pods, or, if they are not Ready, only with further rules.
		if p := slices.IndexFunc(pods, func(p corev1.Pod) bool {
			return p.Namespace == b.Namespace && selector.Matches(labels.Set(p.Labels)) && p.DeletionTimestamp.IsZero() && p.Status.Phase == corev1.PodRunning && podReady(&p)
		}); p >= 0 {
			out.Budgets = append(out.Budgets, fmt.Sprintf("%s/%s (pod %s: %s)", b.Namespace, b.Name, pods[p].Name, why))
		}
	}
	if len(out.Budgets) == 0 {
		return nil
	}
	return out
}

// refuses returns why a budget allows no eviction now; empty if it allows one.
func refuses(b *policyv1.PodDisruptionBudget) string {
	if b.Status.DisruptionsAllowed > 0 {
		return ""
	}
	return fmt.Sprintf("%d of %d pods are Ready, but %d must be", b.Status.CurrentHealthy, b.Status.ExpectedPods, b.Status.DesiredHealthy)
}

// refusesAlways returns why a budget allows no eviction even if all its pods are Ready; empty if it may allow one.
func refusesAlways(b *policyv1.PodDisruptionBudget) string {
	is := func(v *intstr.IntOrString, of int) bool { // of 100
		if v == nil {
			return false
		}
		n, err := intstr.GetScaledValueFromIntOrPercent(v, 100, true)
		return err == nil && n == of && (of == 0 || v.Type == intstr.String)
	}
	s := b.Status
	switch {
	case is(b.Spec.MaxUnavailable, 0):
		return "maxUnavailable is " + b.Spec.MaxUnavailable.String()
	case is(b.Spec.MinAvailable, 100):
		return "minAvailable is " + b.Spec.MinAvailable.String()
	case s.ObservedGeneration >= b.Generation && s.ExpectedPods > 0 && s.DesiredHealthy >= s.ExpectedPods:
		return fmt.Sprintf("%d pods must be Ready, but there are only %d", s.DesiredHealthy, s.ExpectedPods)
	}
	return ""
}

// left returns those of the given pods that are still on the node.
func (c *Client) left(ctx context.Context, node string, of []corev1.Pod) ([]corev1.Pod, error) {
	var all corev1.PodList
	err := c.client.List(ctx, &all, client.MatchingFields{"spec.nodeName": node})
	return slices.DeleteFunc(all.Items, func(p corev1.Pod) bool {
		return !slices.ContainsFunc(of, func(o corev1.Pod) bool { return o.UID == p.UID })
	}), err
}
