// Package admission bounds what unauthenticated peers can make a process spend: connections,
// memory, processor time and TPM time.
//
// Think of each resource as a capacity that sources share. A source is what one party can be
// assumed to own: an IPv4 address or an IPv6 /64 (RFC 6177). While there is room, everybody is
// served. When there is none, the source that holds the most gives way to one that holds
// less: so a few sources cannot keep others out, however often they come, and the worst case
// of a process is the sum of its capacities.
//
// [Limiter] shares what is held (places, bytes), [Rate] what arrives, [Queue] what is worked
// on one after another.
package admission

import (
	"net"
	"net/netip"
)

// Source is who is charged: an IPv4 address or an IPv6 /64. The zero value stands for all
// addresses that are none, as those of unix sockets; they are one source.
type Source = netip.Prefix

// SourceOf returns the source of a network address.
func SourceOf(a net.Addr) Source {
	if a == nil {
		return Source{}
	}
	return SourceOfAddress(a.String())
}

// SourceOfAddress returns the source of an address as [http.Request] has it in RemoteAddr:
// IP:PORT.
func SourceOfAddress(addr string) Source {
	ap, err := netip.ParseAddrPort(addr)
	if err != nil {
		return Source{}
	}
	ip := ap.Addr().Unmap().WithZone("")
	bits := 32
	if ip.Is6() {
		bits = 64
	}
	p, err := ip.Prefix(bits)
	if err != nil {
		return Source{}
	}
	return p
}
