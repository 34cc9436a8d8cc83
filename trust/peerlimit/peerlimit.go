// Package peerlimit bounds the resources that unauthenticated peers can use in a process:
// connections, memory, processor time and TPM time.
//
// Each resource is a capacity that sources share. A source is the address range that one party can
// be assumed to own: an IPv4 address or an IPv6 /64 (RFC 6177). While capacity is free, every
// source is served. When none is free, the source that holds the most gives up a place to one that
// holds less. So a few sources cannot keep others out, however often they connect, and the maximum
// use of a process is the sum of its capacities.
//
// [Limiter] shares what is held (places, bytes), [Rate] limits arrivals, and [Queue] orders work
// that is done one after another.
package peerlimit

import (
	"net"
	"net/netip"
)

// Source is the party that is charged: an IPv4 address or an IPv6 /64. The zero value stands for
// all addresses without an IP, such as those of unix sockets; they are one source.
type Source = netip.Prefix

// SourceOf returns the source of a network address.
func SourceOf(a net.Addr) Source {
	if a == nil {
		return Source{}
	}
	return SourceOfAddress(a.String())
}

// SourceOfAddress returns the source of an address in the form of [http.Request.RemoteAddr]:
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
