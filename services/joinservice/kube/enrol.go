package kube

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/cluster"
	"github.com/muster-k8s/muster/internal/enrolled"
	"github.com/muster-k8s/muster/services/joinservice/nodecert"
	"github.com/muster-k8s/muster/trust/attest"
)

// maxAddresses is what an enrolment has room for: a claim's, and those of the one before.
const maxAddresses = 2 * nodecert.MaxAddresses

// writeAttempts bounds how often a lost compare-and-swap is tried again.
const writeAttempts = 4

// Claim is what a machine asks to be enrolled with. Its machine comes from attestation alone (J1).
type Claim struct {
	Machine   attest.MachineID
	Node      string
	Role      v1alpha1.Role
	Disk      string
	DiskMode  v1alpha1.DiskMode
	Addresses []netip.Addr
	// Boot is what the evidence says of the machine's boot.
	Boot Boot
	// AK is the name of the attestation key that the machine attested with, in hexadecimal digits.
	AK string
}

func (c Claim) spec() v1alpha1.AttestedNodeSpec {
	s := v1alpha1.AttestedNodeSpec{MachineID: c.Machine.String(), Role: c.Role, DiskID: c.Disk, DiskMode: c.DiskMode}
	for _, a := range c.Addresses {
		s.Addresses = append(s.Addresses, a.String())
	}
	return s
}

// Check says whether the claim fits all enrolments, Nodes, Services, API servers and disks that are
// known. Its errors are refusals; it changes nothing.
func (k *Kube) Check(ctx context.Context, c Claim) error {
	if err := k.check(c, k.cluster.Nodes.ByName(c.Node)); err != nil {
		return err
	}
	if owner := k.disks.of(c.Disk); owner == "" || owner == c.Machine.String() {
		return nil // ClaimDisk decides; this is for before anything is written
	}
	_, _, err := k.holdsDisk(ctx, c) // J2
	return err
}

// check takes the enrolment of the node by hand, since a caller may know a newer one.
func (k *Kube) check(c Claim, own *v1alpha1.AttestedNode) error {
	if k.reserved(c.Node) {
		return attest.Refuse(attestv1.Reason_REASON_NAME_TAKEN, "%q is a name of the API server, for which a node gets no certificate", c.Node)
	}
	if err := k.checkTPM(c); err != nil {
		return err
	}
	if k.vacant(own) {
		own = nil
	}
	if own != nil && own.Spec.MachineID != c.Machine.String() { // J4
		return attest.Refuse(attestv1.Reason_REASON_NAME_TAKEN, "node name %q is enrolled to machine %s; `muster forget %s` frees it, `muster replace` gives it to another machine", c.Node, own.Spec.MachineID, c.Node)
	}
	for _, other := range k.cluster.Nodes.ByMachine(c.Machine) {
		if other.Name != c.Node && !k.vacant(other) { // J4
			return attest.Refuse(attestv1.Reason_REASON_NAME_MISMATCH, "the machine is enrolled as %q; `muster forget %s` frees it", other.Name, other.Name)
		}
	}
	if own == nil {
		if c.Role == v1alpha1.RoleControlPlane {
			return attest.Refuse(attestv1.Reason_REASON_NOT_ENROLLED, "control planes are enrolled by the owner: `muster enroll %s --role control-plane --machine-id %s`", c.Node, c.Machine)
		}
		if k.enrolled.get(c.Node) == enrolled.Unattested { // J4: certificates that nobody attested for write under it
			return attest.Refuse(attestv1.Reason_REASON_NODE_EXISTS, "%q was a node before Muster was here, and its certificates live on; `muster forget %s` retires them", c.Node, c.Node)
		}
		if k.nodes.has(c.Node) {
			return attest.Refuse(attestv1.Reason_REASON_NODE_EXISTS, "there is a Node %q that Muster did not enrol; `muster forget %s` if it is not used", c.Node, c.Node)
		}
	} else if err := checkOwn(c, own); err != nil {
		return err
	}
	for _, other := range k.cluster.Nodes.ByDisk(c.Disk) { // J2
		if other.Name != c.Node && !k.vacant(other) {
			return attest.Refuse(attestv1.Reason_REASON_DISK_MISMATCH, "disk %s is enrolled to node %q", c.Disk, other.Name)
		}
	}
	for _, ip := range c.Addresses {
		if err := k.checkAddress(c, own, ip); err != nil {
			return err
		}
	}
	return k.checkNumber(c, own)
}

// checkNumber bounds how many addresses a machine can keep from others by giving them up.
func (k *Kube) checkNumber(c Claim, own *v1alpha1.AttestedNode) error {
	if own == nil {
		return nil
	}
	kept := k.givenUp(own, c.spec().Addresses)
	if n := len(kept) + len(c.Addresses); n > maxAddresses {
		return attest.Refuse(attestv1.Reason_REASON_ADDRESS_REFUSED, "the machine had %d addresses within %s, and may have %d", n, k.life, maxAddresses)
	}
	return nil
}

