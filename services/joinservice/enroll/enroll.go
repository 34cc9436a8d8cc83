// Package enroll decides which machine has which node name, disk and addresses, and records that in AttestedNodes and
// AttestedDisks.
//
// Replicas of joinservice share only the Kubernetes API, and their views of it are slightly out of date. Values that must
// be unique among enrollments (machine, disk, address) are therefore checked twice: before anything is written, and again
// when the informer has returned the own write. By then it has also returned everything that was written earlier, so of two
// competing claims at least the later one sees the other and is refused.
package enroll

import (
	"context"
	"crypto/x509"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/enrollment"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/services/joinservice/access"
	"github.com/muster-k8s/muster/services/joinservice/certificates"
	"github.com/muster-k8s/muster/services/joinservice/nodecert"
	"github.com/muster-k8s/muster/services/joinservice/state"
	"github.com/muster-k8s/muster/trust/attest"
)

// MaxHeldAddresses is the maximum number of addresses in an enrollment: those of a claim and of the one before.
const MaxHeldAddresses = 2 * nodecert.MaxAddresses

// Enrollments is the access of one joinservice to enrollments. Create it before [clusterview.Cluster.Serve] runs.
type Enrollments struct {
	state    *state.State
	list     *access.List
	requests *certificates.Requests
	disks    *disks
	waits    leaseWaits
	leases   LeaseTimings
}

// New registers the informer of AttestedDisks.
func New(s *state.State, l *access.List, r *certificates.Requests, leases LeaseTimings) (*Enrollments, error) {
	es := &Enrollments{state: s, list: l, requests: r, disks: newDisks(), leases: leases}
	return es, clusterview.Watch(s.Cluster, es.disks.set, es.disks.remove)
}

// Claim is what a machine asks to be enrolled with (no claim of evidence, as in RFC 9334). The machine ID comes from attestation only (J1).
type Claim struct {
	Machine   attest.MachineID
	Node      string
	Role      v1alpha1.Role
	Disk      string
	DiskMode  v1alpha1.DiskMode
	Addresses []netip.Addr
	// Boot is the machine's boot, from the evidence.
	Boot Boot
	// AK is the name of the attestation key that the machine attested with, in hexadecimal digits.
	AK string
}

// Spec returns the claim as it is written into an AttestedNode.
func (c Claim) Spec() v1alpha1.AttestedNodeSpec {
	s := v1alpha1.AttestedNodeSpec{MachineID: c.Machine.String(), Role: c.Role, DiskID: c.Disk, DiskMode: c.DiskMode}
	for _, a := range c.Addresses {
		s.Addresses = append(s.Addresses, a.String())
	}
	return s
}

// Check checks the claim against all known enrollments, Nodes, Services, API servers and disks. Errors are refusals; it
// changes nothing.
func (es *Enrollments) Check(ctx context.Context, c Claim) error {
	if err := es.check(c, es.state.Cluster.Nodes.ByName(c.Node)); err != nil {
		return err
	}
	if owner := es.disks.ownerHint(c.Disk); owner == "" || owner == c.Machine.String() {
		return nil // AssignDisk decides; this check runs before anything is written
	}
	_, _, err := es.readDisk(ctx, c) // J2
	return err
}

