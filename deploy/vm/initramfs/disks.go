package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/muster-k8s/muster/internal/image/layout"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
)

// rootDisk finds the partitions of the root and of its hash tree on one disk, and returns MAJOR:MINOR of both. Any
// disk may have partitions of these names; the right one is that whose hash tree begins with the block with the
// measured hash.
func rootDisk(sys, dev string, want layout.Root) (data, tree string, err error) {
	roots, err := partitions(sys, layout.RootName)
	if err != nil {
		return "", "", err
	}
	trees, err := partitions(sys, layout.TreeName)
	if err != nil {
		return "", "", err
	}
	for _, t := range trees {
		if !beginsWith(filepath.Join(dev, t.name), want.Hash) {
			continue
		}
		for _, r := range roots {
			if r.disk == t.disk {
				return r.number, t.number, nil
			}
		}
	}
	return "", "", fmt.Errorf("a disk with the partitions %s and %s of this image (%d and %d have these names): %w", layout.RootName, layout.TreeName, len(roots), len(trees), errNotYet)
}

// beginsWith reports whether the first block of a disk has this hash.
func beginsWith(name string, hash [sha256.Size]byte) bool {
	f, err := os.Open(name)
	if err != nil {
		return false
	}
	defer f.Close()
	b := make([]byte, layout.BlockSize)
	_, err = io.ReadFull(f, b)
	return err == nil && sha256.Sum256(b) == hash
}

// part is a partition: its name in /dev, the disk that it is on, and its MAJOR:MINOR.
type part struct{ name, disk, number string }

// partitions finds those of a name in the GPT.
func partitions(sys, name string) ([]part, error) {
	all, err := filepath.Glob(sys + "/class/block/*/uevent")
	if err != nil {
		return nil, err
	}
	var out []part
	for _, file := range all {
		b, err := os.ReadFile(file)
		if err != nil || !slices.Contains(strings.Split(string(b), "\n"), "PARTNAME="+name) {
			continue
		}
		number, err := os.ReadFile(filepath.Join(filepath.Dir(file), "dev"))
		if err != nil {
			continue // it was removed
		}
		// The link leads to …/DISK/PARTITION.
		at, err := filepath.EvalSymlinks(filepath.Dir(file))
		if err != nil {
			continue
		}
		out = append(out, part{filepath.Base(at), filepath.Dir(at), strings.TrimSpace(string(number))})
	}
	return out, nil
}

// disk finds a disk by its serial number, and returns its path. Virtio disks have theirs in one place, SCSI and NVMe
// ones in another.
func disk(sys, serial string) (string, error) {
	for _, pattern := range []string{"/block/*/serial", "/block/*/device/serial"} {
		all, err := filepath.Glob(sys + pattern)
		if err != nil {
			return "", err
		}
		for _, file := range all {
			if b, err := os.ReadFile(file); err == nil && strings.TrimSpace(string(b)) == serial {
				name, _, _ := strings.Cut(strings.TrimPrefix(file, sys+"/block/"), "/")
				return "/dev/" + name, nil
			}
		}
	}
	return "", fmt.Errorf("a disk with the serial number %s: %w", serial, errNotYet)
}

// state opens the state disk, and returns the device of its file system. It returns when the disk is open, however
// long that takes.
func (b *boot) state(ctx context.Context, img *metadata.Image) (string, error) {
	if img.StateDisk.Mode == metadata.DiskPlain {
		device, err := b.stateDisk(ctx, img.StateDisk)
		if err != nil {
			return "", err
		}
		b.print("this image keeps its state on a disk that is NOT encrypted")
		return device, b.formatPlain(ctx, device)
	}
	const mapped = "/dev/mapper/muster-state"
	found := make(chan error, 1)
	go func() {
		_, err := b.stateDisk(ctx, img.StateDisk)
		found <- err
	}()
	select {
	case err := <-found:
		if err != nil {
			return "", err
		}
	case <-time.After(devices + time.Second): // `bootstrapper unlock` tells its owner that it is missing, and opens it when it is there
	}
	for {
		err := b.inRoot(ctx, bootstrapper, "unlock", "--image", metadata.ImagePath, "--metadata", metadata.MachinePath)
		if err == nil {
			return mapped, nil
		}
		const again = 10 * time.Second
		b.print("unlocking the state disk ended: %v; trying again in %s", err, again)
		if err := wait(ctx, again); err != nil {
			return "", err
		}
	}
}

// stateDisk waits for the disk. In mode plain the image's path is a folder, and the disk is the one with Muster's
// serial number.
func (b *boot) stateDisk(ctx context.Context, s metadata.StateDisk) (string, error) {
	look := func() (string, error) {
		if s.Mode == metadata.DiskLUKS && s.Path != layout.StateDevice {
			if _, err := os.Stat(s.Path); err != nil {
				return "", fmt.Errorf("%s: %w", s.Path, errNotYet)
			}
			return s.Path, nil
		}
		return disk("/sys", layout.StateSerial)
	}
	for {
		device, err := await(ctx, devices, look)
		if errors.Is(err, errNotYet) {
			b.print("waiting for the state disk: %v", err)
			continue
		}
		if err != nil || device == s.Path {
			return device, err
		}
		if err := os.MkdirAll(filepath.Dir(layout.StateDevice), 0o755); err != nil {
			return "", err
		}
		return device, os.Symlink(device, layout.StateDevice)
	}
}

// formatPlain makes a file system on a disk that begins with zeros. It changes no other disk.
func (b *boot) formatPlain(ctx context.Context, device string) error {
	f, err := os.Open(device)
	if err != nil {
		return err
	}
	head := make([]byte, 64<<10)
	_, err = io.ReadFull(f, head)
	f.Close()
	if err != nil {
		return fmt.Errorf("the state disk: %w", err)
	}
	if !bytes.Equal(head, make([]byte, len(head))) {
		return nil
	}
	b.print("the state disk is blank: making a file system")
	return b.inRoot(ctx, "/usr/sbin/mkfs.ext4", "-q", device)
}

// inRoot runs a program of the verified root there, to its end. Its log goes to the journal; its output for a person,
// it writes to the console itself.
func (b *boot) inRoot(ctx context.Context, program string, args ...string) error {
	cmd, out := b.command(ctx, program, args...)
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w: %s", program, err, out.last)
	}
	return nil
}

// command returns a program of the root that is ready to run there, and the writer for its output.
func (b *boot) command(ctx context.Context, program string, args ...string) (*exec.Cmd, *lines) {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.SysProcAttr = &unix.SysProcAttr{Chroot: sysroot}
	// Without udev, libdevmapper has to make its devices itself.
	cmd.Env = []string{programPath, "LANG=C.UTF-8", "DM_DISABLE_UDEV=1"}
	out := &lines{w: b.journal, prefix: "<6>" + filepath.Base(program) + ": "}
	cmd.Dir, cmd.Stdout, cmd.Stderr = "/", out, out
	return cmd, out
}
