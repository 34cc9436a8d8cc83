package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/clusterinfo"
	"github.com/muster-k8s/muster/trust/attest"
)

// EnrolledConfigMap lists the nodes that may write to the API: name to machine ID. An
// admission policy reads it.
const EnrolledConfigMap = "muster-enrolled"

// writeAttempts bounds how often a lost compare-and-swap is tried again.
const writeAttempts = 4

// Claim is what a machine asks to be enrolled with. Its machine comes from attestation alone (J1).
type Claim struct {
	Machine    attest.MachineID
	Node       string
	Role       v1alpha1.Role
	Disk       string
	DiskMode   v1alpha1.DiskMode
	Addresses  []netip.Addr
	ResetCount uint32
}

func (c Claim) spec() v1alpha1.AttestedNodeSpec {
	s := v1alpha1.AttestedNodeSpec{MachineID: c.Machine.String(), Role: c.Role, DiskID: c.Disk, DiskMode: c.DiskMode}
	for _, a := range c.Addresses {
		s.Addresses = append(s.Addresses, a.String())
	}
	return s
}

// Check says whether the claim fits all enrolments, Nodes, Services and API servers that are
// known. Its errors are refusals; it changes nothing.
func (k *Kube) Check(c Claim) error { return k.check(c, k.cluster.Nodes.ByName(c.Node)) }

// check takes the enrolment of the node by hand, since a caller may know a newer one.
func (k *Kube) check(c Claim, own *v1alpha1.AttestedNode) error {
	if k.reserved(c.Node) {
		return attest.Refuse(attestv1.Reason_REASON_NAME_TAKEN, "%q is a name of the API server, for which a node gets no certificate", c.Node)
	}
	if vacant(own) {
		own = nil
	}
	if own != nil && own.Spec.MachineID != c.Machine.String() { // J4
		return attest.Refuse(attestv1.Reason_REASON_NAME_TAKEN, "node name %q is enrolled to machine %s; `kubectl delete attestednode %s` frees it", c.Node, own.Spec.MachineID, c.Node)
	}
	for _, other := range k.cluster.Nodes.ByMachine(c.Machine) {
		if other.Name != c.Node && !vacant(other) { // J4
			return attest.Refuse(attestv1.Reason_REASON_NAME_MISMATCH, "the machine is enrolled as %q; `kubectl delete attestednode %s` frees it", other.Name, other.Name)
		}
	}
	if own == nil {
		if c.Role == v1alpha1.RoleControlPlane {
			return attest.Refuse(attestv1.Reason_REASON_NOT_ENROLLED, "control planes are enrolled by the owner: `muster enroll %s --role control-plane --machine-id %s`", c.Node, c.Machine)
		}
		if k.nodes.has(c.Node) {
			return attest.Refuse(attestv1.Reason_REASON_NODE_EXISTS, "there is a Node %q that Muster did not enrol; delete it if it is not used", c.Node)
		}
	} else if err := checkOwn(c, own); err != nil {
		return err
	}
	for _, other := range k.cluster.Nodes.ByDisk(c.Disk) { // J2
		if other.Name != c.Node && !vacant(other) {
			return attest.Refuse(attestv1.Reason_REASON_DISK_MISMATCH, "disk %s is enrolled to node %q", c.Disk, other.Name)
		}
	}
	for _, ip := range c.Addresses {
		if err := k.checkAddress(c, own, ip); err != nil {
			return err
		}
	}
	return nil
}

// vacant says whether the enrolment was released so long ago that nothing which its machine got with
// the ticket is of use any more: then name and disk are anybody's (J2, J4). A ban stays.
func vacant(n *v1alpha1.AttestedNode) bool {
	return n != nil && !n.Spec.Banned && n.Status.ReleasedAt != nil && time.Since(n.Status.ReleasedAt.Time) > certificateLife
}

