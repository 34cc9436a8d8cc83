// Package state is what all parts of joinservice know of the cluster from its informers: Nodes, Services, and the owners of
// addresses. It may be slightly out of date.
package state

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
	"github.com/muster-k8s/muster/internal/enrollment"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/trust/attest"
)

// WriteAttempts bounds the attempts of a compare-and-swap that lost.
const WriteAttempts = 4

// DefaultCertificateLife is how long a node's certificate is valid unless the owner sets another value, MinCertificateLife
// the minimum of Kubernetes' signer.
const (
	DefaultCertificateLife = nodeaccess.CertificateLife
	MinCertificateLife     = 10 * time.Minute
)

// State is the view of one joinservice. Create it before [clusterview.Cluster.Serve] runs.
type State struct {
	Cluster *clusterview.Cluster
	// Audit gets the actions on machines that are shut out.
	Audit *audit.Log
	Log   *slog.Logger
	// CertificateLife is how long a node's certificate is valid: the value that a ticket requests, and at least the value
	// that the cluster's signer gives when a kubelet renews (--cluster-signing-duration of kube-controller-manager).
	CertificateLife time.Duration
	// Now is the clock for all waits of hours.
	Now func() time.Time

	addresses addresses
	nodes     nodes
	services  serviceAddresses
}

// New registers the informers of Nodes and Services. It returns an error if records, log or c is missing, or life is out of
// range.
func New(c *clusterview.Cluster, records *audit.Log, log *slog.Logger, life time.Duration) (*State, error) {
	if c == nil || records == nil || log == nil {
		return nil, errors.New("state: cluster, audit log and log are required")
	}
	if life > nodeaccess.CertificateLife {
		return nil, fmt.Errorf("state: certificates of %s: the certificates of a name that the owner takes from a machine are revoked for %s at most", life, nodeaccess.CertificateLife)
	}
	if life < MinCertificateLife {
		return nil, fmt.Errorf("state: certificates of %s: Kubernetes signs none for less than %s", life, MinCertificateLife)
	}
	s := &State{Cluster: c, Audit: records, Log: log, CertificateLife: life, Now: time.Now}
	return s, errors.Join(clusterview.Watch(c, s.setNode, s.removeNode), clusterview.Watch(c, s.setService, s.removeService))
}

// UTC formats a time for messages and annotations, as RFC 3339 has it.
func UTC(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// Audited records an action on a machine after it was done: a full disk must not delay a ban.
func (s *State) Audited(ctx context.Context, event, node, machine string, reason attestv1.Reason) {
	if err := s.Audit.Write(audit.Record{Service: "joinservice", Event: event, Reason: attest.ReasonName(reason), Node: node, Machine: machine}); err != nil {
		s.Log.ErrorContext(ctx, "an audit record cannot be written", "event", event, "node", node, "machine", machine, "err", err)
	}
}

// nodes are the existing Nodes, by name.
type nodes struct {
	mu  sync.RWMutex
	set map[string]Node
}

// Node is the known state of a Node; the zero value is that of one that does not exist.
type Node struct {
	UID types.UID
	enrollment.Present
	// Serves is whether pods of joinservice can run there: it is Ready, and labeled as a control plane.
	Serves bool
}

func (n *nodes) put(o *corev1.Node) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.set == nil {
		n.set = map[string]Node{}
	}
	p := enrollment.PresentNode(o)
	n.set[o.Name] = Node{o.UID, p, p.ControlPlane && slices.ContainsFunc(o.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})}
}

func (n *nodes) remove(name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.set, name)
}

// HasNode reports whether there is a Node of that name.
func (s *State) HasNode(name string) bool { return s.Node(name).Is }

// Node returns what is known of a Node.
func (s *State) Node(name string) Node {
	s.nodes.mu.RLock()
	defer s.nodes.mu.RUnlock()
	return s.nodes.set[name]
}

// Present returns what is known of a Node, for [enrollment.Access].
func (s *State) Present(name string) enrollment.Present { return s.Node(name).Present }

// Owner is the owner of an address outside of enrollments.
type Owner struct {
	Kind OwnerKind
	Name string
}

// OwnerKind is the kind of object that has an address.
type OwnerKind string

// Kinds of objects that have addresses.
const (
	OwnerNode    OwnerKind = "Node"
	OwnerService OwnerKind = "Service"
)

// addresses maps addresses to their owners.
type addresses struct {
	mu      sync.RWMutex
	owners  map[netip.Addr]map[Owner]bool
	byOwner map[Owner][]netip.Addr
}

// put replaces all addresses of o; without texts, o is removed. Texts that are not addresses are ignored: a Service's IP
// may be "None".
func (a *addresses) put(o Owner, texts ...string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.owners == nil {
		a.owners, a.byOwner = map[netip.Addr]map[Owner]bool{}, map[Owner][]netip.Addr{}
	}
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
			a.owners[ip] = map[Owner]bool{}
		}
		a.owners[ip][o] = true
		a.byOwner[o] = append(a.byOwner[o], ip)
	}
}

// AddressOwners returns the Nodes and Services that have the address.
func (s *State) AddressOwners(ip netip.Addr) []Owner {
	a := &s.addresses
	a.mu.RLock()
	defer a.mu.RUnlock()
	out := make([]Owner, 0, len(a.owners[ip]))
	for o := range a.owners[ip] {
		out = append(out, o)
	}
	return out
}

func (s *State) setNode(n *corev1.Node) {
	var ips []string
	for _, a := range n.Status.Addresses {
		if a.Type == corev1.NodeInternalIP || a.Type == corev1.NodeExternalIP {
			ips = append(ips, a.Address)
		}
	}
	s.nodes.put(n)
	s.addresses.put(Owner{OwnerNode, n.Name}, ips...)
}

func (s *State) removeNode(n *corev1.Node) {
	s.nodes.remove(n.Name)
	s.addresses.put(Owner{OwnerNode, n.Name})
}

func (s *State) setService(o *corev1.Service) {
	s.services.set(o)
	s.addresses.put(Owner{OwnerService, o.Namespace + "/" + o.Name}, o.Spec.ClusterIPs...)
}

func (s *State) removeService(o *corev1.Service) {
	s.services.remove(o)
	s.addresses.put(Owner{OwnerService, o.Namespace + "/" + o.Name})
}

// Reserved reports whether clients use the name for the API server. A node's serving certificate for it could then be used
// to impersonate the API server: kubeadm puts the first two into the API server's SANs.
func (s *State) Reserved(node string) bool {
	first := func(host string) bool { // a resolver's search list can complete the first label
		label, _, _ := strings.Cut(host, ".")
		return label == node
	}
	return node == "kubernetes" || node == "localhost" || slices.ContainsFunc(s.apiServers(), first)
}

// IsControlPlaneEndpoint reports whether machines reach the API server at ip.
func (s *State) IsControlPlaneEndpoint(ip netip.Addr) bool {
	return slices.ContainsFunc(s.apiServers(), func(host string) bool {
		a, err := netip.ParseAddr(host)
		return err == nil && a.Unmap() == ip
	})
}

// apiServers returns the names and addresses by which clients may reach the API server.
func (s *State) apiServers() []string {
	info, err := s.Cluster.Info()
	if err != nil {
		return nil // then no ticket is issued
	}
	out := slices.Clone(info.APIServerSANs)
	if host, _, err := net.SplitHostPort(info.ControlPlaneEndpoint); err == nil {
		out = append(out, host)
	}
	return out
}