// checkTPM refuses a machine whose TPM is known as another one: it has shown another of its endorsement keys (A8).
func (k *Kube) checkTPM(c Claim) error {
	for _, other := range k.cluster.Nodes.ByAK(c.AK) {
		if other.Spec.MachineID != c.Machine.String() && !k.vacant(other) {
			return attest.Refuse(attestv1.Reason_REASON_TPM_KNOWN, "the TPM is that of node %q, which is enrolled to machine %s; `muster forget %s` frees it", other.Name, other.Spec.MachineID, other.Name)
		}
	}
	return nil
}

// givenUp gives the addresses of an enrollment that are not among those it has next, and until when others may not have
// them: certificates for those it has now may be as young as now.
func (k *Kube) givenUp(n *v1alpha1.AttestedNode, next []string) map[string]time.Time {
	out, now := cluster.Former(n), k.now()
	for _, a := range n.Spec.Addresses {
		out[a] = now.Add(k.life + holdMargin)
	}
	for a, until := range out {
		if slices.Contains(next, a) || !until.After(now) {
			delete(out, a)
		}
	}
	return out
}

// setAddresses gives an enrollment the addresses that it has next; those that it gives up are kept from others for as long as
// certificates for them live (J4).
func (k *Kube) setAddresses(n *v1alpha1.AttestedNode, next []string) {
	cluster.SetFormer(n, k.givenUp(n, next), k.now())
	n.Spec.Addresses = slices.Clone(next)
}

// checkShutOut refuses everything to the machine of an enrollment that is banned or being deleted. From its deletion on it does not
// count until its certificates are retired: what it got meanwhile would outlive it (J4).
func checkShutOut(n *v1alpha1.AttestedNode) error {
	switch {
	case n.Leaving():
		return attest.Refuse(attestv1.Reason_REASON_BANNED, "the enrollment of node %q is being deleted", n.Name)
	case n.Spec.Banned:
		return attest.Refuse(attestv1.Reason_REASON_BANNED, "node %q is banned", n.Name)
	}
	return nil
}

// checkOwn compares the claim with the machine's own enrolment.
func checkOwn(c Claim, own *v1alpha1.AttestedNode) error {
	if err := checkShutOut(own); err != nil {
		return err
	}
	switch {
	case own.Spec.Role != c.Role:
		return attest.Refuse(attestv1.Reason_REASON_ROLE_REFUSED, "the machine is enrolled as %s, and asks to be %s", own.Spec.Role, c.Role)
	case own.Spec.DiskID != "" && own.Spec.DiskID != c.Disk: // J2
		return attest.Refuse(attestv1.Reason_REASON_DISK_MISMATCH, "the machine is enrolled with disk %s, and asks for the key of %s", own.Spec.DiskID, c.Disk)
	case own.Spec.DiskMode != "" && own.Spec.DiskMode != c.DiskMode:
		return attest.Refuse(attestv1.Reason_REASON_DISK_MISMATCH, "the machine is enrolled with a %s disk, and has a %s one now", own.Spec.DiskMode, c.DiskMode)
	}
	_, err := checkBoot(own, &own.Status, c.Boot) // J11: recording it decides
	return err
}

func (k *Kube) checkAddress(c Claim, own *v1alpha1.AttestedNode, ip netip.Addr) error {
	for _, other := range k.cluster.Nodes.ByAddress(ip.String()) {
		if other.Name == c.Node || k.vacant(other) {
			continue
		}
		if slices.Contains(other.Spec.Addresses, ip.String()) {
			return attest.Refuse(attestv1.Reason_REASON_ADDRESS_REFUSED, "address %s is enrolled to node %q", ip, other.Name)
		}
		if until := cluster.Former(other)[ip.String()]; until.After(k.now()) { // J4
			return attest.Refuse(attestv1.Reason_REASON_ADDRESS_REFUSED, "address %s was node %q's, whose certificate for it lives until %s", ip, other.Name, utc(until))
		}
	}
	for _, o := range k.addresses.of(ip) {
		if o.kind == ownerNode && (o.name == c.Node || k.settledAddresses(o.name)) {
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

// settledAddresses says whether the node's addresses stand in its enrolment. What its kubelet writes
// into its Node then keeps no address from anybody: else one node could block those of all others.
func (k *Kube) settledAddresses(node string) bool {
	n := k.cluster.Nodes.ByName(node)
	return n != nil && !k.vacant(n) && len(n.Spec.Addresses) > 0
}

// Enrolment is a claim that was written, and can be taken back.
type Enrolment struct {
	kube    *Kube
	node    *v1alpha1.AttestedNode
	created bool
	claim   v1alpha1.AttestedNodeSpec
	before  *v1alpha1.AttestedNodeSpec // of an enrolment that was changed; nil: it was not
	stood   string                     // the ticket that stood before ours was written, if any
	ticket  string
	// filed is whether certificates were asked for with it; see File.
	filed bool
	// counted is whether our ticket was written into the status for certain, replaced what was there.
	counted  bool
	replaced v1alpha1.AttestedNodeStatus
	retired  bool // older certificates of the name are
}

// Enrol writes the claim and its status, which names the ticket, and lists the node among those that may
// write. What it wrote is undone if it fails. Its errors are refusals.
func (k *Kube) Enrol(ctx context.Context, c Claim, status v1alpha1.AttestedNodeStatus) (*Enrolment, error) {
	if status.Ticket == nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_INTERNAL, "an enrolment without a ticket")
	}
	e, err := k.write(ctx, c)
	if err != nil {
		return nil, err
	}
	e.ticket = status.Ticket.ID
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
	if k.vacant(own) { // a name's machine does not change, so this is another enrolment
		if err := k.delete(ctx, own); err != nil {
			return nil, err
		}
		own = nil
	}
	if own == nil {
		n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: c.Node, Annotations: map[string]string{v1alpha1.EnrolledByTicket: "true"}, Finalizers: []string{v1alpha1.RetireCertificates}}, Spec: c.spec()}
		if err := k.cluster.Client.Create(ctx, n); err != nil {
			return nil, err
		}
		return &Enrolment{kube: k, node: n, created: true, claim: c.spec()}, nil
	}
	e := &Enrolment{kube: k, node: own.DeepCopy(), claim: c.spec(), stood: ticketOf(own)}
	e.node.Spec = c.spec() // not banned: check has seen to that, and the swap would notice a change
	// J4: addresses that the machine has, and does not ask for any more, stay its own until the ticket is out. If another
	// machine could get one, a ticket that fails could not give it back.
	for _, a := range own.Spec.Addresses {
		if len(e.node.Spec.Addresses) < maxAddresses && !slices.Contains(e.node.Spec.Addresses, a) {
			e.node.Spec.Addresses = append(e.node.Spec.Addresses, a)
		}
	}
	if specEqual(e.node.Spec, own.Spec) {
		return e, nil
	}
	if err := k.cluster.Client.Update(ctx, e.node); err != nil {
		return nil, err
	}
	e.before = own.Spec.DeepCopy()
	return e, nil
}

