package kube

import (
	"context"
	"fmt"
	"hash/fnv"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
)

const (
	eventNormal  = corev1.EventTypeNormal
	eventWarning = corev1.EventTypeWarning
	// maxEventMessage is the API's limit in bytes.
	maxEventMessage = 1024
)

// tell makes a Kubernetes Event of an enrollment. What several replicas say at once has one name, and stands there
// once. Events are for people: a lost one is a line in the log.
func (k *Kube) tell(ctx context.Context, n *v1alpha1.AttestedNode, kind, reason, message string) {
	now := metav1.NewTime(k.now())
	said := fnv.New64a()
	_, _ = fmt.Fprint(said, n.UID, reason, message)
	e := &corev1.Event{
		// The API wants the events of objects without a namespace in this one.
		ObjectMeta:     metav1.ObjectMeta{Name: fmt.Sprintf("%s.%016x", n.Name, said.Sum64()), Namespace: metav1.NamespaceDefault},
		InvolvedObject: corev1.ObjectReference{APIVersion: v1alpha1.GroupVersion.String(), Kind: "AttestedNode", Name: n.Name, UID: n.UID},
		Type:           kind, Reason: reason, Message: message[:min(len(message), maxEventMessage)],
		Source: corev1.EventSource{Component: "muster-joinservice"}, FirstTimestamp: now, LastTimestamp: now, Count: 1,
	}
	if err := client.IgnoreAlreadyExists(k.cluster.Client.Create(ctx, e)); err != nil {
		k.log.WarnContext(ctx, "an event cannot be written", "node", n.Name, "reason", reason, "err", err)
	}
}
