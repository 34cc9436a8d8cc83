package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"

	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/internal/image/layout"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func place(t *testing.T, dir, name, content string) {
	t.Helper()
	file := filepath.Join(dir, name)
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestDisksAreFoundByTheirSerialNumbers(t *testing.T) {
	sys := t.TempDir()
	place(t, sys, "block/vda/serial", "boot\n")
	place(t, sys, "block/vdb/serial", "muster-state")
	place(t, sys, "block/nvme0n1/device/serial", "other   \n")
	for serial, want := range map[string]string{"muster-state": "/dev/vdb", "other": "/dev/nvme0n1"} {
		if dev, err := disk(sys, serial); err != nil || dev != want {
			t.Errorf("%s: %q, %v", serial, dev, err)
		}
	}
	if dev, err := disk(sys, "muster"); !errors.Is(err, errNotYet) {
		t.Errorf("a serial number that only begins so: %q, %v", dev, err)
	}
}

// machineOf makes the folders of a machine with these partitions, DISK/PARTITION → name and first block, as
// Linux shows them.
func machineOf(t *testing.T, parts map[string][2]string) (sys, dev string) {
	t.Helper()
	dir := t.TempDir()
	sys, dev = filepath.Join(dir, "sys"), filepath.Join(dir, "dev")
	for at, p := range parts {
		name := filepath.Base(at)
		place(t, sys, "devices/"+at+"/uevent", "DEVTYPE=partition\nPARTNAME="+p[0]+"\n")
		place(t, sys, "devices/"+at+"/dev", at+"\n")
		place(t, dev, name, p[1])
		if err := os.MkdirAll(sys+"/class/block", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink("../../devices/"+at, sys+"/class/block/"+name); err != nil {
			t.Fatal(err)
		}
	}
	return sys, dev
}

func TestTheRootIsOnTheDiskWhoseTreeFitsTheHash(t *testing.T) {
	ours, other := strings.Repeat("a", layout.BlockSize), strings.Repeat("b", layout.BlockSize)
	want := layout.Root{Hash: sha256.Sum256([]byte(ours)), Blocks: 9}
	root, tree := [2]string{layout.RootName, "x"}, [2]string{layout.TreeName, ours}
	for name, parts := range map[string]map[string][2]string{
		"one disk":                     {"vdb/vdb2": root, "vdb/vdb3": tree},
		"another image's before it":    {"vda/vda2": root, "vda/vda3": {layout.TreeName, other}, "vdb/vdb2": root, "vdb/vdb3": tree},
		"another image's after it":     {"vdc/vdc2": root, "vdc/vdc3": {layout.TreeName, other}, "vdb/vdb2": root, "vdb/vdb3": tree},
		"a tree without a root before": {"vda/vda3": tree, "vdb/vdb2": root, "vdb/vdb3": tree},
		"a tree that is too short":     {"vda/vda2": root, "vda/vda3": {layout.TreeName, "a"}, "vdb/vdb2": root, "vdb/vdb3": tree},
	} {
		sys, dev := machineOf(t, parts)
		if d, h, err := rootDisk(sys, dev, want); err != nil || d != "vdb/vdb2" || h != "vdb/vdb3" {
			t.Errorf("%s: %q, %q, %v", name, d, h, err)
		}
	}
	for name, parts := range map[string]map[string][2]string{
		"nothing": nil, "no tree": {"vdb/vdb2": root}, "no root": {"vdb/vdb3": tree}, "two halves": {"vda/vda2": root, "vdb/vdb3": tree},
		"another image's": {"vdb/vdb2": root, "vdb/vdb3": {layout.TreeName, other}},
		"other names":     {"vdb/vdb2": {layout.RootName + "2", "x"}, "vdb/vdb3": {"x" + layout.TreeName, ours}},
	} {
		sys, dev := machineOf(t, parts)
		if d, h, err := rootDisk(sys, dev, want); !errors.Is(err, errNotYet) {
			t.Errorf("%s: %q, %q, %v", name, d, h, err)
		}
	}
}

func TestNothingOfTheStateDiskIsWhereSystemdLooks(t *testing.T) {
	for _, k := range kept {
		for _, searched := range append(filepath.SplitList(strings.TrimPrefix(programPath, "PATH=")), "/etc/systemd", "/run/systemd", "/usr/lib/systemd", "/usr/local/lib/systemd", "/usr/local/sbin", "/etc/modprobe.d", "/etc/udev") {
			if k.at == searched || strings.HasPrefix(searched, k.at+"/") {
				t.Errorf("%s lies on the state disk, and in it %s", k.at, searched)
			}
		}
	}
}

const machine = "apiVersion: muster.dev/v1alpha1\nkind: MachineMetadata\nname: node1\nrole: worker\naddresses: [192.0.2.7]\n"

const static = `apiVersion: muster.dev/v1alpha1
kind: MachineNetwork
interfaces:
- {mac: "52:54:00:00:00:01", addresses: [192.0.2.7/24, "2001:db8::7/64"], gateway: 192.0.2.1, mtu: 1400}
nameservers: [192.0.2.1]
ntp: [192.0.2.2, "2001:db8::2"]
`

func TestANetworkIsReadStrictly(t *testing.T) {
	n, err := parseNetwork([]byte(static))
	if err != nil || n.Interfaces[0].MTU != 1400 || len(n.Interfaces[0].Addresses) != 2 || n.Nameservers[0] != "192.0.2.1" || len(n.NTP) != 2 {
		t.Fatalf("%+v, %v", n, err)
	}
	if _, err := parseNetwork([]byte(strings.Replace(static, `mac: "52:54:00:00:00:01", `, "", 1))); err != nil {
		t.Errorf("one interface needs no address: %v", err)
	}
	second := strings.Replace(static, "nameservers", "- {addresses: [192.0.2.8/24]}\nnameservers", 1)
	for name, tt := range map[string][2]string{
		"another kind":         {strings.Replace(static, "MachineNetwork", "Network", 1), "kind"},
		"another version":      {strings.Replace(static, "v1alpha1", "v2", 1), "apiVersion"},
		"an unknown field":     {static + "colour: red\n", "colour"},
		"a doubled field":      {static + "nameservers: []\n", "nameservers"},
		"no interface":         {"apiVersion: muster.dev/v1alpha1\nkind: MachineNetwork\n", "interfaces"},
		"no mask":              {strings.Replace(static, "7/24", "7", 1), "addresses[0]"},
		"loopback":             {strings.Replace(static, "192.0.2.7/24", "127.0.0.1/8", 1), "addresses[0]"},
		"no address":           {strings.Replace(static, `[192.0.2.7/24, "2001:db8::7/64"]`, "[]", 1), "addresses"},
		"a gateway by name":    {strings.Replace(static, "gateway: 192.0.2.1", "gateway: router", 1), "gateway"},
		"a small MTU":          {strings.Replace(static, "1400", "100", 1), "mtu"},
		"a bad MAC":            {strings.Replace(static, "52:54", "zz", 1), "mac"},
		"two and one nameless": {second, "mac"},
		"a server by name":     {strings.Replace(static, "nameservers: [192.0.2.1]", "nameservers: [\"x\\n\"]", 1), "nameservers[0]"},
		"a line in a server":   {strings.Replace(static, "nameservers: [192.0.2.1]", "nameservers: [\"fe80::1%\\nsearch x\"]", 1), "nameservers[0]"},
		"a clock by name":      {strings.Replace(static, "[192.0.2.2,", "[pool.example,", 1), "ntp[0]"},
		"a line in a clock":    {strings.Replace(static, `"2001:db8::2"`, `"192.0.2.3\nFallbackNTP=x"`, 1), "ntp[1]"},
		"nine clocks":          {strings.Replace(static, "[192.0.2.2,", "["+strings.Repeat("192.0.2.2,", 8), 1), "ntp"},
		"two documents":        {static + "--- # more\n" + static, "one document"},
		"an alias":             {strings.Replace(static, "nameservers: [192.0.2.1]", "nameservers: [&a 192.0.2.1, *a]", 1), "anchors"},
		"four servers":         {strings.Replace(static, "nameservers: [192.0.2.1]", "nameservers: [192.0.2.1, 192.0.2.2, 192.0.2.3, 192.0.2.4]", 1), "nameservers"},
	} {
		if _, err := parseNetwork([]byte(tt[0])); err == nil || !strings.Contains(err.Error(), tt[1]) {
			t.Errorf("%s: %v, want %s", name, err, tt[1])
		}
	}
}

func FuzzNetwork(f *testing.F) {
	f.Add([]byte(static))
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := parseNetwork(b)
		if err != nil {
			return
		}
		for _, i := range n.Interfaces { // configure gets these without another check
			for _, a := range i.Addresses {
				netip.MustParsePrefix(a)
			}
		}
		if r := resolv(n.Nameservers); bytes.Count(r, []byte("\n")) != len(n.Nameservers) {
			t.Errorf("resolv.conf is %q", r)
		}
		if c := clock(n.NTP); bytes.Count(c, []byte("\n")) != 2 {
			t.Errorf("timesyncd's drop-in is %q", c)
		}
	})
}

