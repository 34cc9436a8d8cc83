package discovery

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
)

const (
	// joinservicePort is the NodePort of joinservice on every control plane, unless the owner chose another.
	joinservicePort = "30090"
	// maxPorts bounds the ports that are tried at each address of a control plane: joinservicePort, and those of the metadata's endpoints.
	maxPorts = 4
	// maxPortsOfDNS bounds the ports of DNS records that are tried there too.
	maxPortsOfDNS = 2
)

// Own returns the addresses of a control plane's own joinservice, which it can attest to without other control planes; none for another machine.
func Own(meta *metadata.Machine) []netip.Addr {
	if meta.Role == metadata.RoleControlPlane {
		return meta.Addresses
	}
	return nil
}

// Order is the order in which a machine asks joinservices. Its zero value has none.
//
// An answer of DNS must not keep a machine from the joinservices that it knows without DNS, whatever it names. So these come first, DNS's take only the places
// that are left, and an attempt in which one of DNS's failed is followed by one that begins with the others.
type Order struct { // a copy is independent: no slice is changed in place
	named  []string // by the latest Update
	fixed  int      // how many of named are known without DNS: those of the addresses given to Update, and HOST:PORT in the metadata
	failed []string // of named, the latest at the end
	ofDNS  bool     // the latest that failed was of DNS, which may not name it again
	list   []string // named, in the order of the next attempt
	served string   // the one that served last; empty if there is none
}

// List returns the endpoints of the next attempt, at most [metadata.MaxEndpoints].
func (o *Order) List() []string { return o.list }

// Served records that an endpoint is a joinservice of this cluster: it stays in the list, also if DNS no longer names it, until it fails.
func (o *Order) Served(e string) { o.served = e }

// Failed records that an endpoint failed.
func (o *Order) Failed(e string) {
	if o.served == e {
		o.served = ""
	}
	o.failed = append(slices.DeleteFunc(slices.Clone(o.failed), func(f string) bool { return f == e }), e)
	o.ofDNS = !slices.Contains(o.named[:o.fixed], e)
	o.arrange()
}

// Update takes the endpoints of the metadata, and those of control planes at addresses: these serve at one port, which the owner may have chosen, so the ports
// of other endpoints are tried too. DNS names are looked up each time, so a record's time to live has no effect. If that fails, the endpoints of the previous
// Update stay; if there are none, it is an error, which wraps [ErrUnreachable].
func (o *Order) Update(ctx context.Context, meta *metadata.Machine, addresses []netip.Addr, log *slog.Logger) error {
	return o.update(ctx, meta, addresses, net.DefaultResolver.LookupSRV, log)
}

func (o *Order) update(ctx context.Context, meta *metadata.Machine, addresses []netip.Addr, lookup lookupSRV, log *slog.Logger) error {
	static, names := split(meta.JoinEndpoints)
	list := unique(slices.Concat(at(addresses, append([]string{joinservicePort}, ports(static)...), maxPorts), static))
	fixed := min(len(list), metadata.MaxEndpoints)
	if len(names) > 0 {
		found, err := resolve(ctx, names, lookup)
		if o.served != "" {
			list = append(list, o.served)
		}
		list = append(list, at(addresses, ports(found), maxPortsOfDNS)...)
		list = append(list, found...)
		if err != nil {
			if list = append(list, o.list...); len(list) == 0 {
				return err
			}
			log.WarnContext(ctx, "joinservices could not be looked up; the known ones are asked", "err", err)
		}
		list = unique(list)
	}
	o.named, o.fixed = list[:min(len(list), metadata.MaxEndpoints)], fixed
	o.failed = slices.DeleteFunc(slices.Clone(o.failed), func(f string) bool { return !slices.Contains(o.named, f) })
	o.arrange()
	return nil
}

// arrange sorts the list: endpoints that failed are at the end, the latest last. If that one is of DNS, those known without DNS are at the start nevertheless.
func (o *Order) arrange() {
	o.list = slices.Clone(o.named)
	parts := [][]string{o.list}
	if o.ofDNS {
		parts = [][]string{o.list[:o.fixed], o.list[o.fixed:]}
	}
	for _, p := range parts {
		slices.SortStableFunc(p, func(a, b string) int { return slices.Index(o.failed, a) - slices.Index(o.failed, b) })
	}
}

// split returns the endpoints HOST:PORT, and the names of SRV records.
func split(endpoints []string) (static, names []string) {
	for _, e := range endpoints {
		if name, ok := strings.CutPrefix(e, metadata.ServicePrefix); ok {
			names = append(names, name)
		} else {
			static = append(static, e)
		}
	}
	return static, names
}

// at returns the endpoints at addresses with the first ports, up to the given limit; all addresses with one port come before
// those with the next port.
func at(addresses []netip.Addr, ports []string, most int) (out []string) {
	ports = unique(ports)
	for _, port := range ports[:min(len(ports), most)] {
		for _, a := range addresses {
			out = append(out, net.JoinHostPort(a.String(), port))
		}
	}
	return out
}

func ports(endpoints []string) (out []string) {
	for _, e := range endpoints {
		if _, port, err := net.SplitHostPort(e); err == nil {
			out = append(out, port)
		}
	}
	return out
}

// unique returns each text once, where it is first.
func unique(all []string) (out []string) {
	for _, s := range all {
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	return out
}
