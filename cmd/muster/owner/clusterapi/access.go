package clusterapi

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/internal/enrollment"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
)

// EnsureAccess creates the list of nodes that may not write to the API and brings it in line with the AttestedNodes.
// foreign is set if the cluster's certificate authority issued node certificates before Muster was installed: then
// only enrolled nodes and the nodes in unattested may write. Existing entries stay. It must be called before the
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
	for i := range nodes.Items {
		there[nodes.Items[i].Name] = enrollment.PresentNode(&nodes.Items[i])
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