// check takes the node's enrollment as an argument, since a caller may know a newer one.
func (es *Enrollments) check(c Claim, own *v1alpha1.AttestedNode) error {
	if es.state.Reserved(c.Node) {
		return attest.Refuse(attestv1.Reason_REASON_NAME_TAKEN, "%q is a name of the API server, for which a node gets no certificate", c.Node)
	}
	if err := es.checkTPM(c); err != nil {
		return err
	}
	if es.Expired(own) {
		own = nil
	}
	if own != nil && own.Spec.MachineID != c.Machine.String() { // J4
		return attest.Refuse(attestv1.Reason_REASON_NAME_TAKEN, "node name %q is enrolled to machine %s; `muster forget %s` frees it, `muster replace` gives it to another machine", c.Node, own.Spec.MachineID, c.Node)
	}
	for _, other := range es.state.Cluster.Nodes.ByMachine(c.Machine) {
		if other.Name != c.Node && !es.Expired(other) { // J4
			return attest.Refuse(attestv1.Reason_REASON_NAME_MISMATCH, "the machine is enrolled as %q; `muster forget %s` frees it", other.Name, other.Name)
		}
	}
	if own == nil {
		if c.Role == v1alpha1.RoleControlPlane {
			return attest.Refuse(attestv1.Reason_REASON_NOT_ENROLLED, "control planes are enrolled by the owner: `muster enroll %s --role control-plane --machine-id %s`", c.Node, c.Machine)
		}
		if e, _ := es.list.Entry(c.Node); e.Unattested { // J4: unattested certificates can write under it
			return attest.Refuse(attestv1.Reason_REASON_NODE_EXISTS, "%q was a node before Muster was installed, and its certificates are still valid; `muster forget %s` revokes them", c.Node, c.Node)
		}
		if es.state.HasNode(c.Node) {
			return attest.Refuse(attestv1.Reason_REASON_NODE_EXISTS, "there is a Node %q that Muster did not enroll; `muster forget %s` if it is not used", c.Node, c.Node)
		}
	} else if err := checkOwn(c, own); err != nil {
		return err
	}
	for _, other := range es.state.Cluster.Nodes.ByDisk(c.Disk) { // J2
		mine := own != nil && own.Spec.DiskID == c.Disk && es.ownOutranks(own, other)
		if other.Name != c.Node && !es.Expired(other) && !mine {
			return attest.Refuse(attestv1.Reason_REASON_DISK_MISMATCH, "disk %s is enrolled to node %q", c.Disk, other.Name)
		}
	}
	for _, ip := range c.Addresses {
		if err := es.checkAddress(c, own, ip); err != nil {
			return err
		}
	}
	return es.checkAddressLimit(c, own)
}

// checkAddressLimit bounds how many addresses a machine can block for others by releasing them.
func (es *Enrollments) checkAddressLimit(c Claim, own *v1alpha1.AttestedNode) error {
	if own == nil {
		return nil
	}
	kept := es.formerAddresses(own, c.Spec().Addresses)
	if n := len(kept) + len(c.Addresses); n > MaxHeldAddresses {
		return attest.Refuse(attestv1.Reason_REASON_ADDRESS_REFUSED, "the machine had %d addresses within %s, and may have %d", n, es.state.CertificateLife, MaxHeldAddresses)
	}
	return nil
}

// checkTPM refuses a machine whose TPM is known under another ID, because it has shown another of its endorsement keys
// (A8).
func (es *Enrollments) checkTPM(c Claim) error {
	for _, other := range es.state.Cluster.Nodes.ByAK(c.AK) {
		if other.Spec.MachineID != c.Machine.String() && !es.Expired(other) {
			return attest.Refuse(attestv1.Reason_REASON_TPM_KNOWN, "the TPM is that of node %q, which is enrolled to machine %s; `muster forget %s` frees it", other.Name, other.Spec.MachineID, other.Name)
		}
	}
	return nil
}

// formerAddresses returns the addresses of an enrollment that are not in next, and until when others may not have them:
// certificates for the present addresses may have been issued just now.
func (es *Enrollments) formerAddresses(n *v1alpha1.AttestedNode, next []string) map[string]time.Time {
	out, now := clusterview.Former(n), es.state.Now()
	for _, a := range n.Spec.Addresses {
		out[a] = now.Add(es.state.CertificateLife + HoldMargin)
	}
	for a, until := range out {
		if slices.Contains(next, a) || !until.After(now) {
			delete(out, a)
		}
	}
	return out
}

