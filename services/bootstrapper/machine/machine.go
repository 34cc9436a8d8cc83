// Package machine changes the bootstrapper's own machine: it starts and stops units, runs kubeadm, and places files.
//
// Programs run with a fixed environment and path, which have no secret (K3): secrets are only in files with mode 0600.
package machine

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Machine is what the bootstrapper uses of its machine beside files.
type Machine interface {
	// Unit runs systemctl with one of [Verbs] on a unit.
	Unit(ctx context.Context, verb, unit string) error
	// Kubeadm runs kubeadm to its end and passes each line of its output to line, from one goroutine at a time. If ctx ends, kubeadm is killed.
	Kubeadm(ctx context.Context, line func(string), args ...string) error
	// Pull makes the container runtime at socket, a unix:// URL, pull an image by its digest, unless it has it.
	Pull(ctx context.Context, socket, image string) error
	// ImageNames returns the names with a digest, as in "registry.k8s.io/pause@sha256:…", of the images that containerd has. It fails until containerd has
	// read its database.
	ImageNames(ctx context.Context, socket string) ([]string, error)
	// ImportImages makes containerd import an OCI image layout as a tar archive, beside the images that it has. containerd compares each blob with its digest, and unpacks none.
	ImportImages(ctx context.Context, socket string, archive io.Reader) error
}

// Verbs are the allowed operations on a unit.
var Verbs = []string{"enable", "start", "stop", "restart", "try-restart"}

// These are the bootstrapper's units.
const (
	UnitBootstrapper = "muster-bootstrapper.service"
	UnitKubelet      = "kubelet.service"
	UnitAttester     = "muster-attester.service"
	UnitRenewal      = "muster-renewal.service"
	UnitOrders       = "muster-orders.service"
	UnitReset        = "muster-reset.service"
	UnitUpgrade      = "muster-upgrade.service"
	UnitRotation     = "muster-rotation.service"
	UnitContainerd   = "containerd.service"
	UnitImages       = "muster-images.service"
)

// KubeletMayStart is a file that the kubelet's unit requires (ConditionPathExists of systemd.unit(5)), so that nothing of the state disk runs before the
// bootstrapper has compared it in this boot (B7, B8).
const KubeletMayStart = "/run/muster/kubelet-may-start"

// unitTimeout bounds one run of systemctl, imagesTimeout one for [UnitImages], whose own limit is a minute less, versionTimeout one of a program that only
// prints its version.
const (
	unitTimeout    = 2 * time.Minute
	imagesTimeout  = 16 * time.Minute
	versionTimeout = time.Minute
)

// environment is the environment of every child: nothing of this process's is inherited. Programs of the root file system come before those on the state
// disk (B8).
var environment = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin", "HOME=/root", "LANG=C.UTF-8"}

// Real is this process's machine.
type Real struct{}

// Unit implements [Machine].
func (Real) Unit(ctx context.Context, verb, unit string) error {
	if !slices.Contains(Verbs, verb) {
		return fmt.Errorf("systemctl %q is not among what the bootstrapper does", verb)
	}
	limit := unitTimeout
	if unit == UnitImages {
		limit = imagesTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var out []string
	if err := run(ctx, func(l string) { out = append(out, l) }, "systemctl", verb, unit); err != nil {
		return fmt.Errorf("systemctl %s %s: %w: %s", verb, unit, err, strings.Join(out[max(0, len(out)-5):], "; "))
	}
	return nil
}

// Oneshot runs a unit of Type=oneshot to its end, or waits for the end if the unit already runs. The unit has its own time limit: it continues if ctx ends.
func Oneshot(ctx context.Context, unit string) error {
	var out []string
	if err := run(ctx, func(l string) { out = append(out, l) }, "systemctl", "start", unit); err != nil {
		return fmt.Errorf("systemctl start %s: %w: %s", unit, err, strings.Join(out[max(0, len(out)-5):], "; "))
	}
	return nil
}

// Version returns the version of the kubeadm or kubelet that the bootstrapper's children would run, without "v".
func Version(ctx context.Context, program string) (string, error) {
	args := map[string][]string{"kubeadm": {"version", "--output", "short"}, "kubelet": {"--version"}}[program]
	ctx, cancel := context.WithTimeout(ctx, versionTimeout)
	defer cancel()
	var out string
	if err := run(ctx, func(l string) { out = l }, program, args...); err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", program, strings.Join(args, " "), err, out)
	}
	_, version, found := strings.Cut(out, "v") // v1.36.1, Kubernetes v1.36.1
	if !found {
		return "", fmt.Errorf("%s %s: %q has no version", program, strings.Join(args, " "), out)
	}
	return version, nil
}

// Reboot makes systemd restart the machine, without logind, which Muster's image does not have. It returns before the machine
// goes down.
func Reboot(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, unitTimeout)
	defer cancel()
	var out []string
	if err := run(ctx, func(l string) { out = append(out, l) }, "systemctl", "--no-block", "--job-mode=replace-irreversibly", "start", "reboot.target"); err != nil {
		return fmt.Errorf("systemctl start reboot.target: %w: %s", err, strings.Join(out[max(0, len(out)-5):], "; "))
	}
	return nil
}

// Kubeadm implements [Machine].
func (Real) Kubeadm(ctx context.Context, line func(string), args ...string) error {
	return run(ctx, line, "kubeadm", args...)
}

// Environment returns the environment of a child.
func Environment() []string { return slices.Clone(environment) }

// LookPath finds a program in the children's path, not in this process's. An error ends the search: otherwise, if the root's disk can't be read, a program of
// the state disk would take the place of one of the root (B8).
func LookPath(name string) (string, error) {
	dirs := strings.TrimPrefix(environment[0], "PATH=")
	for _, d := range filepath.SplitList(dirs) {
		p := filepath.Join(d, name)
		st, err := os.Stat(p)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", fmt.Errorf("find %s: %w", name, err)
		}
		if err == nil && st.Mode().IsRegular() && st.Mode().Perm()&0o111 != 0 {
			return p, nil
		}
	}
	return "", fmt.Errorf("%s is not installed in %s", name, dirs)
}

func run(ctx context.Context, line func(string), name string, args ...string) error {
	return feed(ctx, nil, line, name, args...)
}

// feed runs a program with in as its standard input; nil if it has none.
func feed(ctx context.Context, in io.Reader, line func(string), name string, args ...string) error {
	path, err := LookPath(name)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env, cmd.Dir = environment, "/"
	// B3: a kubeadm that outlives its bootstrapper would conflict with the one that the next bootstrapper runs. The kernel sends the signal when the
	// thread that started the child ends.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.WaitDelay = 10 * time.Second // a grandchild may hold the pipe
	r, w := io.Pipe()
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, w, w
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

// lines reads to the end, for lines of every length, so that the writer never blocks.
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
