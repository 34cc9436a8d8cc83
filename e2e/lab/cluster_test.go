package lab_test

import (
	"context"
	"crypto"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/trust/tpm"
)

func bank(t *testing.T) tpm.Bank {
	t.Helper()
	b, err := tpm.ParseBank("sha256")
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func bankHash(t *testing.T) crypto.Hash {
	t.Helper()
	h, ok := bank(t).Hash()
	if !ok {
		t.Fatal("no SHA-256")
	}
	return h
}

// checkEcho lets the pod on each node fetch the answer of the pod on the other.
func checkEcho(t *testing.T, b bench) {
	t.Helper()
	eventually(t, 10*time.Minute, func(ctx context.Context) error {
		_, err := b.kube(ctx, "rollout", "status", "ds/echo", "--timeout=300s")
		return err
	})
	out, err := b.kube(t.Context(), "get", "pods", "-l", "app=echo", "-o", `jsonpath={range .items[*]}{.spec.nodeName} {.metadata.name} {.status.podIP}{"\n"}{end}`)
	if err != nil {
		t.Fatal(err)
	}
	pod, ip := map[string]string{}, map[string]string{}
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		pod[f[0]], ip[f[0]] = f[1], f[2]
	}
	for from, to := range map[string]string{"node1": "node2", "node2": "node1"} {
		eventually(t, 5*time.Minute, func(ctx context.Context) error { // routes follow a new node within a second
			out, err := b.kube(ctx, "exec", pod[from], "--", "/echo", "get", "http://"+ip[to]+":8080/")
			if err != nil {
				return err
			}
			if !strings.Contains(out, "node="+to+" ") {
				return fmt.Errorf("the pod on %s got %q", from, out)
			}
			return nil
		})
	}
}

// traces are the objects of a running lab on this machine.
type traces struct {
	dir        string
	processes  []driver.Process
	namespaces map[string]bool // of its processes, as links in /proc/PID/ns
	cgroups    []string
}

func tracesOf(t *testing.T, b bench) traces {
	t.Helper()
	s, err := b.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	tr := traces{dir: b.Dir, processes: []driver.Process{s.Daemon, s.Owner}, namespaces: map[string]bool{}}
	for _, m := range s.Machines {
		tr.processes = append(tr.processes, m.Init, m.TPM)
	}
	for _, p := range tr.processes {
		if !p.Alive() {
			t.Errorf("process %d of a running lab doesn't run", p.PID)
		}
		for _, kind := range []string{"net", "pid"} {
			ns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", p.PID, kind))
			if err != nil {
				t.Fatal(err)
			}
			own, err := os.Readlink("/proc/self/ns/" + kind)
			if err != nil {
				t.Fatal(err)
			}
			if ns != own {
				tr.namespaces[ns] = true
			}
		}
	}
	if len(tr.namespaces) < 2 {
		t.Errorf("the lab has %d namespaces: this check would find nothing", len(tr.namespaces))
	}
	// The daemon is in no cgroup of its own; a machine's PID 1 is.
	for _, m := range s.Machines {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", m.Init.PID))
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(b)) {
			f := strings.SplitN(strings.TrimSpace(line), ":", 3)
			if f[2] != "/" {
				for _, mount := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/*"} { // version 2, version 1
					found, err := filepath.Glob(mount + filepath.Dir(f[2]))
					if err != nil {
						t.Fatal(err)
					}
					tr.cgroups = append(tr.cgroups, found...)
				}
			}
		}
	}
	if len(s.Machines) > 0 && len(tr.cgroups) == 0 {
		t.Error("no cgroup of the lab's machines was found: this check would find nothing")
	}
	return tr
}

// processesGone looks for the lab's own processes and for any in its namespaces.
func (tr traces) processesGone() error {
	for _, p := range tr.processes {
		if p.Alive() {
			return fmt.Errorf("process %d of the lab still runs", p.PID)
		}
	}
	links, err := filepath.Glob("/proc/[0-9]*/ns/[np][ei][td]")
	if err != nil {
		return err
	}
	for _, l := range links {
		if ns, err := os.Readlink(l); err == nil && tr.namespaces[ns] {
			return fmt.Errorf("%s is in a namespace of the lab", l)
		}
	}
	return nil
}

func (tr traces) checkGone(t *testing.T) {
	t.Helper()
	// All have ended; the process that adopted an orphan may need a moment to reap it.
	eventually(t, 5*time.Minute, func(context.Context) error { return tr.processesGone() })
	for _, c := range tr.cgroups {
		if _, err := os.Stat(c); err == nil {
			t.Errorf("cgroup %s is left", c)
		}
	}
	if strings.Contains(mounts(t), tr.dir) {
		t.Error("a mount of the lab is left")
	}
}

func mounts(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
