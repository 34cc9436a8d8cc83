package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	"github.com/muster-k8s/muster/lab/internal/host"
	"github.com/muster-k8s/muster/lab/internal/lan"
	"github.com/muster-k8s/muster/lab/internal/machine"
	"github.com/muster-k8s/muster/lab/internal/vtpm"
)

// A running machine and the children that make it up.
type running struct {
	Machine
	request NodeRequest
	enter   *child   // parent of the machine's PID 1
	tpm     *child   // nil for a bare machine
	virtual *virtual // what it is instead, if it is a virtual machine
	cgroup  string
	cgroups host.Cgroups
	off     bool // its power was cut: there is nothing to end
}

// add makes a machine and boots it.
func (d *Daemon) add(ctx context.Context, r NodeRequest) (Machine, error) {
	if err := r.check(); err != nil {
		return Machine{}, err
	}
	dir := MachineDir(d.cfg.Dir, r.Name)
	if err := d.reserve(r.Name, r.Number); err != nil {
		return Machine{}, err
	}
	err := d.provision(ctx, dir, r)
	var m *running
	if err == nil {
		m, err = d.boot(ctx, dir, r)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if err != nil {
		delete(d.machines, r.Name) // its folder stays, with the logs of the failure
		return Machine{}, fmt.Errorf("machine %s: %w", r.Name, err)
	}
	d.machines[r.Name] = m
	d.follow(ctx, m)
	return m.Machine, nil
}

// reserve takes the machine's name and number.
func (d *Daemon) reserve(name string, number int) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, m := range d.machines {
		if m.Name == name || m.Number == number {
			return fmt.Errorf("machine %s has this name or number; lab remove-node %s frees both", m.Name, m.Name)
		}
	}
	d.machines[name] = &running{Machine: Machine{Name: name, Number: number}}
	return nil
}

// provision makes what a machine has before its first boot: a disk, a TPM, its metadata.
func (d *Daemon) provision(ctx context.Context, dir string, r NodeRequest) error {
	// The folder of a machine that failed to boot may still be there.
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(dir, "disk", "log"), 0o755); err != nil {
		return err
	}
	var wg sync.WaitGroup
	errs := make([]error, 4)
	if !r.Bare {
		wg.Go(func() {
			ca := vtpm.CA{Dir: filepath.Join(d.cfg.Dir, "ca")}
			if r.ForeignEK {
				ca = vtpm.CA{Dir: filepath.Join(d.cfg.Dir, "ca-foreign")}
			}
			chip := vtpm.TPM{Dir: filepath.Join(dir, "tpm")}
			switch {
			case r.CloudKey:
				errs[0] = chip.ManufactureCloud(ctx, vtpm.CA{Dir: filepath.Join(d.cfg.Dir, "ca-cloud")}, r.Name)
			case r.BareEK:
				errs[0] = chip.ManufactureBare(ctx, ca)
			default:
				errs[0] = chip.Manufacture(ctx, ca)
			}
		})
	}
	if r.Preload && d.cfg.Golden != "" {
		wg.Go(func() { errs[1] = cloneStore(ctx, d.cfg.Golden, filepath.Join(dir, "disk", "containerd")) })
	}
	if r.TamperBootstrapper {
		errs[2] = d.image.Tamper(filepath.Join(dir, "tampered"))
	}
	wg.Wait()
	if r.Metadata != "" {
		errs[3] = os.WriteFile(filepath.Join(dir, "metadata.yaml"), []byte(r.Metadata), 0o644)
	}
	return errors.Join(errs...)
}

// boot starts a provisioned machine: TPM first, as with real power.
func (d *Daemon) boot(ctx context.Context, dir string, r NodeRequest) (*running, error) {
	m := &running{
		Machine: Machine{Name: r.Name, Number: r.Number, Address: lan.Address(r.Number), ControlPlane: r.ControlPlane, Log: filepath.Join(dir, "disk", "log")},
		request: r, cgroup: CgroupName(d.cfg.Dir) + "/" + r.Name, cgroups: d.cgroups,
	}
	if err := d.bootInto(ctx, dir, m); err != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTimeout)
		defer cancel()
		return nil, errors.Join(err, m.end(ctx))
	}
	return m, nil
}