func TestHostsNameTheMachine(t *testing.T) {
	m, err := metadata.ParseMachine([]byte(machine))
	if err != nil {
		t.Fatal(err)
	}
	if got := string(hosts(m)); !strings.Contains(got, "\n192.0.2.7 node1\n") {
		t.Errorf("%q", got)
	}
}

func TestTheClockAsksWhomTheSiteNamesAlone(t *testing.T) {
	if got, want := string(clock([]string{"192.0.2.2", "2001:db8::2"})), "[Time]\nNTP=192.0.2.2 2001:db8::2\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if got := clock(slices.Repeat([]string{"192.0.2.2"}, 2*maxNTP)); bytes.Count(got, []byte("192")) != maxNTP {
		t.Errorf("a lease with many servers: %q", got)
	}
	// systemd-timesyncd runs if this program or the image has written its file, and has none of Debian's servers.
	root := filepath.Join("..", "files", "root", "etc", "systemd")
	for file, want := range map[string]string{
		"system/systemd-timesyncd.service.d/site.conf": "ConditionPathExists=|" + layout.RunClock + "\nConditionDirectoryNotEmpty=|/etc/systemd/timesyncd.conf.d\n",
		"timesyncd.conf": "\nFallbackNTP=127.0.0.1\n",
	} {
		if b, err := os.ReadFile(filepath.Join(root, file)); err != nil || !strings.Contains(string(b), want) {
			t.Errorf("%s: %q, %v", file, b, err)
		}
	}
}

