// Package clusterview is the view of the Kubernetes API in Muster's services: every read comes from an informer's memory,
// every write goes to the API server and is a compare-and-swap.
//
// Replicas share only that API. A view may therefore lack what another replica has just written; a caller that must not
// miss it waits with [Nodes.Await] until its own write has come back, because then everything written earlier has come back
// too.
package clusterview

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sync/errgroup"
	authenticationv1 "k8s.io/api/authentication/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/trust/attest"
)

// Cluster is a client and the informers of one service.
type Cluster struct {
	// Client writes to the API server and reads from it, not from the informers.
	Client client.Client
	// Nodes are the enrollments.
	Nodes *Nodes

	cfg    *rest.Config
	cache  cache.Cache
	info   infoHolder
	mu     sync.Mutex
	others []cache.Cache // one for each ConfigMap and each signer's requests
	synced []toolscache.DoneChecker
}

// Scheme returns the kinds that Muster's services use.
func Scheme() *runtime.Scheme {
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		v1alpha1.AddToScheme, corev1.AddToScheme, certificatesv1.AddToScheme, coordinationv1.AddToScheme, authenticationv1.AddToScheme,
	} {
		if err := add(s); err != nil {
			panic("cluster: kinds registered twice: " + err.Error())
		}
	}
	return s
}

// mapper maps the kinds that Muster's services use to the API server's paths. With it a service makes no request when it
// starts, which may be long before the API server answers: after a power loss all of a cluster starts at once.
func mapper() meta.RESTMapper {
	m := meta.NewDefaultRESTMapper(nil)
	for scope, kinds := range map[meta.RESTScope]map[schema.GroupVersion][]string{
		meta.RESTScopeRoot: {
			v1alpha1.GroupVersion:               {"AttestedDisk", "AttestedNode", "AttestationPolicy"},
			corev1.SchemeGroupVersion:           {"Node"},
			certificatesv1.SchemeGroupVersion:   {"CertificateSigningRequest"},
			authenticationv1.SchemeGroupVersion: {"TokenReview"},
		},
		meta.RESTScopeNamespace: {
			corev1.SchemeGroupVersion:         {"ConfigMap", "Event", "Pod", "Secret", "Service"},
			coordinationv1.SchemeGroupVersion: {"Lease"},
		},
	} {
		for version, names := range kinds {
			for _, name := range names {
				m.Add(version.WithKind(name), scope)
			}
		}
	}
	return m
}

// logOnce routes the log of controller-runtime, which keeps one for the process.
var logOnce sync.Once

// Open prepares a client and the informers that all services need: enrollments and
// the cluster's description. Nothing is read until [Cluster.Serve] runs.
func Open(cfg *rest.Config, log *slog.Logger) (*Cluster, error) {
	if cfg == nil || log == nil {
		return nil, errors.New("cluster: configuration and log are required")
	}
	logOnce.Do(func() { ctrllog.SetLogger(logr.FromSlogHandler(log.Handler())) })
	cfg = rest.CopyConfig(cfg)
	cfg.QPS = -1 // the API server's own priority and fairness is the limit
	scheme, where := Scheme(), mapper()
	c, err := client.New(cfg, client.Options{Scheme: scheme, Mapper: where})
	if err != nil {
		return nil, fmt.Errorf("cluster: %w", err)
	}
	informers, err := cache.New(cfg, cache.Options{
		Scheme:                      scheme,
		Mapper:                      where,
		ReaderFailOnMissingInformer: true,
		DefaultTransform:            cache.TransformStripManagedFields(),
		ByObject: map[client.Object]cache.ByObject{
			&corev1.Node{}: {Transform: slimNode},
			// The API server does not send Services without a cluster IP.
			&corev1.Service{}: {Transform: slimService, Field: fields.AndSelectors(
				fields.OneTermNotEqualSelector("spec.clusterIP", corev1.ClusterIPNone), fields.OneTermNotEqualSelector("spec.clusterIP", ""))},
			&v1alpha1.AttestationPolicy{}: {Field: fields.OneTermEqualSelector("metadata.name", v1alpha1.PolicyName)},
		},
	})
	if err != nil {
		return nil, fmt.Errorf("cluster: %w", err)
	}
	out := &Cluster{Client: c, Nodes: newNodes(), cfg: cfg, cache: informers}
	if err := errors.Join(
		Watch(out, out.Nodes.set, out.Nodes.remove),
		WatchConfigMap(out, clusterinfo.ConfigMap, func(m *corev1.ConfigMap) { out.info.set(m, log) }, out.info.remove),
	); err != nil {
		return nil, err
	}
	return out, nil
}