func (d *Daemon) bootInto(ctx context.Context, dir string, m *running) error {
	r := m.request
	spec := machine.Spec{
		Name: m.Name, Address: m.Address, Dir: dir, Layers: d.image.Layers(!r.NoBootstrapper),
		Cgroups: d.cgroups, Cgroup: m.cgroup, KeepEtc: r.KeepEtc,
	}
	switch {
	case r.Bare:
		spec.Start = []string{"containerd"}
	default:
		tpm := vtpm.TPM{Dir: filepath.Join(dir, "tpm")}
		if err := d.startTPM(ctx, m, tpm, filepath.Join(dir, "tpm.log")); err != nil {
			return err
		}
		spec.Manifest, spec.TPMSocket = d.image.ManifestPath(), tpm.Socket()
	}
	if r.TamperBootstrapper {
		spec.Layers = append([]string{filepath.Join(dir, "tampered")}, spec.Layers...)
	}
	if r.NoBootstrapper {
		if err := attackersPrograms(d.cfg, filepath.Join(dir, "programs")); err != nil {
			return err
		}
		spec.Layers = append([]string{filepath.Join(dir, "programs")}, spec.Layers...)
	}
	j, err := json.MarshalIndent(spec, "", "  ")
	if err != nil {
		return err
	}
	specPath := filepath.Join(dir, "machine.json")
	if err := os.WriteFile(specPath, j, 0o600); err != nil {
		return err
	}
	if err := d.cgroups.Create(m.cgroup); err != nil {
		return err
	}
	m.enter, err = d.start(ctx, exec.Command("/proc/self/exe", "machine-enter", specPath), filepath.Join(dir, "init.log"))
	if err != nil {
		return err
	}
	first, err := m.enter.next(ctx)
	if err != nil {
		return err
	}
	if m.Init, err = host.ProcessOf(first.PID); err != nil {
		return err
	}
	if err := lan.Plug(ctx, m.Name, first.PID); err != nil {
		return err
	}
	return m.enter.boot(ctx)
}

func (d *Daemon) startTPM(ctx context.Context, m *running, tpm vtpm.TPM, log string) error {
	if err := os.Remove(tpm.Socket()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	var err error
	if m.tpm, err = d.start(ctx, tpm.Command(), log); err != nil {
		return err
	}
	m.TPM, m.TPMSocket = m.tpm.process, tpm.Socket()
	return errors.Join(tpm.WaitReady(ctx), m.tpm.pipe.Close(), m.tpm.plug.Close())
}

// remove ends a machine and deletes all that it had.
func (d *Daemon) remove(ctx context.Context, name string) error {
	m, err := d.take(name)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTimeout)
	defer cancel()
	if err := m.end(ctx); err != nil {
		return err
	}
	return os.RemoveAll(MachineDir(d.cfg.Dir, name))
}

// reboot cuts the power and boots again from the same disk.
func (d *Daemon) reboot(ctx context.Context, name string) (Machine, error) {
	if d.virtualOf(name) != nil {
		return d.rebootVM(ctx, name, BootRequest{})
	}
	m, err := d.take(name)
	if err != nil {
		return Machine{}, err
	}
	return d.again(ctx, m)
}

// again ends a machine that was taken, if it runs, and boots it from the same disk.
func (d *Daemon) again(ctx context.Context, m *running) (Machine, error) {
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTimeout)
	defer cancel()
	if err := m.end(end); err != nil {
		return Machine{}, err
	}
	again, err := d.boot(ctx, MachineDir(d.cfg.Dir, m.Name), m.request)
	if err != nil {
		return Machine{}, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.machines[m.Name] = again
	d.follow(ctx, again)
	return again.Machine, nil
}

// follow hands a machine to [Daemon.restartThose] if it ends itself for a restart.
func (d *Daemon) follow(ctx context.Context, m *running) {
	go func() { // the machine ends with the daemon
		<-m.enter.done
		if m.enter.cmd.ProcessState.ExitCode() != machine.CodeRestart {
			return
		}
		select {
		case d.restarts <- m:
		case <-ctx.Done():
		}
	}()
}

