// Command initramfs is the first program of a machine that boots Muster's image: it finds the root that the measured
// command line names, unlocks the state disk, and starts systemd.
//
// Everything that it trusts was measured: itself, the command line, and by its hash the root. The config medium is
// not authenticated. It shows on the console what it is doing, and what it is waiting for.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/muster-k8s/muster/internal/image/layout"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata/provider"
)

const (
	// bootstrapper is Muster's program in the root.
	bootstrapper = "/usr/bin/bootstrapper"
	// sysroot is where the root is mounted until it becomes /.
	sysroot = "/sysroot"
	// mediumFolder is where a volume with metadata is mounted while it is read.
	mediumFolder = "/run/muster/medium"
	// devices is how long disks of the image may take to appear.
	devices = time.Minute
	// settle is how long a credential or an optical drive with metadata may take to appear, before others are looked at that users of the cluster can write.
	settle = 5 * time.Second
	// before is how long an error is shown before the machine restarts.
	before = 30 * time.Second
)

func main() {
	// PID 1 shares root and working directory with the kernel's own threads; both change with it.
	runtime.LockOSThread()
	if os.Getpid() != 1 {
		fmt.Fprintln(os.Stderr, "initramfs: this is the first program of a machine; it runs as PID 1 only")
		os.Exit(1)
	}
	ctx := context.Background()
	b := &boot{console: os.Stdout, metadata: layout.RunMetadata, settle: settle}
	err := b.run(ctx)
	b.print("the machine can't start: %v", err)
	b.print("it restarts in %s", before)
	_ = wait(ctx, before)
	unix.Sync()
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
	select {}
}

// boot is one start of the machine.
type boot struct {
	console io.Writer
	journal io.Writer // nil until there is one
	// metadata is the path of the file with the machine's metadata.
	metadata string
	// settle is how long the machine looks for a credential or an optical drive before it looks at disks or asks its cloud.
	settle time.Duration
	// connect configures the network by DHCP; nil: [boot.up] does.
	connect func(ctx context.Context) error
	// servers are what the network's configuration names; nil if the network is not up.
	servers *servers
}

// run returns only after a failure.
func (b *boot) run(ctx context.Context) error {
	if err := mountKernel(); err != nil {
		return err
	}
	b.openJournal()
	b.print("starting")
	if err := loadModules(modulesFile); err != nil {
		return err
	}
	b.measured()
	if err := b.root(ctx); err != nil {
		return err
	}
	img, err := metadata.LoadImage(sysroot + metadata.ImagePath)
	if err != nil {
		return err
	}
	machine, network, err := b.config(ctx, img, provider.This(mediumFolder))
	if err != nil {
		return err
	}
	if err := unix.Sethostname([]byte(machine.Name)); err != nil {
		return fmt.Errorf("name the machine %s: %w", machine.Name, err)
	}
	if err := bind(b.metadata, sysroot+metadata.MachinePath); err != nil {
		return err
	}
	if err := b.up(ctx, network); err != nil {
		return err
	}
	if err := b.names(machine); err != nil {
		return err
	}
	device, err := b.state(ctx, img)
	if err != nil {
		return err
	}
	if err := b.checkState(ctx, device); err != nil {
		return fmt.Errorf("the state disk was opened, and is not used: %w", err)
	}
	if err := mountState(device, sysroot); err != nil {
		return fmt.Errorf("the state disk: %w", err)
	}
	// Before systemd starts any program of the disk; opening the disk again takes a new boot.
	if err := b.inRoot(ctx, bootstrapper, "accepted"); err != nil {
		return fmt.Errorf("the state disk was opened, and is not used: %w", err)
	}
	b.print("state is mounted; starting systemd")
	return switchRoot(sysroot)
}

// measured prints the registers that the owner's policy checks, so that a person can compare them with the
// prediction.
func (b *boot) measured() {
	for _, n := range []int{4, 9, 11} {
		v, err := os.ReadFile(fmt.Sprintf("/sys/class/tpm/tpm0/pcr-sha256/%d", n))
		if err != nil {
			b.print("PCR %d can't be read, so this machine can't prove what it booted: %v", n, err)
			continue
		}
		b.print("PCR %d is %s", n, strings.ToLower(strings.TrimSpace(string(v))))
	}
}

// root mounts the root that the command line names, and no other.
func (b *boot) root(ctx context.Context) error {
	cmdline, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return err
	}
	want, err := layout.RootOf(string(cmdline))
	if err != nil {
		return err
	}
	type pair struct{ data, tree string }
	found, err := await(ctx, devices, func() (pair, error) {
		data, tree, err := rootDisk("/sys", "/dev", want)
		return pair{data, tree}, err
	})
	if err != nil {
		return fmt.Errorf("find the root: %w", err)
	}
	device, err := openVerity("muster-root", want, found.data, found.tree)
	if err != nil {
		return fmt.Errorf("the root: %w", err)
	}
	if err := os.MkdirAll(sysroot, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(device, sysroot, "squashfs", unix.MS_RDONLY, ""); err != nil {
		return fmt.Errorf("mount the root, which the hash in the command line must fit: %w", err)
	}
	for _, m := range kernelMounts {
		if err := unix.Mount(m.target, sysroot+m.target, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return fmt.Errorf("mount %s in the root: %w", m.target, err)
		}
	}
	b.print("the root is verified as it is read")
	return nil
}

// errNotYet is returned while a device is not there yet.
var errNotYet = errors.New("it is not there")

// await calls look until it returns something other than errNotYet, or until the timeout.
func await[T any](ctx context.Context, most time.Duration, look func() (T, error)) (T, error) {
	const pause = 20 * time.Millisecond
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	for {
		v, err := look()
		if !errors.Is(err, errNotYet) {
			return v, err
		}
		if wait(ctx, pause) != nil {
			return v, fmt.Errorf("%w after %s", err, most)
		}
	}
}

func wait(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

// bind puts a file or folder over another.
func bind(from, over string) error {
	if err := unix.Mount(from, over, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount %s over %s: %w", from, over, err)
	}
	return nil
}

// write writes a file of /run whole.
func write(name string, content []byte) error {
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	return os.WriteFile(name, content, 0o644)
}
