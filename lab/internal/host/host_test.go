package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestParseCgroups(t *testing.T) {
	const (
		tmpfs   = "30 29 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
		cpu     = "31 30 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
		memory  = "32 30 0:28 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
		systemd = "33 30 0:29 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,release_agent=/x,name=systemd\n"
		unified = "34 30 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
		v2      = "30 29 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
	)
	for name, tt := range map[string]struct {
		own, mounts string
		want        Cgroups
	}{
		"version 1, with controllers that share a hierarchy": {
			own: "3:name=systemd:/\n2:memory:/a\n1:cpuacct,cpu:/\n0::/\n", mounts: tmpfs + cpu + memory + systemd + unified,
			want: Cgroups{Hierarchies: []Hierarchy{
				{Name: "name=systemd", Mount: "/sys/fs/cgroup/systemd"},
				{Name: "memory", Mount: "/sys/fs/cgroup/memory"},
				{Name: "cpu,cpuacct", Mount: "/sys/fs/cgroup/cpu,cpuacct"},
			}},
		},
		"a hierarchy that is not mounted stays away": {
			own: "2:memory:/a\n1:cpu,cpuacct:/\n", mounts: tmpfs + memory,
			want: Cgroups{Hierarchies: []Hierarchy{{Name: "memory", Mount: "/sys/fs/cgroup/memory"}}},
		},
		"version 2": {
			own: "0::/user.slice\n", mounts: v2,
			want: Cgroups{Unified: true, Hierarchies: []Hierarchy{{Mount: "/sys/fs/cgroup"}}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := parseCgroups(tt.own, tt.mounts)
			if err != nil || !reflect.DeepEqual(got, tt.want) {
				t.Errorf("%+v, %v, want %+v", got, err, tt.want)
			}
		})
	}
	if _, err := parseCgroups("0::/\n", tmpfs); err == nil {
		t.Error("no hierarchy at all is no error")
	}
}

func TestCgroupsOfTheLabComeAndGo(t *testing.T) {
	c, err := DetectCgroups()
	if err != nil {
		t.Fatal(err)
	}
	top := fmt.Sprintf("muster-lab-test-%d", os.Getpid())
	group := top + "/node1"
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 5*time.Minute)
		defer cancel()
		if err := c.Remove(ctx, top); err != nil {
			t.Error(err)
		}
	})
	if err := c.Create(group); err != nil { // needs root, as the lab does
		t.Fatal(err)
	}
	if err := c.Weigh(top, 3); err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]string{"cpu.shares": "3072\n", "cpu.weight": "300\n"} { // version 1, version 2
		found, err := filepath.Glob("/sys/fs/cgroup/*/" + top + "/" + file)
		also, err2 := filepath.Glob("/sys/fs/cgroup/" + top + "/" + file)
		if err := errors.Join(err, err2); err != nil {
			t.Fatal(err)
		}
		for _, f := range append(found, also...) {
			if got, err := os.ReadFile(f); err != nil || string(got) != want {
				t.Errorf("%s is %q, want %q: %v", f, got, want, err)
			}
		}
	}
	cmd := exec.CommandContext(t.Context(), "sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := c.Enter(group, cmd.Process.Pid); err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := c.Remove(short, top); err == nil || !c.Exists(group) {
		t.Errorf("a cgroup with a process in it was removed: %v", err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Error("it was not killed")
	}
	ctx, stop := context.WithTimeout(t.Context(), 5*time.Minute)
	defer stop()
	if err := c.Remove(ctx, top); err != nil || c.Exists(top) {
		t.Errorf("left: %v", err)
	}
}

func TestAProcessIsKnownByItsStart(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p, err := ProcessOf(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	if !p.Alive() {
		t.Error("a running process is not alive")
	}
	later := Process{PID: p.PID, Start: p.Start + 1}
	if later.Alive() {
		t.Error("another process with the same pid passes for this one")
	}
	if err := later.Signal(syscall.SIGKILL); err != nil {
		t.Error(err)
	}
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := p.Wait(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a signal for another process ended this one, or Wait gave up early: %v", err)
	}
	if err := p.Signal(syscall.SIGKILL); err != nil {
		t.Error(err)
	}
	if err := p.Wait(t.Context()); err != nil { // a zombie by now: it has ended
		t.Error(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Error("it was not killed")
	}
	if (Process{}).Alive() {
		t.Error("no process is alive")
	}
}
