package machine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"github.com/google/go-tpm/tpm2/transport/linuxudstpm"

	"github.com/muster-k8s/muster/lab/internal/firmware"
	"github.com/muster-k8s/muster/lab/internal/image"
	"github.com/muster-k8s/muster/lab/internal/lan"
)

// Path is the PATH of everything that runs in a machine.
const Path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// CodeRestart is the exit code of PID 1, and of [Enter], when the machine is to start again.
const CodeRestart = 75

// errRestart ends PID 1 for a restart; lab's main gives it [CodeRestart].
var errRestart = errors.New("the machine restarts")

// Code returns the exit code of a process of the lab that ended with err.
func Code(err error) int {
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.Is(err, errRestart):
		return CodeRestart
	case errors.As(err, &exit):
		return exit.ExitCode()
	}
	return 1
}

// Init is PID 1 of a machine. It returns when the boot has failed, or for a restart, which is for the process that made the machine.
func Init(ctx context.Context, specPath string) error {
	syscall.CloseOnExec(fdReport)
	syscall.CloseOnExec(fdPlug)
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	sup, err := boot(ctx, specPath, log)
	if err != nil {
		log.Error("boot failed", "err", err)
		return errors.Join(err, report(Report{Error: err.Error()}))
	}
	if err := report(Report{Ready: true}); err != nil {
		return err
	}
	return sup.serveUntilRestart(ctx)
}

func boot(ctx context.Context, specPath string, log *slog.Logger) (*supervisor, error) {
	if err := os.Setenv("PATH", Path); err != nil {
		return nil, err
	}
	s, err := loadSpec(specPath)
	if err != nil {
		return nil, err
	}
	var manifest image.Manifest
	if s.Manifest != "" {
		if manifest, err = image.LoadManifest(s.Manifest); err != nil {
			return nil, err
		}
	}
	clock := time.Now()
	lap := func(stage string) {
		log.Info("boot", "stage", stage, "took", time.Since(clock).Round(time.Millisecond))
		clock = time.Now()
	}
	if err := syscall.Sethostname([]byte(s.Name)); err != nil {
		return nil, err
	}
	if err := makeRoot(s); err != nil {
		return nil, fmt.Errorf("root file system: %w", err)
	}
	lap("root file system")
	if err := connect(ctx, s.Address); err != nil {
		return nil, err
	}
	if err := leaveTopCgroup(s.Cgroups); err != nil { // after connect: the parent has moved by then
		return nil, err
	}
	lap("network")
	if s.Manifest != "" {
		if err := measure(manifest); err != nil {
			return nil, fmt.Errorf("firmware: %w", err)
		}
		lap("firmware")
	}
	// From here on all children are the supervisor's.
	sigchld := make(chan os.Signal, 64)
	signal.Notify(sigchld, syscall.SIGCHLD)
	sup, err := newSupervisor(inMachine, []string{"PATH=" + Path, "HOME=/root", "LANG=C.UTF-8"}, log)
	if err != nil {
		return nil, err
	}
	go sup.reap(sigchld)
	l, err := net.Listen("unix", controlSocket)
	if err != nil {
		return nil, err
	}
	go sup.serve(ctx, l)
	wanted := s.Start
	if wanted == nil {
		wanted = sup.atBoot()
	}
	for _, u := range bootOrder(sup.units, wanted) {
		if err := sup.start(ctx, u); err != nil {
			return nil, err
		}
		lap("unit " + u)
	}
	return sup, nil
}

// connect waits for the cable and configures eth0.
func connect(ctx context.Context, address string) error {
	plug := os.NewFile(fdPlug, "plug")
	defer plug.Close()
	if _, err := io.ReadFull(plug, make([]byte, 1)); err != nil {
		return fmt.Errorf("no network cable: %w", err)
	}
	return lan.Configure(ctx, address)
}

// measure hashes the machine's present files and extends the hashes into its TPM.
func measure(m image.Manifest) error {
	files, err := firmware.Hash("/", m.Files)
	if err != nil {
		return err
	}
	t, err := linuxudstpm.Open(image.TPMSocket)
	if err != nil {
		return err
	}
	return errors.Join(firmware.Boot(t, files, image.EventLog), t.Close())
}
