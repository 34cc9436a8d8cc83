package membertest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/internal/kubetest"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
)

// spare are the verbs of an informer that tests need not observe: client-go lists if it can't watch from the start, and the
// right to list gives no more than that to watch.
const spare = "list"

// Intruder is the User-Agent of a test that acts with a service's account itself. [Cluster.CheckRights] ignores its requests.
const Intruder = "intruder"

// CheckRights compares the rights of a service's account, by the chart, with the requests that it has made since the
// cluster started: none beyond its rights, and each right used at least once. It is for the end of a package whose tests
// use all that the service does.
func (c *Cluster) CheckRights(ctx context.Context, account string) error {
	user := "system:serviceaccount:" + clusterinfo.Namespace + ":" + account
	asked, err := c.AllRequests(func(r kubetest.Request) bool { return r.User.Name == user && r.UserAgent != Intruder })
	if err != nil {
		return err
	}
	cluster, local := &rbacv1.ClusterRole{}, &rbacv1.Role{}
	if err := errors.Join(
		c.Client.Get(ctx, client.ObjectKey{Name: "muster:" + account}, cluster),
		c.Client.Get(ctx, client.ObjectKey{Namespace: clusterinfo.Namespace, Name: "muster:" + account}, local),
	); err != nil {
		return err
	}
	rules := slices.Concat(cluster.Rules, local.Rules)
	var errs []error
	for _, r := range asked {
		// Tests may remove a right for a while, to test the effect.
		granted := slices.ContainsFunc(rules, func(rule rbacv1.PolicyRule) bool {
			return slices.ContainsFunc(rule.Resources, func(resource string) bool {
				return slices.ContainsFunc(rule.Verbs, func(verb string) bool { return uses(r, rule, resource, verb) })
			})
		})
		if r.Annotations[kubetest.Decision] == "forbid" && !granted {
			errs = append(errs, fmt.Errorf("%s asked for what it may not do: %s %s %q", account, r.Verb, name(r.Object.Group, r.Object.Resource, r.Object.Subresource), r.Object.Name))
		}
	}
	for _, rule := range rules {
		for _, resource := range rule.Resources {
			for _, verb := range rule.Verbs {
				if verb != spare && !slices.ContainsFunc(asked, func(r kubetest.Request) bool { return uses(r, rule, resource, verb) }) {
					errs = append(errs, fmt.Errorf("%s may %s %v %s %v and never did: take the right away, or test what it is for", account, verb, rule.APIGroups, resource, rule.ResourceNames))
				}
			}
		}
	}
	return errors.Join(errs...)
}

// uses reports whether an allowed request needs the verb of a rule on a resource.
func uses(r kubetest.Request, rule rbacv1.PolicyRule, resource, verb string) bool {
	if resource == "signers" && verb == "approve" {
		// The API server itself checks this when a request's approval is updated.
		resource, verb = "certificatesigningrequests/approval", "update"
	} else if len(rule.ResourceNames) > 0 && r.Object.Name != "" && !slices.Contains(rule.ResourceNames, r.Object.Name) {
		return false
	}
	return r.Verb == verb && slices.Contains(rule.APIGroups, r.Object.Group) && name("", r.Object.Resource, r.Object.Subresource) == resource
}

func name(group, resource, subresource string) string {
	out := resource
	if subresource != "" {
		out += "/" + subresource
	}
	if group != "" {
		out = strings.Join([]string{out, group}, ".")
	}
	return out
}