// checkOwn compares the claim with the machine's own enrollment.
func checkOwn(c Claim, own *v1alpha1.AttestedNode) error {
	if err := access.CheckShutOut(own); err != nil {
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

func (es *Enrollments) checkAddress(c Claim, own *v1alpha1.AttestedNode, ip netip.Addr) error {
	for _, other := range es.state.Cluster.Nodes.ByAddress(ip.String()) {
		if other.Name == c.Node || es.Expired(other) || own != nil && slices.Contains(own.Spec.Addresses, ip.String()) && es.ownOutranks(own, other) {
			continue
		}
		if slices.Contains(other.Spec.Addresses, ip.String()) {
			return attest.Refuse(attestv1.Reason_REASON_ADDRESS_REFUSED, "address %s is enrolled to node %q", ip, other.Name)
		}
		if until := clusterview.Former(other)[ip.String()]; until.After(es.state.Now()) { // J4
			return attest.Refuse(attestv1.Reason_REASON_ADDRESS_REFUSED, "address %s was node %q's, whose certificate for it lives until %s", ip, other.Name, state.UTC(until))
		}
	}
	for _, o := range es.state.AddressOwners(ip) {
		if o.Kind == state.OwnerNode && (o.Name == c.Node || own != nil && slices.Contains(own.Spec.Addresses, ip.String())) {
			continue // no kubelet takes an address from a machine that has it
		}
		return attest.Refuse(attestv1.Reason_REASON_ADDRESS_REFUSED, "address %s belongs to %s %q", ip, o.Kind, o.Name)
	}
	// The API servers run on control planes, whose addresses belong to Nodes and to the Service default/kubernetes. The
	// endpoint may also be the address of one of them.
	mine := own != nil && own.Spec.Role == v1alpha1.RoleControlPlane && slices.Contains(own.Spec.Addresses, ip.String())
	if !mine && es.state.IsControlPlaneEndpoint(ip) {
		return attest.Refuse(attestv1.Reason_REASON_ADDRESS_REFUSED, "address %s is the control-plane endpoint", ip)
	}
	return nil
}

// PendingTicket is a claim that was written, and whose ticket is not issued yet.
//
// If the ticket fails afterwards, the claim stays: the machine was accepted, gets the same name and disk at its next
// attempt, and could have kept them by succeeding. A claim that never becomes a node is removed later, see [Enrollments.Expired].
type PendingTicket struct {
	enrollments *Enrollments
	node        *v1alpha1.AttestedNode
	// before is the enrollment before the claim; nil if the claim created it.
	before *v1alpha1.AttestedNode
}

// Enroll writes the claim. If another machine claims the same machine ID, TPM, disk or address at the same time, at least
// the later one is refused. Errors are refusals.
func (es *Enrollments) Enroll(ctx context.Context, c Claim) (*PendingTicket, error) {
	e, err := es.write(ctx, c)
	if err != nil {
		return nil, err
	}
	// If the caller disconnects, its claim must still be removed when it conflicts with another machine's.
	ctx, cancel := clusterview.Outlive(ctx)
	defer cancel()
	if err := es.state.Cluster.Nodes.Await(ctx, e.node.Name, e.node.UID, e.node.ResourceVersion); err != nil {
		return nil, clusterview.Unavailable("enroll", err)
	}
	if err := es.check(c, es.state.Cluster.Nodes.ByName(c.Node)); err != nil { // J2, J4, A8: see the package's comment
		e.rollBack(ctx)
		return nil, err
	}
	return e, nil
}

// rollBack removes an enrollment that lost a race for a unique value, or restores its previous state. Nothing was issued for
// it yet. If it was changed meanwhile, or the API server does not answer, it stays: another machine cannot get the value
// before the owner has decided.
func (e *PendingTicket) rollBack(ctx context.Context) {
	ctx, cancel := clusterview.Outlive(ctx)
	defer cancel()
	es := e.enrollments
	var err error
	if e.before == nil {
		err = es.Delete(ctx, e.node)
	} else {
		n := e.node.DeepCopy()
		n.Spec, n.Annotations = *e.before.Spec.DeepCopy(), maps.Clone(e.before.Annotations)
		err = es.state.Cluster.Client.Update(ctx, n)
	}
	if err != nil {
		es.state.Log.ErrorContext(ctx, "two machines claim the same, and the claim of one could not be taken back: `muster forget` one of them", "node", e.node.Name, "machine", e.node.Spec.MachineID, "err", err)
	}
}

// write creates or changes the AttestedNode by compare-and-swap.
func (es *Enrollments) write(ctx context.Context, c Claim) (*PendingTicket, error) {
	own := es.state.Cluster.Nodes.ByName(c.Node)
	for range state.WriteAttempts {
		if err := es.check(c, own); err != nil {
			return nil, err
		}
		e, err := es.replaceOrUpdate(ctx, c, own)
		if err == nil {
			return e, nil
		}
		if !apierrors.IsConflict(err) && !apierrors.IsAlreadyExists(err) && !apierrors.IsNotFound(err) {
			return nil, clusterview.Unavailable("write AttestedNode "+c.Node, err)
		}
		// Another writer was first: read the present state, and decide again.
		own = &v1alpha1.AttestedNode{}
		if err := es.state.Cluster.Client.Get(ctx, client.ObjectKey{Name: c.Node}, own); apierrors.IsNotFound(err) {
			own = nil
		} else if err != nil {
			return nil, clusterview.Unavailable("read AttestedNode "+c.Node, err)
		}
	}
	return nil, clusterview.Unavailable("write AttestedNode "+c.Node, fmt.Errorf("it changed %d times meanwhile", state.WriteAttempts))
}

func (es *Enrollments) replaceOrUpdate(ctx context.Context, c Claim, own *v1alpha1.AttestedNode) (*PendingTicket, error) {
	if es.Expired(own) { // a name's machine does not change, so this is another enrollment
		if err := es.Delete(ctx, own); err != nil {
			return nil, err
		}
		own = nil
	}
	if own == nil {
		n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{
			Name: c.Node, Finalizers: []string{v1alpha1.RevokeCertificates},
			Annotations: map[string]string{v1alpha1.EnrolledByTicket: "true", v1alpha1.AttestationKey: c.AK, v1alpha1.AskedAt: state.UTC(es.state.Now())},
		}, Spec: c.Spec()}
		if err := es.state.Cluster.Client.Create(ctx, n); err != nil {
			return nil, err
		}
		return &PendingTicket{enrollments: es, node: n}, nil
	}
	n := own.DeepCopy()
	// J4: addresses that the machine no longer asks for are blocked for others while its certificates for them are valid.
	// The machine can have them back at any time.
	clusterview.SetFormer(n, es.formerAddresses(own, c.Spec().Addresses), es.state.Now())
	n.Spec = c.Spec() // not banned: check ensures that, and the compare-and-swap would detect a change
	metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.AttestationKey, c.AK)
	metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.AskedAt, state.UTC(es.state.Now())) // J4: and so that another ticket of the machine detects the change
	if !n.Revokes() {                                                                        // J4: before any certificate is requested, so that none is valid after the enrollment without being revoked
		n.Finalizers = append(n.Finalizers, v1alpha1.RevokeCertificates)
	}
	if err := es.state.Cluster.Client.Update(ctx, n); err != nil {
		return nil, err
	}
	return &PendingTicket{enrollments: es, node: n, before: own}, nil
}

