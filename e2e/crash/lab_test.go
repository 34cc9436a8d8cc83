package crash

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
)

// realLab is a lab with real machines: the owner's program, kubeadm, kubelet and the rest are the real ones.
type realLab struct {
	*labtest.Cluster
	t *testing.T
}

// init starts `muster init` and gives what to wait with.
func (r *realLab) init() func() error {
	r.t.Helper()
	cmd, err := r.Command(r.t.Context(), driver.Owner, append([]string{"muster"}, r.InitArgs("demo")...)...)
	if err != nil {
		r.t.Fatal(err)
	}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	return func() error {
		err := cmd.Wait()
		r.t.Logf("muster init:\n%s", out.String())
		return err
	}
}

func (r *realLab) machine(name string) driver.Machine {
	r.t.Helper()
	s, err := r.Status(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	for _, m := range s.Machines {
		if m.Name == name {
			return m
		}
	}
	r.t.Fatalf("no machine %s", name)
	return driver.Machine{}
}

// victim is a machine whose bootstrapper is to be killed.
type victim struct {
	r    *realLab
	name string
	init int    // PID 1 of the machine, as the host sees it
	log  string // of its bootstrapper
	read int    // bytes of the log that were read
}

func (r *realLab) victim(name string) *victim {
	r.t.Helper()
	m := r.machine(name)
	return &victim{r: r, name: name, init: m.Init.PID, log: filepath.Join(m.Log, "muster-bootstrapper.log")}
}

// pid returns the bootstrapper's process, a child of the machine's PID 1; 0: there is none.
func (v *victim) pid() int {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", v.init))
	if err != nil {
		return 0
	}
	var children []byte
	for _, t := range threads {
		if b, err := os.ReadFile(t); err == nil {
			children = append(append(children, b...), ' ')
		}
	}
	for f := range strings.FieldsSeq(string(children)) {
		cmdline, err := os.ReadFile("/proc/" + f + "/cmdline")
		if err == nil && string(cmdline) == "/usr/bin/bootstrapper\x00run\x00" {
			pid, err := strconv.Atoi(f)
			if err == nil {
				return pid
			}
		}
	}
	return 0
}

// line is one of the bootstrapper's log.
type line struct {
	Time                     time.Time
	Msg, Phase, Text, Reason string
	RetryAfter               string `json:"retry_after"`
}

// news returns the log's lines since the last call.
func (v *victim) news() []line {
	b, err := os.ReadFile(v.log)
	if err != nil || len(b) < v.read {
		return nil
	}
	b = b[v.read:]
	b = b[:bytes.LastIndexByte(b, '\n')+1]
	v.read += len(b)
	var out []line
	for text := range bytes.Lines(b) {
		var l line
		if json.Unmarshal(text, &l) == nil {
			out = append(out, l)
		}
	}
	return out
}

func (v *victim) journal() (journal.Record, error) {
	return journal.Open(fmt.Sprintf("/proc/%d/root/var/lib/muster/journal", v.init)).Load()
}

// killAt kills the bootstrapper with SIGKILL as soon as its log has a matching line of progress. It fails if the
// machine is a node before that.
func (v *victim) killAt(what string, fits func(line) bool) {
	v.r.t.Helper()
	deadline := time.After(labtest.Patience)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		for _, l := range v.news() {
			if l.Msg != "progress" || !fits(l) {
				continue
			}
			pid := v.pid()
			if pid == 0 || syscall.Kill(pid, syscall.SIGKILL) != nil {
				break // it has ended since: it is a node, or was killed too late before
			}
			labtest.Eventually(v.r.t, func(context.Context) error {
				if v.pid() == pid {
					return fmt.Errorf("%s's bootstrapper was killed and runs", v.name)
				}
				return nil
			})
			v.news() // its last lines
			rec, err := v.journal()
			if err != nil {
				v.r.t.Fatalf("%s: killed at %s: %v", v.name, what, err)
			}
			v.r.t.Logf("%s: killed at %s (%s %q); the journal says %s", v.name, what, l.Phase, l.Text, rec.Step)
			return
		}
		// The last steps are quick: on a busy computer the process finishes before the test reads its log.
		if rec, err := v.journal(); err == nil && rec.Step == journal.StepDone && v.pid() == 0 {
			v.r.t.Logf("%s: was a node before it could be killed at %s", v.name, what)
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			v.r.t.Fatalf("%s: never saw %s", v.name, what)
		}
	}
}