// checkOwn compares the claim with the machine's own enrolment.
func checkOwn(c Claim, own *v1alpha1.AttestedNode) error {
	switch {
	case own.Spec.Banned:
		return attest.Refuse(attestv1.Reason_REASON_BANNED, "node %q is banned", c.Node)
	case own.Spec.Role != c.Role:
		return attest.Refuse(attestv1.Reason_REASON_ROLE_REFUSED, "the machine is enrolled as %s, and asks to be %s", own.Spec.Role, c.Role)
	case own.Spec.DiskID != "" && own.Spec.DiskID != c.Disk: // J2
		return attest.Refuse(attestv1.Reason_REASON_DISK_MISMATCH, "the machine is enrolled with disk %s, and asks for the key of %s", own.Spec.DiskID, c.Disk)
	case own.Spec.DiskMode != "" && own.Spec.DiskMode != c.DiskMode:
		return attest.Refuse(attestv1.Reason_REASON_DISK_MISMATCH, "the machine is enrolled with a %s disk, and has a %s one now", own.Spec.DiskMode, c.DiskMode)
	case own.Status.ResetCount != nil && int64(c.ResetCount) < *own.Status.ResetCount:
		return clockWentBack(c.Node, int64(c.ResetCount), *own.Status.ResetCount)
	}
	return nil
}

func (k *Kube) checkAddress(c Claim, own *v1alpha1.AttestedNode, ip netip.Addr) error {
	for _, other := range k.cluster.Nodes.ByAddress(ip.String()) {
		if other.Name != c.Node && !vacant(other) {
			return attest.Refuse(attestv1.Reason_REASON_ADDRESS_REFUSED, "address %s is enrolled to node %q", ip, other.Name)
		}
	}
	for _, o := range k.addresses.of(ip) {
		if o.kind == ownerNode && o.name == c.Node {
			continue
		}
		return attest.Refuse(attestv1.Reason_REASON_ADDRESS_REFUSED, "address %s belongs to %s %q", ip, o.kind, o.name)
	}
	// The API servers themselves are on control planes, whose addresses are Nodes', and behind the
	// Service default/kubernetes. The endpoint may also be the address of one of them.
	mine := own != nil && own.Spec.Role == v1alpha1.RoleControlPlane && slices.Contains(own.Spec.Addresses, ip.String())
	if !mine && k.isControlPlaneEndpoint(ip) {
		return attest.Refuse(attestv1.Reason_REASON_ADDRESS_REFUSED, "address %s is the control-plane endpoint", ip)
	}
	return nil
}

// Enrolment is a claim that was written, and can be taken back.
type Enrolment struct {
	kube    *Kube
	node    *v1alpha1.AttestedNode
	created bool
	before  *v1alpha1.AttestedNodeSpec // of an enrolment that was changed; nil: it was not
	listed  bool                       // in the ConfigMap by us
}

// Enrol writes the claim and its status, and lists the node among those that may write. What it
// wrote is undone if it fails. Its errors are refusals.
func (k *Kube) Enrol(ctx context.Context, c Claim, status v1alpha1.AttestedNodeStatus) (*Enrolment, error) {
	e, err := k.write(ctx, c)
	if err != nil {
		return nil, err
	}
	if err := e.finish(ctx, c, status); err != nil {
		e.Undo(ctx)
		return nil, err
	}
	return e, nil
}

// write creates or changes the AttestedNode by compare-and-swap.
func (k *Kube) write(ctx context.Context, c Claim) (*Enrolment, error) {
	own := k.cluster.Nodes.ByName(c.Node)
	for range writeAttempts {
		if err := k.check(c, own); err != nil {
			return nil, err
		}
		e, err := k.writeOver(ctx, c, own)
		if err == nil {
			return e, nil
		}
		if !apierrors.IsConflict(err) && !apierrors.IsAlreadyExists(err) && !apierrors.IsNotFound(err) {
			return nil, unavailable("write AttestedNode "+c.Node, err)
		}
		// Somebody was faster: look at what is really there, and judge again.
		own = &v1alpha1.AttestedNode{}
		if err := k.cluster.Client.Get(ctx, client.ObjectKey{Name: c.Node}, own); apierrors.IsNotFound(err) {
			own = nil
		} else if err != nil {
			return nil, unavailable("read AttestedNode "+c.Node, err)
		}
	}
	return nil, unavailable("write AttestedNode "+c.Node, fmt.Errorf("it changed %d times meanwhile", writeAttempts))
}

