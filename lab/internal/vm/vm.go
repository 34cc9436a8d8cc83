// Package vm runs virtual machines that boot as real ones do: UEFI firmware that measures, a TPM 2.0 of their own, a
// read-only disk image, and a state disk that survives a power cut.
//
// A [VM] is a folder and, while it is powered, two processes: QEMU and its swtpm. Everything that a machine keeps
// when its power is cut is in the folder, so cutting it is SIGKILL, and power on is starting both again. There is no
// KVM: QEMU emulates (TCG), which takes the same on every host and makes a boot last half a minute.
package vm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/muster-k8s/muster/lab/internal/host"
	"github.com/muster-k8s/muster/lab/internal/vtpm"
)

// StateSerial is the serial number of the state disk, by which its machine finds it:
// /dev/disk/by-id/virtio-muster-state, and /sys/block/*/serial before there is an udev.
const StateSerial = "muster-state"

// Defaults of a [Config].
const (
	DefaultMemory = 2048 // MiB
	DefaultState  = 4096 // MiB; the file is sparse
	processors    = 2
)

// FirmwareTimeout is how long a machine may take from power on to the first line of what it boots, on
// a host that is busy. 16 to 26 seconds were measured for Linux, 5 for a program of the firmware's.
const FirmwareTimeout = 2 * time.Minute

// ErrFirmware is returned if firmware was silent, or QEMU ended, before anything had booted, twice.
var ErrFirmware = errors.New("the firmware has not started what is on the boot disk")

// ErrNothingBoots is returned if firmware has tried all boot options without success: the console shows why.
var ErrNothingBoots = errors.New("the firmware found nothing that it may start")

// A Config describes a machine. Dir, Image, CA, Spawn and Log are required.
type Config struct {
	Dir    string            // its folder
	Image  string            // the raw disk image that it boots; it is not written to
	CA     vtpm.CA           // where its TPM's certificates come from, when it gets power first
	Medium map[string][]byte // files of its config medium; nil if it has none
	State  int               // size of its state disk in MiB, when it gets power first; 0 for DefaultState
	Memory int               // MiB; 0 for DefaultMemory
	MAC    net.HardwareAddr  // of its network card
	Tap    string            // the tap device that its network card is plugged into; empty if it has no card
	// SecureBoot gives it firmware that starts what [SecureBootKey] signed, and nothing else. It is for the whole
	// life of the machine: its variables hold the key.
	SecureBoot bool
	Hardware   Hardware
	// ClockOffset is how far its real-time clock is ahead of the host's when it gets power.
	ClockOffset time.Duration
	// Spawn starts a process, on a thread that lives as long as the machine should: the kernel ends
	// the process with the thread.
	Spawn func(*exec.Cmd) error
	Log   *slog.Logger
}

// Hardware is what the provider of a machine can put below its image, from one power on to the next. Empty fields add nothing.
type Hardware struct {
	Firmware  string `json:"firmware"`  // flash image of firmware code, in place of the one that SecureBoot chooses
	OptionROM string `json:"optionROM"` // PCI expansion ROM of its random-number device
	Disk      string `json:"disk"`      // raw image of one more disk, read-only
	FirstDisk string `json:"firstDisk"` // raw image of a read-only disk that gets the kernel's name of the state disk
	CD        string `json:"cd"`        // image of a CD in a SCSI drive
	OEMString string `json:"oemString"` // a string of the firmware's tables: SMBIOS, type 11
	// MachineCredential is a file that QEMU's fw_cfg device offers as the systemd credential muster.machine.
	MachineCredential string `json:"machineCredential"`
}

// A VM is a machine with power.
type VM struct {
	Process host.Process // QEMU
	TPM     host.Process // swtpm
	Console string       // the file with what it wrote to its serial port since power on

	dir  string
	qemu *process
	tpm  *process
	log  *slog.Logger
}

// StatePath is the state disk of the machine in dir: a raw image.
func StatePath(dir string) string { return filepath.Join(dir, "state.raw") }

// VariablesPath is the flash image with the firmware's variables of the machine in dir.
func VariablesPath(dir string) string { return filepath.Join(dir, variablesFile) }

// tpmOf is the TPM of the machine in dir.
func tpmOf(dir string) vtpm.TPM { return vtpm.TPM{Dir: filepath.Join(dir, "tpm")} }

// Start powers a machine on. It first creates a missing TPM, firmware variables and state disk. It returns when a program
// other than firmware has written to the console. If firmware hangs, it retries once, and logs that.
func Start(ctx context.Context, c Config) (*VM, error) {
	if c.Dir == "" || c.Image == "" || c.Spawn == nil || c.Log == nil {
		return nil, errors.New("vm: Dir, Image, Spawn and Log are required")
	}
	if err := provision(ctx, c); err != nil {
		return nil, fmt.Errorf("make the machine in %s: %w", c.Dir, err)
	}
	m, err := powerOn(ctx, c)
	if !errors.Is(err, ErrFirmware) {
		return m, err
	}
	// About one boot in forty ends silently in OVMF under TCG.
	c.Log.WarnContext(ctx, "the machine's firmware hangs: one more power cycle", "dir", c.Dir, "err", err)
	return powerOn(ctx, c)
}

