// Package lan is the lab's network: an unnamed network namespace with one bridge, and on the bridge's own address the
// services of a data center: a load balancer in front of the control planes, and a mirror for files and container
// images.
//
// The daemon runs in that namespace, so all of this is reachable only for the lab's machines; not from the host or
// from another lab.
package lan

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net"
	"os/exec"
	"strconv"
	"strings"
)

// The lab's addresses. Several labs use the same ones, each in a namespace of its own.
const (
	Network      = "192.168.77.0/24"
	Gateway      = "192.168.77.1"
	Owner        = "192.168.77.2"
	ControlPlane = Gateway + ":6443" // the cluster's control-plane endpoint
	Registry     = Gateway + ":5000"
	FilesHost    = Gateway // HTTP on port 80
	bridge       = "lan0"
)

// Address is the IPv4 address of the machine with this number, 1 to 240.
func Address(number int) string { return "192.168.77." + strconv.Itoa(10+number) }

// Setup makes the bridge in the caller's network namespace.
func Setup(ctx context.Context) error {
	return ip(ctx,
		"link set lo up",
		"link add "+bridge+" type bridge forward_delay 0",
		"addr add "+Gateway+"/24 dev "+bridge,
		"link set "+bridge+" up",
	)
}

// Plug connects the network namespace of process pid to the bridge: it gets an eth0. The
// cable disappears with the namespace, which the kernel may keep for a while after its last
// process: what an earlier machine of that name has left there is unplugged.
func Plug(ctx context.Context, name string, pid int) error {
	port := "v" + name
	if len(port) > 15 { // IFNAMSIZ
		return fmt.Errorf("machine name %q: at most 14 characters", name)
	}
	if _, err := net.InterfaceByName(port); err == nil {
		if err := ip(ctx, "link delete "+port); err != nil {
			if _, gone := net.InterfaceByName(port); gone == nil { // it went by itself meanwhile
				return err
			}
		}
	}
	return ip(ctx,
		fmt.Sprintf("link add %s type veth peer name eth0 address %s netns %d", port, HardwareAddress(name), pid),
		fmt.Sprintf("link set %s master %s up", port, bridge),
	)
}

// Tap makes a network card's other end for a virtual machine: a tap device (tun(4)) on the bridge, in the
// caller's network namespace. It replaces the one that an earlier power on of that name has left.
func Tap(ctx context.Context, name string) (device string, err error) {
	device = "v" + name
	if len(device) > 15 { // IFNAMSIZ
		return "", fmt.Errorf("machine name %q: at most 14 characters", name)
	}
	if err := Untap(ctx, name); err != nil {
		return "", err
	}
	return device, ip(ctx, "tuntap add dev "+device+" mode tap", fmt.Sprintf("link set %s master %s up", device, bridge))
}

// Untap removes the device of [Tap], if it exists.
func Untap(ctx context.Context, name string) error {
	if _, err := net.InterfaceByName("v" + name); err == nil {
		return ip(ctx, "link delete v"+name)
	}
	return nil
}

// HardwareAddress is a machine's permanent address, as a network card's is: other machines cache it, and would not
// find a machine that comes back with another one.
func HardwareAddress(name string) net.HardwareAddr {
	sum := sha256.Sum256([]byte(name))
	return append(net.HardwareAddr{0x02}, sum[:5]...) // locally administered (IEEE 802)
}

// Configure sets the address and the route of eth0 in the caller's network namespace.
func Configure(ctx context.Context, address string) error {
	return ip(ctx,
		"link set lo up",
		"addr add "+address+"/24 dev eth0",
		"link set eth0 up",
		"route add default via "+Gateway,
	)
}

func ip(ctx context.Context, commands ...string) error {
	cmd := exec.CommandContext(ctx, "ip", "-batch", "-")
	cmd.Stdin = strings.NewReader(strings.Join(commands, "\n") + "\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("ip: %w: %s", err, out)
	}
	return nil
}
