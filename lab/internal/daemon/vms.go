package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"

	"github.com/muster-k8s/muster/lab/internal/lan"
	"github.com/muster-k8s/muster/lab/internal/vm"
	"github.com/muster-k8s/muster/lab/internal/vtpm"
)

// MaxVMs is how many virtual machines of a lab may be powered at a time: each one emulates two processors, and with
// more of them all deadlines are wrong.
const MaxVMs = 2

// errPowerCut ends a boot whose machine loses its power meanwhile.
var errPowerCut = errors.New("its power was cut while it booted")

// A virtual is a virtual machine, powered or not. It stays known, with its folder, until it is removed.
type virtual struct {
	dir  string
	tap  string        // its name on the lan
	slot chan struct{} // holds one element while an operation runs

	mu      sync.Mutex
	request VMRequest
	vm      *vm.VM                  // nil before the first power on
	abort   context.CancelCauseFunc // cancels the boot in progress; nil if there is none
}

func newVirtual(dir string, r VMRequest) *virtual {
	return &virtual{dir: dir, tap: r.Name, slot: make(chan struct{}, 1), request: r}
}

// powered reports whether it counts towards [MaxVMs].
func (v *virtual) powered() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.abort != nil || v.vm != nil && v.vm.Alive()
}

// info completes the description of the machine.
func (v *virtual) info(m Machine) Machine {
	v.mu.Lock()
	defer v.mu.Unlock()
	m.VM, m.Log = true, v.dir
	if v.vm != nil {
		m.Init, m.TPM, m.Console = v.vm.Process, v.vm.TPM, v.vm.Console
		m.Running = v.vm.Alive()
	}
	return m
}

// end cuts the power, also in the middle of a boot, and unplugs the network.
func (v *virtual) end(ctx context.Context) error {
	v.mu.Lock()
	if v.abort != nil {
		v.abort(errPowerCut)
	}
	v.mu.Unlock()
	select {
	case v.slot <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-v.slot }()
	v.mu.Lock()
	m := v.vm
	v.mu.Unlock()
	if m == nil {
		return nil
	}
	return errors.Join(m.Kill(ctx), lan.Untap(ctx, v.tap))
}

// virtualOf returns a virtual machine, or nil.
func (d *Daemon) virtualOf(name string) *virtual {
	d.mu.Lock()
	defer d.mu.Unlock()
	if m := d.machines[name]; m != nil {
		return m.virtual
	}
	return nil
}

// addVM makes a virtual machine and powers it on. One that fails to boot stays, so that it can be examined and
// started again.
func (d *Daemon) addVM(ctx context.Context, r VMRequest) (Machine, error) {
	if err := r.check(); err != nil {
		return Machine{}, err
	}
	if err := d.reserve(r.Name, r.Number); err != nil {
		return Machine{}, err
	}
	m := &running{
		Machine: Machine{Name: r.Name, Number: r.Number, Address: lan.Address(r.Number), ControlPlane: r.ControlPlane},
		virtual: newVirtual(MachineDir(d.cfg.Dir, r.Name), r),
	}
	d.mu.Lock()
	d.machines[r.Name] = m
	d.mu.Unlock()
	return d.powerOn(ctx, m)
}

// rebootVM cuts a virtual machine's power and powers it on again, with another image if b names one.
func (d *Daemon) rebootVM(ctx context.Context, name string, b BootRequest) (Machine, error) {
	d.mu.Lock()
	m := d.machines[name]
	d.mu.Unlock()
	if m == nil || m.virtual == nil {
		return Machine{}, errNoVM(name)
	}
	if b.Image != "" && !filepath.IsAbs(b.Image) {
		return Machine{}, fmt.Errorf("image %q of machine %s: want an absolute path", b.Image, name)
	}
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTimeout)
	defer cancel()
	if err := m.virtual.end(end); err != nil {
		return Machine{}, err
	}
	m.virtual.mu.Lock()
	if b.Image != "" {
		m.virtual.request.Image = b.Image
	}
	if b.Medium != nil {
		m.virtual.request.Medium = b.Medium
	}
	if b.Hardware != nil {
		m.virtual.request.Hardware = *b.Hardware
	}
	m.virtual.mu.Unlock()
	return d.powerOn(ctx, m)
}

