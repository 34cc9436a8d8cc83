// Package machine is the few things that a bootstrapper does to the machine it runs on:
// start and stop units, run kubeadm, and place files.
//
// Programs run with a fixed environment and path, and are told nothing secret (K3):
// whatever is secret travels in files with mode 0600, or not at all.
package machine

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Machine is what the bootstrapper needs of its machine beside files.
type Machine interface {
	// Unit runs systemctl with one of [Verbs] on a unit.
	Unit(ctx context.Context, verb, unit string) error
	// Kubeadm runs kubeadm to its end and hands each line of its output to line, from one
	// goroutine at a time. If ctx ends, kubeadm is killed.
	Kubeadm(ctx context.Context, line func(string), args ...string) error
	// Pull has the container runtime at socket, a unix:// URL, pull an image by its digest, unless it has it.
	Pull(ctx context.Context, socket, image string) error
}

// Verbs are what may be asked of a unit.
var Verbs = []string{"enable", "start", "stop", "restart"}

// Units that the bootstrapper knows.
const (
	UnitBootstrapper = "muster-bootstrapper.service"
	UnitKubelet      = "kubelet.service"
	UnitAttester     = "muster-attester.service"
	UnitRenewal      = "muster-renewal.service"
	UnitContainerd   = "containerd.service"
)

// unitTimeout bounds one systemctl.
const unitTimeout = 2 * time.Minute

// environment of every child: nothing of ours is inherited. Programs of the root come before those that lie on the state disk (B8).
var environment = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin", "HOME=/root", "LANG=C.UTF-8"}

// Real is the machine that this process runs on.
type Real struct{}

// Unit implements [Machine].
func (Real) Unit(ctx context.Context, verb, unit string) error {
	if !slices.Contains(Verbs, verb) {
		return fmt.Errorf("systemctl %q is not among what the bootstrapper does", verb)
	}
	ctx, cancel := context.WithTimeout(ctx, unitTimeout)
	defer cancel()
	var out []string
	if err := run(ctx, func(l string) { out = append(out, l) }, "systemctl", verb, unit); err != nil {
		return fmt.Errorf("systemctl %s %s: %w: %s", verb, unit, err, strings.Join(out[max(0, len(out)-5):], "; "))
	}
	return nil
}

// Kubeadm implements [Machine].
func (Real) Kubeadm(ctx context.Context, line func(string), args ...string) error {
	return run(ctx, line, "kubeadm", args...)
}

// Environment gives the environment of a child.
func Environment() []string { return slices.Clone(environment) }

// LookPath finds a program in the children's path, not in ours.
func LookPath(name string) (string, error) {
	dirs := strings.TrimPrefix(environment[0], "PATH=")
	for _, d := range filepath.SplitList(dirs) {
		p := filepath.Join(d, name)
		if st, err := os.Stat(p); err == nil && st.Mode().IsRegular() && st.Mode().Perm()&0o111 != 0 {
			return p, nil
		}
	}
	return "", fmt.Errorf("%s is not installed in %s", name, dirs)
}

func run(ctx context.Context, line func(string), name string, args ...string) error {
	path, err := LookPath(name)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env, cmd.Dir = environment, "/"
	// B3: a kubeadm that outlived its bootstrapper would work against the one that the next
	// bootstrapper runs. The kernel sends the signal when the thread ends that started the child.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.WaitDelay = 10 * time.Second // a grandchild may hold the pipe
	r, w := io.Pipe()
	cmd.Stdout, cmd.Stderr = w, w
	read := make(chan struct{})
	go func() {
		defer close(read)
		lines(r, line)
	}()
	err = cmd.Run()
	_ = w.Close()
	<-read
	if ctx.Err() != nil {
		return errors.Join(context.Cause(ctx), err)
	}
	return err
}

// lines reads to the end, whatever the length of a line, so that the writer never blocks.
func lines(r io.Reader, line func(string)) {
	b := bufio.NewReaderSize(r, 64<<10)
	for {
		l, isPrefix, err := b.ReadLine()
		if err != nil {
			return
		}
		line(string(l))
		for isPrefix && err == nil {
			_, isPrefix, err = b.ReadLine() // the rest of a very long line is dropped
		}
	}
}