// joined waits until the journal says that the machine is a node.
func (v *victim) joined() {
	v.r.t.Helper()
	labtest.Eventually(v.r.t, func(context.Context) error {
		rec, err := v.journal()
		if err == nil && rec.Step != journal.StepDone {
			err = fmt.Errorf("%s is not done: the journal says %s", v.name, rec.Step)
		}
		return err
	})
}

// phase matches a line of progress with that phase.
func phase(name string) func(line) bool {
	return func(l line) bool { return l.Phase == "PHASE_"+name }
}

// says matches a line of progress whose text begins so.
func says(text string) func(line) bool {
	return func(l line) bool { return strings.HasPrefix(l.Text, text) }
}

// point is a moment at which a machine's bootstrapper is killed.
type point struct {
	what string
	fits func(line) bool
}

// sample returns the points in their order: all of them in the long mode, else a random selection, one of which is in
// kubeadm.
func sample(t *testing.T, chance *rand.Rand, all []point) (some []point) {
	t.Helper()
	if long() {
		return all
	}
	const others = 1
	pick := map[int]bool{}
	for len(pick) < others {
		pick[chance.IntN(len(all))] = true
	}
	for i, p := range all {
		if pick[i] || strings.HasPrefix(p.what, "kubeadm ") && p.what != "kubeadm has finished" {
			some = append(some, p)
			t.Logf("to be killed at: %s", p.what)
		}
	}
	return some
}

// B3 with the real kubeadm: the bootstrapper of the first machine, and then that of a worker, is killed in each of
// its phases, and started again by its unit. The owner's program is called once and only has to wait; kubectl shows
// both nodes Ready.
func TestRealMachinesKilledInEachPhaseBecomeNodes(t *testing.T) {
	t.Parallel() // it mostly waits
	chance := seeded(t)
	r := &realLab{labtest.Up(t, "crash"), t}
	r.Add(t, r.First(t))
	node1 := r.victim("node1")
	wait := r.init()
	ended := make(chan error, 1)
	go func() { ended <- wait() }()

	inKubeadmInit := []string{"certs", "kubeconfig", "etcd", "control-plane", "wait-control-plane"}[chance.IntN(5)]
	for _, at := range sample(t, chance, []point{
		{"waiting", phase("WAITING")},
		{"locked", phase("LOCKED")},
		{"disk", phase("DISK")},
		{"components", phase("COMPONENTS")},
		{"configured", says("kubeadm's configuration is written")},
		{"kubeadm " + inKubeadmInit, says("kubeadm init: " + inKubeadmInit)},
		{"kubeadm has finished", phase("KUBEADM")},
		{"cluster state", phase("CLUSTER_STATE")},
		{"done", phase("DONE")},
	}) {
		node1.killAt(at.what, at.fits)
	}
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	r.Ready(t, "node1")

	r.Add(t, labtest.Worker("node2"))
	node2 := r.victim("node2")
	inKubeadmJoin := []string{"preflight", "kubelet-start"}[chance.IntN(2)]
	for _, at := range sample(t, chance, []point{
		{"waiting", phase("WAITING")},
		{"locked", phase("LOCKED")},
		{"disk", phase("DISK")},
		{"components", phase("COMPONENTS")},
		{"configured", says("certificates and configuration are in place")},
		{"kubeadm " + inKubeadmJoin, says("kubeadm join: " + inKubeadmJoin)},
		{"kubeadm has finished", phase("KUBEADM")},
	}) {
		node2.killAt(at.what, at.fits)
	}
	node2.joined()
	r.Ready(t, "node2")
	for _, m := range []string{"node1", "node2"} {
		for _, u := range []string{"kubelet", "muster-attester"} {
			if out, err := r.At(t.Context(), m, "", "systemctl", "is-active", u); err != nil {
				t.Errorf("%s: %s is %s", m, u, out)
			}
		}
	}
	t.Log(r.MustKubectl(t, "get", "nodes,attestednodes"))
	if !long() {
		return // the rest takes minutes: make test-crash
	}
	t.Run("three workers join while what they need is killed", func(t *testing.T) { r.joinsWhileServicesDie(t, chance) })
	t.Run("a control plane is killed in each phase of its join", func(t *testing.T) { r.killsAControlPlane(t) })
}