func specEqual(a, b v1alpha1.AttestedNodeSpec) bool {
	x, y := slices.Sorted(slices.Values(a.Addresses)), slices.Sorted(slices.Values(b.Addresses))
	return a.MachineID == b.MachineID && a.Role == b.Role && a.DiskID == b.DiskID && a.DiskMode == b.DiskMode && a.Banned == b.Banned && slices.Equal(x, y)
}

// Record records the ticket and its basis by compare-and-swap, before any part of it is sent: of a machine and its copy,
// the second finds what the first has written (J11). clientCert and servingCert are the node's certificates: if older ones
// of the name are revoked, the first is allowed to write (J4). Errors are refusals; it fails after a ban or a removal since
// [Enrollments.Enroll].
func (e *PendingTicket) Record(ctx context.Context, c Claim, status v1alpha1.AttestedNodeStatus, clientCert, servingCert *x509.Certificate) error {
	es := e.enrollments
	if status.Ticket == nil {
		return attest.Refuse(attestv1.Reason_REASON_INTERNAL, "an enrollment without a ticket")
	}
	if err := es.WriteStatus(ctx, e.node, func(s *v1alpha1.AttestedNodeStatus) error {
		if err := c.Boot.record(e.node, s, e.enrollments.state.HasNode(e.node.Name), true); err != nil {
			return err
		}
		s.Ticket, s.ReleasedAt = status.Ticket.DeepCopy(), nil
		s.Ticket.CertificateID = nodeaccess.ID(clientCert)
		mergeVerdict(s, status)
		raiseExpiry(s, Expiry{clientCert.NotAfter, servingCert.NotAfter})
		return nil
	}); err != nil {
		return err
	}
	if !es.list.Differs(e.node.Name, e.node) {
		return nil // with an outdated view, the Enforcer does it
	}
	return es.list.Settle(ctx, e.node.Name)
}