// ticketOf gives the ID of the latest ticket that stands, or nothing.
func ticketOf(n *v1alpha1.AttestedNode) string {
	if n.Status.Ticket == nil {
		return ""
	}
	return n.Status.Ticket.ID
}

func specEqual(a, b v1alpha1.AttestedNodeSpec) bool {
	x, y := slices.Sorted(slices.Values(a.Addresses)), slices.Sorted(slices.Values(b.Addresses))
	return a.MachineID == b.MachineID && a.Role == b.Role && a.DiskID == b.DiskID && a.DiskMode == b.DiskMode && a.Banned == b.Banned && slices.Equal(x, y)
}

// Keep says that the ticket is out: addresses that its machine had before, and did not ask for any more, are anybody's once
// its certificates for them have expired. If the API server does not answer they go with the machine's next ticket.
func (e *Enrolment) Keep(ctx context.Context) {
	if specEqual(e.node.Spec, e.claim) {
		return
	}
	ctx, cancel := undo(ctx)
	defer cancel()
	k, n := e.kube, &v1alpha1.AttestedNode{}
	err := k.cluster.Client.Get(ctx, client.ObjectKeyFromObject(e.node), n)
	if err == nil && n.UID == e.node.UID && ticketOf(n) == e.ticket && specEqual(n.Spec, e.node.Spec) { // else another ticket sees to it
		k.setAddresses(n, e.claim.Addresses)
		n.Spec = *e.claim.DeepCopy()
		err = k.cluster.Client.Update(ctx, n)
	}
	if err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
		k.log.WarnContext(ctx, "a node's earlier addresses are still its own", "node", e.node.Name, "err", err)
	}
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
		e.replaced = *s.DeepCopy()
		if err := c.Boot.record(e.node, s, true); err != nil { // J11: long before the key leaves
			return err
		}
		t := status.Ticket.DeepCopy()
		t.Standing, t.Enrolled, t.Reclaims = standing(s.Ticket)+1, byTicket(e.node), s.ReleasedAt
		if s.Ticket != nil && t.Reclaims == nil {
			t.Reclaims = s.Ticket.Reclaims
		}
		s.Ticket, s.ReleasedAt = t, nil
		judged(s, status)
		return nil
	}); err != nil {
		return err
	}
	e.counted = true
	if err := k.mark(ctx, e.node); err != nil { // J4
		return err
	}
	if e.replaced.AKName != status.AKName { // A8: two replicas may have looked before either wrote
		if err := k.cluster.Nodes.Await(ctx, e.node.Name, e.node.UID, e.node.ResourceVersion); err != nil {
			return unavailable("enrol", err)
		}
		if err := k.checkTPM(c); err != nil {
			return err
		}
	}
	// Where no ticket stood before, our view of the list may be from before the node was struck.
	if e.replaced.Ticket != nil && k.enrolled.get(c.Node) == c.Machine.String() {
		_, e.retired = k.enrolled.retirement(c.Node)
		return nil
	}
	list, err := k.list(ctx, c.Node, c.Machine.String(), e.node.Spec.Role)
	if err != nil {
		return err
	}
	_, e.retired = list.Data[enrolled.Key(c.Node)]
	return nil
}
