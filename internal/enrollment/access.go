// Package enrollment holds what both joinservice and the owner's program decide about an enrollment: which nodes may write
// to the API, by their AttestedNodes, and which machine may have a disk, by its AttestedDisk. It is decided only here.
package enrollment

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
)

// ByTicket reports whether a join ticket created the enrollment, and not the owner.
func ByTicket(n *v1alpha1.AttestedNode) bool { return n.Annotations[v1alpha1.EnrolledByTicket] != "" }

// Suspended reports whether the machine of the enrollment may not write: it is banned or removed, or has returned its
// ticket.
func Suspended(n *v1alpha1.AttestedNode) bool { return n.ShutOut() || n.Status.ReleasedAt != nil }

// Certified reports whether a machine got certificates of the node: by a ticket, or as the first machine of a cluster.
func Certified(n *v1alpha1.AttestedNode) bool {
	v := n.Status.LastVerdict
	return n.Status.Ticket != nil || n.Status.Certificates != nil || v != nil && v.Accepted
}

// Present is the known state of the Node of a name.
type Present struct {
	// Is reports that the Node exists, ControlPlane that it has the label of control planes, which no kubelet can set.
	Is, ControlPlane bool
	// Addresses are its internal addresses: the API server connects to its kubelet at the first one.
	Addresses []string
}

// PresentNode returns the state of a Node.
func PresentNode(n *corev1.Node) Present {
	p := Present{Is: true}
	_, p.ControlPlane = n.Labels[clusterinfo.ControlPlaneLabel]
	for _, a := range n.Status.Addresses {
		if a.Type == corev1.NodeInternalIP {
			p.Addresses = append(p.Addresses, a.Address)
		}
	}
	return p
}

// Clock is the time by the clocks of the control planes: a wrong one neither ends a revocation early nor creates one that
// ends early (J4).
type Clock struct {
	// Latest is the start of new revocations. Earliest decides whether one has expired; zero if none has.
	Earliest, Latest time.Time
}

// Access returns the entry that a name must have. have is the present entry, n its AttestedNode (nil if it has none),
// members whether the list is of members only. It must be called after each change of them; with the same arguments the
// result is the same.
func Access(have nodeaccess.Entry, n *v1alpha1.AttestedNode, node Present, members bool, clock Clock) nodeaccess.Entry {
	next := have
	if n == nil {
		if have.Suspended { // J4: the enrollment was removed without a revocation
			next = have.Revoke(clock.Latest)
		}
		next.Suspended = false
		next.ControlPlane = have.Unattested && node.Is && node.ControlPlane
		next.Member = members && have.Unattested
	} else {
		next.Suspended = Suspended(n)
		next.ControlPlane = !next.Suspended && (n.Spec.Role == v1alpha1.RoleControlPlane && Certified(n) || have.Unattested && node.Is && node.ControlPlane)
		next.Member = members && !n.ShutOut() && (have.Member || Certified(n))
		if t := n.Status.Ticket; t != nil && t.CertificateID != "" && !n.ShutOut() {
			if have.Unattested { // J4: from now on the name is an attested machine's
				next = have.Revoke(clock.Latest)
				next.Suspended, next.Member = Suspended(n), members
				next.ControlPlane = !next.Suspended && n.Spec.Role == v1alpha1.RoleControlPlane
			}
			next = next.Allow(t.CertificateID)
		}
	}
	if next.Revoked != nil && next.Revoked.Lapsed(clock.Earliest) {
		next.Revoked = nil
	}
	// Once there, they stay: a kubelet that changes its Node's addresses back and forth causes one write of the list. A ban deletes the Node, which the same kubelet
	// creates again after the ban.
	next.Addresses = ""
	if n != nil && (have.Addresses != "" || next.Suspended && Certified(n) || node.Is && !next.Unattested && !node.reports(n.Spec.Addresses)) {
		next.Addresses = strings.Join(slices.Sorted(slices.Values(n.Spec.Addresses)), " ")
	}
	return next
}

// reports reports whether the Node has the addresses that a kubelet reports of an enrollment's, the first one of each family, and no others.
func (p Present) reports(enrolled []string) bool {
	if len(p.Foreign(enrolled)) > 0 {
		return false
	}
	for _, sep := range []string{".", ":"} {
		of := func(a string) bool { return strings.Contains(a, sep) }
		if i := slices.IndexFunc(enrolled, of); i >= 0 && !slices.Contains(p.Addresses, enrolled[i]) {
			return false
		}
	}
	return true
}

// Foreign returns the addresses of the Node that its enrollment does not have.
func (p Present) Foreign(enrolled []string) []string {
	return slices.DeleteFunc(slices.Clone(p.Addresses), func(a string) bool { return slices.Contains(enrolled, a) })
}

// conflicts bounds the attempts of a compare-and-swap on the list: every replica and the owner write one object.
var conflicts = wait.Backoff{Steps: 12, Duration: 10 * time.Millisecond, Factor: 1.6, Jitter: 0.5, Cap: time.Second}

// Key returns the name of the list's ConfigMap.
func Key() client.ObjectKey {
	return client.ObjectKey{Namespace: clusterinfo.Namespace, Name: nodeaccess.ConfigMap}
}

// Change reads the list, has change edit it, and writes it by compare-and-swap; after a conflict it starts again. What
// change reads from the API is read after the list: if another program changes that meanwhile, its own change of the list
// comes later, or makes this one fail. It returns the resulting ConfigMap. For a missing list, [apierrors.IsNotFound] is
// true of the error.
func Change(ctx context.Context, c client.Client, change func(context.Context, *nodeaccess.List) error) (*corev1.ConfigMap, error) {
	backoff := conflicts
	for {
		m, err := changeOnce(ctx, c, change)
		if err == nil {
			return m, nil
		}
		if !apierrors.IsConflict(err) || backoff.Steps == 0 {
			return nil, fmt.Errorf("ConfigMap %s: %w", nodeaccess.ConfigMap, err)
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("ConfigMap %s: %w: %w", nodeaccess.ConfigMap, context.Cause(ctx), err)
		case <-time.After(backoff.Step()):
		}
	}
}

func changeOnce(ctx context.Context, c client.Client, change func(context.Context, *nodeaccess.List) error) (*corev1.ConfigMap, error) {
	m := &corev1.ConfigMap{}
	if err := c.Get(ctx, Key(), m); err != nil {
		return nil, err
	}
	list, err := nodeaccess.Parse(m.Data)
	if err != nil {
		return nil, err
	}
	if err := change(ctx, list); err != nil {
		return nil, err
	}
	data, err := list.Data()
	if err != nil || maps.Equal(data, m.Data) {
		return m, err
	}
	m.Data = data
	return m, c.Update(ctx, m)
}

// Reconcile updates the list's entries of nodes from their AttestedNodes, which it reads after the list (J4). present
// returns the state of a Node. It returns the resulting list.
func Reconcile(ctx context.Context, c client.Client, present func(string) Present, clock Clock, nodes ...string) (*nodeaccess.List, error) {
	var out *nodeaccess.List
	_, err := Change(ctx, c, func(ctx context.Context, l *nodeaccess.List) error {
		for _, name := range nodes {
			n := &v1alpha1.AttestedNode{}
			if err := c.Get(ctx, client.ObjectKey{Name: name}, n); apierrors.IsNotFound(err) {
				n = nil
			} else if err != nil {
				return fmt.Errorf("read AttestedNode %s: %w", name, err)
			}
			l.Set(name, Access(l.Entry(name), n, present(name), l.MembersOnly, clock))
		}
		out = l
		return nil
	})
	return out, err
}
