package state

import (
	"context"
	"net"
	"net/netip"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
)

// serviceAddresses stores the cluster IP of each Service by NAMESPACE/NAME.
type serviceAddresses struct {
	mu sync.RWMutex
	of map[string]string
}

func (s *serviceAddresses) set(v *corev1.Service) {
	ip := ""
	for _, text := range v.Spec.ClusterIPs { // the first is the main one; "None" is no address
		if _, err := netip.ParseAddr(text); err == nil {
			ip = text
			break
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.of == nil {
		s.of = map[string]string{}
	}
	s.of[v.Namespace+"/"+v.Name] = ip
}

func (s *serviceAddresses) remove(v *corev1.Service) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.of, v.Namespace+"/"+v.Name)
}

// lookUp returns the cluster IP of NAME.NAMESPACE.svc, and any other host unchanged.
func (s *serviceAddresses) lookUp(host string) string {
	name, ok := strings.CutSuffix(host, ".svc")
	if !ok {
		return host
	}
	service, namespace, ok := strings.Cut(name, ".")
	if !ok {
		return host
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	if ip := s.of[namespace+"/"+service]; ip != "" {
		return ip
	}
	return host
}

// DialService returns a dialer that resolves Services from the informers. The cluster's DNS may be down for minutes after a
// control plane has failed, since its pods may have run there; machines are admitted nevertheless.
func (s *State) DialService(dialer *net.Dialer) func(ctx context.Context, network, addr string) (net.Conn, error) {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		if host, port, err := net.SplitHostPort(addr); err == nil {
			addr = net.JoinHostPort(s.services.lookUp(host), port)
		}
		return dialer.DialContext(ctx, network, addr)
	}
}
