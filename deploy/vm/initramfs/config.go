package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata/provider"
)

// network is the content of network.yaml, or of another source's document of this kind. Like all metadata, it is not measured. False values can isolate
// the machine but disclose nothing, because all connections are attested.
type network struct {
	APIVersion string `json:"apiVersion"` // muster.dev/v1alpha1
	Kind       string `json:"kind"`       // MachineNetwork
	// Interfaces that get addresses; the others stay down.
	Interfaces []netInterface `json:"interfaces"`
	// Nameservers go to resolv.conf, at most three.
	Nameservers []string `json:"nameservers,omitempty"`
	// NTP are addresses of servers that systemd-timesyncd asks for the time, at most eight. None: it doesn't run.
	NTP []string `json:"ntp,omitempty"`
}

type netInterface struct {
	MAC       string   `json:"mac"`               // of the interface; empty: the only one
	Addresses []string `json:"addresses"`         // ADDRESS/BITS
	Gateway   string   `json:"gateway,omitempty"` // of the default route
	MTU       int      `json:"mtu,omitempty"`     // bytes; 0 for the driver's
}

const (
	networkKind    = "MachineNetwork"
	maxInterfaces  = 16
	maxNameservers = 3 // resolv.conf(5)
	maxNTP         = 8
)

func parseNetwork(b []byte) (*network, error) {
	n := &network{}
	if err := metadata.Unmarshal(b, n); err != nil {
		return nil, err
	}
	if n.APIVersion != metadata.APIVersion || n.Kind != networkKind {
		return nil, fmt.Errorf("want apiVersion %s and kind %s, not %q and %q", metadata.APIVersion, networkKind, n.APIVersion, n.Kind)
	}
	if len(n.Interfaces) == 0 || len(n.Interfaces) > maxInterfaces {
		return nil, fmt.Errorf("interfaces: want 1 to %d, not %d", maxInterfaces, len(n.Interfaces))
	}
	if len(n.Nameservers) > maxNameservers {
		return nil, fmt.Errorf("nameservers: at most %d, not %d", maxNameservers, len(n.Nameservers))
	}
	if len(n.NTP) > maxNTP {
		return nil, fmt.Errorf("ntp: at most %d, not %d", maxNTP, len(n.NTP))
	}
	for field, list := range map[string][]string{"nameservers": n.Nameservers, "ntp": n.NTP} {
		for i, s := range list {
			if a, err := netip.ParseAddr(s); err != nil || a.Zone() != "" {
				return nil, fmt.Errorf("%s[%d]: want an IP address, not %q", field, i, s)
			}
		}
	}
	for i, f := range n.Interfaces {
		if err := f.check(len(n.Interfaces)); err != nil {
			return nil, fmt.Errorf("interfaces[%d].%w", i, err)
		}
	}
	return n, nil
}

func (f netInterface) check(of int) error {
	if _, err := net.ParseMAC(f.MAC); err != nil && (f.MAC != "" || of > 1) {
		return fmt.Errorf("mac: want one like 52:54:00:12:34:56, not %q; it may be missing if there is one interface only", f.MAC)
	}
	if len(f.Addresses) == 0 || len(f.Addresses) > maxInterfaces {
		return fmt.Errorf("addresses: want 1 to %d, not %d", maxInterfaces, len(f.Addresses))
	}
	for i, s := range f.Addresses {
		p, err := netip.ParsePrefix(s)
		if err != nil || p.Addr().IsUnspecified() || p.Addr().IsMulticast() || p.Addr().IsLoopback() {
			return fmt.Errorf("addresses[%d]: want ADDRESS/BITS of this machine, not %q", i, s)
		}
	}
	if a, err := netip.ParseAddr(f.Gateway); f.Gateway != "" && (err != nil || a.Zone() != "") {
		return fmt.Errorf("gateway: want an IP address, not %q", f.Gateway)
	}
	if f.MTU != 0 && (f.MTU < 576 || f.MTU > 65535) {
		return fmt.Errorf("mtu: want 576 to 65535 bytes, not %d", f.MTU)
	}
	return nil
}

// config waits for the machine's metadata and writes their file for this boot. It configures the network first if they are a cloud's; the network is nil if
// DHCP configures it. While neither DHCP nor the cloud answers, it looks into the other sources again and again.
func (b *boot) config(ctx context.Context, img *metadata.Image, at provider.Machine) (*metadata.Machine, *network, error) {
	local, disks, cloud := at.Choose(img.Metadata)
	every := at
	every.Disks = true
	find := func(at provider.Machine, names []string) (*provider.Found, error) {
		f, err := at.Find(ctx, names)
		if errors.Is(err, provider.ErrAbsent) {
			err = fmt.Errorf("%w: %w", errNotYet, err)
		}
		return f, err
	}
	for {
		found, err := await(ctx, b.settle, func() (*provider.Found, error) { return find(at, local) })
		if errors.Is(err, errNotYet) && (len(cloud) == 0 || len(disks) > 0) {
			most := devices
			if len(cloud) > 0 {
				most = 0 // once
			}
			found, err = await(ctx, most, func() (*provider.Found, error) {
				f, err := find(at, local)
				if errors.Is(err, errNotYet) && len(disks) > 0 {
					f, err = find(every, disks)
				}
				return f, err
			})
		}
		if errors.Is(err, errNotYet) && len(cloud) > 0 {
			if err = b.byDHCP(ctx); err == nil {
				found, err = at.Find(ctx, cloud)
			}
		}
		if errors.Is(err, errNotYet) {
			b.print("waiting for this machine's metadata: %v", err)
			continue
		}
		if err == nil {
			m, n, uerr := b.use(found)
			if err = uerr; err == nil {
				return m, n, nil
			}
		}
		b.print("this machine has no usable metadata: %v; looking again in %s", err, before)
		if err := wait(ctx, before); err != nil {
			return nil, nil, err
		}
	}
}

// dhcpTime is how long the network of a cloud's machine is awaited before the other sources are looked at again.
const dhcpTime = time.Minute

// byDHCP configures the network of a machine that may be a cloud's.
func (b *boot) byDHCP(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, dhcpTime)
	defer cancel()
	connect := b.connect
	if connect == nil {
		connect = func(ctx context.Context) error { return b.up(ctx, nil) }
	}
	if err := connect(ctx); err != nil {
		return fmt.Errorf("no network for the cloud's metadata service within %s: %w; a credential, or a CD with metadata, can be attached instead", dhcpTime, err)
	}
	return nil
}

// use completes and parses what was found, and writes the file.
func (b *boot) use(found *provider.Found) (*metadata.Machine, *network, error) {
	file, m, err := metadata.Complete(found.Document, found.Platform, found.Source)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: MachineMetadata: %w", found.From, err)
	}
	var n *network
	if found.Network != nil {
		if n, err = parseNetwork(found.Network); err != nil {
			return nil, nil, fmt.Errorf("%s: %s: %w", found.From, networkKind, err)
		}
		if b.servers != nil { // it would add to what DHCP has configured
			return nil, nil, fmt.Errorf("%s has a document of kind %s, and DHCP has configured the network already: reboot the machine, or remove the document if the metadata are a cloud's", found.From, networkKind)
		}
	}
	if err := write(b.metadata, file); err != nil {
		return nil, nil, err
	}
	b.print("this machine is %s, and asks to be a %s; its metadata are from %s", m.Name, m.Role, m.Source)
	return m, n, nil
}

// linkTimeout is how long an interface may take to appear.
const linkTimeout = 30 * time.Second