func TestOnlyWholeLeasesAreUsed(t *testing.T) {
	lease := func(ip net.IP, options ...dhcpv4.Option) *dhcpv4.DHCPv4 {
		d, err := dhcpv4.New(dhcpv4.WithYourIP(ip))
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range options {
			d.UpdateOption(o)
		}
		return d
	}
	ip, mask := net.IPv4(192, 0, 2, 9), dhcpv4.OptSubnetMask(net.CIDRMask(24, 32))
	o, err := offered(lease(ip, mask, dhcpv4.OptRouter(net.IPv4(192, 0, 2, 1)), dhcpv4.OptDNS(net.IPv4(192, 0, 2, 2)), dhcpv4.OptNTPServers(net.IPv4(192, 0, 2, 3))))
	if err != nil || o.address.String() != "192.0.2.9/24" || o.gateway.String() != "192.0.2.1" || o.routes != nil || !slices.Equal(o.names, []string{"192.0.2.2"}) || !slices.Equal(o.clocks, []string{"192.0.2.3"}) {
		t.Errorf("%+v, %v", o, err)
	}
	if o, err := offered(lease(ip, mask)); err != nil || o.gateway.IsValid() || o.clocks != nil {
		t.Errorf("without a router: %+v, %v", o, err)
	}
	one := &dhcpv4.Route{Dest: &net.IPNet{IP: net.IPv4(198, 51, 100, 77), Mask: net.CIDRMask(24, 32)}, Router: net.IPv4(192, 0, 2, 2)}
	o, err = offered(lease(ip, mask, dhcpv4.OptRouter(net.IPv4(192, 0, 2, 1)), dhcpv4.OptClasslessStaticRoute(slices.Repeat([]*dhcpv4.Route{one}, maxRoutes+1)...)))
	if err != nil || o.gateway.IsValid() || len(o.routes) != maxRoutes || o.routes[0].to.String() != "198.51.100.0/24" {
		t.Errorf("with routes: %+v, %v", o, err)
	}
	for name, l := range map[string]*dhcpv4.DHCPv4{
		"no mask": lease(ip), "no address": lease(net.IPv4zero, mask), "many machines' address": lease(net.IPv4(224, 0, 0, 1), mask),
		"a mask that is none": lease(ip, dhcpv4.OptSubnetMask(net.IPMask{255, 0, 255, 0})),
	} {
		if o, err := offered(l); err == nil {
			t.Errorf("%s: %v", name, o)
		}
	}
}

