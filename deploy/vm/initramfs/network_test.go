package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/server4"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// space is a network namespace of its own, with one thread in it.
type space struct {
	fd   int
	work chan func() error
	done chan error
}

func newSpace(t *testing.T) *space {
	t.Helper()
	s := &space{work: make(chan func() error), done: make(chan error)}
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine, and the namespace with it
		for f := range s.work {
			s.done <- f()
		}
	}()
	t.Cleanup(func() { close(s.work) })
	s.do(t, func() (err error) {
		if err = unix.Unshare(unix.CLONE_NEWNET); err == nil {
			s.fd, err = unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		}
		return err
	})
	t.Cleanup(func() { _ = unix.Close(s.fd) })
	return s
}

func (s *space) do(t *testing.T, f func() error) {
	t.Helper()
	s.work <- f
	if err := <-s.done; err != nil {
		t.Fatal(err)
	}
}

// add makes an interface whose other end, of the same name, is at the site.
func add(name string, site *space) error {
	return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name, PeerNamespace: netlink.NsFd(site.fd)})
}

func TestNoInterfaceTakesRouterAdvertisements(t *testing.T) {
	site := newSpace(t)
	newSpace(t).do(t, func() error {
		if err := add("before", site); err != nil {
			return err
		}
		if err := noAdvertisements(); err != nil {
			return err
		}
		if err := add("after", site); err != nil {
			return err
		}
		for _, name := range []string{"all", "default", "lo", "before", "after"} {
			b, err := os.ReadFile("/proc/sys/net/ipv6/conf/" + name + "/accept_ra")
			if err != nil {
				return err
			}
			if string(b) != "0\n" {
				return fmt.Errorf("%s: accept_ra is %q", name, b)
			}
		}
		return nil
	})
}

// serve answers DHCP on a site's interface.
func serve(t *testing.T, site *space, name string, options ...dhcpv4.Modifier) {
	t.Helper()
	var server *server4.Server
	site.do(t, func() error {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		own := net.IPv4(192, 0, 2, 1)
		if err := netlink.AddrAdd(link, &netlink.Addr{IPNet: &net.IPNet{IP: own, Mask: net.CIDRMask(24, 32)}}); err != nil {
			return err
		}
		server, err = server4.NewServer(name, &net.UDPAddr{IP: net.IPv4zero, Port: dhcpv4.ServerPort}, func(c net.PacketConn, to net.Addr, m *dhcpv4.DHCPv4) {
			kind := dhcpv4.MessageTypeOffer
			if m.MessageType() == dhcpv4.MessageTypeRequest {
				kind = dhcpv4.MessageTypeAck
			}
			answer, err := dhcpv4.NewReplyFromRequest(m, append([]dhcpv4.Modifier{
				dhcpv4.WithMessageType(kind), dhcpv4.WithYourIP(net.IPv4(192, 0, 2, 9)), dhcpv4.WithServerIP(own), dhcpv4.WithNetmask(net.CIDRMask(24, 32)),
				dhcpv4.WithLeaseTime(600), dhcpv4.WithOption(dhcpv4.OptServerIdentifier(own)), dhcpv4.WithRouter(own),
			}, options...)...)
			if err == nil {
				_, err = c.WriteTo(answer.ToBytes(), to)
			}
			if err != nil && !errors.Is(err, net.ErrClosed) {
				t.Error(err)
			}
		})
		return err
	})
	ended := make(chan struct{})
	go func() { defer close(ended); _ = server.Serve() }()
	t.Cleanup(func() { _ = server.Close(); <-ended })
}

// Of several interfaces, the one with a DHCP server is used. The others, without a link or without a server, are down at the end.
func TestTheInterfaceWithADHCPServerIsUsed(t *testing.T) {
	site, machine := newSpace(t), newSpace(t)
	names := []string{"cut", "silent", "served"}
	machine.do(t, func() error {
		for _, name := range names {
			if err := add(name, site); err != nil {
				return err
			}
		}
		return nil
	})
	site.do(t, func() error {
		for _, name := range names[1:] {
			link, err := netlink.LinkByName(name)
			if err == nil {
				err = netlink.LinkSetUp(link)
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
	metadata := &net.IPNet{IP: net.IPv4(169, 254, 169, 254), Mask: net.CIDRMask(32, 32)}
	serve(t, site, "served", dhcpv4.WithOption(dhcpv4.OptClasslessStaticRoute(
		&dhcpv4.Route{Dest: &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}, Router: net.IPv4(192, 0, 2, 2)},
		&dhcpv4.Route{Dest: &net.IPNet{IP: net.IPv4(198, 51, 100, 0), Mask: net.CIDRMask(24, 32)}, Router: net.IPv4zero},
		&dhcpv4.Route{Dest: metadata, Router: net.IPv4(192, 0, 2, 3)},
	)))
	machine.do(t, func() error {
		link, o, err := lease(t.Context())
		if err != nil {
			return err
		}
		if link.Name != "served" || o.address.String() != "192.0.2.9/24" {
			return fmt.Errorf("%s has %s", link.Name, o.address)
		}
		all, err := links()
		if err != nil {
			return err
		}
		for _, l := range all {
			if up := l.Attrs().Flags&net.FlagUp != 0; up != (l.Attrs().Name == "served") {
				t.Errorf("%s is up: %v", l.Attrs().Name, up)
			}
		}
		routes, err := netlink.RouteList(nil, netlink.FAMILY_V4)
		var got []string
		for _, r := range routes {
			got = append(got, fmt.Sprintf("%v by %v", r.Dst, r.Gw))
		}
		slices.Sort(got)
		if want := []string{"0.0.0.0/0 by 192.0.2.2", "169.254.169.254/32 by 192.0.2.3", "192.0.2.0/24 by <nil>", "198.51.100.0/24 by <nil>"}; !slices.Equal(got, want) {
			t.Errorf("routes %q, want %q", got, want)
		}
		return err
	})
}

func TestAStaticNetworkOfSeveralInterfacesNamesOne(t *testing.T) {
	site := newSpace(t)
	newSpace(t).do(t, func() error {
		if _, err := linkOf(""); !errors.Is(err, errNotYet) {
			t.Errorf("no interface: %v", err)
		}
		if err := add("one", site); err != nil {
			return err
		}
		one, err := linkOf("")
		if err != nil {
			return fmt.Errorf("the only interface: %w", err)
		}
		if err := add("two", site); err != nil {
			return err
		}
		mac := one.Attrs().HardwareAddr.String()
		if _, err := linkOf(""); err == nil || errors.Is(err, errNotYet) || !strings.Contains(err.Error(), mac) {
			t.Errorf("two interfaces: %v", err)
		}
		if l, err := linkOf(strings.ToUpper(mac)); err != nil || l.Attrs().Name != "one" {
			t.Errorf("the named interface: %v", err)
		}
		if _, err := linkOf("52:54:00:00:00:01"); !errors.Is(err, errNotYet) || !strings.Contains(err.Error(), mac) {
			t.Errorf("an interface that is not there: %v", err)
		}
		return nil
	})
}
