package kms

import (
	"context"
	"crypto/sha256"
	"slices"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	"k8s.io/apimachinery/pkg/util/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

const (
	// reviewTimeout bounds one TokenReview.
	reviewTimeout = 5 * time.Second
	// reviewLife is how long an accepted token is cached, as long as the API server itself caches one.
	reviewLife = 10 * time.Second
	// retryAPI is the pause that is sent to a caller if the Kubernetes API fails.
	retryAPI = 2 * time.Second
	// nodeNameKey is where Kubernetes puts the node of a token's pod (KEP-4193).
	nodeNameKey = "authentication.kubernetes.io/node-name"
)

// TokenReview returns a function that asks the API server, which also knows whether the token's pod still exists. An
// accepted token is not reviewed again for [reviewLife]: a joinservice uses one for all machines that join in that time.
// kms checks in each call whether the token's machine is banned.
func TokenReview(c client.Client) func(context.Context, string) (Workload, error) {
	accepted := cache.NewExpiring() // by SHA-256: no token stays in memory (K3)
	return func(ctx context.Context, token string) (Workload, error) {
		key := sha256.Sum256([]byte(token))
		if w, ok := accepted.Get(key); ok {
			if w, ok := w.(Workload); ok {
				return w, nil
			}
		}
		ctx, cancel := context.WithTimeout(ctx, reviewTimeout)
		defer cancel()
		r := &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: token, Audiences: []string{Audience}}}
		if err := c.Create(ctx, r); err != nil {
			return Workload{}, attest.RefuseFor(retryAPI, attestv1.Reason_REASON_API_UNAVAILABLE, "token review: %w", err)
		}
		if !r.Status.Authenticated || !slices.Contains(r.Status.Audiences, Audience) {
			// The API server's error is about the token; it does not contain it.
			return Workload{}, attest.Refuse(attestv1.Reason_REASON_WORKLOAD_IDENTITY, "Kubernetes does not accept the token for audience %q: %s", Audience, r.Status.Error)
		}
		w := Workload{User: r.Status.User.Username}
		if names := r.Status.User.Extra[nodeNameKey]; len(names) == 1 {
			w.Node = names[0]
		}
		if w.User == Caller { // no other user can fill the memory
			accepted.Set(key, w, reviewLife)
		}
		return w, nil
	}
}
