// Package rollout restarts nodes in turn, for a new image or a new Kubernetes.
package rollout

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
)

// Rollout lists which image each node runs.
type Rollout struct {
	// Nodes are those that have attested, by name.
	Nodes []NodeImage `json:"nodes"`
	// Images counts the nodes of each image of the policy in force, including nodes that are off. An image with 0 nodes can
	// be removed from the policy.
	Images map[string]int `json:"images"`

	err       error
	upgrading bool // an upgrade of Kubernetes is in progress, and has also drained nodes
}

// NodeImage is what a node's machine booted, by its last evidence and the names of the policy in force.
type NodeImage struct {
	Node string        `json:"node"`
	Role v1alpha1.Role `json:"role"`
	// Image and Class are empty if the policy has none with these PCR values.
	Image string `json:"image,omitempty"`
	Class string `json:"class,omitempty"`
	// Since is when this boot's first evidence was verified; zero if it is not known.
	Since time.Time `json:"since,omitzero"`
	// Attested is the time of the last evidence, Accepted whether the policy accepted it.
	Attested time.Time `json:"attested"`
	Accepted bool      `json:"accepted"`
	// Silent is why its machine gets no orders; empty if it gets them.
	Silent string `json:"silent,omitempty"`
	// Held reports that it is unschedulable since a command drained it, and Restarted that its machine has restarted since.
	Held      bool `json:"held,omitempty"`
	Restarted bool `json:"restarted,omitempty"`
}

// unordered returns why a node's machine gets no orders; empty if nothing in the cluster prevents them.
func unordered(n *v1alpha1.AttestedNode, now time.Time) string {
	switch v := n.Status.LastVerdict; {
	case n.Leaving():
		return "it is being removed"
	case n.ShutOut():
		return "it is banned"
	case v == nil:
		return "" // it has joined only now
	case !v.Accepted:
		return "its last verdict is " + problem.Printable(v.Reason)
	case now.Sub(v.Time.Time) > policies.Attests:
		return "it has not attested since " + v.Time.Local().Format(time.DateTime)
	}
	return ""
}

// Err returns why no machine gets orders now; nil if all machines with an empty Silent get them.
func (r *Rollout) Err() error { return r.err }

// Outdated returns the nodes that run an image: those that can be restarted, and those whose machines get no orders. held are nodes with another
// image that an interrupted rollout restarted and left cordoned.
func (r *Rollout) Outdated(image string) (restart, skipped, held []NodeImage) {
	for _, n := range r.Nodes {
		switch {
		case n.Image == image && n.Silent != "":
			skipped = append(skipped, n)
		case n.Image == image:
			restart = append(restart, n)
		case n.Restarted && n.Silent == "" && !r.upgrading:
			held = append(held, n)
		}
	}
	return restart, skipped, held
}

// RolloutStatus reads which image each node runs.
func RolloutStatus(ctx context.Context, d *ownerdir.Dir) (*Rollout, error) {
	kube, err := access.Connect(d)
	if err != nil {
		return nil, err
	}
	have, err := kube.Policy(ctx)
	if err != nil {
		return nil, err
	}
	public, err := d.OwnerKeys()
	if err != nil {
		return nil, err
	}
	p, err := policies.OpenPolicy(have, public) // needed for the names of the images
	if err != nil {
		return nil, fmt.Errorf("the cluster's policy: %w", err)
	}
	all, err := kube.Enrollments(ctx)
	if err != nil {
		return nil, err
	}
	nodes, err := kube.Nodes(ctx)
	if err != nil {
		return nil, err
	}
	boots := map[string]clusterapi.Boot{}
	for i := range nodes {
		boots[nodes[i].Name] = clusterapi.BootOf(&nodes[i])
	}
	info, err := kube.Description(ctx)
	if err != nil && !clusterapi.Absent(err) {
		return nil, err
	}
	now, err := kube.ServerTime(ctx)
	if err != nil {
		return nil, err
	}
	out := &Rollout{Nodes: []NodeImage{}, Images: map[string]int{}, upgrading: info != nil && info.Other() != nil}
	if policies.NoneAttests(all, now) {
		out.err = problem.WithRemedy(errors.New(policies.NoneHasAttested+", so no machine gets orders"), "Nothing was changed. "+policies.WhyNoneAttests)
	}
	for _, name := range p.Images() {
		out.Images[name] = 0
	}
	for i := range all {
		n := &all[i]
		if n.Status.LastVerdict == nil {
			continue
		}
		values, err := policies.StoredPCRs(n)
		if err != nil {
			return nil, fmt.Errorf("AttestedNode %s: %w", n.Name, err)
		}
		r := NodeImage{Node: n.Name, Role: n.Spec.Role, Attested: n.Status.LastVerdict.Time.Time, Accepted: n.Status.LastVerdict.Accepted, Silent: unordered(n, now)}
		r.Held, r.Restarted = boots[n.Name].Held, boots[n.Name].Restarted()
		r.Image, r.Class = p.Names(values)
		if n.Status.Boot != nil {
			r.Since = n.Status.Boot.Since.Time
		}
		out.Nodes = append(out.Nodes, r)
		out.Images[r.Image]++
	}
	slices.SortFunc(out.Nodes, func(a, b NodeImage) int { return cmp.Compare(a.Node, b.Node) })
	return out, nil
}