// The numbers are those of linux/dm-ioctl.h, on every 64-bit machine.
func TestTheDeviceMapperIsAskedAsTheKernelWants(t *testing.T) {
	root := layout.Root{Hash: [32]byte{0xab}, Blocks: 1000}
	table := verityTable(root, "254:2", "254:3")
	if want := fmt.Sprintf("1 254:2 254:3 4096 4096 1000 0 sha256 ab%s - 1 panic_on_corruption", strings.Repeat("00", 31)); table != want {
		t.Errorf("%s", table)
	}
	b := dmRequest("name", "verity", table, 8000)
	le := binary.LittleEndian
	for what, x := range map[string][2]uint64{
		"version": {uint64(le.Uint32(b)), 4}, "size": {uint64(le.Uint32(b[12:])), uint64(len(b))}, "start": {uint64(le.Uint32(b[16:])), 312},
		"targets": {uint64(le.Uint32(b[20:])), 1}, "flags": {uint64(le.Uint32(b[28:])), 1},
		"sectors": {le.Uint64(b[312+8:]), 8000}, "next": {uint64(le.Uint32(b[312+20:])), uint64(len(b) - 312)}, "whole words": {uint64(len(b) % 8), 0},
	} {
		if x[0] != x[1] {
			t.Errorf("%s is %d, want %d", what, x[0], x[1])
		}
	}
	if !bytes.HasPrefix(b[48:], []byte("name\x00")) || !bytes.HasPrefix(b[336:], []byte("verity\x00")) || !bytes.HasPrefix(b[352:], append([]byte(table), 0)) {
		t.Error("a name is elsewhere")
	}
}

func TestLogsComeInWholeLinesOfBoundedLength(t *testing.T) {
	var got bytes.Buffer
	l := &lines{w: &got, prefix: "<6>x: "}
	for _, s := range []string{"one\ntw", "o\n\n", strings.Repeat("long", 500), "er\nlast\nnot yet"} {
		if n, err := l.Write([]byte(s)); n != len(s) || err != nil {
			t.Errorf("%d, %v", n, err)
		}
	}
	if want := "<6>x: one\n<6>x: two\n<6>x: " + strings.Repeat("long", maxLine/4) + "\n<6>x: last\n"; got.String() != want || string(l.last) != "last" {
		t.Errorf("%q, and last %q", got.String(), l.last)
	}
	var console, journal bytes.Buffer
	b := &boot{console: &console}
	b.print("%d", 1)
	b.journal = &journal
	b.print("%d", 2)
	if console.String() != "muster: 1\nmuster: 2\n" || journal.String() != "<5>muster: 2\n" {
		t.Errorf("%q, %q", &console, &journal)
	}
}

func TestWaitingEnds(t *testing.T) {
	attempts := 0
	v, err := await(t.Context(), time.Minute, func() (int, error) {
		if attempts++; attempts < 3 {
			return 0, fmt.Errorf("x: %w", errNotYet)
		}
		return 7, nil
	})
	if err != nil || v != 7 {
		t.Errorf("%d, %v", v, err)
	}
	if _, err := await(t.Context(), time.Millisecond, func() (int, error) { return 0, errNotYet }); !errors.Is(err, errNotYet) {
		t.Errorf("over: %v", err)
	}
	other := errors.New("other")
	if _, err := await(t.Context(), time.Minute, func() (int, error) { return 0, other }); !errors.Is(err, other) {
		t.Errorf("another error: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := await(ctx, time.Minute, func() (int, error) { return 0, errNotYet }); !errors.Is(err, errNotYet) {
		t.Errorf("cancelled: %v", err)
	}
}
