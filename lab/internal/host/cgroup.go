package host

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// A Hierarchy is one mounted cgroup hierarchy.
type Hierarchy struct {
	Name  string `json:"name"`  // as mount options write it: "cpu,cpuacct", "name=systemd"; empty for version 2
	Mount string `json:"mount"` // where the host has mounted its root
}

// Cgroups are the hierarchies that processes of this machine are in.
type Cgroups struct {
	Unified     bool        `json:"unified"` // version 2 alone
	Hierarchies []Hierarchy `json:"hierarchies"`
}

// DetectCgroups finds out how this machine's cgroups are mounted.
func DetectCgroups() (Cgroups, error) {
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return Cgroups{}, err
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return Cgroups{}, err
	}
	return parseCgroups(string(own), string(mounts))
}

// parseCgroups reads /proc/PID/cgroup and /proc/PID/mountinfo. Only hierarchies that are mounted with their root
// count: a controller that the host does not give is not used.
func parseCgroups(own, mountinfo string) (Cgroups, error) {
	var c Cgroups
	var unified string
	mounted := map[string]string{} // hierarchy → mount point
	for line := range strings.Lines(mountinfo) {
		pre, post, ok := strings.Cut(line, " - ")
		a, b := strings.Fields(pre), strings.Fields(post)
		if !ok || len(a) < 5 || len(b) < 3 {
			continue
		}
		switch b[0] {
		case "cgroup2":
			if unified == "" {
				unified = a[4]
			}
		case "cgroup":
			mounted[hierarchyName(b[2])] = a[4]
		}
	}
	for line := range strings.Lines(own) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) != 3 || f[0] == "0" {
			continue
		}
		name := hierarchyName(f[1])
		if at, ok := mounted[name]; ok {
			c.Hierarchies = append(c.Hierarchies, Hierarchy{Name: name, Mount: at})
		}
	}
	if len(c.Hierarchies) > 0 {
		return c, nil
	}
	if unified == "" {
		return c, errors.New("no cgroup hierarchy is mounted (looked in /proc/self/mountinfo): mount cgroup2 on /sys/fs/cgroup")
	}
	return Cgroups{Unified: true, Hierarchies: []Hierarchy{{Mount: unified}}}, nil
}

// hierarchyName keeps of mount options (or of a /proc/PID/cgroup field) what names the
// hierarchy, in a fixed order.
func hierarchyName(opts string) string {
	var keep []string
	for o := range strings.SplitSeq(opts, ",") {
		switch o {
		case "rw", "ro", "relatime", "xattr", "noprefix", "clone_children", "cpuset_v2_mode", "all", "none", "":
			continue
		}
		if strings.HasPrefix(o, "release_agent=") {
			continue
		}
		keep = append(keep, o)
	}
	slices.Sort(keep)
	return strings.Join(keep, ",")
}

// Create makes the cgroup at path (like "lab-1234/node1") in each hierarchy, ready to
// take processes and sub-groups.
func (c Cgroups) Create(path string) error {
	for _, h := range c.Hierarchies {
		at := h.Mount
		for part := range strings.SplitSeq(path, "/") {
			if c.Unified {
				// A group hands on what its parent has enabled; failing controllers are left out.
				enableControllers(at)
			}
			at = filepath.Join(at, part)
			if err := os.Mkdir(at, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
				return fmt.Errorf("make cgroup: %w", err)
			}
			if err := inherit(h, at); err != nil {
				return err
			}
		}
	}
	return nil
}

// inherit sets what version 1 does not inherit: an empty cpuset takes no process.
func inherit(h Hierarchy, at string) error {
	if slices.Contains(strings.Split(h.Name, ","), "cpuset") {
		for _, f := range []string{"cpuset.cpus", "cpuset.mems"} {
			v, err := os.ReadFile(filepath.Join(filepath.Dir(at), f))
			if err == nil {
				err = os.WriteFile(filepath.Join(at, f), v, 0o644)
			}
			if err != nil {
				return fmt.Errorf("set up cpuset cgroup: %w", err)
			}
		}
		if err := os.WriteFile(filepath.Join(at, "cgroup.clone_children"), []byte("1"), 0o644); err != nil {
			return fmt.Errorf("set up cpuset cgroup: %w", err)
		}
	}
	return nil
}

// Weigh sets the weight of the cgroup at path: on a busy computer it gets as much processor time as that many processes
// outside any cgroup. Where the kernel groups those by session (sched(7), "The autogroup feature"), a session counts as
// one. Without this call the weight is one, however many processes the cgroup has.
func (c Cgroups) Weigh(path string, processes int) error {
	for _, h := range c.Hierarchies {
		file, value := "cpu.shares", 1024*processes
		if c.Unified {
			file, value = "cpu.weight", 100*processes
		} else if !slices.Contains(strings.Split(h.Name, ","), "cpu") {
			continue
		}
		f, err := os.OpenFile(filepath.Join(h.Mount, path, file), os.O_WRONLY, 0)
		if errors.Is(err, fs.ErrNotExist) {
			continue // the host does not hand on this controller
		}
		if err == nil {
			_, err = f.WriteString(strconv.Itoa(value))
			err = errors.Join(err, f.Close())
		}
		if err != nil {
			return fmt.Errorf("set the cgroup's weight: %w", err)
		}
	}
	return nil
}

func enableControllers(at string) {
	have, err := os.ReadFile(filepath.Join(at, "cgroup.controllers"))
	if err != nil {
		return
	}
	for name := range strings.FieldsSeq(string(have)) {
		// One by one: a controller that cannot be delegated must not block the others.
		_ = os.WriteFile(filepath.Join(at, "cgroup.subtree_control"), []byte("+"+name), 0o644)
	}
}

// Enter moves a process, with all its threads, into the cgroup at path.
func (c Cgroups) Enter(path string, pid int) error {
	for _, h := range c.Hierarchies {
		f := filepath.Join(h.Mount, path, "cgroup.procs")
		if err := os.WriteFile(f, []byte(strconv.Itoa(pid)), 0o644); err != nil {
			return fmt.Errorf("enter cgroup: %w", err)
		}
	}
	return nil
}

// Remove takes away the cgroup at path and all below it, as soon as the last process
// has left; ctx bounds the wait.
func (c Cgroups) Remove(ctx context.Context, path string) error {
	for _, h := range c.Hierarchies {
		if err := removeTree(ctx, filepath.Join(h.Mount, path)); err != nil {
			return err
		}
	}
	return nil
}

// Exists reports whether any hierarchy has a cgroup at path.
func (c Cgroups) Exists(path string) bool {
	return slices.ContainsFunc(c.Hierarchies, func(h Hierarchy) bool {
		_, err := os.Stat(filepath.Join(h.Mount, path))
		return err == nil
	})
}

func removeTree(ctx context.Context, root string) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		var dirs []string
		err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
			if err != nil {
				if errors.Is(err, fs.ErrNotExist) {
					return nil
				}
				return err
			}
			if d.IsDir() {
				dirs = append(dirs, p)
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("remove cgroup: %w", err)
		}
		var last error
		for _, d := range slices.Backward(dirs) { // children come after their parent in dirs
			if err := syscall.Rmdir(d); err != nil && !errors.Is(err, syscall.ENOENT) {
				last = fmt.Errorf("remove cgroup %s: %w", d, err)
			}
		}
		if last == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return last
		case <-tick.C:
		}
	}
}
