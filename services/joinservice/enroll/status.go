package enroll

import (
	"context"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/enrollment"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/services/joinservice/state"
)

// WriteStatus is a compare-and-swap on the enrollment that was checked: after a ban between check and write, or its
// deletion, it fails. After a concurrent status write of another replica it does not: it calls change again with the new
// status. Errors are refusals, including those of change.
func (es *Enrollments) WriteStatus(ctx context.Context, n *v1alpha1.AttestedNode, change func(*v1alpha1.AttestedNodeStatus) error) error {
	spec, revokes, what := n.Spec, n.Revokes(), "write the status of AttestedNode "+n.Name
	for range state.WriteAttempts {
		if err := change(&n.Status); err != nil {
			return err
		}
		e, _ := es.list.Entry(n.Name)
		enrollment.SetConditions(n, e)
		err := es.state.Cluster.Client.Status().Update(ctx, n)
		if err == nil {
			return nil
		}
		if !apierrors.IsConflict(err) {
			return clusterview.Unavailable(what, err)
		}
		uid := n.UID
		if err := es.state.Cluster.Client.Get(ctx, client.ObjectKeyFromObject(n), n); err != nil {
			return clusterview.Unavailable(what, err)
		}
		if n.UID != uid || n.Leaving() || !specEqual(n.Spec, spec) || revokes && !n.Revokes() { // J4: it is about to be deleted
			return clusterview.Unavailable(what, fmt.Errorf("AttestedNode %s was changed at the same time", n.Name))
		}
	}
	return clusterview.Unavailable(what, fmt.Errorf("it changed %d times meanwhile", state.WriteAttempts))
}

// Expiry is when a node's certificates end.
type Expiry struct{ Client, Serving time.Time }

// WriteExpiry writes the ends into the node's status, unless they are there: each replica sees the same certificates.
func (es *Enrollments) WriteExpiry(ctx context.Context, node string, e Expiry) error {
	n := es.state.Cluster.Nodes.ByName(node)
	if n == nil || !raiseExpiry(n.Status.DeepCopy(), e) {
		return nil
	}
	return es.WriteStatus(ctx, n.DeepCopy(), func(st *v1alpha1.AttestedNodeStatus) error {
		raiseExpiry(st, e)
		return nil
	})
}

// raiseExpiry sets the values that are later than the present ones, and reports whether any was. Values that the machine
// itself reports replace them.
func raiseExpiry(s *v1alpha1.AttestedNodeStatus, e Expiry) (changed bool) {
	set := func(to **metav1.Time, end time.Time) {
		if !end.IsZero() && (*to == nil || end.Unix() > (*to).Unix()) {
			*to, changed = new(metav1.NewTime(end)), true
		}
	}
	if s.Certificates == nil {
		s.Certificates = &v1alpha1.NodeCertificates{}
	}
	set(&s.Certificates.ClientExpiresAt, e.Client)
	set(&s.Certificates.ServingExpiresAt, e.Serving)
	return changed
}
