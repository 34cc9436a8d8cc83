package machine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"
)

// Namespaces that make a machine.
const namespaces = syscall.CLONE_NEWNS | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC |
	syscall.CLONE_NEWNET | syscall.CLONE_NEWPID | syscall.CLONE_NEWCGROUP

// Enter moves this process into the machine's cgroups and starts PID 1 in new namespaces.
// A cgroup namespace begins where its maker is, so that must come first. It returns when
// PID 1 has ended; if this process ends before, the kernel ends PID 1 and so the machine.
func Enter(specPath string) error {
	s, err := loadSpec(specPath)
	if err != nil {
		return err
	}
	if err := s.Cgroups.Enter(s.Cgroup, os.Getpid()); err != nil {
		return err
	}
	runtime.LockOSThread() // Pdeathsig is sent when the *thread* that started the child ends
	cmd := exec.Command("/proc/self/exe", "machine-init", specPath)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.ExtraFiles = []*os.File{os.NewFile(fdReport, "report"), os.NewFile(fdPlug, "plug")}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: namespaces, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start PID 1 in new namespaces: %w", err)
	}
	if err := makeRoom(s); err != nil {
		return errors.Join(err, cmd.Process.Kill())
	}
	signal.Ignore(syscall.SIGINT) // a Ctrl-C at the terminal is for the command in front
	if err := report(Report{PID: cmd.Process.Pid}); err != nil {
		return errors.Join(err, cmd.Process.Kill())
	}
	return cmd.Wait()
}

// makeRoom moves this process out of the machine's top cgroup where that is of version 2: a group with processes of
// its own cannot delegate controllers. PID 1 also moves, before it continues ([leaveTopCgroup]).
func makeRoom(s Spec) error {
	if !s.Cgroups.Unified {
		return nil
	}
	const leaf = "enter"
	if err := os.Mkdir(filepath.Join(s.Cgroups.Hierarchies[0].Mount, s.Cgroup, leaf), 0o755); err != nil {
		return err
	}
	return s.Cgroups.Enter(s.Cgroup+"/"+leaf, os.Getpid())
}

// HoldNetwork keeps the network namespace that it runs in: it waits for the cable, takes
// the address, and stays until ctx ends.
func HoldNetwork(ctx context.Context, address string) error {
	if err := connect(ctx, address); err != nil {
		return errors.Join(err, report(Report{Error: err.Error()}))
	}
	if err := report(Report{Ready: true}); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}
