// Package host handles the lab's Linux machine: its Debian packages, its cgroup hierarchies, and processes by an
// identity that a reused pid does not have.
//
// The lab adds cgroup sub-directories and processes there, records each one, and removes exactly those again; it
// never mounts, unmounts or reconfigures anything that it did not make.
package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"slices"
	"strings"
)

// Packages are the Debian packages whose programs the lab and the project's tests run, or
// put into machines and images.
var Packages = []string{
	"runc", "containernetworking-plugins", "nftables", "iproute2", "iptables", "util-linux",
	"conntrack", "ethtool", "socat", "netbase", // /etc/protocols, for kube-proxy's image
	"swtpm", "swtpm-tools",
	"curl", "openssl", // an intruder's tools, and the manual's
	"gcc", "libc6-dev", "libssl-dev", // tests: the TPM simulator and the race detector are C
	"mmdebstrap", "squashfs-tools", "kmod", "sbsigntool", // disk images
	"cryptsetup-bin", "cpio", "fdisk", "binutils", // tests: state disks, and other programs that read what disk images are made of
	"qemu-system-x86", "ovmf", "mtools", "dosfstools", "e2fsprogs", "genisoimage", // virtual machines and volumes with their metadata
	"prometheus", // tests of alerts and dashboards
}

// ErrNotRoot is returned if the caller may not make namespaces.
var ErrNotRoot = errors.New("the lab makes namespaces, mounts and cgroups: run it as root")

// EnsurePackages installs what is missing of [Packages], and of more, with apt-get; progress goes to log.
// It does nothing, in a few milliseconds, when all are there.
func EnsurePackages(ctx context.Context, log io.Writer, more ...string) error {
	if os.Geteuid() != 0 {
		return ErrNotRoot
	}
	missing, err := missingPackages(ctx, slices.Concat(Packages, more))
	if err != nil || len(missing) == 0 {
		return err
	}
	fmt.Fprintf(log, "installing Debian packages: %s\n", strings.Join(missing, " "))
	allow, err := startNothing()
	if err != nil {
		return err
	}
	defer allow()
	install := append([]string{"install", "-y", "--no-install-recommends"}, missing...)
	for _, args := range [][]string{{"update"}, install} {
		cmd := exec.CommandContext(ctx, "apt-get", args...)
		cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("apt-get %s: %w; install these packages by hand and try again: %s\n%s",
				args[0], err, strings.Join(missing, " "), tail(out))
		}
	}
	return nil
}

// policyFile is the file that Debian's maintainer scripts check before they start a daemon (Debian policy,
// invoke-rc.d(8)).
const policyFile = "/usr/sbin/policy-rc.d"

// startNothing prevents packages with a daemon from starting it here, where tests start their own. An existing policy
// of the machine stays unchanged. The returned function removes the policy again.
func startNothing() (undo func(), err error) {
	f, err := os.OpenFile(policyFile, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755)
	if errors.Is(err, fs.ErrExist) {
		return func() {}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("keep packages from starting daemons: %w", err)
	}
	undo = func() { _ = os.Remove(policyFile) }
	_, err = f.WriteString("#!/bin/sh\nexit 101\n")
	if err = errors.Join(err, f.Close()); err != nil {
		undo()
		return nil, err
	}
	return undo, nil
}

func missingPackages(ctx context.Context, wanted []string) ([]string, error) {
	args := append([]string{"-W", "-f=${Package} ${db:Status-Status}\n"}, wanted...)
	out, err := exec.CommandContext(ctx, "dpkg-query", args...).Output()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) { // it exits with 1 when a package is unknown, and still lists the others
		return nil, fmt.Errorf("dpkg-query (the lab needs Debian or a system with its packages): %w", err)
	}
	var missing []string
	for _, p := range wanted {
		if !strings.Contains("\n"+string(out), "\n"+p+" installed\n") {
			missing = append(missing, p)
		}
	}
	return missing, nil
}

func tail(b []byte) string {
	const most = 2000
	if len(b) > most {
		b = b[len(b)-most:]
	}
	return string(b)
}
