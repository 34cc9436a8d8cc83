// Package kube is joinservice's access to the Kubernetes API: it tracks the owners of names and addresses, writes
// enrollments, and gets certificates signed.
//
// Replicas of joinservice share only that API, and their views of it are slightly out of date. Values that must be unique
// among enrollments (machine, disk, address) are therefore checked twice: before anything is written, and again when the
// informer has returned the own write. By then it has also returned everything that was written earlier, so of two
// competing claims at least the later one sees the other and is refused.
package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/services/joinservice/nodecert"
	"github.com/muster-k8s/muster/trust/attest"
)

// Kube reads and writes for joinservice. Create it before [clusterview.Cluster.Serve] runs.
type Kube struct {
	cluster   *clusterview.Cluster
	audit     *audit.Log
	log       *slog.Logger
	addresses *addresses
	nodes     *names
	disks     *disks
	access    *accessView
	requests  *requests
	records   *records
	clocks    clocks
	waits     leaseWaits
	services  serviceAddresses
	evicting  sync.Map // UIDs of enrollments whose eviction this replica has seen start, and not end
	// life is how long a node's certificate is valid.
	life   time.Duration
	leases Leases
	// now is the clock for all waits of hours.
	now func() time.Time
}

// Leases are the waits for kubelets' Leases, which distinguish a running machine from one that has stopped (J11).
type Leases struct {
	// First is the maximum time from a machine's ticket, or from the key of its disk, to the first Lease of its kubelet:
	// until then no later boot of it is accepted. 0: one is accepted at once.
	First time.Duration
	// Watch is how long at least the Lease of a node is watched after its machine has booted again: longer than its
	// kubelet's renewal interval, which is 10 s by default. A Lease with a longer duration is watched longer.
	Watch time.Duration
}

// DefaultLeases fit kubelets with their default settings.
var DefaultLeases = Leases{First: 2 * time.Minute, Watch: 15 * time.Second}

// DefaultCertificateLife is how long a node's certificate is valid unless the owner sets another value, MinCertificateLife
// the minimum of Kubernetes' signer.
const (
	DefaultCertificateLife = nodeaccess.CertificateLife
	MinCertificateLife     = 10 * time.Minute
)

// New registers the informers that joinservice needs beside those of c. records gets the actions on machines that are shut
// out. life is how long a node's certificate is valid: the value that a ticket requests, and at least the value that the
// cluster's signer gives when a kubelet renews (--cluster-signing-duration of kube-controller-manager).
func New(c *clusterview.Cluster, records *audit.Log, log *slog.Logger, life time.Duration, leases Leases) (*Kube, error) {
	if c == nil || records == nil || log == nil {
		return nil, errors.New("kube: cluster, audit log and log are required")
	}
	if life > nodeaccess.CertificateLife {
		return nil, fmt.Errorf("kube: certificates of %s: the certificates of a name that the owner takes from a machine are revoked for %s at most", life, nodeaccess.CertificateLife)
	}
	if life < MinCertificateLife {
		return nil, fmt.Errorf("kube: certificates of %s: Kubernetes signs none for less than %s", life, MinCertificateLife)
	}
	k := &Kube{
		cluster: c, audit: records, log: log, addresses: newAddresses(), nodes: newNames(), disks: newDisks(), access: &accessView{}, requests: newRequests(), records: newRecords(),
		life: life, leases: leases, now: time.Now,
	}
	k.requests.now = func() time.Time { return k.now() }
	return k, errors.Join(
		clusterview.Watch(c, k.setNode, k.removeNode),
		clusterview.Watch(c, k.setService, k.removeService),
		clusterview.WatchConfigMap(c, nodeaccess.ConfigMap, k.setAccess, func(*corev1.ConfigMap) { k.access.set(nil) }),
		clusterview.WatchRequests(c, signerOf[nodecert.Client], k.requests.set, k.requests.remove),
		clusterview.WatchRequests(c, signerOf[nodecert.Serving], k.requests.set, k.requests.remove),
		clusterview.Watch(c, k.disks.set, k.disks.remove),
	)
}

// audited records an action on a machine after it was done: a full disk must not delay a ban.
func (k *Kube) audited(ctx context.Context, event, node, machine string, reason attestv1.Reason) {
	if err := k.audit.Write(audit.Record{Service: "joinservice", Event: event, Reason: attest.ReasonName(reason), Node: node, Machine: machine}); err != nil {
		k.log.ErrorContext(ctx, "an audit record cannot be written", "event", event, "node", node, "machine", machine, "err", err)
	}
}

// names are the existing Nodes, by name.
type names struct {
	mu  sync.RWMutex
	set map[string]present
}

