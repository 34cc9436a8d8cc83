package clusterapi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/enrollment"
)

// errBannedAgain is returned for an enrollment that was banned after the owner was shown the plan: its owner does not want the machine back.
var errBannedAgain = errors.New("muster ban has banned it meanwhile, and the ban would end with this: if you want that, run the same command again")

// ErrUnbanned is returned if the ban of forget, reset or replace was lifted before the last write of that command.
var ErrUnbanned = errors.New("its ban was lifted meanwhile, so its machine may have new certificates: run the same command again")

// ErrOtherDisk is returned by forget, reset and replace for an enrollment whose disk is not that of the plan.
var ErrOtherDisk = errors.New("it has another disk meanwhile")

// ErrOwnBan is returned by [Client.SetBanned] for a ban of a replacement or removal, which only that command ends.
var ErrOwnBan = errors.New("muster forget, reset or replace has banned it, and was interrupted or still runs")

// ownBans are the annotations of bans that forget, reset and replace set, and end themselves. A ban without one is the owner's.
var ownBans = []string{v1alpha1.KeepNode, v1alpha1.Removing}

// bannedByOwner reports whether muster ban has banned an enrollment, and not a replacement or removal that is not at its end.
func bannedByOwner(n *v1alpha1.AttestedNode) bool {
	return n.Spec.Banned && !slices.ContainsFunc(ownBans, func(a string) bool { return n.Annotations[a] != "" })
}

// stillOwn returns an error unless an enrollment still has the ban of [Client.banPlanned] with that annotation.
func stillOwn(n *v1alpha1.AttestedNode, annotation string) error {
	switch {
	case !n.Spec.Banned:
		return ErrUnbanned
	case n.Annotations[annotation] == "":
		return errBannedAgain
	}
	return nil
}

// banPlanned bans the enrollment that a plan has found, with one annotation of ownBans. It refuses one that the owner has banned after the plan, and one
// that has another disk.
func (c *Client) banPlanned(ctx context.Context, p *Presence, annotation string) error {
	err := c.changeEnrollment(ctx, p, func(n *v1alpha1.AttestedNode) (bool, error) {
		if bannedByOwner(n) && !bannedByOwner(p.Enrollment) {
			return false, errBannedAgain
		}
		if n.Spec.DiskID != p.Enrollment.Spec.DiskID { // K4: erasing a disk can't be undone
			return false, fmt.Errorf("%w: %s, and not %s", ErrOtherDisk, cmp.Or(n.Spec.DiskID, "none is recorded"), cmp.Or(p.Enrollment.Spec.DiskID, "unrecorded"))
		}
		return setBan(n, annotation), nil
	}, func(ctx context.Context, n *v1alpha1.AttestedNode) error { return c.client.Update(ctx, n) })
	if err != nil {
		return fmt.Errorf("ban AttestedNode %s: %w", p.Name, err)
	}
	return nil
}

// setBan bans an enrollment with that annotation of ownBans alone, or with none, and reports whether that changes it.
func setBan(n *v1alpha1.AttestedNode, annotation string) bool {
	changed := !n.Spec.Banned
	n.Spec.Banned = true
	for _, a := range ownBans {
		_, has := n.Annotations[a]
		changed = changed || has != (a == annotation)
		delete(n.Annotations, a)
	}
	if annotation != "" {
		metav1.SetMetaDataAnnotation(&n.ObjectMeta, annotation, "true")
	}
	return changed
}

// BanPlanned is [Client.SetBanned] for a command that deletes the enrollment after that. It refuses an enrollment that the owner has banned after p was
// read. Afterwards, p has the ban, so that [Client.Forget] with the same p does not take it for a later one.
func (c *Client) BanPlanned(ctx context.Context, p *Presence) error {
	if err := c.banPlanned(ctx, p, v1alpha1.Removing); err != nil {
		return err
	}
	setBan(p.Enrollment, v1alpha1.Removing)
	return c.suspend(ctx, p)
}

// SetBanned bans the machine of an enrolled name, or lifts its ban. From then on, the API server refuses the writes of a banned machine, also if no
// joinservice runs. A ban removes the annotations of an interrupted replacement or removal: with [v1alpha1.KeepNode] joinservice does not evict the node (J10),
// and these commands would end the ban.
func (c *Client) SetBanned(ctx context.Context, p *Presence, banned bool) error {
	err := c.changeEnrollment(ctx, p, func(n *v1alpha1.AttestedNode) (bool, error) {
		if banned {
			return setBan(n, ""), nil
		}
		if n.Spec.Banned && !bannedByOwner(n) {
			return false, ErrOwnBan
		}
		changed := setBan(n, "") || n.Spec.Banned
		n.Spec.Banned = false
		return changed, nil
	}, func(ctx context.Context, n *v1alpha1.AttestedNode) error { return c.client.Update(ctx, n) })
	if err != nil {
		return fmt.Errorf("change AttestedNode %s: %w", p.Name, err)
	}
	return c.suspend(ctx, p)
}

// suspend brings a name's entry in the list of nodes that may not write up to date with its ban.
func (c *Client) suspend(ctx context.Context, p *Presence) error {
	now, err := c.serverTime(ctx)
	if err != nil {
		return err
	}
	present := func(string) enrollment.Present {
		if p.Node == nil {
			return enrollment.Present{}
		}
		return enrollment.PresentNode(p.Node)
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