// Expired reports whether an enrollment that a ticket created holds nothing any more: it has been unused for so long that
// every certificate that may have been issued for it has expired. Then its name is free (J4), and the sweeper removes it. A
// claimed disk does not become free (J2). A banned enrollment stays, and one that is being removed stays until its
// certificates are revoked.
func (es *Enrollments) Expired(n *v1alpha1.AttestedNode) bool {
	if n == nil || n.ShutOut() || !enrollment.ByTicket(n) {
		return false
	}
	return (n.Status.ReleasedAt != nil || es.Unfinished(n)) && es.list.Clock().Earliest.Sub(LastTicketActivity(n)) > es.state.CertificateLife+HoldMargin
}

// LastTicketActivity returns when the machine of an enrollment last asked for a ticket, or returned one. A certificate may have been
// issued for it until then, whatever the result.
func LastTicketActivity(n *v1alpha1.AttestedNode) time.Time {
	last := n.CreationTimestamp.Time
	if t := n.Status.ReleasedAt; t != nil {
		last = t.Time
	}
	if t, err := time.Parse(time.RFC3339, n.Annotations[v1alpha1.AskedAt]); err == nil && t.After(last) {
		last = t
	}
	return last
}

// Unfinished reports whether a ticket created the enrollment and was not issued: it is in progress or has failed. It is false
// for a node that was restored from a backup without its status, and for a machine that has attested since.
func (es *Enrollments) Unfinished(n *v1alpha1.AttestedNode) bool {
	return enrollment.ByTicket(n) && !enrollment.Certified(n) && n.Status.ReleasedAt == nil && !es.state.HasNode(n.Name)
}

// ownOutranks reports whether a machine got something by a ticket before another one claimed it: an unfinished claim of the other
// does not take it away.
func (es *Enrollments) ownOutranks(own, other *v1alpha1.AttestedNode) bool {
	return own != nil && enrollment.Certified(own) && es.Unfinished(other)
}

// Delete removes exactly this state of n, no later one. It is for enrollments without valid certificates, so there is
// nothing to revoke. If it is interrupted, the finalizer is missing: the next ticket or sweep adds it again.
func (es *Enrollments) Delete(ctx context.Context, n *v1alpha1.AttestedNode) error {
	if err := es.requests.Delete(ctx, es.requests.FiledBy(n.Name)); err != nil {
		return err
	}
	n = n.DeepCopy()
	if n.Revokes() {
		n.Finalizers = slices.DeleteFunc(n.Finalizers, func(f string) bool { return f == v1alpha1.RevokeCertificates })
		if err := es.state.Cluster.Client.Update(ctx, n); err != nil {
			return err
		}
	}
	return es.state.Cluster.Client.Delete(ctx, n, client.Preconditions{UID: &n.UID, ResourceVersion: &n.ResourceVersion})
}
