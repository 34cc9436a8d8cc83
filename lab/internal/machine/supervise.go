package machine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/muster-k8s/muster/lab/internal/image"
)

// folders are where a supervisor reads and writes.
type folders struct {
	units   string // unit files
	enabled string // a file for each unit that was enabled or disabled, with that state
	notify  string // sockets for sd_notify(3), a socket per unit
	logs    string // what units print, NAME.log
}

// enabledDir survives a reboot.
const enabledDir = "/var/lib/systemd/enabled"

// inMachine are the folders of a real machine.
var inMachine = folders{units: image.Units, enabled: enabledDir, notify: "/run/systemd/notify", logs: "/var/log"}

const (
	startLimit  = 10 * time.Minute // for Type=notify: from start to READY=1
	stopTimeout = 20 * time.Second // from SIGTERM to SIGKILL
)

// A service is what runs, or doesn't, of a unit.
type service struct {
	state  string // inactive, activating, active, deactivating or failed, as systemctl prints it
	pid    int    // 0: no process
	wanted bool   // by start; a service that ends by itself is restarted only while wanted
	result string // how the last process ended
	good   bool   // it ended with exit code 0
	notify *net.UnixConn
}

// A supervisor runs units and reaps every orphan of the machine, as PID 1 must.
type supervisor struct {
	at  folders
	env []string
	log *slog.Logger

	mu       sync.Mutex
	changed  chan struct{} // closed and replaced at each change of a state
	units    map[string]Unit
	services map[string]*service
	pids     map[int]string // running main processes

	restart  func()        // closes restarts
	restarts chan struct{} // closed: the machine is to restart
}

func newSupervisor(f folders, env []string, log *slog.Logger) (*supervisor, error) {
	s := &supervisor{
		at: f, env: env, log: log,
		changed: make(chan struct{}), services: map[string]*service{}, pids: map[int]string{}, restarts: make(chan struct{}),
	}
	s.restart = sync.OnceFunc(func() { close(s.restarts) })
	if err := os.MkdirAll(f.notify, 0o755); err != nil {
		return nil, err
	}
	return s, s.reload()
}

// reload reads the unit files again; running units continue.
func (s *supervisor) reload() error {
	units, err := loadUnits(s.at.units)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.units = units
	for name := range units {
		if s.services[name] == nil {
			s.services[name] = &service{state: "inactive"}
		}
	}
	return nil
}

// enable makes a unit one of those that start at boot, or takes that back.
func (s *supervisor) enable(name string, on bool) error {
	said := disabled
	if on {
		said = "enabled\n"
	}
	return os.WriteFile(filepath.Join(s.at.enabled, name), []byte(said), 0o644)
}

const disabled = "disabled\n"

// isEnabled reports whether a unit starts at boot: by the last systemctl command, or otherwise by its file.
func (s *supervisor) isEnabled(u Unit) bool {
	said, err := os.ReadFile(filepath.Join(s.at.enabled, u.Name))
	if err != nil {
		return slices.Contains(u.WantedBy, bootTarget)
	}
	return string(said) != disabled
}

