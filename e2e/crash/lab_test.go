package crash

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
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

// realLab is a lab with real machines: the owner's program, kubeadm, kubelet and the rest are
// the real ones.
type realLab struct {
	*driver.Lab
	t    *testing.T
	root string // of the checkout
}

// labPatience bounds what real machines need, on a machine that does other things too.
const labPatience = 5 * time.Minute

// newLab brings a lab up, with a policy in the owner's folder that accepts its machines.
func newLab(t *testing.T) *realLab {
	t.Helper()
	lab, root := labtest.New(t, "crash")
	r := &realLab{Lab: lab, t: t, root: root}
	images := filepath.Join(root, "dist", "images")
	err := lab.Up(t.Context(), driver.Up{
		Lab: filepath.Join(root, "bin", "lab"), Bootstrapper: filepath.Join(root, "bin", "bootstrapper"), Preinstalled: []string{"kubelet"},
		Images: []string{filepath.Join(images, "joinservice.tar"), filepath.Join(images, "kms.tar")},
	})
	if err != nil {
		t.Fatal(err)
	}
	r.must(driver.Owner, r.muster(), "policy", "from-measurements", lab.MeasurementsPath(), "--ek-root", "ek-roots.pem", "--operator",
		"--node-cidr", driver.NodeSubnet, "--role", "worker", "--role", "control-plane", "--allow-plain-state", "-o", "policy.yaml")
	return r
}

func (r *realLab) muster() string { return filepath.Join(r.root, "bin", "muster") }

// at runs a command in a machine or on the owner's seat and gives what it printed.
func (r *realLab) at(ctx context.Context, where string, argv ...string) (string, error) {
	cmd, err := r.Command(ctx, where, argv...)
	if err != nil {
		return "", err
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("%s on %s: %w\n%s", argv[0], where, err, out)
	}
	return string(out), nil
}

func (r *realLab) must(where string, argv ...string) string {
	r.t.Helper()
	out, err := r.at(r.t.Context(), where, argv...)
	if err != nil {
		r.t.Fatal(err)
	}
	return out
}

func (r *realLab) kubectl(ctx context.Context, args ...string) (string, error) {
	return r.at(ctx, "node1", append([]string{"kubectl", "--kubeconfig", "/etc/kubernetes/admin.conf", "--request-timeout=10s"}, args...)...)
}

// addFirst boots node1, which allows an init.
func (r *realLab) addFirst() {
	r.t.Helper()
	hash := sha256.Sum256(initSecret)
	if err := os.WriteFile(filepath.Join(r.OwnerDir(), "init-secret.hex"), []byte(hex.EncodeToString(initSecret)+"\n"), 0o600); err != nil {
		r.t.Fatal(err)
	}
	if _, err := r.AddNode(r.t.Context(), driver.Node{Name: "node1", Role: "control-plane", InitSecretHash: hex.EncodeToString(hash[:])}); err != nil {
		r.t.Fatal(err)
	}
}

// init starts `muster init` and gives what to wait with.
func (r *realLab) init() func() error {
	r.t.Helper()
	images := filepath.Join(r.root, "dist", "images")
	cmd, err := r.Command(r.t.Context(), driver.Owner, r.muster(), "init",
		"--name", "demo", "--endpoint", "192.168.77.11:9000", "--init-secret-file", "init-secret.hex", "--policy", "policy.yaml",
		"--control-plane-endpoint", driver.ControlPlaneEndpoint, "--pod-cidr", driver.PodSubnet, "--service-cidr", driver.ServiceSubnet,
		"--components", "components.yaml", "--manifests", filepath.Join("manifests", "podnet.yaml"), "--images", filepath.Join(images, "digests.json"))
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

// ready waits until a node is.
func (r *realLab) ready(name string) {
	r.t.Helper()
	r.until(name+" is Ready", func(ctx context.Context) error {
		out, err := r.kubectl(ctx, "get", "node", name, "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`)
		if err == nil && out != "True" {
			err = fmt.Errorf("%s is there, Ready=%q", name, out)
		}
		return err
	})
}

// until repeats a check until it succeeds.
func (r *realLab) until(what string, check func(context.Context) error) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), labPatience)
	defer cancel()
	tick := time.NewTicker(300 * time.Millisecond)
	defer tick.Stop()
	for {
		err := check(ctx)
		if err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			r.t.Fatalf("not within %s: %s: %v", labPatience, what, err)
		}
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
	read int    // bytes of the log that were looked at
}

