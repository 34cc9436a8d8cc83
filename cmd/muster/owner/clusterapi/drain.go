package clusterapi

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/kubectl/pkg/drain"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/printable"
	"github.com/muster-k8s/muster/trust/attest"
)

// askWithin bounds the query for the budgets that have blocked a drain.
const askWithin = 10 * time.Second

// evictEvery is the pause before a second attempt at an eviction that a PodDisruptionBudget has refused.
const evictEvery = 5 * time.Second

// DrainOptions allow a drain to end pods although data or the pods themselves are lost.
type DrainOptions struct {
	// EmptyDir allows pods with emptyDir volumes, whose data are lost.
	EmptyDir bool
	// Force allows pods without a controller.
	Force bool
	// Returns states that the caller will make the node schedulable again. The Node gets the annotation [v1alpha1.Returns], so that a repeated drain
	// after an interruption detects it.
	Returns bool
}

// Drain makes a node unschedulable and evicts its pods, as kubectl drain does: within their PodDisruptionBudgets, with their own grace periods, and
// without those of DaemonSets. It waits until they are gone, or ctx ends. cordoned reports that the node was schedulable before it was drained by a
// caller with Returns. If a budget never allows the eviction of a pod, Drain returns a [BudgetError] before it changes anything. If the options do
// not allow a pod, it returns an error that names it before it evicts any.
func (c *Client) Drain(ctx context.Context, name string, o DrainOptions, report func(string)) (cordoned bool, err error) {
	h, node, err := c.drainer(ctx, name)
	if err != nil {
		return false, err
	}
	var pods []corev1.Pod
	out := &evictions{report: report, blocked: func() []string {
		var b *BudgetError
		if errors.As(c.budgets(ctx, pods, false), &b) {
			return b.Budgets
		}
		return nil
	}}
	h.Force, h.DeleteEmptyDirData, h.ErrOut = o.Force, o.EmptyDir, out
	if list, errs := h.GetPodsForDeletion(name); len(errs) == 0 { // otherwise it is reported below
		if err := c.budgets(ctx, list.Pods(), true); err != nil {
			return false, fmt.Errorf("drain %s: %w", name, err)
		}
	}
	schedulable := !node.Spec.Unschedulable
	cordoned = schedulable || o.Returns && node.Annotations[v1alpha1.Returns] != ""
	note := ""
	if cordoned && o.Returns {
		note = cmp.Or(node.Status.NodeInfo.BootID, unknownBoot)
	}
	if err := c.returns(ctx, node, note); err != nil {
		return false, fmt.Errorf("cordon %s: %w", name, err)
	}
	if err := drain.RunCordonOrUncordon(h, node, true); err != nil {
		return false, fmt.Errorf("cordon %s: %w", name, err)
	}
	if schedulable {
		report("unschedulable: no new pods")
	}
	list, errs := h.GetPodsForDeletion(name)
	if len(errs) > 0 {
		return cordoned, fmt.Errorf("drain %s: %w", name, errors.Join(errs...))
	}
	pods = list.Pods()
	if err := h.DeleteOrEvictPods(pods); err != nil {
		if ctx.Err() != nil { // kubectl reports "global timeout reached" with the largest possible duration
			err = context.Cause(ctx)
		}
		return cordoned, fmt.Errorf("drain %s: %w", name, errors.Join(c.inTheWay(ctx, name, pods), err))
	}
	report(fmt.Sprintf("drained: %d pods evicted", len(pods)))
	return cordoned, nil
}

// Uncordon makes a node schedulable.
func (c *Client) Uncordon(ctx context.Context, name string) error {
	return once(ctx, func(ctx context.Context) error {
		h, node, err := c.drainer(ctx, name)
		if err != nil {
			return err
		}
		if err := drain.RunCordonOrUncordon(h, node, false); err != nil {
			return err
		}
		return c.returns(ctx, node, "")
	})
}

