package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/clusterinfo"
	"github.com/muster-k8s/muster/internal/enrolled"
)

// enrolledView is what the informer last saw of the ConfigMap.
type enrolledView struct {
	follow func(map[string]string) // set before the informers run, or nil

	mu   sync.RWMutex
	data map[string]string
}

func (v *enrolledView) set(m *corev1.ConfigMap) {
	v.mu.Lock()
	v.data = m.Data
	v.mu.Unlock()
	if v.follow != nil {
		v.follow(m.Data)
	}
}

func (v *enrolledView) remove(*corev1.ConfigMap) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.data = nil
}

func (v *enrolledView) get(node string) string {
	v.mu.RLock()
	defer v.mu.RUnlock()
	return v.data[node]
}

// all gives what must not be changed.
func (v *enrolledView) all() map[string]string {
	v.mu.RLock()
	defer v.mu.RUnlock()
	return v.data
}

// struck says whether the node must not be on the list, whatever it was before.
func struck(n *v1alpha1.AttestedNode) bool { return n.ShutOut() || n.Status.ReleasedAt != nil }

// mayWrite says whether a node belongs on the list: it is a node.
func (k *Kube) mayWrite(n *v1alpha1.AttestedNode) bool {
	return n != nil && !struck(n) && (certified(n) || k.nodes.has(n.Name))
}

// certified says whether a machine has got a node's certificates, by a ticket or as the first machine and those that were adopted. It has them also
// after a ban that was lifted, and has no Node then.
func certified(n *v1alpha1.AttestedNode) bool {
	return n.Status.Ticket != nil || n.Status.Certificates != nil
}

// list puts a node into the ConfigMap, which it gives as it is then. A merge patch of one key cannot lose another replica's, and
// whose the key is was settled by compare-and-swap on the AttestedNode before.
func (k *Kube) list(ctx context.Context, node, machine string, role v1alpha1.Role) (*corev1.ConfigMap, error) {
	// The owner's `muster init` made the ConfigMap. Without it no node may write, and to make it anew
	// with one node would lock out all others.
	patch, err := json.Marshal(map[string]any{"data": map[string]string{node: machine}})
	if err != nil {
		return nil, err
	}
	m, err := k.patchEnrolled(ctx, types.MergePatchType, patch)
	if err != nil {
		return nil, unavailable("write ConfigMap "+enrolled.ConfigMap, err)
	}
	return m, k.listControlPlanes(ctx, m, func(_ map[string]string, names map[string]bool) {
		delete(names, node) // a control plane may have had the name before
		if role == v1alpha1.RoleControlPlane {
			names[node] = true
		}
	})
}

// listControlPlanes changes which nodes are listed as control planes, by compare-and-swap from m on, which it brings up to date.
func (k *Kube) listControlPlanes(ctx context.Context, m *corev1.ConfigMap, change changeNames) error {
	for range writeAttempts {
		want, same := change.apply(m.Data)
		if same {
			return nil
		}
		// Joins of workers change other keys of it all the time, so it is this key that must be as it was. Only one that is not there can't be compared.
		kind, patch := types.JSONPatchType, any([]map[string]string{
			{"op": "test", "path": "/data/" + enrolled.ControlPlanes, "value": m.Data[enrolled.ControlPlanes]},
			{"op": "replace", "path": "/data/" + enrolled.ControlPlanes, "value": want},
		})
		if _, there := m.Data[enrolled.ControlPlanes]; !there {
			kind, patch = types.MergePatchType, map[string]any{
				"metadata": map[string]string{"resourceVersion": m.ResourceVersion}, "data": map[string]string{enrolled.ControlPlanes: want},
			}
		}
		raw, err := json.Marshal(patch)
		if err != nil {
			return err
		}
		now, err := k.patchEnrolled(ctx, kind, raw)
		if err == nil {
			*m = *now
			return nil
		}
		if !apierrors.IsConflict(err) && !apierrors.IsInvalid(err) { // another replica was faster
			return unavailable("write ConfigMap "+enrolled.ConfigMap, err)
		}
		*m = corev1.ConfigMap{}
		if err := k.cluster.Client.Get(ctx, client.ObjectKey{Name: enrolled.ConfigMap, Namespace: clusterinfo.Namespace}, m); err != nil {
			return unavailable("read ConfigMap "+enrolled.ConfigMap, err)
		}
	}
	return unavailable("write ConfigMap "+enrolled.ConfigMap, fmt.Errorf("the list of control planes changed %d times meanwhile", writeAttempts))
}

// changeNames changes the names of control planes; listed is what the ConfigMap says.
type changeNames func(listed map[string]string, names map[string]bool)