func (r *realLab) victim(name string) *victim {
	r.t.Helper()
	m := r.machine(name)
	return &victim{r: r, name: name, init: m.Init.PID, log: filepath.Join(m.Log, "muster-bootstrapper.log")}
}

// pid gives the bootstrapper's process, a child of the machine's PID 1; 0: there is none.
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

// news gives the log's lines since the last call.
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

// killAt kills the bootstrapper with SIGKILL as soon as its log has a line of progress that
// fits, and says which step the journal was at when it was dead.
func (v *victim) killAt(what string, fits func(line) bool) journal.Step {
	v.r.t.Helper()
	deadline := time.After(labPatience)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		for _, l := range v.news() {
			if l.Msg != "progress" || !fits(l) {
				continue
			}
			pid := v.pid()
			if pid == 0 || syscall.Kill(pid, syscall.SIGKILL) != nil {
				v.r.t.Fatalf("%s: %s: no bootstrapper to kill", v.name, what)
			}
			v.r.until(v.name+"'s bootstrapper is dead", func(context.Context) error {
				if v.pid() == pid {
					return errors.New("it runs")
				}
				return nil
			})
			v.news() // what it told before it died
			rec, err := journal.Open(fmt.Sprintf("/proc/%d/root/var/lib/muster/journal", v.init)).Load()
			if err != nil {
				v.r.t.Fatalf("%s: killed at %s: %v", v.name, what, err)
			}
			v.r.t.Logf("%s: killed at %s (%s %q); the journal says %s", v.name, what, l.Phase, l.Text, rec.Step)
			return rec.Step
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
	v.r.until(v.name+" is done", func(context.Context) error {
		rec, err := journal.Open(fmt.Sprintf("/proc/%d/root/var/lib/muster/journal", v.init)).Load()
		if err == nil && rec.Step != journal.StepDone {
			err = fmt.Errorf("the journal says %s", rec.Step)
		}
		return err
	})
}

// phase fits a line of progress with that phase.
func phase(name string) func(line) bool {
	return func(l line) bool { return l.Phase == "PHASE_"+name }
}

// says fits a line of progress whose text begins so.
func says(text string) func(line) bool {
	return func(l line) bool { return strings.HasPrefix(l.Text, text) }
}

// point is a moment at which a machine's bootstrapper is killed.
type point struct {
	what string
	fits func(line) bool
}

// sample gives the points in their order: all of them in the long mode, else some by chance, one of
// which is in kubeadm.
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

// B3 with the real kubeadm: the bootstrapper of the first machine, and then that of a worker, is
// killed in each of its phases in turn, and started again by its unit. The owner's program is
// called once and sees only that it had to wait; kubectl shows both nodes Ready.
func TestRealMachinesKilledInEachPhaseBecomeNodes(t *testing.T) {
	t.Parallel() // it mostly waits
	chance := seeded(t)
	r := newLab(t)
	r.addFirst()
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
	r.ready("node1")

	if _, err := r.AddNode(t.Context(), driver.Node{Name: "node2", JoinEndpoints: []string{"192.168.77.11:30090"}}); err != nil {
		t.Fatal(err)
	}
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
	r.ready("node2")
	for _, m := range []string{"node1", "node2"} {
		for _, u := range []string{"kubelet", "muster-attester"} {
			if out, err := r.at(t.Context(), m, "systemctl", "is-active", u); err != nil {
				t.Errorf("%s: %s is %s", m, u, out)
			}
		}
	}
	out := r.must("node1", "kubectl", "--kubeconfig", "/etc/kubernetes/admin.conf", "get", "nodes,attestednodes")
	t.Log(out)
	if !long() {
		return // the rest takes minutes: make test-crash
	}
	t.Run("three workers join while what they need is killed", func(t *testing.T) { r.joinsWhileServicesDie(t, chance) })
	t.Run("a control plane is killed in each phase of its join", func(t *testing.T) { r.killsAControlPlane(t) })
}
