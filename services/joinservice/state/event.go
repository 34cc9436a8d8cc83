package state

import (
	"context"
	"fmt"
	"hash/fnv"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
)

// Kinds of events.
const (
	Normal  = corev1.EventTypeNormal
	Warning = corev1.EventTypeWarning
	// maxEventMessage is the API's limit in bytes.
	maxEventMessage = 1024
)

// Emit creates a Kubernetes Event for an enrollment. Equal events of several replicas have the same name, so one is stored.
// Events are for people: a failure is only logged.
func (s *State) Emit(ctx context.Context, n *v1alpha1.AttestedNode, kind, reason, message string) {
	now := metav1.NewTime(s.Now())
	hash := fnv.New64a()
	_, _ = fmt.Fprint(hash, n.UID, reason, message)
	e := &corev1.Event{
		// The API requires this namespace for events of objects without one.
		ObjectMeta:     metav1.ObjectMeta{Name: fmt.Sprintf("%s.%016x", n.Name, hash.Sum64()), Namespace: metav1.NamespaceDefault},
		InvolvedObject: corev1.ObjectReference{APIVersion: v1alpha1.GroupVersion.String(), Kind: "AttestedNode", Name: n.Name, UID: n.UID},
		Type:           kind, Reason: reason, Message: message[:min(len(message), maxEventMessage)],
		Source: corev1.EventSource{Component: "muster-joinservice"}, FirstTimestamp: now, LastTimestamp: now, Count: 1,
	}
	if err := client.IgnoreAlreadyExists(s.Cluster.Client.Create(ctx, e)); err != nil {
		s.Log.WarnContext(ctx, "an event cannot be written", "node", n.Name, "reason", reason, "err", err)
	}
}
