package discovery

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"slices"

	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
)

// joinservicePort is the NodePort of joinservice on every control plane, unless the owner chose another.
const joinservicePort = "30090"

// Endpoints returns the joinservices to attest to, those known before in their order. A control plane also has its own, so it does not depend on other ones,
// nor on DNS. All serve at one port, which the owner may have chosen: the endpoints in the metadata have it.
func Endpoints(ctx context.Context, meta *metadata.Machine, known []string, log *slog.Logger) ([]string, error) {
	var own []netip.Addr
	if meta.Role == metadata.RoleControlPlane {
		own = meta.Addresses
	}
	meta, err := Resolve(ctx, meta, slices.Concat(known, At(&metadata.Machine{}, own)), log)
	if err != nil {
		return nil, err
	}
	return Merge(known, slices.Concat(meta.JoinEndpoints, At(meta, own))), nil
}

// At returns the endpoints of joinservices at addresses, by all ports that the endpoints of [Resolve] have.
func At(meta *metadata.Machine, addresses []netip.Addr) (out []string) {
	var ports []string
	for _, e := range meta.JoinEndpoints {
		if _, port, err := net.SplitHostPort(e); err == nil && !slices.Contains(ports, port) {
			ports = append(ports, port)
		}
	}
	for _, port := range append(ports, joinservicePort) { // the metadata's may be a load balancer's
		for _, a := range addresses {
			if e := net.JoinHostPort(a.String(), port); !slices.Contains(out, e) {
				out = append(out, e)
			}
		}
	}
	return out
}
