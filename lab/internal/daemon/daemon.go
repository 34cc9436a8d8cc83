package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/muster-k8s/muster/lab/internal/host"
	"github.com/muster-k8s/muster/lab/internal/image"
	"github.com/muster-k8s/muster/lab/internal/lan"
	"github.com/muster-k8s/muster/lab/internal/machine"
	"github.com/muster-k8s/muster/lab/internal/oci"
)

// cleanTimeout bounds how long the kernel may take to let go of cgroups.
const cleanTimeout = 5 * time.Minute

// stopTimeout is how long a virtual machine may take to shut down.
const stopTimeout = 2 * time.Minute

// weight is how many processes, or sessions, a lab counts as when its machines share the processors with what else the
// computer does. As one, the machines would miss their deadlines beside a compiler.
const weight = 3

// A Daemon is a running lab.
type Daemon struct {
	cfg     Config
	log     *slog.Logger
	image   image.Image
	cgroups host.Cgroups
	spawn   func(*exec.Cmd) error // starts a process as a child of a thread that lives as long as the daemon
	stop    context.CancelFunc    // ends Run

	mu       sync.Mutex
	owner    *child
	machines map[string]*running

	restarts chan *running // machines that have ended themselves for a restart
}

// Run is the daemon: it returns after a shutdown request or when ctx ends, after it has ended its machines and
// removed their cgroups.
func Run(ctx context.Context, dir string, log *slog.Logger) (err error) {
	cfg, err := loadConfig(dir)
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	d := &Daemon{cfg: cfg, log: log, image: image.Image{Dir: filepath.Join(dir, "image")}, spawn: spawner(), stop: stop, machines: map[string]*running{}, restarts: make(chan *running)}
	if d.cgroups, err = host.DetectCgroups(); err != nil {
		return err
	}
	if err := errors.Join(d.cgroups.Create(CgroupName(dir)), d.cgroups.Weigh(CgroupName(dir), weight)); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.clean(context.WithoutCancel(ctx))) }()
	if err := lan.Setup(ctx); err != nil {
		return err
	}

	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	part := func(name string, serve func() error) {
		wg.Go(func() {
			if err := serve(); err != nil && ctx.Err() == nil {
				log.Error("part of the lab ended", "part", name, "err", err)
				stop()
			}
		})
	}
	registry, err := lan.NewRegistry(filepath.Join(dir, "registry"), cfg.Layouts)
	if err != nil {
		return err
	}
	files := lan.Files{Dir: cfg.KubeDir, Sums: cfg.Sums, Published: filepath.Join(dir, "published")}
	for _, s := range []struct {
		name, network, addr string
		handler             http.Handler
	}{
		{"registry", "tcp", lan.Registry, registry},
		{"mirror", "tcp", lan.FilesHost + ":80", files.Handler()},
		{"control", "unix", SocketPath(dir), d.handler(ctx)},
	} {
		if s.network == "unix" { // by now everything else runs: the socket shows that the lab answers
			if err := d.prepare(ctx); err != nil {
				return err
			}
		}
		l, err := net.Listen(s.network, s.addr)
		if err != nil {
			return err
		}
		srv := &http.Server{Handler: s.handler, ReadHeaderTimeout: 10 * time.Second}
		context.AfterFunc(ctx, func() { _ = srv.Close() }) // on each way out: stop runs before wg.Wait
		part(s.name, func() error { return srv.Serve(l) })
	}
	l, err := net.Listen("tcp", lan.ControlPlane)
	if err != nil {
		return err
	}
	f := lan.Forwarder{Backends: d.controlPlanes, Healthy: lan.APIServerReady, Log: log}
	part("forwarder", func() error { return f.Serve(ctx, l) })
	part("restarts", func() error { return d.restartThose(ctx) })
	log.Info("lab is up", "dir", dir)
	<-ctx.Done()
	return nil
}

// prepare fills the registry and sets up the owner's workstation.
func (d *Daemon) prepare(ctx context.Context) error {
	for _, l := range d.cfg.Layouts {
		if err := oci.Push(ctx, l, lan.Registry); err != nil {
			return err
		}
	}
	seat, err := d.start(ctx, exec.Command("/proc/self/exe", "seat", lan.Owner), filepath.Join(d.cfg.Dir, "owner.log"), func(c *exec.Cmd) {
		c.SysProcAttr.Cloneflags = syscall.CLONE_NEWNET
	})
	if err != nil {
		return err
	}
	d.mu.Lock()
	d.owner = seat
	d.mu.Unlock()
	if err := lan.Plug(ctx, "owner", seat.cmd.Process.Pid); err != nil {
		return err
	}
	return seat.boot(ctx)
}

