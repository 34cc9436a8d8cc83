package renewal

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/apiserver"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/services/bootstrapper/epoch"
	"github.com/muster-k8s/muster/trust/attest"
)

// Cluster is the part of the API that a renewal uses.
type Cluster interface {
	// Exclusively runs do while this control plane holds the lease, and returns its error. The context of do ends when the lease is lost.
	Exclusively(ctx context.Context, do func(context.Context) error) error
	// Unhealthy lists the static pods of control planes that are not Ready, as "etcd-node2".
	Unhealthy(ctx context.Context) ([]string, error)
	// Runs reports whether this control plane's pod of the component is Ready and has the annotation.
	Runs(ctx context.Context, component, annotation string) (bool, error)
	// ShutOut reports whether this control plane's enrollment is banned or being deleted. Its kubelet can't update the status that Runs reads then.
	ShutOut(ctx context.Context) (bool, error)
	// Banned returns the nodes of the other banned enrollments by an ID of the ban, except those of an unfinished `muster replace`. A second ban of
	// the same enrollment has another ID.
	Banned(ctx context.Context) (map[string]string, error)
	// Evicted reports whether neither a Node of the name nor a pod on it exists.
	Evicted(ctx context.Context, node string) (bool, error)
	// Publish writes this control plane's certificates to where the owner's program reads them.
	Publish(ctx context.Context, list []Certificate) error
	// PublishKeys writes the state of this control plane's keys to where the owner's program reads it.
	PublishKeys(ctx context.Context, s clusterinfo.KeyStates) error
	// Name is the name of this control plane's node.
	Name() string
	// OtherControlPlanes returns the addresses of the other enrolled control planes.
	OtherControlPlanes(ctx context.Context) ([]netip.Addr, error)
	// Epoch returns the cluster's epoch, its policy's serial and its bans, and increments the epoch if they changed.
	Epoch(ctx context.Context) (epoch.Record, clusterinfo.History, error)
	// PublishEpoch writes the epoch in this machine's TPM to where the owner's program reads it.
	PublishEpoch(ctx context.Context, e clusterinfo.HistoryEpoch) error
	// SignAdministrators decides on requests for an administrator's certificate.
	SignAdministrators(ctx context.Context, cfg Config) error
	Close()
}

const (
	requestTimeout = 20 * time.Second
	dialTimeout    = 5 * time.Second
	// bannedAtOnce bounds the enrollments that are in memory.
	bannedAtOnce = 100
	// A lease is free leaseLife after its last renewal. It has to outlast a restart of the API server, through which it is renewed. leaseRetry is the default
	// of the pause between two attempts to get it.
	leaseLife, leaseDeadline, leaseRetry = 3 * time.Minute, 2 * time.Minute, 5 * time.Second
)

type cluster struct {
	kubernetes.Interface
	node string
	// holder is who holds the lease, retry the pause between two attempts to get it.
	holder string
	retry  time.Duration
	owner  attest.OwnerKeys
	log    *slog.Logger
	close  func()
}

// Connect returns the cluster with the rights of this control plane's admin.conf. It uses the machine's own API server, which a network attacker can't
// impersonate, or, while that does not answer, the address in admin.conf.
func Connect(root, node string, owner attest.OwnerKeys, log *slog.Logger) (Cluster, error) {
	return connect(root, node, owner, log)
}

func connect(root, node string, owner attest.OwnerKeys, log *slog.Logger) (*cluster, error) {
	config, err := kubeconfig(root, "admin.conf")
	if err != nil {
		return nil, err
	}
	own, err := kubeconfig(root, "controller-manager.conf") // kubeadm sets the machine's own address in it
	if err != nil {
		return nil, err
	}
	config.Timeout, config.UserAgent = requestTimeout, "muster-bootstrapper"
	config.QPS, config.Burst = 50, 100 // by default, five a second of each API group
	if at, err := url.Parse(own.Host); err == nil && at.Host != "" {
		config.Dial = ownFirst(at.Host)
	}
	config.Wrap(apiserver.Only)
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, err
	}
	k, err := kubernetes.NewForConfigAndClient(config, client)
	if err != nil {
		return nil, err
	}
	return &cluster{Interface: k, node: node, holder: "renewal/" + node, retry: leaseRetry, owner: owner, log: log, close: client.CloseIdleConnections}, nil
}

