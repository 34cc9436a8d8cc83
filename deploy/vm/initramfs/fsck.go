package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
)

// e2fsck checks and repairs an ext4 file system (e2fsprogs; its exit codes are in e2fsck(8)).
const e2fsck = "/usr/sbin/e2fsck"

// checkState checks the whole file system of the state disk before it is mounted, also if it is marked as clean. An
// attacker who was root before the reboot could otherwise have two files share blocks, one of them a program of the
// cluster's list: a process that may write the other one could then change the program after the bootstrapper has
// compared it (B8). e2fsck gives each file blocks of its own.
func (b *boot) checkState(ctx context.Context, device string) error {
	b.print("checking the file system of the state disk")
	cmd, out := b.command(ctx, e2fsck, "-f", "-y", device)
	repaired, err := fsck(cmd)
	if err != nil {
		return fmt.Errorf("%w: %s", err, out.last)
	}
	if repaired {
		b.print("the file system of the state disk had errors, and e2fsck has repaired it; the journal has what it found")
	}
	return nil
}

// fsck runs e2fsck, and reports whether it has repaired anything. It is an error if errors are left.
func fsck(cmd *exec.Cmd) (repaired bool, err error) {
	const corrected, reboot = 1, 2 // the latter is about a file system that is mounted
	err = cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() > 0 && exit.ExitCode()&^(corrected|reboot) == 0 {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("%s: %w", cmd.Path, err)
	}
	return false, nil
}
