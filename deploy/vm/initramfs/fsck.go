package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
)

// e2fsck checks and repairs an ext4 file system (e2fsprogs; its exit codes are in e2fsck(8)).
const e2fsck = "/usr/sbin/e2fsck"

// e2fsckArgs are the arguments of e2fsck for a device. It repairs everything, and may also use an unchecked backup of the superblock. With -j, it
// reads no journal on another disk, also if a superblock names one (B5).
func e2fsckArgs(device string) []string { return []string{"-f", "-y", "-j", "/dev/null", device} }

// checkState checks the whole file system of the state disk before it is mounted, also if it is marked as clean. An
// attacker who was root before the reboot could otherwise have two files share blocks, one of them a program of the
// cluster's list: a process that may write the other one could then change the program after the bootstrapper has
// compared it (B8). e2fsck gives each file blocks of its own.
func (b *boot) checkState(ctx context.Context, device string) error {
	b.print("checking the file system of the state disk")
	cmd, out := b.command(ctx, e2fsck, e2fsckArgs(device)...)
	repaired, err := fsck(cmd, device)
	if _, ended := errors.AsType[*exec.ExitError](err); ended {
		return fmt.Errorf("%w: %s", err, out.last)
	}
	if err != nil {
		return err
	}
	if repaired {
		b.print("the file system of the state disk had errors, and e2fsck has repaired it; the journal has what it found")
	}
	return nil
}

// fsck runs e2fsck, and reports whether it has repaired anything. It is an error if errors are left, or if the superblock is refused before or after. If
// the superblock is that of no ext4, e2fsck uses none of it, but a backup, which is checked afterwards.
func fsck(cmd *exec.Cmd, device string) (repaired bool, err error) {
	first := checkSuperblock(device)
	if first != nil && !errors.Is(first, errMagic) {
		return false, first
	}
	const corrected, reboot = 1, 2 // the latter is about a file system that is mounted
	err = cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() > 0 && exit.ExitCode()&^(corrected|reboot) == 0 {
		repaired, err = true, nil
	}
	if err != nil && first != nil {
		return false, fmt.Errorf("%w; %s found no backup of the superblock: %w", first, cmd.Path, err)
	}
	if err != nil {
		return false, fmt.Errorf("%s: %w", cmd.Path, err)
	}
	return repaired, checkSuperblock(device) // the journal, or a backup of the superblock, may have replaced it
}