// Undrainable returns an error that names the pods that a drain with these options would not evict, or a [BudgetError] for
// pods that no drain can evict.
func (c *Client) Undrainable(ctx context.Context, name string, o DrainOptions) error {
	h, _, err := c.drainer(ctx, name)
	if err != nil {
		return err
	}
	h.Force, h.DeleteEmptyDirData = o.Force, o.EmptyDir
	list, errs := h.GetPodsForDeletion(name)
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	return c.budgets(ctx, list.Pods(), true)
}

// inTheWay describes the remaining pods after a failed drain: a [BudgetError] if a budget has blocked it, otherwise their names; nil if that is not
// known.
func (c *Client) inTheWay(ctx context.Context, name string, pods []corev1.Pod) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), askWithin)
	defer cancel()
	pods, err := c.left(ctx, name, pods)
	if err != nil {
		return nil
	}
	err = c.budgets(ctx, pods, false)
	if _, is := errors.AsType[*BudgetError](err); is || len(pods) == 0 {
		return err
	}
	names := make([]string, len(pods))
	for i, p := range pods {
		names[i] = p.Namespace + "/" + p.Name
	}
	slices.Sort(names)
	return fmt.Errorf("still on the node: %s", strings.Join(names[:min(len(names), 5)], ", "))
}

// returns sets the annotation that a node will be made schedulable again, or removes it if the value is empty.
func (c *Client) returns(ctx context.Context, node *corev1.Node, note string) error {
	if node.Annotations[v1alpha1.Returns] == note {
		return nil
	}
	var value any
	if note != "" {
		value = note
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]any{v1alpha1.Returns: value}}})
	if err != nil {
		return err
	}
	return c.client.Patch(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node.Name}}, client.RawPatch(types.MergePatchType, patch))
}

// drainer returns kubectl's drain, and the node.
func (c *Client) drainer(ctx context.Context, name string) (*drain.Helper, *corev1.Node, error) {
	k, err := kubernetes.NewForConfig(c.rest)
	if err != nil {
		return nil, nil, err
	}
	node, err := k.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if Absent(err) {
		return nil, nil, attest.Refuse(attestv1.Reason_REASON_NOT_ENROLLED, "there is no node %s", name)
	} else if err != nil {
		return nil, nil, err
	}
	h := &drain.Helper{
		Ctx: ctx, Client: k, GracePeriodSeconds: -1, IgnoreAllDaemonSets: true, EvictErrorRetryDelay: evictEvery, Out: &lines{report: func(string) {}}, ErrOut: &lines{report: func(string) {}},
	}
	return h, node, nil
}

// lines is a writer that passes each line to report. Several goroutines write to it, always whole lines.
type lines struct{ report func(string) }

func (l *lines) Write(b []byte) (int, error) {
	for line := range strings.Lines(string(b)) {
		l.report(printable.ASCII(strings.TrimSpace(line), maxWhy))
	}
	return len(b), nil
}

// evictions reports the output of kubectl's drain. For repeated evictions, it reports each refusing budget only once, while kubectl repeats a line
// for each pod every five seconds.
type evictions struct {
	report  func(string)
	blocked func() []string // the budgets that refuse an eviction now, as in [BudgetError]

	mu    sync.Mutex
	asked time.Time
	said  map[string]bool
}

func (e *evictions) Write(b []byte) (int, error) {
	text := string(b)
	if !strings.Contains(text, "(will retry after ") {
		return (&lines{report: e.report}).Write(b)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if time.Since(e.asked) < evictEvery {
		return len(b), nil
	}
	e.asked = time.Now()
	for _, budget := range e.blocked() {
		name, _, _ := strings.Cut(budget, " ")
		if !e.said[name] {
			if e.said == nil {
				e.said = map[string]bool{}
			}
			e.said[name] = true
			e.report(printable.ASCII("waits for the PodDisruptionBudget "+budget, maxWhy))
		}
	}
	return len(b), nil
}
