package main

import (
	"fmt"
	"os"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// In a network namespace of its own: no interface accepts router advertisements, also not a later one.
func TestNoInterfaceTakesRouterAdvertisements(t *testing.T) {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine, and the namespace with it
		done <- func() error {
			if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
				return err
			}
			add := func(name string) error {
				return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "-peer"})
			}
			if err := add("before"); err != nil {
				return err
			}
			if err := noAdvertisements(); err != nil {
				return err
			}
			if err := add("after"); err != nil {
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
		}()
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}