func kubeconfig(root, name string) (*rest.Config, error) {
	text, err := os.ReadFile(filepath.Join(root, folder, name))
	if err != nil {
		return nil, err
	}
	defer clear(text)
	config, err := clientcmd.RESTConfigFromKubeConfig(text)
	if err != nil {
		return nil, errors.New(name + " cannot be read") // the cause could contain the key
	}
	return config, nil
}

// ownFirst dials this machine's API server first; its certificate has all names and addresses of the endpoint.
func ownFirst(own string) func(ctx context.Context, network, addr string) (net.Conn, error) {
	d := &net.Dialer{Timeout: dialTimeout, KeepAlive: 30 * time.Second}
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		if conn, err := d.DialContext(ctx, network, own); err == nil {
			return conn, nil
		}
		return d.DialContext(ctx, network, addr)
	}
}

func (c *cluster) Close() { c.close() }

// uncanceled is a lock whose writes are not canceled, only bounded by requestTimeout. The API server could still carry out a canceled renewal after the
// election has read the lease to release it: the release then conflicts, and other control planes wait until the lease expires.
type uncanceled struct{ resourcelock.Interface }

func (l uncanceled) Create(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	return l.Interface.Create(context.WithoutCancel(ctx), r)
}

func (l uncanceled) Update(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	return l.Interface.Update(context.WithoutCancel(ctx), r)
}

// Exclusively implements [Cluster] with the lease for joining control planes: no member of etcd restarts while another one is added (J8). client-go's
// election measures by its own clock whether a lease has expired, as joinservice does.
func (c *cluster) Exclusively(ctx context.Context, do func(context.Context) error) error {
	ctx, cancel := context.WithCancel(klog.NewContext(ctx, logr.FromSlogHandler(c.log.Handler())))
	defer cancel()
	var (
		mu             sync.Mutex
		started, ended bool
	)
	done := make(chan error, 1)
	e, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: uncanceled{&resourcelock.LeaseLock{
			LeaseMeta:  metav1.ObjectMeta{Namespace: clusterinfo.Namespace, Name: clusterinfo.ControlPlaneLease},
			Client:     c.CoordinationV1(),
			LockConfig: resourcelock.ResourceLockConfig{Identity: c.holder},
		}},
		LeaseDuration: leaseLife, RenewDeadline: leaseDeadline, RetryPeriod: c.retry, ReleaseOnCancel: true, Name: clusterinfo.ControlPlaneLease,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(ctx context.Context) {
				mu.Lock()
				started = !ended
				mu.Unlock()
				if started {
					done <- do(ctx)
					cancel()
				}
			},
			OnStoppedLeading: func() {},
		},
	})
	if err != nil {
		return err
	}
	e.Run(ctx)
	mu.Lock()
	ended = true
	begun := started
	mu.Unlock()
	if !begun {
		return errors.Join(errors.New("the lease of control planes was not to be had"), context.Cause(ctx))
	}
	return <-done
}

// Unhealthy implements [Cluster]. A node writes the mirror pods of its static pods, with any labels: those of nodes that are enrolled as workers are
// ignored.
func (c *cluster) Unhealthy(ctx context.Context) ([]string, error) {
	pods, err := c.CoreV1().Pods(metav1.NamespaceSystem).List(ctx, metav1.ListOptions{LabelSelector: "tier=control-plane"})
	if err != nil {
		return nil, err
	}
	var out []string
	for i := range pods.Items {
		p := &pods.Items[i]
		if ready(p) {
			continue
		}
		n, err := c.enrollment(ctx, p.Spec.NodeName)
		if err != nil {
			return nil, err
		}
		if n == nil || n.Spec.Role != v1alpha1.RoleWorker {
			out = append(out, p.Name)
		}
	}
	slices.Sort(out)
	return out, nil
}