// Watch calls set for each object that exists or changes, and remove for each that is deleted, one at a time for each call
// of Watch. The objects are shared: they must not be changed. Call it before [Cluster.Serve].
func Watch[T client.Object](c *Cluster, set, remove func(T)) error {
	return watch(c, c.cache, set, remove)
}

// WatchConfigMap is [Watch] for one ConfigMap in Muster's namespace. A service's role names the ConfigMaps that it may
// read, so each has its own request.
func WatchConfigMap(c *Cluster, name string, set, remove func(*corev1.ConfigMap)) error {
	return watchSome(c, cache.Options{
		DefaultTransform:  cache.TransformStripManagedFields(),
		DefaultNamespaces: map[string]cache.Config{clusterinfo.Namespace: {FieldSelector: fields.OneTermEqualSelector("metadata.name", name)}},
	}, set, remove)
}

// WatchRequests is [Watch] for the certificate requests of one signer: the API server sends no others. Each object has the
// user that filed it and the decision; the request itself is left out, since its author chooses its size.
func WatchRequests(c *Cluster, signer string, set, remove func(*certificatesv1.CertificateSigningRequest)) error {
	return watchSome(c, cache.Options{
		DefaultTransform:     slimRequest,
		DefaultFieldSelector: fields.OneTermEqualSelector("spec.signerName", signer),
	}, set, remove)
}

// watchSome is [Watch] with informers of its own.
func watchSome[T client.Object](c *Cluster, some cache.Options, set, remove func(T)) error {
	some.Scheme, some.Mapper, some.ReaderFailOnMissingInformer = c.Client.Scheme(), c.Client.RESTMapper(), true
	one, err := cache.New(c.cfg, some)
	if err != nil {
		return fmt.Errorf("cluster: %w", err)
	}
	c.mu.Lock()
	c.others = append(c.others, one)
	c.mu.Unlock()
	return watch(c, one, set, remove)
}

func watch[T client.Object](c *Cluster, from cache.Cache, set, remove func(T)) error {
	object, ok := reflect.New(reflect.TypeFor[T]().Elem()).Interface().(T)
	if !ok {
		return errors.New("cluster: watch pointers to objects")
	}
	// Before the cache is started this creates the informer and does not wait for it, so it needs no deadline.
	informer, err := from.GetInformer(context.Background(), object, cache.BlockUntilSynced(false))
	if err != nil {
		return fmt.Errorf("cluster: informer of %T: %w", object, err)
	}
	handler, err := informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { call(o, set) },
		UpdateFunc: func(_, o any) { call(o, set) },
		DeleteFunc: func(o any) {
			if gone, ok := o.(toolscache.DeletedFinalStateUnknown); ok {
				o = gone.Obj
			}
			call(o, remove)
		},
	})
	if err != nil {
		return fmt.Errorf("cluster: informer of %T: %w", object, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.synced = append(c.synced, informer.HasSyncedChecker(), handler.HasSyncedChecker())
	return nil
}

func call[T client.Object](o any, f func(T)) {
	if object, ok := o.(T); ok {
		f(object)
	}
}

// Serve runs the informers until ctx ends.
func (c *Cluster) Serve(ctx context.Context) error {
	c.mu.Lock()
	all := append([]cache.Cache{c.cache}, c.others...)
	c.mu.Unlock()
	g, ctx := errgroup.WithContext(ctx)
	for _, one := range all {
		g.Go(func() error { return one.Start(ctx) })
	}
	if err := g.Wait(); err != nil {
		return fmt.Errorf("cluster: %w", err)
	}
	return nil
}

// Ready returns nil if all objects that existed at the start have been seen.
func (c *Cluster) Ready() error {
	for _, checker := range c.checkers() {
		select {
		case <-checker.Done():
		default:
			return fmt.Errorf("informer %s has not synced yet", checker.Name())
		}
	}
	return nil
}

// Await waits until [Cluster.Ready] returns nil.
func (c *Cluster) Await(ctx context.Context) error {
	for _, checker := range c.checkers() {
		select {
		case <-checker.Done():
		case <-ctx.Done():
			return fmt.Errorf("informer %s: %w", checker.Name(), context.Cause(ctx))
		}
	}
	return nil
}

func (c *Cluster) checkers() []toolscache.DoneChecker {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.synced)
}

// How long a client waits after API_UNAVAILABLE, and how long clean-up continues.
const (
	retryAPI       = 2 * time.Second
	outliveTimeout = 10 * time.Second
)

// Unavailable returns a refusal with API_UNAVAILABLE for an answer of the API server that the caller cannot correct.
func Unavailable(what string, err error) error {
	return attest.RefuseFor(retryAPI, attestv1.Reason_REASON_API_UNAVAILABLE, "%s: %w", what, err)
}

// Outlive returns a context for clean-up: it ends at most 10 s after ctx.
func Outlive(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), outliveTimeout)
}
