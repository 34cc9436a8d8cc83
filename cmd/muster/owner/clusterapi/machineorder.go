package clusterapi

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/printable"
	"github.com/muster-k8s/muster/trust/attest"
)

// Enrollment returns a node's AttestedNode; NOT_ENROLLED if it has none.
func (c *Client) Enrollment(ctx context.Context, name string) (*v1alpha1.AttestedNode, error) {
	n := &v1alpha1.AttestedNode{}
	err := once(ctx, func(ctx context.Context) error {
		err := c.client.Get(ctx, types.NamespacedName{Name: name}, n)
		if apierrors.IsNotFound(err) {
			return attest.Refuse(attestv1.Reason_REASON_NOT_ENROLLED, "there is no node %s", name)
		}
		return err
	})
	if err == nil && n.Name != name { // B11: the order is signed for the name that the owner typed, not for one that the API returns
		return nil, fmt.Errorf("the API server answers with the enrollment of %s instead of that of %s: do not trust it", printable.ASCII(n.Name, maxWhy), name)
	}
	return n, err
}

// WithdrawOrder removes an order from a node if it is ours and the machine has not started it; begun reports that it has. If over is not empty, a
// write of ours that replaces the enrollment of that resource version may still be in progress. Then WithdrawOrder changes the enrollment, so that
// the API server refuses that write.
func (c *Client) WithdrawOrder(ctx context.Context, name string, ours func(note string) bool, over string) (begun bool, _ error) {
	err := once(ctx, func(ctx context.Context) error {
		n, err := c.Enrollment(ctx, name)
		if err != nil {
			return err
		}
		note, there := n.Annotations[v1alpha1.OwnerOrder]
		signed, err := ownerorder.ParseMachineNote(note)
		if begun = err == nil && ours(note) && n.Status.Order != nil && n.Status.Order.Digest == signed.Digest(); begun {
			return nil
		}
		switch {
		case !ours(note) && n.ResourceVersion != over:
			return nil
		case there:
			delete(n.Annotations, v1alpha1.OwnerOrder)
		default:
			metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.OwnerOrder, "") // no order
		}
		return c.client.Update(ctx, n) // a conflict is tried again
	})
	return begun, err
}

// PutOrder writes the order that sign returns for a node's enrollment, in the form of [v1alpha1.OwnerOrder]. sign is called
// again if the enrollment has changed meanwhile.
func (c *Client) PutOrder(ctx context.Context, name string, sign func(*v1alpha1.AttestedNode) (string, error)) error {
	return once(ctx, func(ctx context.Context) error {
		n, err := c.Enrollment(ctx, name)
		if err != nil {
			return err
		}
		note, err := sign(n)
		if err != nil || n.Annotations[v1alpha1.OwnerOrder] == note {
			return err
		}
		metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.OwnerOrder, note)
		return c.client.Update(ctx, n) // a conflict is tried again
	})
}
