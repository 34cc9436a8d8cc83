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

// static configures interfaces as the medium says.
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

// linkOf finds an Ethernet interface by its address; without one, the first.
func linkOf(mac string) (netlink.Link, error) {
	all, err := netlink.LinkList()
	if err != nil {
		return nil, err
	}
	want, _ := net.ParseMAC(mac)
	for _, l := range all {
		a := l.Attrs()
		if a.Flags&net.FlagLoopback != 0 || a.EncapType != "ether" {
			continue
		}
		if mac == "" || a.HardwareAddr.String() == want.String() {
			return l, nil
		}
	}
	if mac == "" {
		return nil, fmt.Errorf("a network interface: %w", errNotYet)
	}
	return nil, fmt.Errorf("a network interface with the address %s: %w", mac, errNotYet)
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
	route := &netlink.Route{LinkIndex: link.Attrs().Index, Gw: gateway.AsSlice()}
	if !slices.ContainsFunc(addresses, func(a netip.Prefix) bool { return a.Contains(gateway) }) { // clouds give an address without a network, as 10.0.0.2/32
		route.Flags = int(netlink.FLAG_ONLINK)
	}
	if err := netlink.RouteReplace(route); err != nil {
		return fmt.Errorf("%s: default route by %s: %w", name, gateway, err)
	}
	return nil
}

// dhcp asks for an address until it has one (RFC 2131), and leaves the lease's renewal to systemd-networkd. It
// returns the servers that the lease names.
func (b *boot) dhcp(ctx context.Context) (servers, error) {
	for {
		found, err := b.lease(ctx)
		if err == nil || ctx.Err() != nil {
			return found, err
		}
		b.print("waiting for an address by DHCP: %v; a document of kind %s in the metadata may configure it instead", err, networkKind)
	}
}

func (b *boot) lease(ctx context.Context) (servers, error) {
	const most = time.Minute
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	link, err := await(ctx, linkTimeout, func() (netlink.Link, error) { return linkOf("") })
	if err != nil {
		return servers{}, err
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return servers{}, err
	}
	name := link.Attrs().Name
	client, err := nclient4.New(name)
	if err != nil {
		return servers{}, errors.Join(err, wait(ctx, time.Second))
	}
	defer func() { _ = client.Close() }()
	l, err := client.Request(ctx, dhcpv4.WithRequestedOptions(dhcpv4.OptionNTPServers))
	if err != nil {
		return servers{}, errors.Join(err, wait(ctx, time.Second))
	}
	address, gateway, found, err := offered(l.ACK)
	if err != nil {
		return servers{}, errors.Join(err, wait(ctx, time.Second))
	}
	if err := configure(link, []netip.Prefix{address}, gateway); err != nil {
		return servers{}, err
	}
	b.print("network: %s has %s by DHCP", name, address)
	return found, write("/run/systemd/network/10-muster.network", renewal(link.Attrs().HardwareAddr))
}

// offered returns those parts of the server's answer that this machine uses.
func offered(ack *dhcpv4.DHCPv4) (address netip.Prefix, gateway netip.Addr, found servers, err error) {
	ip, ok := netip.AddrFromSlice(ack.YourIPAddr.To4())
	bits, size := ack.SubnetMask().Size()
	if !ok || ip.IsUnspecified() || ip.IsMulticast() || size != 32 || bits == 0 {
		return address, gateway, found, fmt.Errorf("the server offered the address %v with the mask %v", ack.YourIPAddr, ack.SubnetMask())
	}
	if r := ack.Router(); len(r) > 0 {
		gateway, _ = netip.AddrFromSlice(r[0].To4())
	}
	for _, s := range ack.DNS() {
		found.names = append(found.names, s.String())
	}
	for _, s := range ack.NTPServers() {
		found.clocks = append(found.clocks, s.String())
	}
	return netip.PrefixFrom(ip, bits), gateway, found, nil
}

// renewal is the configuration with which systemd-networkd continues (systemd.network(5)). It leaves addresses and
// routes of other programs, such as a CNI plugin, unchanged.
func renewal(mac net.HardwareAddr) []byte {
	return fmt.Appendf(nil, "[Match]\nMACAddress=%s\nType=ether\n\n[Network]\nDHCP=ipv4\nKeepConfiguration=yes\nLinkLocalAddressing=no\nIPv6AcceptRA=no\n\n[DHCPv4]\nUseHostname=no\nUseDNS=no\nUseNTP=no\n", mac)
}