// atBoot lists the units that start at boot, by name.
func (s *supervisor) atBoot() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var names []string
	for name, u := range s.units {
		if s.isEnabled(u) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// start starts a unit and waits until it is active. A unit whose condition doesn't hold
// stays as it is, without an error, as with systemd.
func (s *supervisor) start(ctx context.Context, name string) error {
	s.mu.Lock()
	u, ok := s.units[name]
	if !ok {
		s.mu.Unlock()
		return errNoUnit(name)
	}
	svc := s.services[name]
	for _, c := range u.Conditions {
		if _, err := os.Stat(c); err != nil {
			s.mu.Unlock()
			s.log.Info("condition failed", "unit", name, "path", c)
			return nil
		}
	}
	svc.wanted = true
	var err error
	if svc.pid == 0 {
		err = s.spawn(name)
	}
	s.mu.Unlock()
	if err != nil {
		return err
	}
	if u.OneShot { // as of systemd, its start takes as long as its process
		if err := s.wait(ctx, func() bool { return svc.pid == 0 }); err != nil {
			return fmt.Errorf("%s.service has not ended: %w", name, err)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if !svc.good {
			return fmt.Errorf("%s.service failed: %s", name, svc.result)
		}
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	if err := s.wait(ctx, func() bool { return svc.state != "activating" }); err != nil {
		return fmt.Errorf("%s.service did not report that it is ready: %w", name, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if svc.state == "failed" {
		return fmt.Errorf("%s.service failed: %s", name, svc.result)
	}
	return nil
}

// spawn starts a unit's process; the caller holds mu, so that the reaper can't see the end
// of a process before its pid is known.
func (s *supervisor) spawn(name string) error {
	u, svc := s.units[name], s.services[name]
	fail := func(err error) error {
		svc.result = err.Error()
		s.set(svc, "failed")
		return fmt.Errorf("start %s.service: %w", name, err)
	}
	env := s.env
	if u.Notify {
		if err := s.listen(name, svc); err != nil {
			return fail(err)
		}
		env = append(env[:len(env):len(env)], "NOTIFY_SOCKET="+filepath.Join(s.at.notify, name))
	}
	argv, env, err := u.command(env)
	if err != nil {
		return fail(err)
	}
	log, err := os.OpenFile(filepath.Join(s.at.logs, name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o640)
	if err != nil {
		return fail(err)
	}
	defer log.Close()
	path, err := exec.LookPath(argv[0])
	if err != nil {
		return fail(err)
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return fail(err)
	}
	defer null.Close()
	pid, err := syscall.ForkExec(path, argv, &syscall.ProcAttr{
		Dir: "/", Env: env, Files: []uintptr{null.Fd(), log.Fd(), log.Fd()},
		Sys: &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return fail(err)
	}
	svc.pid = pid
	s.pids[pid] = name
	s.log.Info("started", "unit", name, "pid", pid)
	if u.Notify || u.OneShot {
		s.set(svc, "activating")
	} else {
		s.set(svc, "active")
	}
	return nil
}

// listen opens the unit's notification socket (sd_notify(3)), one per unit, so that the address identifies the unit that is
// ready.
func (s *supervisor) listen(name string, svc *service) error {
	if svc.notify != nil {
		return nil
	}
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(s.at.notify, name), Net: "unixgram"})
	if err != nil {
		return err
	}
	svc.notify = c
	go func() { // as long as PID 1 lives
		buf := make([]byte, 4096)
		for {
			n, err := c.Read(buf)
			if err != nil {
				return
			}
			for line := range strings.Lines(string(buf[:n])) {
				if strings.TrimSpace(line) == "READY=1" {
					s.mu.Lock()
					if svc.state == "activating" && svc.pid != 0 {
						s.set(svc, "active")
					}
					s.mu.Unlock()
				}
			}
		}
	}()
	return nil
}

// stop ends a unit's process and waits for its end.
func (s *supervisor) stop(ctx context.Context, name string) error {
	s.mu.Lock()
	svc, ok := s.services[name]
	if !ok {
		s.mu.Unlock()
		return errNoUnit(name)
	}
	svc.wanted = false
	pid := svc.pid
	if pid == 0 {
		s.set(svc, "inactive")
		s.mu.Unlock()
		return nil
	}
	s.set(svc, "deactivating")
	_ = syscall.Kill(pid, syscall.SIGTERM) // mu is held: the pid is still this service's
	s.mu.Unlock()

	ended := func() bool { return svc.pid != pid }
	term, cancel := context.WithTimeout(ctx, stopTimeout)
	defer cancel()
	if s.wait(term, ended) == nil {
		return nil
	}
	s.mu.Lock()
	if !ended() {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	s.mu.Unlock()
	return s.wait(ctx, ended)
}

// serveUntilRestart returns [errRestart] when the machine is to restart, with all units stopped, as systemd does it; nil if ctx ends.
func (s *supervisor) serveUntilRestart(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-s.restarts:
	}
	s.log.Info("restart")
	s.mu.Lock()
	names := slices.Collect(maps.Keys(s.services))
	s.mu.Unlock()
	var wg sync.WaitGroup
	for _, name := range names {
		wg.Go(func() {
			if err := s.stop(ctx, name); err != nil { // it ends with PID 1
				s.log.Warn("stop", "unit", name, "err", err)
			}
		})
	}
	wg.Wait()
	return errRestart
}

// wait returns when cond, evaluated under mu, holds.
func (s *supervisor) wait(ctx context.Context, cond func() bool) error {
	for {
		s.mu.Lock()
		ok, changed := cond(), s.changed
		s.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		}
	}
}

// set changes a state; the caller holds mu.
func (s *supervisor) set(svc *service, state string) {
	svc.state = state
	close(s.changed)
	s.changed = make(chan struct{})
}

// reap collects every child that has ended, each time the kernel signals one.
func (s *supervisor) reap(sigchld <-chan os.Signal) {
	for range sigchld {
		s.mu.Lock()
		for {
			var status syscall.WaitStatus
			var used syscall.Rusage
			pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, &used)
			if errors.Is(err, syscall.EINTR) {
				continue
			}
			if pid <= 0 || err != nil {
				break
			}
			if name, ok := s.pids[pid]; ok {
				delete(s.pids, pid)
				s.ended(name, status, &used)
			}
		}
		s.mu.Unlock()
	}
}

// ended books the end of a unit's process; the caller holds mu.
func (s *supervisor) ended(name string, status syscall.WaitStatus, used *syscall.Rusage) {
	u, svc := s.units[name], s.services[name]
	svc.pid = 0
	svc.result = fmt.Sprintf("exit code %d", status.ExitStatus())
	if status.Signaled() {
		svc.result = "signal " + status.Signal().String()
	}
	cpu := time.Duration(used.Utime.Nano() + used.Stime.Nano())
	s.log.Info("ended", "unit", name, "result", svc.result, "cpu_seconds", cpu.Seconds(), "max_rss_kib", used.Maxrss) // with its children's
	good := status.Exited() && status.ExitStatus() == 0
	svc.good = good
	if svc.wanted && (u.Restart == "always" || u.Restart == "on-failure" && !good) {
		s.set(svc, "activating")
		time.AfterFunc(u.RestartWait, func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			if svc.wanted && svc.pid == 0 {
				if err := s.spawn(name); err != nil {
					s.log.Error("restart", "err", err)
				}
			}
		})
		return
	}
	if svc.wanted && !good {
		s.set(svc, "failed")
	} else {
		s.set(svc, "inactive")
	}
	svc.wanted = false
}

type errNoUnit string

func (e errNoUnit) Error() string { return "Unit " + string(e) + ".service could not be found." }
