package sweeping

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/services/joinservice/state"
)

// podsAtOnce bounds how many of a node's pods are read at a time: their authors choose the size of their metadata.
const podsAtOnce = 8

// evictions evicts the nodes that are shut out, one after another; [Enforcer.pass] has made admission refuse their writes
// before. It evicts nothing before all informers have synced.
func (e *Enforcer) evictions(ctx context.Context) {
	if e.state.Cluster.Await(ctx) != nil {
		return // ctx has ended
	}
	again := time.NewTicker(lookEvery)
	defer again.Stop()
	for {
		e.mu.Lock()
		nodes := e.leaving
		e.leaving = map[string]bool{}
		e.mu.Unlock()
		failed := false
		for node := range nodes { // in random order, so replicas start with different ones
			if err := e.leave(ctx, node); err != nil && ctx.Err() == nil {
				failed = true
				e.state.Log.ErrorContext(ctx, "a node that is shut out could not be evicted; trying again", "node", node, "err", err)
				e.mu.Lock()
				e.leaving[node] = true
				e.mu.Unlock()
			}
		}
		var retry <-chan time.Time
		if failed {
			retry = time.After(retryWait/2 + rand.N(retryWait)) //nolint:gosec // spreading load is no secret
		}
		select {
		case <-ctx.Done():
			return
		case <-e.kickLeave:
		case <-retry:
		case <-again.C:
			e.stillThere()
		}
	}
}

// stillThere checks again what an eviction should have ended: it may have had to wait for another control plane.
func (e *Enforcer) stillThere() {
	for _, n := range e.state.Cluster.Nodes.All() {
		if n.ShutOut() && (n.Leaving() || e.state.HasNode(n.Name)) {
			e.queue(n.Name)
		}
	}
}

func (e *Enforcer) queue(node string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.leaving[node] = true
	wake(e.kickLeave)
}

// leave evicts a node that is shut out, and ends its enrollment if that is being deleted. Each step may be repeated, also
// by several replicas at the same time. Before each step, after it has chosen what to delete, every replica reads from the
// API server whether the enrollment still exists and is shut out: so it deletes nothing of the name's next machine, or of
// one whose ban was lifted.
func (e *Enforcer) leave(ctx context.Context, node string) error {
	n, err := e.list.ShutOut(ctx, node, "")
	if n == nil || err != nil {
		return err
	}
	if e.lastControlPlane(n) {
		e.state.Log.WarnContext(ctx, "a control plane is shut out and joinservice can run on no other one: its Node stays until then", "node", node)
		e.state.Emit(ctx, n, state.Warning, "NotEvicted", "no other control plane is Ready and has the label node-role.kubernetes.io/control-plane, so its Node stays: without it no joinservice would run")
		return nil
	}
	if n.Leaving() {
		if err := e.list.Revoke(ctx, n); err != nil {
			return errors.Join(err, e.list.Settle(ctx, node)) // a list without room for a revocation has room for a suspension
		}
	} else if err := e.list.Settle(ctx, node); err != nil { // before its Node is deleted: its kubelet must not create it again
		return err
	}
	if n.Leaving() || n.Annotations[v1alpha1.KeepNode] == "" {
		if err := e.evict(ctx, n); err != nil {
			return err
		}
	}
	if n.Leaving() {
		return e.finish(ctx, n)
	}
	return nil
}

// unfinished reports whether an enrollment that is not shut out has an annotation of an interrupted `muster replace`, `forget` or `reset`: its ban was lifted
// by hand. The annotation would keep the next ban from evicting, or from being seen as the owner's.
func unfinished(n *v1alpha1.AttestedNode) bool {
	_, keep := n.Annotations[v1alpha1.KeepNode]
	_, removing := n.Annotations[v1alpha1.Removing]
	return (keep || removing) && !n.ShutOut()
}

// lastControlPlane reports whether joinservice can run on no other control plane that is not shut out. After a ban is
// lifted, the kubelet creates the Node, and may not label it as a control plane.
func (e *Enforcer) lastControlPlane(n *v1alpha1.AttestedNode) bool {
	return n.Spec.Role == v1alpha1.RoleControlPlane && !slices.ContainsFunc(e.state.Cluster.Nodes.All(), func(o *v1alpha1.AttestedNode) bool {
		return o.Name != n.Name && o.Spec.Role == v1alpha1.RoleControlPlane && !o.ShutOut() && e.state.Node(o.Name).Serves
	})
}