// provision makes what lasts. Each part is made once and is whole when it has its name.
func provision(ctx context.Context, c Config) error {
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return err
	}
	made := filepath.Join(c.Dir, "tpm", "manufactured")
	if _, err := os.Stat(made); errors.Is(err, fs.ErrNotExist) {
		if err := os.RemoveAll(filepath.Dir(made)); err != nil {
			return err
		}
		if err := tpmOf(c.Dir).Manufacture(ctx, c.CA); err != nil {
			return err
		}
		if err := os.WriteFile(made, nil, 0o600); err != nil {
			return err
		}
	}
	if err := once(VariablesPath(c.Dir), func(tmp string) error {
		_, vars := firmware(c)
		b, err := os.ReadFile(vars)
		if err != nil {
			return err
		}
		return os.WriteFile(tmp, b, 0o600)
	}); err != nil {
		return err
	}
	if err := once(StatePath(c.Dir), func(tmp string) error {
		return errors.Join(os.WriteFile(tmp, nil, 0o600), os.Truncate(tmp, int64(orDefault(c.State, DefaultState))<<20))
	}); err != nil {
		return err
	}
	if c.Medium == nil {
		return nil
	}
	return WriteMedium(ctx, filepath.Join(c.Dir, mediumFile), c.Medium)
}

func once(path string, write func(tmp string) error) error {
	if _, err := os.Stat(path); err == nil {
		return nil
	}
	if err := write(path + ".new"); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

func orDefault(v, d int) int {
	if v == 0 {
		return d
	}
	return v
}

// powerOn starts the TPM, then QEMU, and waits until something has booted.
func powerOn(ctx context.Context, c Config) (_ *VM, err error) {
	for _, socket := range []string{filepath.Join(c.Dir, "tpm", vtpm.ControlSocket), filepath.Join(c.Dir, qmpSocket)} {
		if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	m := &VM{dir: c.Dir, log: c.Log}
	if m.Console, err = nextConsole(c.Dir); err != nil {
		return nil, err
	}
	chip := tpmOf(c.Dir)
	if m.tpm, err = start(c.Spawn, chip.ChipCommand(), filepath.Join(c.Dir, "tpm.log")); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.Kill(context.WithoutCancel(ctx)))
		}
	}()
	m.TPM = m.tpm.identity
	if err := chip.WaitChip(ctx); err != nil {
		return nil, err
	}
	cmd := exec.Command("qemu-system-x86_64", arguments(c, m.Console)...)
	cmd.Dir = c.Dir // relative paths: a socket's path is limited to 107 bytes
	if m.qemu, err = start(c.Spawn, cmd, filepath.Join(c.Dir, "qemu.log")); err != nil {
		return nil, err
	}
	m.Process = m.qemu.identity
	boot, cancel := context.WithTimeoutCause(ctx, FirmwareTimeout, fmt.Errorf("%w within %s", ErrFirmware, FirmwareTimeout))
	defer cancel()
	if err := m.booted(boot); err != nil {
		return nil, err
	}
	return m, nil
}

// booted returns when something other than firmware writes to the console.
func (m *VM) booted(ctx context.Context) error {
	started, nothing := false, false
	_, err := m.Wait(ctx, func(line string) bool {
		if line == bootManager+"No bootable option or device was found." {
			nothing = true
			return true
		}
		if started && line != "" && !strings.HasPrefix(line, bootManager) {
			return true
		}
		started = started || strings.HasPrefix(line, bootManager+"starting ")
		return false
	})
	if errors.Is(err, errPowerOff) {
		return fmt.Errorf("%w: %w; %s ends with %q, %s with %q", ErrFirmware, err, m.qemu.log, lastLine(m.qemu.log), m.tpm.log, lastLine(m.tpm.log))
	}
	if err == nil && nothing {
		return ErrNothingBoots
	}
	return err
}

// Kill cuts the power of the machine and of its TPM.
func (m *VM) Kill(ctx context.Context) error {
	var errs []error
	for _, p := range []*process{m.qemu, m.tpm} {
		if p != nil {
			errs = append(errs, p.kill(ctx))
		}
	}
	return errors.Join(errs...)
}

// Shutdown presses the power button and waits until the machine has gone off by itself; when ctx ends
// first, the machine is still on.
func (m *VM) Shutdown(ctx context.Context) error {
	if err := powerButton(ctx, filepath.Join(m.dir, qmpSocket)); err != nil {
		return err
	}
	select {
	case <-m.qemu.done:
		return m.tpm.kill(ctx) // it ends with QEMU anyway
	case <-ctx.Done():
		return fmt.Errorf("the machine doesn't heed its power button: %w", context.Cause(ctx))
	}
}

// Alive reports whether the machine has power: it goes off by itself when it powers off or reboots.
func (m *VM) Alive() bool { return m.Process.Alive() }

// A process is one of a machine's two.
type process struct {
	identity host.Process
	done     chan struct{} // closed when it has ended
	log      string
}

func start(spawn func(*exec.Cmd) error, cmd *exec.Cmd, log string) (*process, error) {
	f, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	cmd.Stdout, cmd.Stderr = f, f
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setsid: true}
	if err := spawn(cmd); err != nil {
		return nil, err
	}
	p := &process{done: make(chan struct{}), log: log}
	p.identity, err = host.ProcessOf(cmd.Process.Pid)
	go func() {
		_ = cmd.Wait() // how it ended is in its log
		close(p.done)
	}()
	if err != nil {
		return nil, errors.Join(err, cmd.Process.Kill())
	}
	return p, nil
}

// lastLine returns the last line of a log; empty if there is none.
func lastLine(file string) string {
	b, err := os.ReadFile(file)
	if err != nil {
		return err.Error()
	}
	b = bytes.TrimRight(b, "\n")
	return string(b[bytes.LastIndexByte(b, '\n')+1:])
}

func (p *process) kill(ctx context.Context) error {
	if err := p.identity.Signal(syscall.SIGKILL); err != nil {
		return err
	}
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("process %d doesn't end: %w", p.identity.PID, ctx.Err())
	}
}
