package floods

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// memory is a cgroup with a memory limit, as the kubelet or systemd gives a service one.
type memory struct {
	dir     string
	unified bool // version 2
}

// newMemory creates a cgroup beside this process's own. It is removed after the test.
func newMemory(t *testing.T, name string, limit int64) *memory {
	t.Helper()
	root, unified, err := memoryRoot()
	if err != nil {
		t.Fatal(err)
	}
	m := &memory{dir: filepath.Join(root, fmt.Sprintf("muster-floods-%d-%s", os.Getpid(), name)), unified: unified}
	if err := os.Mkdir(m.dir, 0o755); err != nil {
		t.Fatalf("make a cgroup (as root): %v", err)
	}
	t.Cleanup(func() { m.remove(t) })
	files := map[string]int64{"memory.limit_in_bytes": limit, "memory.kmem.tcp.limit_in_bytes": limit} // the latter counts sockets
	if unified {
		files = map[string]int64{"memory.max": limit}
	}
	for file, value := range files {
		if err := os.WriteFile(filepath.Join(m.dir, file), []byte(strconv.FormatInt(value, 10)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return m
}

// memoryRoot finds the mount point of the memory controller.
func memoryRoot() (dir string, unified bool, err error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", false, err
	}
	for line := range strings.Lines(string(b)) {
		before, after, _ := strings.Cut(line, " - ")
		at, what := strings.Fields(before), strings.Fields(after)
		if len(at) < 5 || len(what) < 3 {
			continue
		}
		controllers, _ := os.ReadFile(filepath.Join(at[4], "cgroup.subtree_control"))
		switch {
		case what[0] == "cgroup" && strings.Contains(","+what[2]+",", ",memory,"):
			return at[4], false, nil
		case what[0] == "cgroup2" && strings.Contains(string(controllers), "memory"):
			return at[4], true, nil
		}
	}
	return "", false, errors.New("no memory controller is mounted: /proc/self/mountinfo has none of version 1, and no root of version 2 hands one on")
}

// remove waits until the last process is gone.
func (m *memory) remove(t *testing.T) {
	t.Helper()
	end := time.After(5 * time.Minute)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := os.Remove(m.dir)
		if err == nil || errors.Is(err, os.ErrNotExist) {
			return
		}
		select {
		case <-tick.C:
		case <-end:
			t.Errorf("remove the cgroup: %v", err)
			return
		}
	}
}

// command runs a program in the group from its first instruction on.
func (m *memory) command(args []string) []string {
	return append([]string{"/bin/sh", "-c", `echo $$ >"$0/cgroup.procs" && exec "$@"`, m.dir}, args...)
}

// usage is the maximum of the group, in bytes: in total, and for version 1 that of its sockets, which is not
// included.
func (m *memory) usage(t *testing.T) (peak, sockets int64) {
	t.Helper()
	if m.unified {
		return m.number(t, "memory.peak"), 0
	}
	return m.number(t, "memory.max_usage_in_bytes"), m.number(t, "memory.kmem.tcp.max_usage_in_bytes")
}

func (m *memory) number(t *testing.T, file string) int64 {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(m.dir, file))
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// kills is the number of processes that the kernel has killed because of the limit.
func (m *memory) kills(t *testing.T) int {
	t.Helper()
	file := "memory.oom_control"
	if m.unified {
		file = "memory.events"
	}
	b, err := os.ReadFile(filepath.Join(m.dir, file))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if value, ok := strings.CutPrefix(line, "oom_kill "); ok {
			n, err := strconv.Atoi(strings.TrimSpace(value))
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatalf("%s has no oom_kill: %s", file, b)
	return 0
}
