package crash

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/muster-k8s/muster/lab/labtest"
)

// processes returns the processes of a program in a machine, with those of its pods, by their IDs on the host.
func (r *realLab) processes(machine, program string) []int {
	r.t.Helper()
	init := r.machine(machine).Init.PID
	entries, err := os.ReadDir("/proc")
	if err != nil {
		r.t.Fatal(err)
	}
	parents := map[int]int{}
	var found []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		stat, err := os.ReadFile(filepath.Join("/proc", e.Name(), "stat"))
		if err != nil {
			continue // it has just ended
		}
		// After the name, which may hold anything: state, parent.
		rest := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
		if parents[pid], err = strconv.Atoi(rest[1]); err != nil {
			continue
		}
		cmdline, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		if argv0, _, _ := strings.Cut(string(cmdline), "\x00"); err == nil && filepath.Base(argv0) == program {
			found = append(found, pid)
		}
	}
	return slices.DeleteFunc(found, func(pid int) bool {
		for pid != init && pid > 1 {
			pid = parents[pid]
		}
		return pid != init
	})
}

// kill kills a program of node1 with SIGKILL and reports whether it was running.
func (r *realLab) kill(program string) bool {
	r.t.Helper()
	pids := r.processes("node1", program)
	for _, pid := range pids {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			r.t.Fatal(err)
		}
	}
	return len(pids) > 0
}

// refusedWith waits until the machine's log has a refusal with one of the reasons.
func (v *victim) refusedWith(reasons ...string) line {
	v.r.t.Helper()
	var got line
	labtest.Eventually(v.r.t, func(context.Context) error {
		for _, l := range v.lines() {
			if l.Msg == "not joined yet" && slices.Contains(reasons, l.Reason) {
				got = l
				return nil
			}
		}
		return fmt.Errorf("%s is not refused with %v yet", v.name, reasons)
	})
	return got
}

// lines returns the whole log.
func (v *victim) lines() []line {
	all := &victim{log: v.log}
	return all.news()
}

// hintsHonored checks that after each refusal with a hint the machine waited at least that long before its next
// request, and returns the reasons of those refusals.
func (v *victim) hintsHonored() map[string]int {
	v.r.t.Helper()
	seen := map[string]int{}
	var until time.Time
	for _, l := range v.lines() {
		switch {
		case l.Msg == "not joined yet":
			hint, err := time.ParseDuration(l.RetryAfter)
			if err != nil {
				v.r.t.Errorf("%s: retry_after: %v", v.name, err)
			}
			until = l.Time.Add(hint)
			if hint > 0 {
				seen[l.Reason]++
			}
		case l.Msg == "progress" && strings.HasPrefix(l.Text, "asking ") && l.Time.Before(until):
			v.r.t.Errorf("%s: asked again %s before it was told to", v.name, until.Sub(l.Time))
		}
	}
	return seen
}

func (r *realLab) addWorker(name string) *victim {
	r.t.Helper()
	r.Add(r.t, labtest.Worker(name))
	return r.victim(name)
}

// joinsWhileServicesDie lets three workers join while services that a join needs are down or die. Each receives the
// reason and the time to wait, waits that long, and joins in the end.
func (r *realLab) joinsWhileServicesDie(t *testing.T, chance *rand.Rand) {
	r.t = t
	var victims []*victim

	// Killed a second time, kms comes back with the kubelet's first back-off, 10 s later.
	for range 2 {
		labtest.Eventually(t, func(context.Context) error {
			if !r.kill("kms") {
				return errors.New("kms is to be killed, and is not running")
			}
			return nil
		})
	}
	victims = append(victims, r.addWorker("node3"))
	l := victims[0].refusedWith("KMS_UNAVAILABLE")
	t.Logf("node3, while kms is down: %s, retry after %s", l.Reason, l.RetryAfter)

	victims[0].joined() // so kms is back

	// etcd is down for a while: kubelet ends a static pod without a manifest.
	const manifest, aside = "/etc/kubernetes/manifests/etcd.yaml", "/etc/kubernetes/etcd.yaml.aside"
	r.Must(t, "node1", "", "mv", manifest, aside)
	labtest.Eventually(t, func(context.Context) error {
		if len(r.processes("node1", "etcd")) > 0 {
			return errors.New("etcd has no manifest any more, and runs")
		}
		return nil
	})
	victims = append(victims, r.addWorker("node4"), r.addWorker("node5"))
	l = victims[1].refusedWith("API_UNAVAILABLE")
	t.Logf("node4, while etcd is down: %s, retry after %s", l.Reason, l.RetryAfter)
	r.Must(t, "node1", "", "mv", aside, manifest)

	programs := []string{"kube-apiserver", "etcd", "kms", "joinservice"}
	for range 6 {
		p := programs[chance.IntN(len(programs))]
		pause := time.NewTimer(200*time.Millisecond + within(chance, 2*time.Second))
		<-pause.C
		t.Logf("killed %s: %v", p, r.kill(p))
	}
	for _, v := range victims {
		v.joined()
		r.Ready(t, v.name)
		hints := v.hintsHonored()
		t.Logf("%s is in; refused before with a hint: %v", v.name, hints)
		if v != victims[2] && len(hints) == 0 {
			t.Errorf("%s was never told when to come back", v.name)
		}
	}
	t.Log(r.MustKubectl(t, "get", "nodes,attestednodes"))
}
