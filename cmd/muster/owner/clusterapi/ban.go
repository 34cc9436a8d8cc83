package clusterapi

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/enrollment"
)

// errBannedAgain is returned for an enrollment that was banned after the owner was shown the plan: its owner does not want the machine back.
var errBannedAgain = errors.New("muster ban has banned it meanwhile, and the ban would end with this: if you want that, run the same command again")

// bannedByOwner reports whether muster ban has banned an enrollment, and not a replacement that is not at its end.
func bannedByOwner(n *v1alpha1.AttestedNode) bool {
	return n.Spec.Banned && n.Annotations[v1alpha1.KeepNode] == ""
}

// SetBanned bans the machine of an enrolled name, or lifts its ban. From then on, the API server refuses the writes of a banned machine, also if no
// joinservice runs. A ban removes the annotation of an interrupted replacement, because with it joinservice does not evict the node (J10).
func (c *Client) SetBanned(ctx context.Context, p *Presence, banned bool) error {
	err := c.changeEnrollment(ctx, p, func(n *v1alpha1.AttestedNode) bool {
		_, keeps := n.Annotations[v1alpha1.KeepNode]
		keeps = keeps && banned
		if keeps {
			delete(n.Annotations, v1alpha1.KeepNode)
		}
		was := n.Spec.Banned
		n.Spec.Banned = banned
		return keeps || was != banned
	}, func(ctx context.Context, n *v1alpha1.AttestedNode) error { return c.client.Update(ctx, n) })
	if err != nil {
		return fmt.Errorf("change AttestedNode %s: %w", p.Name, err)
	}
	now, err := c.serverTime(ctx)
	if err != nil {
		return err
	}
	present := func(string) enrollment.Present {
		return enrollment.Present{Is: p.Node != nil, ControlPlane: p.ControlPlane}
	}
	if _, err := enrollment.Reconcile(ctx, c.client, present, enrollment.Clock{Latest: now}, p.Name); err != nil && !apierrors.IsNotFound(err) { // without the list, no node can write
		return err
	}
	return nil
}

// AwaitEviction waits until joinservice has deleted a banned name's Node and its pods.
func (c *Client) AwaitEviction(ctx context.Context, name string) error {
	return until(ctx, func(ctx context.Context) (bool, error) {
		if err := c.client.Get(ctx, types.NamespacedName{Name: name}, &corev1.Node{}); !Absent(err) {
			return false, err
		}
		var pods corev1.PodList
		err := c.client.List(ctx, &pods, client.MatchingFields{"spec.nodeName": name})
		return err == nil && len(pods.Items) == 0, err
	})
}
