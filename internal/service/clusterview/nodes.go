package clusterview

import (
	"context"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/trust/attest"
)

// Nodes is the view of all enrollments, indexed by the values that must be unique. The returned objects are shared: they
// must not be changed.
type Nodes struct {
	mu        sync.RWMutex
	byName    map[string]*v1alpha1.AttestedNode
	byMachine index
	byAK      index
	byDisk    index
	byAddress index
	changed   chan struct{} // closed and replaced with each change
}

// index maps a value to the names of the enrollments that have it. There should be one; more than one means that two
// replicas wrote at the same time.
type index map[string]map[string]bool

func (i index) add(value, name string) {
	if value == "" {
		return
	}
	if i[value] == nil {
		i[value] = make(map[string]bool, 1)
	}
	i[value][name] = true
}

func (i index) drop(value, name string) {
	delete(i[value], name)
	if len(i[value]) == 0 {
		delete(i, value)
	}
}

func newNodes() *Nodes {
	return &Nodes{byName: map[string]*v1alpha1.AttestedNode{}, byMachine: index{}, byAK: index{}, byDisk: index{}, byAddress: index{}, changed: make(chan struct{})}
}

func (n *Nodes) set(node *v1alpha1.AttestedNode) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.unlink(node.Name)
	n.byName[node.Name] = node
	n.byMachine.add(node.Spec.MachineID, node.Name)
	n.byAK.add(node.Status.AKName, node.Name)
	n.byAK.add(node.Annotations[v1alpha1.AttestationKey], node.Name)
	n.byDisk.add(node.Spec.DiskID, node.Name)
	for _, a := range addresses(node) {
		n.byAddress.add(a, node.Name)
	}
	n.broadcast()
}

func (n *Nodes) remove(node *v1alpha1.AttestedNode) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.unlink(node.Name)
	delete(n.byName, node.Name)
	n.broadcast()
}

func (n *Nodes) unlink(name string) {
	old, ok := n.byName[name]
	if !ok {
		return
	}
	n.byMachine.drop(old.Spec.MachineID, name)
	n.byAK.drop(old.Status.AKName, name)
	n.byAK.drop(old.Annotations[v1alpha1.AttestationKey], name)
	n.byDisk.drop(old.Spec.DiskID, name)
	for _, a := range addresses(old) {
		n.byAddress.drop(a, name)
	}
}

// addresses returns the addresses of an enrollment, and its former ones.
func addresses(n *v1alpha1.AttestedNode) []string {
	return slices.AppendSeq(slices.Clone(n.Spec.Addresses), maps.Keys(Former(n)))
}

func (n *Nodes) broadcast() {
	close(n.changed)
	n.changed = make(chan struct{})
}

// ByName returns the enrollment of that node; nil if there is none.
func (n *Nodes) ByName(name string) *v1alpha1.AttestedNode {
	n.mu.RLock()
	defer n.mu.RUnlock()
	return n.byName[name]
}

// All returns every enrollment, in no particular order.
func (n *Nodes) All() []*v1alpha1.AttestedNode {
	n.mu.RLock()
	defer n.mu.RUnlock()
	return slices.Collect(maps.Values(n.byName))
}

// ByMachine returns the enrollments of a machine: none, or one.
func (n *Nodes) ByMachine(id attest.MachineID) []*v1alpha1.AttestedNode {
	return n.find(n.byMachine, id.String())
}

// ByAK returns the enrollments whose machine last attested with the attestation key of that name, in hexadecimal digits:
// none, or one. A TPM has one such key, whichever endorsement key certifies it.
func (n *Nodes) ByAK(name string) []*v1alpha1.AttestedNode { return n.find(n.byAK, name) }

// ByDisk returns the enrollments with that disk.
func (n *Nodes) ByDisk(id string) []*v1alpha1.AttestedNode { return n.find(n.byDisk, id) }

// ByAddress returns the enrollments that have that address or had it, see [Former], in the form of [netip.Addr.String].
func (n *Nodes) ByAddress(a string) []*v1alpha1.AttestedNode { return n.find(n.byAddress, a) }

func (n *Nodes) find(i index, value string) []*v1alpha1.AttestedNode {
	n.mu.RLock()
	defer n.mu.RUnlock()
	var out []*v1alpha1.AttestedNode
	for name := range i[value] {
		out = append(out, n.byName[name])
	}
	return out
}

// Banned reports whether any enrollment of the machine, or of its TPM under another ID, is banned or being deleted (A8).
func (n *Nodes) Banned(c attest.Claims) bool {
	return n.banned(c.Machine(), hex.EncodeToString(c.AKName()))
}

func (n *Nodes) banned(id attest.MachineID, ak string) bool {
	return slices.ContainsFunc(slices.Concat(n.ByMachine(id), n.ByAK(ak)), func(node *v1alpha1.AttestedNode) bool { return node.ShutOut() })
}

// Await waits until the view has exactly that object at that resource version or a later one, and with it all that was
// written before. It returns an error when ctx ends, for example because the object was deleted at once.
func (n *Nodes) Await(ctx context.Context, name string, uid types.UID, version string) error {
	for {
		n.mu.RLock()
		node, changed := n.byName[name], n.changed
		n.mu.RUnlock()
		if node != nil && node.UID == uid {
			order, err := resourceversion.CompareResourceVersion(node.ResourceVersion, version)
			if err != nil {
				return fmt.Errorf("resource version of AttestedNode %s: %w", name, err)
			}
			if order >= 0 {
				return nil
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("AttestedNode %s did not come back from the API server: %w", name, context.Cause(ctx))
		}
	}
}

// Changed returns a channel that is closed at the next change.
func (n *Nodes) Changed() <-chan struct{} {
	n.mu.RLock()
	defer n.mu.RUnlock()
	return n.changed
}