// present is the known state of a Node.
type present struct {
	uid types.UID
	// controlPlane is whether it is labeled as a control plane, which a kubelet may not do (NodeRestriction).
	controlPlane bool
	// serves is whether pods of joinservice can run there: it is Ready, and labeled as a control plane.
	serves bool
}

func newNames() *names { return &names{set: map[string]present{}} }

func (n *names) put(o *corev1.Node) {
	n.mu.Lock()
	defer n.mu.Unlock()
	_, labeled := o.Labels[clusterinfo.ControlPlaneLabel]
	n.set[o.Name] = present{o.UID, labeled, labeled && slices.ContainsFunc(o.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})}
}

func (n *names) remove(name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.set, name)
}

func (n *names) has(name string) bool { return n.get(name) != present{} }

// get returns the zero value for a Node that does not exist.
func (n *names) get(name string) present {
	n.mu.RLock()
	defer n.mu.RUnlock()
	return n.set[name]
}

// owner is the owner of an address outside of enrollments.
type owner struct {
	kind ownerKind
	name string
}

type ownerKind string

const (
	ownerNode    ownerKind = "Node"
	ownerService ownerKind = "Service"
)

// addresses maps addresses to their owners.
type addresses struct {
	mu      sync.RWMutex
	owners  map[netip.Addr]map[owner]bool
	byOwner map[owner][]netip.Addr
}

func newAddresses() *addresses {
	return &addresses{owners: map[netip.Addr]map[owner]bool{}, byOwner: map[owner][]netip.Addr{}}
}

// put replaces all addresses of o; without texts, o is removed. Texts that are not addresses are ignored: a Service's IP
// may be "None".
func (a *addresses) put(o owner, texts ...string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, ip := range a.byOwner[o] {
		delete(a.owners[ip], o)
		if len(a.owners[ip]) == 0 {
			delete(a.owners, ip)
		}
	}
	delete(a.byOwner, o)
	for _, t := range texts {
		ip, err := netip.ParseAddr(t)
		if err != nil {
			continue
		}
		ip = ip.Unmap()
		if a.owners[ip] == nil {
			a.owners[ip] = map[owner]bool{}
		}
		a.owners[ip][o] = true
		a.byOwner[o] = append(a.byOwner[o], ip)
	}
}

// of returns the owners of an address.
func (a *addresses) of(ip netip.Addr) []owner {
	a.mu.RLock()
	defer a.mu.RUnlock()
	out := make([]owner, 0, len(a.owners[ip]))
	for o := range a.owners[ip] {
		out = append(out, o)
	}
	return out
}

func (k *Kube) setNode(n *corev1.Node) {
	var ips []string
	for _, a := range n.Status.Addresses {
		if a.Type == corev1.NodeInternalIP || a.Type == corev1.NodeExternalIP {
			ips = append(ips, a.Address)
		}
	}
	k.nodes.put(n)
	k.addresses.put(owner{ownerNode, n.Name}, ips...)
}

func (k *Kube) removeNode(n *corev1.Node) {
	k.nodes.remove(n.Name)
	k.addresses.put(owner{ownerNode, n.Name})
}

func (k *Kube) setService(s *corev1.Service) {
	k.services.set(s)
	k.addresses.put(owner{ownerService, s.Namespace + "/" + s.Name}, s.Spec.ClusterIPs...)
}

func (k *Kube) removeService(s *corev1.Service) {
	k.services.remove(s)
	k.addresses.put(owner{ownerService, s.Namespace + "/" + s.Name})
}

// reserved reports whether clients use the name for the API server. A node's serving certificate for it could then be used
// to impersonate the API server: kubeadm puts the first two into the API server's SANs.
func (k *Kube) reserved(node string) bool {
	first := func(host string) bool { // a resolver's search list can complete the first label
		label, _, _ := strings.Cut(host, ".")
		return label == node
	}
	return node == "kubernetes" || node == "localhost" || slices.ContainsFunc(k.apiServers(), first)
}

// isControlPlaneEndpoint reports whether machines reach the API server at ip.
func (k *Kube) isControlPlaneEndpoint(ip netip.Addr) bool {
	return slices.ContainsFunc(k.apiServers(), func(host string) bool {
		a, err := netip.ParseAddr(host)
		return err == nil && a.Unmap() == ip
	})
}

// apiServers returns the names and addresses by which clients may reach the API server.
func (k *Kube) apiServers() []string {
	info, err := k.cluster.Info()
	if err != nil {
		return nil // then no ticket is issued
	}
	out := slices.Clone(info.APIServerSANs)
	if host, _, err := net.SplitHostPort(info.ControlPlaneEndpoint); err == nil {
		out = append(out, host)
	}
	return out
}