// restartThose boots machines again that restart themselves, until ctx ends.
func (d *Daemon) restartThose(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		select {
		case <-ctx.Done():
			return nil
		case m := <-d.restarts:
			wg.Go(func() { d.restartOne(ctx, m) })
		}
	}
}

func (d *Daemon) restartOne(ctx context.Context, m *running) {
	d.mu.Lock()
	same := d.machines[m.Name] == m
	if same { // otherwise it was removed, killed or rebooted meanwhile
		delete(d.machines, m.Name)
	}
	d.mu.Unlock()
	if !same {
		return
	}
	if _, err := d.again(ctx, m); err != nil {
		d.log.Error("restart", "machine", m.Name, "err", err)
	}
}

// kill cuts the power: without notice, and permanently until a reboot. The machine stays known.
func (d *Daemon) kill(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTimeout)
	defer cancel()
	if v := d.virtualOf(name); v != nil {
		return v.end(ctx)
	}
	m, err := d.take(name)
	if err != nil {
		return err
	}
	err = m.end(ctx)
	m.off = err == nil
	d.mu.Lock()
	defer d.mu.Unlock()
	d.machines[name] = m
	return err
}

func (d *Daemon) take(name string) (*running, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	m := d.machines[name]
	if m == nil || m.enter == nil && m.virtual == nil {
		return nil, fmt.Errorf("there is no machine %q; lab status lists them", name)
	}
	delete(d.machines, name)
	return m, nil
}

// end kills a machine with everything in it and removes its cgroups.
func (m *running) end(ctx context.Context) error {
	if m.off {
		return nil
	}
	if m.virtual != nil {
		return m.virtual.end(ctx)
	}
	var errs []error
	if m.enter != nil {
		// The kernel ends PID 1 with its parent, and the PID namespace with PID 1.
		errs = append(errs, m.enter.end(ctx), m.Init.Wait(ctx))
		_, _ = m.enter.pipe.Close(), m.enter.plug.Close() // closed already unless the boot failed
	}
	if m.tpm != nil {
		errs = append(errs, m.tpm.end(ctx))
	}
	if m.cgroup != "" {
		errs = append(errs, m.cgroups.Remove(ctx, m.cgroup))
	}
	return errors.Join(errs...)
}

// attackersPrograms makes a layer with every Kubernetes program, for a machine without Muster.
func attackersPrograms(cfg Config, layer string) error {
	bin := filepath.Join(layer, "usr", "local", "bin")
	if err := os.MkdirAll(bin, 0o755); err != nil {
		return err
	}
	for _, p := range []string{"kubelet", "kubeadm", "kubectl"} {
		from, to := filepath.Join(cfg.KubeDir, p), filepath.Join(bin, p)
		if _, err := os.Stat(to); err == nil { // made at an earlier boot
			continue
		}
		if os.Link(from, to) == nil {
			continue
		}
		b, err := os.ReadFile(from)
		if err != nil {
			return err
		}
		if err := os.WriteFile(to, b, 0o755); err != nil {
			return err
		}
	}
	return nil
}

// cloneStore gives a machine its own copy of a containerd folder, in milliseconds: files
// that containerd never changes (blobs, and the files of snapshots, which are lower layers
// of overlays) become hard links; its databases are copied.
func cloneStore(ctx context.Context, from, to string) error {
	for _, how := range []string{"-al", "-a"} { // a plain copy where links can't go: another file system
		if err := os.RemoveAll(to); err != nil {
			return err
		}
		out, err := exec.CommandContext(ctx, "cp", how, "--", from, to).CombinedOutput()
		if err == nil {
			break
		}
		if how == "-a" {
			return fmt.Errorf("copy containerd's folder: %w: %s", err, out)
		}
	}
	return filepath.WalkDir(to, func(p string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() || !strings.HasSuffix(p, ".db") {
			return err
		}
		b, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		if err := os.Remove(p); err != nil {
			return err
		}
		return os.WriteFile(p, b, 0o600)
	})
}