// apply returns the list after the change, and whether it is the one of before.
func (c changeNames) apply(listed map[string]string) (want string, same bool) {
	names := map[string]bool{}
	for _, name := range strings.Fields(listed[enrolled.ControlPlanes]) {
		names[name] = true
	}
	c(listed, names)
	want = strings.Join(slices.Sorted(maps.Keys(names)), " ")
	return want, want == listed[enrolled.ControlPlanes]
}

// strike takes the node from the list if the machine is the one that stands there (J4): who
// enrolled under the name meanwhile stays, and the API's error says that the test failed.
func (k *Kube) strike(ctx context.Context, node, machine string) error {
	path := "/data/" + node // no character of a node's name or of [enrolled.Key] needs an escape (RFC 6901)
	type operation struct {
		Op    string  `json:"op"`
		Path  string  `json:"path"`
		Value *string `json:"value,omitempty"`
	}
	patch, err := json.Marshal([]operation{{"test", path, &machine}, {"remove", path, nil}})
	if err != nil {
		return err
	}
	_, err = k.patchEnrolled(ctx, types.JSONPatchType, patch)
	return err
}

// unlist is strike where it is as well if the machine stands there no more. Its error is a refusal.
func (k *Kube) unlist(ctx context.Context, node, machine string) error {
	err := k.strike(ctx, node, machine)
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsInvalid(err) {
		return unavailable("write ConfigMap "+enrolled.ConfigMap, err)
	}
	return nil
}

func (k *Kube) patchEnrolled(ctx context.Context, kind types.PatchType, patch []byte) (*corev1.ConfigMap, error) {
	m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: enrolled.ConfigMap, Namespace: clusterinfo.Namespace}}
	return m, k.cluster.Client.Patch(ctx, m, client.RawPatch(kind, patch))
}

// settle makes the list say of a node what its AttestedNode says. It is called after the AttestedNode
// was changed, and asks the API server rather than a view. Whoever changes an AttestedNode calls it or
// list afterwards, and it looks again after each write. So whatever the order, the last one to write
// has seen the last change, and no live node stays without its place.
//
// put is for a node whose ban was lifted: it gets its place back even without ticket and Node.
func (k *Kube) settle(ctx context.Context, node string, put bool) error {
	for range writeAttempts {
		n := &v1alpha1.AttestedNode{}
		if err := k.cluster.Client.Get(ctx, client.ObjectKey{Name: node}, n); apierrors.IsNotFound(err) {
			n = nil
		} else if err != nil {
			return unavailable("read AttestedNode "+node, err)
		}
		if n != nil && keepsNode(n) {
			delete(n.Annotations, v1alpha1.KeepNode)
			if err := k.cluster.Client.Update(ctx, n); apierrors.IsConflict(err) {
				continue
			} else if client.IgnoreNotFound(err) != nil {
				return unavailable("write AttestedNode "+node, err)
			}
		}
		m := &corev1.ConfigMap{}
		if err := k.cluster.Client.Get(ctx, client.ObjectKey{Name: enrolled.ConfigMap, Namespace: clusterinfo.Namespace}, m); apierrors.IsNotFound(err) {
			return nil // nobody may write
		} else if err != nil {
			return unavailable("read ConfigMap "+enrolled.ConfigMap, err)
		}
		have, listed := m.Data[node]
		if n == nil && have == enrolled.Unattested {
			return nil // the owner's word, on a node that was here before Muster
		}
		may := k.mayWrite(n) || put && n != nil && !struck(n)
		if may == listed && (!may || have == n.Spec.MachineID) {
			return nil
		}
		if may {
			if _, err := k.list(ctx, node, n.Spec.MachineID, n.Spec.Role); err != nil {
				return err
			}
			continue
		}
		if err := k.unlist(ctx, node, have); err != nil {
			return err
		}
		k.log.InfoContext(ctx, "node struck from those that may write", "node", node, "machine", have)
	}
	return unavailable("write ConfigMap "+enrolled.ConfigMap, fmt.Errorf("node %s changed %d times meanwhile", node, writeAttempts))
}

// takeNoRequests has admission refuse the certificate requests of a node until the [Sweeper] finds that most of them are deleted.
func (k *Kube) takeNoRequests(ctx context.Context, node string) error {
	if k.enrolled.get(enrolled.RequestsKey(node)) != "" || k.enrolled.get(node) == "" { // of a node that is not listed it takes none anyway
		return nil
	}
	patch, err := json.Marshal(map[string]any{"data": map[string]string{enrolled.RequestsKey(node): enrolled.TooMany}})
	if err != nil {
		return err
	}
	if _, err := k.patchEnrolled(ctx, types.MergePatchType, patch); err != nil {
		return unavailable("write ConfigMap "+enrolled.ConfigMap, err)
	}
	k.log.WarnContext(ctx, "a node files certificate requests faster than they can be deleted; admission takes none of it for a minute", "node", node)
	return nil
}
