package ownertest

import (
	"context"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/internal/service/clusterview"
)

// lookAgain is how often a loop over [Changes] runs although nothing has changed. Asking an API server every few milliseconds takes a processor from the
// tests beside it.
const lookAgain = 250 * time.Millisecond

// Changes is for a loop that waits for an object of [Shared]: `for range Changes(ctx, &v1alpha1.AttestedNodeList{}, "w1")`. It runs at once, after each
// change of the object, and now and then for what else the loop looks at, until ctx ends. It does not say what has changed: read the object.
func Changes(ctx context.Context, kind client.ObjectList, name string) func(yield func() bool) {
	return ChangesIn(ctx, kind, "", name)
}

// ChangesIn is [Changes] for a namespace; without a name, for all its objects of a kind.
func ChangesIn(ctx context.Context, kind client.ObjectList, namespace, name string) func(yield func() bool) {
	return func(yield func() bool) {
		again := time.NewTicker(lookAgain)
		defer again.Stop()
		var events <-chan watch.Event
		stop := func() {}
		defer func() { stop() }()
		for ctx.Err() == nil {
			if events == nil {
				if w, err := watchShared(ctx, kind, namespace, name); err == nil { // else its kind is not defined yet
					events, stop = w.ResultChan(), w.Stop
				}
			}
			if !yield() {
				return
			}
			select {
			case _, open := <-events:
				if !open {
					stop()
					events = nil
				}
			case <-again.C:
			case <-ctx.Done():
			}
		}
	}
}

func watchShared(ctx context.Context, kind client.ObjectList, namespace, name string) (watch.Interface, error) {
	scheme := clusterview.Scheme()
	if err := appsv1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	c, err := client.NewWithWatch(Shared.Admin, client.Options{Scheme: scheme, Mapper: Shared.Client.RESTMapper()})
	if err != nil {
		return nil, err
	}
	in := []client.ListOption{client.InNamespace(namespace)}
	if name != "" {
		in = append(in, client.MatchingFields{"metadata.name": name})
	}
	return c.Watch(ctx, kind, in...)
}