// Runs implements [Cluster].
func (c *cluster) Runs(ctx context.Context, component, annotation string) (bool, error) {
	pod, err := c.CoreV1().Pods(metav1.NamespaceSystem).Get(ctx, component+"-"+c.node, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return false, nil // between two pods
	}
	return err == nil && pod.Spec.NodeName == c.node && pod.Annotations[Annotation] == annotation && pod.DeletionTimestamp == nil && ready(pod), err
}

// ShutOut implements [Cluster]. A node of an adopted cluster may have no enrollment, and is not shut out.
func (c *cluster) ShutOut(ctx context.Context) (bool, error) {
	n, err := c.enrollment(ctx, c.node)
	return n != nil && n.ShutOut(), err
}

// enrollment returns the enrollment of a node; nil if it has none.
func (c *cluster) enrollment(ctx context.Context, node string) (*v1alpha1.AttestedNode, error) {
	text, err := c.CoreV1().RESTClient().Get().AbsPath("/apis", v1alpha1.GroupVersion.String(), "attestednodes", node).DoRaw(ctx)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var n v1alpha1.AttestedNode
	if err := json.Unmarshal(text, &n); err != nil {
		return nil, fmt.Errorf("AttestedNode %s: %w", node, err)
	}
	return &n, nil
}

// Banned implements [Cluster].
func (c *cluster) Banned(ctx context.Context) (map[string]string, error) {
	out := map[string]string{}
	o := metav1.ListOptions{FieldSelector: "spec.banned=true", Limit: bannedAtOnce}
	for {
		text, err := c.CoreV1().RESTClient().Get().AbsPath("/apis", v1alpha1.GroupVersion.String(), "attestednodes").VersionedParams(&o, scheme.ParameterCodec).DoRaw(ctx)
		if apierrors.IsNotFound(err) {
			return out, nil
		}
		if apierrors.IsBadRequest(err) {
			return nil, fmt.Errorf("list banned AttestedNodes: their definition is of an older Muster, run muster upgrade: %w", err)
		}
		if err != nil {
			return nil, fmt.Errorf("list banned AttestedNodes: %w", err)
		}
		var list v1alpha1.AttestedNodeList
		if err := json.Unmarshal(text, &list); err != nil {
			return nil, fmt.Errorf("AttestedNodes: %w", err)
		}
		for _, n := range list.Items {
			if _, keep := n.Annotations[v1alpha1.KeepNode]; n.Spec.Banned && !keep && n.Name != c.node {
				// Each change of the spec raises the generation.
				out[fmt.Sprintf("%s/%d", n.UID, n.Generation)] = n.Name
			}
		}
		if o.Continue = list.Continue; o.Continue == "" {
			return out, nil
		}
	}
}

// Evicted implements [Cluster].
func (c *cluster) Evicted(ctx context.Context, node string) (bool, error) {
	if _, err := c.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		return false, err
	}
	pods, err := c.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + node, Limit: 1})
	return err == nil && len(pods.Items) == 0, err
}

// SignAdministrators implements [Cluster].
func (c *cluster) SignAdministrators(ctx context.Context, cfg Config) error {
	return administrators{c.CertificatesV1().CertificateSigningRequests(), cfg}.sign(ctx)
}

func ready(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// Publish implements [Cluster] with an annotation of the Node.
func (c *cluster) Publish(ctx context.Context, list []Certificate) error {
	value, err := json.Marshal(list)
	if err != nil {
		return err
	}
	return c.annotate(ctx, clusterinfo.CertificatesAnnotation, string(value))
}
