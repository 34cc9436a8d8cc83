package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/internal/image/layout"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
)

// maxConfig limits a file of the config medium, in bytes.
const maxConfig = 256 << 10

// network is the content of network.yaml. Like the whole config medium, it is not measured. False values can isolate
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
	MTU       int      `json:"mtu,omitempty"`     // bytes; 0: the driver's
}

const (
	networkKind    = "MachineNetwork"
	maxInterfaces  = 16
	maxNameservers = 3 // resolv.conf(5)
	maxNTP         = 8
)

func parseNetwork(b []byte) (*network, error) {
	n := &network{}
	if err := yaml.UnmarshalStrict(b, n, yaml.DisallowUnknownFields); err != nil {
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

// config waits for the config medium and reads it. The network is nil if DHCP configures it.
func (b *boot) config(ctx context.Context) (*metadata.Machine, *network, error) {
	for {
		device, err := await(ctx, devices, func() (string, error) { return labelled("/sys", "/dev", layout.ConfigLabel) })
		if errors.Is(err, errNotYet) {
			b.print("waiting for the config medium: %v; it has to hold %s", err, layout.MetadataFile)
			continue
		}
		if err != nil {
			return nil, nil, err
		}
		m, n, err := takeConfig(device)
		if err == nil {
			b.print("this machine is %s, and asks to be a %s; its metadata are from %s", m.Name, m.Role, device)
			return m, n, nil
		}
		b.print("the config medium %s can't be used: %v; reading it again in %s", device, err, before)
		if err := wait(ctx, before); err != nil {
			return nil, nil, err
		}
	}
}

// takeConfig copies the medium's files to their paths for this boot.
func takeConfig(device string) (*metadata.Machine, *network, error) {
	const at = "/run/muster/medium"
	if err := os.MkdirAll(at, 0o700); err != nil {
		return nil, nil, err
	}
	if err := unix.Mount(device, at, "vfat", unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return nil, nil, fmt.Errorf("mount it: %w", err)
	}
	defer func() { _ = unix.Unmount(at, unix.MNT_DETACH) }()
	return readConfig(at)
}

func readConfig(dir string) (*metadata.Machine, *network, error) {
	b, err := readBounded(filepath.Join(dir, layout.MetadataFile))
	if err != nil {
		return nil, nil, err
	}
	m, err := metadata.ParseMachine(b)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", layout.MetadataFile, err)
	}
	var n *network
	nb, err := readBounded(filepath.Join(dir, layout.NetworkFile))
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, nil, err
	default:
		if n, err = parseNetwork(nb); err != nil {
			return nil, nil, fmt.Errorf("%s: %w", layout.NetworkFile, err)
		}
	}
	return m, n, write(layout.RunMetadata, b)
}

func readBounded(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxConfig+1))
	if err != nil {
		return nil, err
	}
	if len(b) > maxConfig {
		return nil, fmt.Errorf("%s: longer than %d bytes", filepath.Base(name), maxConfig)
	}
	return b, nil
}

// linkTimeout is how long an interface may take to appear.
const linkTimeout = 30 * time.Second