// evict deletes the Node, and then its pods: this ends the tokens that are bound to them, and what the node authorizer lets
// their node read. Without a Node no new pods run there, and admission refuses those that name it (muster-pods-of-nodes).
// It returns an error as long as one of them exists (J10).
func (e *Enforcer) evict(ctx context.Context, n *v1alpha1.AttestedNode) error {
	if o := e.state.Node(n.Name); o.UID != "" {
		if now, err := e.list.ShutOut(ctx, n.Name, n.UID); now == nil || err != nil {
			return err
		}
		err := e.state.Cluster.Client.Delete(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name}}, client.Preconditions{UID: &o.UID}, background)
		if ignoreGone(err) != nil {
			return clusterview.Unavailable("delete Node "+n.Name, err)
		}
		if err == nil {
			e.evicting.Store(n.UID, nil)
		}
	}
	// Pods with tokens and Secrets come first. Mirror pods of static pods have neither, and the node itself creates them,
	// in any number. A pod that cannot be deleted does not prevent the deletion of others.
	var failed error
	for _, mirrors := range []bool{false, true} {
		if err := e.podsOf(ctx, n.Name, func(pods []metav1.PartialObjectMetadata) error {
			why, err := e.deletePods(ctx, n, pods, mirrors)
			failed = cmp.Or(failed, why)
			return err
		}); err != nil {
			return err
		}
	}
	held, err := e.held(ctx, n.Name)
	switch {
	case err != nil:
		return errors.Join(err, failed)
	case held != "":
		if now, err := e.list.ShutOut(ctx, n.Name, n.UID); now == nil || err != nil {
			return err
		}
		e.evicting.Store(n.UID, nil)
		if failed != nil {
			held = fmt.Sprintf("%v; %s", failed, held)
		}
		e.state.Emit(ctx, n, state.Warning, "NotEvicted", held)
		return fmt.Errorf("its Node or pods on it are still there: %s", held)
	}
	if _, begun := e.evicting.LoadAndDelete(n.UID); begun {
		e.state.Log.InfoContext(ctx, "the Node of a machine that is shut out is deleted, with its pods", "node", n.Name, "machine", n.Spec.MachineID)
		e.state.Audited(ctx, "node evicted", n.Name, n.Spec.MachineID, attestv1.Reason_REASON_BANNED)
		e.state.Emit(ctx, n, state.Warning, "Evicted", "its machine is shut out: its Node and the pods on it are deleted")
	}
	return nil
}

// podsOf calls do with the pods of a node, some at a time.
func (e *Enforcer) podsOf(ctx context.Context, node string, do func([]metav1.PartialObjectMetadata) error) error {
	pods := &metav1.PartialObjectMetadataList{}
	pods.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("PodList"))
	for more := true; more; more = pods.Continue != "" {
		if err := e.state.Cluster.Client.List(ctx, pods, client.MatchingFields{"spec.nodeName": node}, client.Limit(podsAtOnce), client.Continue(pods.Continue)); err != nil {
			return clusterview.Unavailable("list the pods of node "+node, err)
		}
		if err := do(pods.Items); err != nil {
			return err
		}
	}
	return nil
}

// background also removes the finalizers of an earlier deletion that waits for dependents.
const background = client.PropagationPolicy(metav1.DeletePropagationBackground)

// deletePods deletes pods, each independently of the others, and returns the first error of those that cannot be deleted as
// why.
func (e *Enforcer) deletePods(ctx context.Context, n *v1alpha1.AttestedNode, pods []metav1.PartialObjectMetadata, mirrors bool) (why, err error) {
	if now, err := e.list.ShutOut(ctx, n.Name, n.UID); now == nil || err != nil {
		return nil, err
	}
	var g errgroup.Group
	for i := range pods {
		pod := &pods[i]
		if _, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]; mirror && !mirrors {
			continue
		}
		g.Go(func() error {
			err := e.state.Cluster.Client.Delete(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name}}, client.Preconditions{UID: &pod.UID}, client.GracePeriodSeconds(0), background)
			if ignoreGone(err) != nil {
				return clusterview.Unavailable("delete pod "+pod.Namespace+"/"+pod.Name, err)
			}
			return nil
		})
	}
	return g.Wait(), nil
}

// held returns what keeps a Node or its pods from being deleted; empty if none exists. As long as they exist, their tokens
// are valid, and the node's certificate reads their Secrets.
func (e *Enforcer) held(ctx context.Context, node string) (string, error) {
	nodes := &metav1.PartialObjectMetadataList{}
	nodes.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("NodeList"))
	if err := e.state.Cluster.Client.List(ctx, nodes, client.MatchingFields{"metadata.name": node}); err != nil {
		return "", clusterview.Unavailable("read Node "+node, err)
	}
	var first string
	count := 0
	note := func(what string, o *metav1.PartialObjectMetadata) {
		if count++; count == 1 {
			first = fmt.Sprintf("%s, finalizers %q", what, o.Finalizers)
		}
	}
	for i := range nodes.Items {
		note("Node "+node, &nodes.Items[i])
	}
	err := e.podsOf(ctx, node, func(pods []metav1.PartialObjectMetadata) error {
		for i := range pods {
			note("pod "+pods[i].Namespace+"/"+pods[i].Name, &pods[i])
		}
		return nil
	})
	if err != nil || count == 0 {
		return "", err
	}
	return fmt.Sprintf("%s; %d in all. Remove finalizers that no controller acts on: kubectl patch --type merge -p '{\"metadata\":{\"finalizers\":null}}'", first, count), nil
}

// ignoreGone returns nil for an object that another replica has deleted, also if a new one has its name.
func ignoreGone(err error) error {
	if apierrors.IsConflict(err) {
		return nil
	}
	return client.IgnoreNotFound(err)
}

// finish removes an enrollment whose certificates are revoked. The requests of its kubelet are deleted (J4).
func (e *Enforcer) finish(ctx context.Context, n *v1alpha1.AttestedNode) error {
	asked := e.requests.FiledBy(n.Name)
	now, err := e.list.ShutOut(ctx, n.Name, n.UID)
	if now == nil || err != nil {
		return err
	}
	if err := e.requests.Delete(ctx, asked); err != nil {
		return err
	}
	if !now.Revokes() {
		return nil // the finalizer of another program
	}
	now.Finalizers = slices.DeleteFunc(now.Finalizers, func(f string) bool { return f == v1alpha1.RevokeCertificates })
	if err := e.state.Cluster.Client.Update(ctx, now); client.IgnoreNotFound(err) != nil {
		return clusterview.Unavailable("write AttestedNode "+n.Name, err)
	}
	e.state.Log.InfoContext(ctx, "an enrollment has ended: its name is free", "node", n.Name, "machine", n.Spec.MachineID)
	return nil
}
