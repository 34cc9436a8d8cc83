package clusterapi

import (
	"context"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/enrollment"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
)

// EnsureAccess creates the list of nodes that may not write to the API and brings it in line with the AttestedNodes.
// foreign is set if the cluster's certificate authority issued node certificates before Muster was installed: then
// only enrolled nodes and those of unattested may write. Existing entries stay. It must be called before the
// admission policies exist.
func (c *Client) EnsureAccess(ctx context.Context, foreign bool, first string, unattested []string) error {
	return once(ctx, func(ctx context.Context) error {
		data, err := nodeaccess.New(foreign).Data()
		if err != nil {
			return err
		}
		if err := c.createAccess(ctx, data); err != nil {
			return err
		}
		if _, err := enrollment.Change(ctx, c.client, func(_ context.Context, l *nodeaccess.List) error {
			l.MembersOnly = l.MembersOnly || foreign
			for _, name := range unattested {
				if e := l.Entry(name); e.Revoked == nil {
					e.Unattested = true
					l.Set(name, e)
				}
			}
			return nil
		}); err != nil {
			return err
		}
		return c.reconcileAccess(ctx, append([]string{first}, unattested...))
	})
}

// createAccess creates the list if it does not exist.
func (c *Client) createAccess(ctx context.Context, data map[string]string) error {
	m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
		Namespace: Namespace, Name: nodeaccess.ConfigMap, Labels: map[string]string{"app.kubernetes.io/part-of": "muster"},
	}, Data: data}
	if err := c.client.Create(ctx, m); err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	return nil
}

// reconcileAccess brings the list's entries of these names in line with their AttestedNodes and Nodes.
func (c *Client) reconcileAccess(ctx context.Context, names []string) error {
	var nodes corev1.NodeList
	if err := c.client.List(ctx, &nodes); err != nil {
		return err
	}
	there := map[string]enrollment.Present{}
	for _, n := range nodes.Items {
		_, control := n.Labels[clusterinfo.ControlPlaneLabel]
		there[n.Name] = enrollment.Present{Is: true, ControlPlane: control}
	}
	latest, err := c.serverTime(ctx)
	if err != nil {
		return err
	}
	if now := time.Now(); now.After(latest) {
		latest = now
	}
	// No revocation expires by the clock of this computer (J4): joinservice does that.
	_, err = enrollment.Reconcile(ctx, c.client, func(name string) enrollment.Present { return there[name] }, enrollment.Clock{Latest: latest}, names...)
	return err
}

// former is the ConfigMap that listed the nodes that may write, in versions before v0.1.
const former = "muster-enrolled"

// MigrateAccess creates the list of nodes that may not write from the list of nodes that may, which earlier versions
// wrote. Nodes that were removed from the former list stay removed. It must be called before the services of this
// version run, and once more after that with last set: it then takes over removals that the previous services have
// made meanwhile, and deletes the former list. found reports whether a former list exists.
func (c *Client) MigrateAccess(ctx context.Context, foreign, last bool) (found bool, err error) {
	err = once(ctx, func(ctx context.Context) error {
		old := &corev1.ConfigMap{}
		if err := c.client.Get(ctx, types.NamespacedName{Namespace: Namespace, Name: former}, old); Absent(err) {
			return nil
		} else if err != nil {
			return err
		}
		found = true
		from, members, err := parseFormer(old.Data, foreign)
		if err != nil {
			return err
		}
		data, err := nodeaccess.New(foreign).Data()
		if err != nil {
			return err
		}
		if err := c.createAccess(ctx, data); err != nil {
			return err
		}
		var enrolled v1alpha1.AttestedNodeList
		if err := c.client.List(ctx, &enrolled); err != nil {
			return err
		}
		names := from.Nodes()
		for _, n := range enrolled.Items {
			names = append(names, n.Name)
		}
		if _, err := enrollment.Change(ctx, c.client, func(_ context.Context, l *nodeaccess.List) error {
			l.MembersOnly = l.MembersOnly || foreign
			for _, name := range from.Nodes() {
				have, was := l.Entry(name), from.Entry(name)
				if have.Revoked == nil || was.Revoked != nil && was.Revoked.Until.After(have.Revoked.Until) {
					have.Revoked = was.Revoked
				}
				have.Unattested = have.Unattested || was.Unattested && have.Revoked == nil
				have.ControlPlane = have.ControlPlane || was.ControlPlane
				l.Set(name, have)
			}
			for _, name := range members {
				e := l.Entry(name)
				e.Member = true
				l.Set(name, e)
			}
			return nil
		}); err != nil {
			return err
		}
		// J4: the former list shows a ban or a removal by a missing key.
		if err := c.reconcileAccess(ctx, names); err != nil || !last {
			return err
		}
		return client.IgnoreNotFound(c.client.Delete(ctx, old, client.Preconditions{ResourceVersion: &old.ResourceVersion}))
	})
	return found, err
}

// parseFormer reads the former list: NAME has the machine ID as value, or "unattested"; NAME_certificates is a revocation; _control-planes has names.
func parseFormer(data map[string]string, foreign bool) (l *nodeaccess.List, members []string, err error) {
	l = nodeaccess.New(foreign)
	for key, value := range data {
		switch name, revoked := strings.CutSuffix(key, "_certificates"); {
		case key == "_control-planes":
			for _, name := range strings.Fields(value) {
				e := l.Entry(name)
				e.ControlPlane = true
				l.Set(name, e)
			}
		case revoked:
			words := strings.Fields(value)
			until := time.Time{}
			if len(words) > 0 {
				if until, err = time.Parse(time.RFC3339, words[0]); err != nil {
					return nil, nil, err
				}
			}
			e := l.Entry(name)
			e.Revoked = &nodeaccess.Revocation{Until: until, Allowed: words[min(1, len(words)):]}
			l.Set(name, e)
		case strings.Contains(key, "_"): // requests of a node that are refused for a minute
		default:
			if foreign {
				members = append(members, key)
			}
			e := l.Entry(key)
			e.Unattested = value == "unattested"
			l.Set(key, e)
		}
	}
	return l, members, nil
}