// powerOn boots a virtual machine that is off, unless [MaxVMs] are powered.
func (d *Daemon) powerOn(ctx context.Context, m *running) (Machine, error) {
	v := m.virtual
	select {
	case v.slot <- struct{}{}:
		defer func() { <-v.slot }()
	case <-ctx.Done():
		return Machine{}, ctx.Err()
	}
	boot, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if err := d.takePower(m, cancel); err != nil {
		return Machine{}, err
	}
	started, err := d.bootVM(boot, v)
	v.mu.Lock()
	v.abort = nil
	if started != nil {
		v.vm = started
	}
	v.mu.Unlock()
	if err != nil {
		return Machine{}, fmt.Errorf("machine %s: %w", m.Name, err)
	}
	return v.info(m.Machine), nil
}

// takePower counts the machine in, or refuses it.
func (d *Daemon) takePower(m *running, abort context.CancelCauseFunc) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var others []string
	for _, o := range d.machines {
		if o != m && o.virtual != nil && o.virtual.powered() {
			others = append(others, o.Name)
		}
	}
	slices.Sort(others)
	if len(others) >= MaxVMs {
		return fmt.Errorf("machine %s stays off: %d virtual machines have power already (%v), and more would be too slow for every deadline; lab vm stop or lab vm kill one of them", m.Name, len(others), others)
	}
	m.virtual.mu.Lock()
	defer m.virtual.mu.Unlock()
	m.virtual.abort = abort
	return nil
}

func (d *Daemon) bootVM(ctx context.Context, v *virtual) (*vm.VM, error) {
	v.mu.Lock()
	r := v.request
	v.mu.Unlock()
	tap, err := lan.Tap(ctx, v.tap)
	if err != nil {
		return nil, err
	}
	ca := vtpm.CA{Dir: filepath.Join(d.cfg.Dir, "ca")}
	if r.ForeignEK {
		ca = vtpm.CA{Dir: filepath.Join(d.cfg.Dir, "ca-foreign")}
	}
	group := CgroupName(d.cfg.Dir) + "/" + v.tap // which goes with the lab
	if err := d.cgroups.Create(group); err != nil {
		return nil, err
	}
	spawn := func(cmd *exec.Cmd) error {
		if err := d.spawn(cmd); err != nil {
			return err
		}
		if err := d.cgroups.Enter(group, cmd.Process.Pid); err != nil && !errors.Is(err, syscall.ESRCH) { // ended already: its log shows why
			err = errors.Join(err, cmd.Process.Kill())
			_ = cmd.Wait() // killed
			return err
		}
		return nil
	}
	return vm.Start(ctx, vm.Config{
		Dir: v.dir, Image: r.Image, CA: ca, Medium: r.Medium, State: r.StateMiB, Memory: r.MemoryMiB, SecureBoot: r.SecureBoot, Hardware: r.Hardware, ClockOffset: r.ClockOffset,
		MAC: lan.HardwareAddress(r.Name), Tap: tap, Spawn: spawn, Log: d.log,
	})
}

// stopVM presses the power button.
func (d *Daemon) stopVM(ctx context.Context, name string) error {
	v := d.virtualOf(name)
	if v == nil {
		return errNoVM(name)
	}
	v.mu.Lock()
	m := v.vm
	v.mu.Unlock()
	if m == nil || !m.Alive() {
		return fmt.Errorf("machine %s has no power", name)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, stopTimeout, fmt.Errorf("not off after %s; lab vm kill cuts its power", stopTimeout))
	defer cancel()
	return m.Shutdown(ctx)
}

func errNoVM(name string) error {
	return fmt.Errorf("there is no virtual machine %q; lab vm list names them", name)
}

func (d *Daemon) handleVMs(handle func(string, func(context.Context, *http.Request) (any, error))) {
	handle("POST /vms", func(ctx context.Context, r *http.Request) (any, error) {
		var req VMRequest
		if err := json.NewDecoder(r.Body).Decode(&req); err != nil {
			return nil, err
		}
		return d.addVM(ctx, req)
	})
	handle("POST /vms/{name}/reboot", func(ctx context.Context, r *http.Request) (any, error) {
		var req BootRequest
		if err := json.NewDecoder(r.Body).Decode(&req); err != nil {
			return nil, err
		}
		return d.rebootVM(ctx, r.PathValue("name"), req)
	})
	handle("POST /vms/{name}/stop", func(ctx context.Context, r *http.Request) (any, error) {
		return nil, d.stopVM(ctx, r.PathValue("name"))
	})
}
