package machine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
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

// Init is PID 1 of a machine. It returns only when the boot has failed.
func Init(ctx context.Context, specPath string) error {
	syscall.CloseOnExec(fdReport)
	syscall.CloseOnExec(fdPlug)
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	if err := boot(ctx, specPath, log); err != nil {
		log.Error("boot failed", "err", err)
		return errors.Join(err, report(Report{Error: err.Error()}))
	}
	if err := report(Report{Ready: true}); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

func boot(ctx context.Context, specPath string, log *slog.Logger) error {
	if err := os.Setenv("PATH", Path); err != nil {
		return err
	}
	s, err := loadSpec(specPath)
	if err != nil {
		return err
	}
	var manifest image.Manifest
	if s.Manifest != "" {
		if manifest, err = image.LoadManifest(s.Manifest); err != nil {
			return err
		}
	}
	clock := time.Now()
	lap := func(stage string) {
		log.Info("boot", "stage", stage, "took", time.Since(clock).Round(time.Millisecond))
		clock = time.Now()
	}
	if err := syscall.Sethostname([]byte(s.Name)); err != nil {
		return err
	}
	if err := makeRoot(s); err != nil {
		return fmt.Errorf("root file system: %w", err)
	}
	lap("root file system")
	if err := connect(ctx, s.Address); err != nil {
		return err
	}
	if err := leaveTopCgroup(s.Cgroups); err != nil { // after connect: the parent has moved by then
		return err
	}
	lap("network")
	if s.Manifest != "" {
		if err := measure(manifest); err != nil {
			return fmt.Errorf("firmware: %w", err)
		}
		lap("firmware")
	}
	// From here on all children are the supervisor's.
	sigchld := make(chan os.Signal, 64)
	signal.Notify(sigchld, syscall.SIGCHLD)
	sup, err := newSupervisor(inMachine, []string{"PATH=" + Path, "HOME=/root", "LANG=C.UTF-8"}, log)
	if err != nil {
		return err
	}
	go sup.reap(sigchld)
	l, err := net.Listen("unix", controlSocket)
	if err != nil {
		return err
	}
	go sup.serve(ctx, l)
	wanted := s.Start
	if wanted == nil {
		wanted = sup.atBoot()
	}
	for _, u := range bootOrder(sup.units, wanted) {
		if err := sup.start(ctx, u); err != nil {
			return err
		}
		lap("unit " + u)
	}
	return nil
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