// clean ends every child and removes the lab's cgroups.
func (d *Daemon) clean(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, cleanTimeout)
	defer cancel()
	d.mu.Lock()
	owner, machines := d.owner, d.machines
	d.owner, d.machines = nil, map[string]*running{}
	d.mu.Unlock()
	var errs []error
	for _, m := range machines {
		errs = append(errs, m.end(ctx))
	}
	if owner != nil {
		errs = append(errs, owner.end(ctx))
	}
	errs = append(errs, d.cgroups.Remove(ctx, CgroupName(d.cfg.Dir)))
	return errors.Join(errs...)
}

// controlPlanes are the load balancer's back ends.
func (d *Daemon) controlPlanes() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var addrs []string
	for _, m := range d.machines {
		if m.ControlPlane {
			addrs = append(addrs, m.Address+":6443")
		}
	}
	slices.Sort(addrs)
	return addrs
}

func (d *Daemon) status() Status {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := Status{Machines: []Machine{}}
	s.Daemon, _ = host.ProcessOf(os.Getpid()) // it runs this line
	if d.owner != nil {
		s.Owner = d.owner.process
	}
	for _, m := range d.machines {
		info := m.Machine
		if m.virtual != nil {
			info = m.virtual.info(info)
		} else {
			info.Running = m.Init.Alive()
		}
		s.Machines = append(s.Machines, info)
	}
	slices.SortFunc(s.Machines, func(a, b Machine) int { return strings.Compare(a.Name, b.Name) })
	return s
}

func (d *Daemon) handler(life context.Context) http.Handler {
	mux := http.NewServeMux()
	// A machine's boot continues after the caller disconnects, and ends with the lab.
	handle := func(pattern string, f func(ctx context.Context, r *http.Request) (any, error)) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			v, err := f(life, r)
			if err != nil {
				d.log.Error("request", "pattern", pattern, "err", err)
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
			w.Header().Set("Content-Type", "application/json")
			if err := json.NewEncoder(w).Encode(v); err != nil {
				d.log.Warn("answer", "pattern", pattern, "err", err)
			}
		})
	}
	handle("GET /status", func(context.Context, *http.Request) (any, error) { return d.status(), nil })
	handle("POST /machines", func(ctx context.Context, r *http.Request) (any, error) {
		var req NodeRequest
		if err := json.NewDecoder(r.Body).Decode(&req); err != nil {
			return nil, err
		}
		return d.add(ctx, req)
	})
	handle("DELETE /machines/{name}", func(ctx context.Context, r *http.Request) (any, error) {
		return nil, d.remove(ctx, r.PathValue("name"))
	})
	handle("POST /machines/{name}/reboot", func(ctx context.Context, r *http.Request) (any, error) {
		return d.reboot(ctx, r.PathValue("name"))
	})
	handle("POST /machines/{name}/kill", func(ctx context.Context, r *http.Request) (any, error) {
		return nil, d.kill(ctx, r.PathValue("name"))
	})
	d.handleVMs(handle)
	handle("POST /push", func(ctx context.Context, r *http.Request) (any, error) {
		var layout string
		if err := json.NewDecoder(r.Body).Decode(&layout); err != nil {
			return nil, err
		}
		return nil, oci.Push(ctx, layout, lan.Registry)
	})
	handle("POST /shutdown", func(context.Context, *http.Request) (any, error) {
		// The answer is sent before the listener closes: the caller waits for the end of this process.
		time.AfterFunc(50*time.Millisecond, d.stop)
		return nil, nil
	})
	return mux
}

// Seat is the process that holds the owner's network namespace.
func Seat(ctx context.Context, address string) error {
	return machine.HoldNetwork(ctx, address)
}

// spawner returns a function that starts commands on one thread for the daemon's whole
// life: the kernel sends Pdeathsig when the thread that forked ends, not the process.
func spawner() func(*exec.Cmd) error {
	type job struct {
		cmd  *exec.Cmd
		done chan error
	}
	jobs := make(chan job)
	go func() {
		runtime.LockOSThread()
		for j := range jobs {
			j.done <- j.cmd.Start()
		}
	}()
	return func(c *exec.Cmd) error {
		j := job{c, make(chan error)}
		jobs <- j
		if err := <-j.done; err != nil {
			return fmt.Errorf("start %s: %w", filepath.Base(c.Path), err)
		}
		return nil
	}
}