func (k *Kube) writeOver(ctx context.Context, c Claim, own *v1alpha1.AttestedNode) (*Enrolment, error) {
	if vacant(own) { // a name's machine does not change, so this is another enrolment
		if err := k.cluster.Client.Delete(ctx, own.DeepCopy(), client.Preconditions{UID: &own.UID, ResourceVersion: &own.ResourceVersion}); err != nil {
			return nil, err
		}
		own = nil
	}
	if own == nil {
		n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: c.Node}, Spec: c.spec()}
		if err := k.cluster.Client.Create(ctx, n); err != nil {
			return nil, err
		}
		return &Enrolment{kube: k, node: n, created: true}, nil
	}
	n := own.DeepCopy()
	n.Spec = c.spec() // not banned: check has seen to that, and the swap would notice a change
	if specEqual(n.Spec, own.Spec) {
		return &Enrolment{kube: k, node: n}, nil
	}
	if err := k.cluster.Client.Update(ctx, n); err != nil {
		return nil, err
	}
	return &Enrolment{kube: k, node: n, before: own.Spec.DeepCopy()}, nil
}

func specEqual(a, b v1alpha1.AttestedNodeSpec) bool {
	x, y := slices.Sorted(slices.Values(a.Addresses)), slices.Sorted(slices.Values(b.Addresses))
	return a.MachineID == b.MachineID && a.Role == b.Role && a.DiskID == b.DiskID && a.DiskMode == b.DiskMode && a.Banned == b.Banned && slices.Equal(x, y)
}

func (e *Enrolment) finish(ctx context.Context, c Claim, status v1alpha1.AttestedNodeStatus) error {
	k := e.kube
	if e.created || e.before != nil {
		if err := k.cluster.Nodes.Await(ctx, e.node.Name, e.node.UID, e.node.ResourceVersion); err != nil {
			return unavailable("enrol", err)
		}
		if err := k.check(c, k.cluster.Nodes.ByName(c.Node)); err != nil { // J2, J4: see the package's comment
			return err
		}
	}
	if err := k.writeStatus(ctx, e.node, func(s *v1alpha1.AttestedNodeStatus) error {
		enrolled := e.created || s.ReleasedAt != nil || (s.Ticket != nil && s.Ticket.Enrolled)
		if s.Ticket = status.Ticket.DeepCopy(); s.Ticket != nil {
			s.Ticket.Enrolled = enrolled
		}
		s.ReleasedAt = nil
		judged(s, status)
		return nil
	}); err != nil {
		return err
	}
	listed, err := k.list(ctx, c.Node, c.Machine.String())
	e.listed = listed
	return err
}

// Undo takes back what Enrol wrote, unless a later ticket of the machine relies on it by now: that
// one has written its status since. It goes on when ctx has ended, and says in the log what is left
// if it fails.
func (e *Enrolment) Undo(ctx context.Context) {
	ctx, cancel := undo(ctx)
	defer cancel()
	k := e.kube
	var err error
	switch {
	case e.created:
		err = client.IgnoreNotFound(k.cluster.Client.Delete(ctx, e.node, client.Preconditions{UID: &e.node.UID, ResourceVersion: &e.node.ResourceVersion}))
	case e.before != nil:
		n := e.node.DeepCopy()
		n.Spec = *e.before
		err = k.cluster.Client.Update(ctx, n)
	}
	if apierrors.IsConflict(err) {
		k.log.InfoContext(ctx, "an enrolment stays: a later ticket of its machine relies on it", "node", e.node.Name, "machine", e.node.Spec.MachineID)
		return
	}
	if err == nil && e.listed {
		err = k.unlist(ctx, e.node.Name, e.node.Spec.MachineID)
	}
	if err != nil {
		k.log.ErrorContext(ctx, "an enrolment could not be taken back; look at AttestedNode and ConfigMap by hand", "node", e.node.Name, "configmap", EnrolledConfigMap, "err", err)
	}
}

