// Package jointoken says what the bootstrap token of a join ticket is, where the cluster's credential is one:
// joinservice makes it, and the owner's program tells it from tokens that others made.
package jointoken

import (
	"time"

	corev1 "k8s.io/api/core/v1"
)

const (
	// Life is how long a ticket's token is good for if nobody deletes it before.
	Life = 5 * time.Minute
	// Group is what a token's bearer is in beside system:authenticated and system:bootstrappers, which has every
	// bootstrap token. The chart's RBAC lets it read two ConfigMaps and get Nodes; what a cluster grants to
	// system:bootstrappers itself, it has too.
	Group = "system:bootstrappers:muster"
	// Namespace is the one in which Kubernetes looks for bootstrap tokens.
	Namespace = "kube-system"

	// Credential is the chart's value joinservice.joinCredential with which tickets have tokens.
	Credential = "token"
)

// The keys of a bootstrap token's Secret that tell whose it is and how long it is good for.
const (
	GroupsKey     = "auth-extra-groups"
	ExpirationKey = "expiration"
)

// Is says whether s is a ticket's token: of no other group, and good for no longer than [Life] from now. slack is how far
// clocks may differ.
func Is(s *corev1.Secret, now time.Time, slack time.Duration) bool {
	until, err := time.Parse(time.RFC3339, string(s.Data[ExpirationKey]))
	return err == nil && string(s.Data[GroupsKey]) == Group && until.Sub(now) <= Life+slack
}
