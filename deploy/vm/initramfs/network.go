package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/muster-k8s/muster/internal/image/layout"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
)

// servers are addresses that the site provides: IP addresses, in order of preference.
type servers struct{ names, clocks []string }

// up configures the machine's network once, by a document or by DHCP.
func (b *boot) up(ctx context.Context, n *network) error {
	if b.servers != nil {
		return nil
	}
	if err := noAdvertisements(); err != nil {
		return fmt.Errorf("the network: %w", err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("the network: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("the network: lo: %w", err)
	}
	var found servers
	if n == nil {
		found, err = b.dhcp(ctx)
	} else {
		found, err = servers{n.Nameservers, n.NTP}, b.static(ctx, n)
	}
	if err != nil {
		return fmt.Errorf("the network: %w", err)
	}
	b.servers = &found
	return nil
}

// names writes the files to which the root's resolv.conf and hosts are links, and the one that systemd-timesyncd waits for.
func (b *boot) names(m *metadata.Machine) error {
	if err := write(layout.RunHosts, hosts(m)); err != nil {
		return err
	}
	if clocks := b.servers.clocks; len(clocks) > 0 {
		b.print("the time comes from %s", strings.Join(clocks, ", "))
		if err := write(layout.RunClock, clock(clocks)); err != nil {
			return err
		}
	}
	return write(layout.RunResolv, resolv(b.servers.names))
}

// noAdvertisements makes all interfaces, also later ones, ignore IPv6 router advertisements (accept_ra in the kernel's ip-sysctl). A neighbor could otherwise reach the
// machine from any number of addresses, past the limits for each source. A kernel without IPv6 has no such files.
func noAdvertisements() error {
	files, err := filepath.Glob("/proc/sys/net/ipv6/conf/*/accept_ra")
	for _, f := range files {
		err = errors.Join(err, os.WriteFile(f, []byte("0"), 0))
	}
	return err
}

// clock is a drop-in of systemd-timesyncd (timesyncd.conf(5)).
func clock(servers []string) []byte {
	return fmt.Appendf(nil, "[Time]\nNTP=%s\n", strings.Join(servers[:min(len(servers), maxNTP)], " "))
}

func hosts(m *metadata.Machine) []byte {
	return fmt.Appendf(nil, "127.0.0.1 localhost\n::1 localhost\n%s %s\n", m.Addresses[0], m.Name)
}

func resolv(servers []string) []byte {
	var b strings.Builder
	for _, s := range servers[:min(len(servers), maxNameservers)] {
		fmt.Fprintf(&b, "nameserver %s\n", s)
	}
	return []byte(b.String())
}

// static configures interfaces by the medium's document.
func (b *boot) static(ctx context.Context, n *network) error {
	for _, f := range n.Interfaces {
		link, err := await(ctx, linkTimeout, func() (netlink.Link, error) { return linkOf(f.MAC) })
		if err != nil {
			return err
		}
		if f.MTU != 0 {
			if err := netlink.LinkSetMTU(link, f.MTU); err != nil {
				return fmt.Errorf("%s: MTU %d: %w", link.Attrs().Name, f.MTU, err)
			}
		}
		var gateway netip.Addr
		if f.Gateway != "" {
			gateway = netip.MustParseAddr(f.Gateway)
		}
		var addresses []netip.Prefix
		for _, s := range f.Addresses {
			addresses = append(addresses, netip.MustParsePrefix(s))
		}
		if err := configure(link, addresses, gateway); err != nil {
			return err
		}
		b.print("network: %s has %s", link.Attrs().Name, strings.Join(f.Addresses, ", "))
	}
	return nil
}

// links returns the Ethernet interfaces; none is errNotYet.
func links() ([]netlink.Link, error) {
	all, err := netlink.LinkList()
	if err != nil {
		return nil, err
	}
	all = slices.DeleteFunc(all, func(l netlink.Link) bool {
		return l.Attrs().Flags&net.FlagLoopback != 0 || l.Attrs().EncapType != "ether"
	})
	if len(all) == 0 {
		return nil, fmt.Errorf("a network interface: %w", errNotYet)
	}
	return all, nil
}

// linkOf returns the interface with an address; without one, the only interface.
func linkOf(mac string) (netlink.Link, error) {
	all, err := links()
	if err != nil {
		return nil, err
	}
	if mac == "" {
		if len(all) > 1 {
			return nil, fmt.Errorf("interfaces[0].mac is missing, and this machine has several interfaces: write one of %s", macs(all))
		}
		return all[0], nil
	}
	want, _ := net.ParseMAC(mac)
	for _, l := range all {
		if l.Attrs().HardwareAddr.String() == want.String() {
			return l, nil
		}
	}
	return nil, fmt.Errorf("a network interface with the address %s: %w; there are %s", mac, errNotYet, macs(all))
}

func macs(all []netlink.Link) string {
	var out []string
	for _, l := range all {
		out = append(out, l.Attrs().HardwareAddr.String())
	}
	return strings.Join(out, ", ")
}

func configure(link netlink.Link, addresses []netip.Prefix, gateway netip.Addr) error {
	name := link.Attrs().Name
	for _, a := range addresses {
		addr := &netlink.Addr{IPNet: &net.IPNet{IP: a.Addr().AsSlice(), Mask: net.CIDRMask(a.Bits(), a.Addr().BitLen())}}
		if a.Addr().Is6() {
			addr.Flags = unix.IFA_F_NODAD // the address has to work at once
		}
		if err := netlink.AddrReplace(link, addr); err != nil {
			return fmt.Errorf("%s: address %s: %w", name, a, err)
		}
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if !gateway.IsValid() {
		return nil
	}
	return addRoute(link, route{gateway: gateway}, addresses)
}

// route leads to a network. The zero network is the default route, and the zero gateway is none: the network is at the interface.
type route struct {
	to      netip.Prefix
	gateway netip.Addr
}

func addRoute(link netlink.Link, r route, addresses []netip.Prefix) error {
	out, to := &netlink.Route{LinkIndex: link.Attrs().Index}, "all networks"
	if r.to.IsValid() && r.to.Bits() > 0 {
		to = r.to.String()
		out.Dst = &net.IPNet{IP: r.to.Addr().AsSlice(), Mask: net.CIDRMask(r.to.Bits(), r.to.Addr().BitLen())}
	}
	switch {
	case !r.gateway.IsValid() || r.gateway.IsUnspecified():
		out.Scope = netlink.SCOPE_LINK
	case !slices.ContainsFunc(addresses, func(a netip.Prefix) bool { return a.Contains(r.gateway) }): // clouds give an address without a network, as 10.0.0.2/32
		out.Flags = int(netlink.FLAG_ONLINK)
		fallthrough
	default:
		out.Gw = r.gateway.AsSlice()
	}
	if err := netlink.RouteReplace(out); err != nil {
		return fmt.Errorf("%s: route to %s by %s: %w", link.Attrs().Name, to, r.gateway, err)
	}
	return nil
}

// dhcp asks for an address until it has one (RFC 2131), and leaves the lease's renewal to systemd-networkd. It
// returns the servers that the lease names.
func (b *boot) dhcp(ctx context.Context) (servers, error) {
	for {
		link, l, err := lease(ctx)
		if err == nil {
			b.print("network: %s has %s by DHCP", link.Name, l.address)
			return l.servers, write("/run/systemd/network/10-muster.network", renewal(link.HardwareAddr))
		}
		if ctx.Err() != nil {
			return servers{}, err
		}
		b.print("waiting for an address by DHCP: %v; a document of kind %s in the metadata may configure it instead", err, networkKind)
	}
}

const (
	// carrierTimeout is how long interfaces may take to find a link after they are up; a switch's negotiation takes a few seconds.
	carrierTimeout = 10 * time.Second
	// leaseTimeout bounds the attempt to get an address by one interface. The client repeats a lost message twice in it.
	leaseTimeout = 15 * time.Second
	// maxRoutes bounds the routes that are taken of a lease.
	maxRoutes = 32
)

// lease configures the first interface on which a DHCP server answers. Those without a link are not asked; all others are down again at the end.
func lease(ctx context.Context) (*netlink.LinkAttrs, offer, error) {
	all, err := await(ctx, linkTimeout, links)
	if err != nil {
		return nil, offer{}, err
	}
	for _, l := range all {
		err = errors.Join(err, netlink.LinkSetUp(l))
	}
	connected, cerr := await(ctx, carrierTimeout, func() ([]netlink.Link, error) {
		now, err := links()
		if now = slices.DeleteFunc(now, func(l netlink.Link) bool { return l.Attrs().RawFlags&unix.IFF_LOWER_UP == 0 }); err == nil && len(now) == 0 {
			err = fmt.Errorf("a cable or virtual network at one of the interfaces %s: %w", macs(all), errNotYet)
		}
		return now, err
	})
	if err = errors.Join(err, cerr); len(connected) == 0 {
		return nil, offer{}, err
	}
	for _, l := range connected {
		o, oerr := ask(ctx, l)
		if oerr != nil {
			err = errors.Join(err, fmt.Errorf("%s (%s): %w", l.Attrs().Name, l.Attrs().HardwareAddr, oerr))
			continue
		}
		var down error
		for _, other := range all {
			if other.Attrs().Index != l.Attrs().Index {
				down = errors.Join(down, netlink.LinkSetDown(other))
			}
		}
		return l.Attrs(), o, down
	}
	return nil, offer{}, err
}

// ask asks for an address on one interface, and configures it.
func ask(ctx context.Context, link netlink.Link) (offer, error) {
	ctx, cancel := context.WithTimeout(ctx, leaseTimeout)
	defer cancel()
	client, err := nclient4.New(link.Attrs().Name)
	if err != nil {
		return offer{}, errors.Join(err, wait(ctx, time.Second))
	}
	defer func() { _ = client.Close() }()
	l, err := client.Request(ctx, dhcpv4.WithRequestedOptions(dhcpv4.OptionNTPServers, dhcpv4.OptionClasslessStaticRoute))
	if err != nil {
		return offer{}, errors.Join(err, wait(ctx, time.Second))
	}
	o, err := offered(l.ACK)
	if err != nil {
		return offer{}, errors.Join(err, wait(ctx, time.Second))
	}
	err = configure(link, []netip.Prefix{o.address}, o.gateway)
	for _, r := range o.routes {
		if err == nil {
			err = addRoute(link, r, []netip.Prefix{o.address})
		}
	}
	return o, err
}

// offer is what a DHCP server gives this machine.
type offer struct {
	address netip.Prefix
	gateway netip.Addr // invalid: none
	routes  []route    // instead of the gateway
	servers
}

// offered returns those parts of the server's answer that this machine uses.
func offered(ack *dhcpv4.DHCPv4) (o offer, err error) {
	ip, ok := netip.AddrFromSlice(ack.YourIPAddr.To4())
	bits, size := ack.SubnetMask().Size()
	if !ok || ip.IsUnspecified() || ip.IsMulticast() || size != 32 || bits == 0 {
		return o, fmt.Errorf("the server offered the address %v with the mask %v", ack.YourIPAddr, ack.SubnetMask())
	}
	o.address = netip.PrefixFrom(ip, bits)
	if r := ack.Router(); len(r) > 0 {
		o.gateway, _ = netip.AddrFromSlice(r[0].To4())
	}
	if all := ack.ClasslessStaticRoute(); len(all) > 0 { // the router is ignored then (RFC 3442)
		o.gateway = netip.Addr{}
		for _, r := range all[:min(len(all), maxRoutes)] {
			to, _ := netip.AddrFromSlice(r.Dest.IP.To4())
			bits, _ := r.Dest.Mask.Size()
			gateway, _ := netip.AddrFromSlice(r.Router.To4())
			o.routes = append(o.routes, route{to: netip.PrefixFrom(to, bits).Masked(), gateway: gateway})
		}
	}
	for _, s := range ack.DNS() {
		o.names = append(o.names, s.String())
	}
	for _, s := range ack.NTPServers() {
		o.clocks = append(o.clocks, s.String())
	}
	return o, nil
}

// renewal is the configuration with which systemd-networkd continues (systemd.network(5)). It leaves addresses and
// routes of other programs, such as a CNI plugin, unchanged.
func renewal(mac net.HardwareAddr) []byte {
	return fmt.Appendf(nil, "[Match]\nMACAddress=%s\nType=ether\n\n[Network]\nDHCP=ipv4\nKeepConfiguration=yes\nLinkLocalAddressing=no\nIPv6AcceptRA=no\n\n[DHCPv4]\nUseHostname=no\nUseDNS=no\nUseNTP=no\n", mac)
}