// returnWithin is how old a ticket may be that is returned: a machine that loses the race for its
// node lock knows at once.
const returnWithin = 10 * time.Minute

// Withdraw releases the enrolment that a returned ticket made. The machine must be the ticket's own
// (J1), and no Node may have come of it; else TICKET_UNKNOWN.
//
// The ticket's certificate and disk key are out, whatever the machine says. So its name is struck
// from those that may write at once, but name and disk stay the machine's own until the certificate
// has expired: else one machine could collect names and keys of disks (J2, J4).
func (k *Kube) Withdraw(ctx context.Context, m attest.MachineID, ticket string) (node string, err error) {
	for _, n := range k.cluster.Nodes.ByMachine(m) {
		t := n.Status.Ticket
		if t == nil || t.ID != ticket || k.nodes.has(n.Name) || time.Since(t.IssuedAt.Time) > returnWithin {
			continue
		}
		if n.Spec.Banned {
			return n.Name, attest.Refuse(attestv1.Reason_REASON_BANNED, "node %q is banned", n.Name)
		}
		live := n.DeepCopy()
		live.Status.Ticket = nil
		if t.Enrolled {
			live.Status.ReleasedAt = new(metav1.Now())
		}
		if err := k.cluster.Client.Status().Update(ctx, live); err != nil { // a compare-and-swap
			return n.Name, unavailable("write the status of AttestedNode "+n.Name, err)
		}
		if !t.Enrolled {
			return n.Name, nil
		}
		return n.Name, k.unlist(ctx, n.Name, n.Spec.MachineID)
	}
	return "", attest.Refuse(attestv1.Reason_REASON_TICKET_UNKNOWN, "machine %s has no such ticket, or it was used", m)
}

// enrolledView is what the informer last saw of the ConfigMap.
type enrolledView struct {
	mu   sync.RWMutex
	data map[string]string
}

func (v *enrolledView) set(m *corev1.ConfigMap) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.data = m.Data
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

// list puts a node into the ConfigMap. A merge patch of one key cannot lose another replica's, and
// whose the key is was settled by compare-and-swap on the AttestedNode before.
func (k *Kube) list(ctx context.Context, node, machine string) (changed bool, err error) {
	if k.enrolled.get(node) == machine {
		return false, nil
	}
	// The owner's `muster init` made the ConfigMap. Without it no node may write, and to make it anew
	// with one node would lock out all others.
	patch, err := json.Marshal(map[string]any{"data": map[string]string{node: machine}})
	if err != nil {
		return false, err
	}
	if err := k.patchEnrolled(ctx, types.MergePatchType, patch); err != nil {
		return false, unavailable("write ConfigMap "+EnrolledConfigMap, err)
	}
	return true, nil
}

// unlist strikes the node if the machine is the one that is listed: who enrolled under the name
// meanwhile stays.
func (k *Kube) unlist(ctx context.Context, node, machine string) error {
	path := "/data/" + node // a DNS label needs no escapes (RFC 6901)
	patch, err := json.Marshal([]map[string]string{{"op": "test", "path": path, "value": machine}, {"op": "remove", "path": path}})
	if err != nil {
		return err
	}
	err = k.patchEnrolled(ctx, types.JSONPatchType, patch)
	if apierrors.IsNotFound(err) || apierrors.IsInvalid(err) { // the test failed: it is gone, or somebody else's
		return nil
	}
	if err != nil {
		return unavailable("write ConfigMap "+EnrolledConfigMap, err)
	}
	return nil
}

func (k *Kube) patchEnrolled(ctx context.Context, kind types.PatchType, patch []byte) error {
	m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: EnrolledConfigMap, Namespace: clusterinfo.Namespace}}
	return k.cluster.Client.Patch(ctx, m, client.RawPatch(kind, patch))
}
