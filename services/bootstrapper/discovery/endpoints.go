package discovery

import (
	"net"
	"slices"

	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
)

// joinservicePort is where every control plane serves joinservice, a NodePort, if its owner has chosen no other.
const joinservicePort = "30090"

// Endpoints returns the joinservices to attest to. A control plane has one of its own, so it does not
// depend on those that were there before it. All serve at one port, which its owner may have chosen: the
// endpoints that the machine was given have it.
func Endpoints(meta *metadata.Machine) []string {
	out := Merge(nil, meta.JoinEndpoints)
	if meta.Role != metadata.RoleControlPlane {
		return out
	}
	var ports []string
	for _, e := range meta.JoinEndpoints {
		if _, port, err := net.SplitHostPort(e); err == nil && !slices.Contains(ports, port) {
			ports = append(ports, port)
		}
	}
	for _, port := range append(ports, joinservicePort) { // the others' may be a load balancer's
		for _, a := range meta.Addresses {
			out = Merge(out, append(out, net.JoinHostPort(a.String(), port)))
		}
	}
	return out
}
