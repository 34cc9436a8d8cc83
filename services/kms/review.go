package kms

import (
	"context"
	"slices"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

const (
	// reviewTimeout bounds one TokenReview.
	reviewTimeout = 5 * time.Second
	// retryAPI is what a caller is told to wait for the Kubernetes API.
	retryAPI = 2 * time.Second
	// nodeNameKey is where Kubernetes puts the node of a token's pod (KEP-4193).
	nodeNameKey = "authentication.kubernetes.io/node-name"
)

// TokenReview asks the API server, which also knows whether the token's pod still exists.
func TokenReview(c client.Client) func(context.Context, string) (Workload, error) {
	return func(ctx context.Context, token string) (Workload, error) {
		ctx, cancel := context.WithTimeout(ctx, reviewTimeout)
		defer cancel()
		r := &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: token, Audiences: []string{Audience}}}
		if err := c.Create(ctx, r); err != nil {
			return Workload{}, attest.RefuseFor(retryAPI, attestv1.Reason_REASON_API_UNAVAILABLE, "token review: %w", err)
		}
		if !r.Status.Authenticated || !slices.Contains(r.Status.Audiences, Audience) {
			// The API server's error speaks of the token; it does not hold it.
			return Workload{}, attest.Refuse(attestv1.Reason_REASON_WORKLOAD_IDENTITY, "Kubernetes does not accept the token for audience %q: %s", Audience, r.Status.Error)
		}
		w := Workload{User: r.Status.User.Username}
		if names := r.Status.User.Extra[nodeNameKey]; len(names) == 1 {
			w.Node = names[0]
		}
		return w, nil
	}
}
