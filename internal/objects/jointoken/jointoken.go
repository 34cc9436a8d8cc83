// Package jointoken defines the bootstrap token of a join ticket, for clusters that use one: joinservice creates it, and
// the owner's program distinguishes it from other tokens.
package jointoken

import (
	"time"

	corev1 "k8s.io/api/core/v1"
)

const (
	// Life is how long a ticket's token is valid if it is not deleted before.
	Life = 5 * time.Minute
	// Group is a group of the token's user, beside system:authenticated and system:bootstrappers, which every bootstrap
	// token has. The chart's RBAC lets it read two ConfigMaps and get Nodes; it also has what a cluster grants to
	// system:bootstrappers.
	Group = "system:bootstrappers:muster"
	// Namespace is the namespace where Kubernetes looks for bootstrap tokens.
	Namespace = "kube-system"

	// Credential is the value of the chart's joinservice.joinCredential for tickets with tokens.
	Credential = "token"
)

// The keys of a bootstrap token's Secret with its groups and its expiration.
const (
	GroupsKey     = "auth-extra-groups"
	ExpirationKey = "expiration"
)

// Is reports whether s is a ticket's token: of no other group, and valid for at most [Life] from now. slack is the maximum
// difference of clocks.
func Is(s *corev1.Secret, now time.Time, slack time.Duration) bool {
	until, err := time.Parse(time.RFC3339, string(s.Data[ExpirationKey]))
	return err == nil && string(s.Data[GroupsKey]) == Group && until.Sub(now) <= Life+slack
}
