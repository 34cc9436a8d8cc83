//go:build scale

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/internal/enrollment"
	"github.com/muster-k8s/muster/internal/kubetest"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/services/bootstrapper/discovery"
	"github.com/muster-k8s/muster/services/bootstrapper/reattestation"
)

var (
	program   = flag.String("program", "", "the joinservice to measure")
	document  = flag.String("page", "", "the page that the figures go into")
	many      = flag.Int("nodes", 5000, "how many nodes are enrolled in a large cluster")
	excluded  = flag.Int("entries", 1000, "how many names are on the list of nodes that may not write")
	within    = flag.Duration("within", 5*time.Minute, "the time in which each machine attests again once")
	attesting = flag.Bool("reattest", true, "measure how all nodes attest again, too: 15 minutes")
	rush      = flag.Int("rush", 500, "how many machines ask for a ticket in the same second")
)

// results are the measurements of the run. Durations are in milliseconds, processor time in seconds, memory in MiB.
type results struct {
	Machine string `json:"machine"`
	Load    string `json:"load"`
	Nodes   int    `json:"nodes"`
	Entries int    `json:"entries"`

	Sizes           []size
	RequestsPerJoin float64

	Rush struct {
		Machines, Rivals, Refused int
		Seconds                   float64
		Slowest                   float64
		MemoryMiB                 float64
	}
	Spread, AtOnce, OneSource round
}

// round is the cost of a re-attestation of all machines.
type round struct {
	Seconds, JoinserviceCPU, APIServerCPU float64
	Late                                  int
	Took                                  spread
	MemoryMiB                             float64
}

type spread struct{ Median, P90, P99 float64 }

// size is the measurements with that many enrolled nodes.
type size struct {
	Nodes, Entries int
	Lease          spread
	Joins          joins
}

type joins struct {
	PerSecond float64
	Took      spread
}

func spreadOf(all []time.Duration) spread {
	slices.Sort(all)
	at := func(q float64) float64 {
		return float64(all[min(len(all)-1, int(q*float64(len(all))))].Microseconds()) / 1000
	}
	return spread{at(0.5), at(0.9), at(0.99)}
}

// TestScale measures the cost of the number of enrolled nodes, with a real API server and joinservices in processes of
// their own. It fails if a ratio that docs/performance.md promises is not reached.
func TestScale(t *testing.T) {
	s := setUp(t, func(s *fixture) { s.apart = true })
	r := &results{Machine: fmt.Sprintf("%d processors", runtime.NumCPU()), Load: strings.TrimSpace(read(t, "/proc/loadavg")), Nodes: *many, Entries: *excluded}
	services := []*replica{s.replica(t)}
	sizes := []int{0, *many / 5, *many / 2, *many}
	crowd := s.crowd(t, 1+*many+len(sizes)*perSize+*rush+*rush/20)
	first := crowd.take(1)
	if err := s.joinOne(t, first[0], services); err != nil {
		t.Fatal(err)
	}
	enrolled := crowd.take(*many)
	for i, n := range sizes {
		at := size{Nodes: n}
		if i > 0 {
			s.fill(t, enrolled[sizes[i-1]:n])
			at.Entries = *excluded * n / *many
			s.exclude(t, at.Entries)
		}
		at.Lease = s.renewals(t, first[0].name)
		at.Joins, r.RequestsPerJoin = s.joins(t, crowd.take(perSize), services)
		r.Sizes = append(r.Sizes, at)
		t.Logf("%+v", at)
	}

	services = append(services, s.replica(t), s.replica(t))
	if *attesting {
		s.reattestations(t, r, enrolled, services)
	}
	s.rush(t, r, crowd.take(*rush), crowd.take(*rush/20), services)

	b, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s\n%s", b, r.table())
	if *document != "" {
		if err := errors.Join(put(*document, r.table()), r.plot(t)); err != nil {
			t.Fatal(err)
		}
	}
	small, large := r.Sizes[0], r.Sizes[len(r.Sizes)-1]
	for what, bad := range map[string]bool{
		"a Lease renewal costs more in a large cluster":           large.Lease.Median > 1.15*small.Lease.Median,
		"joins are slower in a large cluster":                     large.Joins.PerSecond < 0.9*small.Joins.PerSecond,
		"a join takes more than eight requests of the API server": r.RequestsPerJoin > 8.3, // one deletion in a minute, and the sweepers' requests meanwhile
		"machines attested late":                                  r.Spread.Late > 0 || r.OneSource.Late > 0,
	} {
		if bad {
			t.Error(what)
		}
	}
}

// perSize is how many machines join in a cluster of each size.
const perSize = 150

// joins makes machines join, eight at a time, and counts the requests to the API server for each.
func (s *fixture) joins(t *testing.T, machines []*newcomer, services []*replica) (joins, float64) {
	t.Helper()
	count := func() int {
		all, err := s.AllRequests(func(r kubetest.Request) bool {
			return r.Verb != "watch" && (strings.HasPrefix(r.UserAgent, "muster-joinservice/") || strings.HasPrefix(r.UserAgent, kmsAgent))
		})
		if err != nil {
			t.Fatal(err)
		}
		kinds := map[string]int{}
		for _, r := range all {
			kinds[fmt.Sprintf("%s %s/%s %d", r.Verb, r.Object.Resource, r.Object.Subresource, r.Status.Code)]++
		}
		t.Logf("requests to the API server so far: %v", kinds)
		return len(all)
	}
	before, start := count(), time.Now()
	took := make([]time.Duration, len(machines))
	var all errgroup.Group
	all.SetLimit(8)
	for i, m := range machines {
		all.Go(func() error {
			began := time.Now()
			err := s.joinOne(t, m, services)
			took[i] = time.Since(began)
			return err
		})
	}
	if err := all.Wait(); err != nil {
		t.Fatal(err)
	}
	rate := float64(len(machines)) / time.Since(start).Seconds()
	return joins{rate, spreadOf(took)}, float64(count()-before) / float64(len(machines))
}

// renewals renews the node's Lease, as its kubelet does every ten seconds.
func (s *fixture) renewals(t *testing.T, node string) spread {
	t.Helper()
	const times = 400
	api := s.as(t, node)
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: corev1.NamespaceNodeLease, Name: node}, Spec: coordinationv1.LeaseSpec{HolderIdentity: &node}}
	if err := api.Create(t.Context(), lease); err != nil {
		if err := api.Get(t.Context(), client.ObjectKeyFromObject(lease), lease); err != nil {
			t.Fatal(err)
		}
	}
	took := make([]time.Duration, 0, times)
	for range times {
		lease.Spec.RenewTime = &metav1.MicroTime{Time: time.Now()}
		start := time.Now()
		if err := api.Update(t.Context(), lease); err != nil {
			t.Fatal(err)
		}
		took = append(took, time.Since(start))
	}
	return spreadOf(took)
}

// fill enrolls machines as if they had joined long ago, with their Nodes.
func (s *fixture) fill(t *testing.T, machines []*newcomer) {
	t.Helper()
	var all errgroup.Group
	all.SetLimit(16)
	for _, m := range machines {
		m.LockTo(s.ID)
		all.Go(func() error {
			n := &v1alpha1.AttestedNode{
				ObjectMeta: metav1.ObjectMeta{Name: m.name, Finalizers: []string{v1alpha1.RevokeCertificates}, Annotations: map[string]string{v1alpha1.EnrolledByTicket: "true"}},
				Spec:       v1alpha1.AttestedNodeSpec{MachineID: m.ID().String(), Role: v1alpha1.RoleWorker, DiskID: m.disk, DiskMode: v1alpha1.DiskModePlain, Addresses: []string{m.address}},
			}
			if err := s.Client.Create(t.Context(), n); err != nil {
				return err
			}
			now := metav1.Now()
			n.Status.Ticket = &v1alpha1.Ticket{ID: strings.Repeat("0", 32), IssuedAt: now}
			n.Status.LastVerdict = &v1alpha1.Verdict{Accepted: true, Reason: "ACCEPTED", Time: now}
			enrollment.SetConditions(n, nodeaccess.Entry{})
			addresses := []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: m.address}}
			node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: m.name}, Status: corev1.NodeStatus{Addresses: addresses}}
			return errors.Join(s.Client.Status().Update(t.Context(), n), s.Client.Create(t.Context(), node))
		})
	}
	if err := all.Wait(); err != nil {
		t.Fatal(err)
	}
}

// exclude adds that many names of removed machines to the list.
func (s *fixture) exclude(t *testing.T, n int) {
	t.Helper()
	membertest.Eventually(t, func() error {
		_, err := enrollment.Change(t.Context(), s.Client, func(_ context.Context, l *nodeaccess.List) error {
			for i := range *excluded {
				e := nodeaccess.Entry{}
				if i < n {
					e = e.Revoke(time.Now())
				}
				l.Set(fmt.Sprintf("removed-%05d", i), e)
			}
			return nil
		})
		return err
	})
	membertest.Eventually(t, func() error { // admission sees it
		return membertest.Want(len(s.Access(t).Nodes()) >= n, "the list is shorter")
	})
}

// reattestations makes all machines attest again: spread over the five minutes in which each of them does it, and then all
// as soon as they can, as after an outage.
func (s *fixture) reattestations(t *testing.T, r *results, machines []*newcomer, services []*replica) {
	t.Helper()
	measure := func(over time.Duration) (out round) {
		took := make([]time.Duration, len(machines))
		var late atomic.Int64
		join, api := cpu(t, "joinservice"), cpu(t, "kube-apiserver")
		start := time.Now()
		var all sync.WaitGroup
		for i, m := range machines {
			all.Go(func() {
				at := start.Add(time.Duration(float64(over) * float64(i) / float64(len(machines))))
				select {
				case <-time.After(time.Until(at)):
				case <-t.Context().Done():
					return
				}
				timing := reattestation.DefaultTiming
				err := s.again(t, m, services, discovery.NewPauses(timing.RetryMin, timing.RetryMax), func(c joinv1connect.JoinServiceClient) error {
					_, err := c.Reattest(t.Context(), &joinv1.ReattestRequest{BootSecret: oneSecret})
					return err
				})
				took[i] = time.Since(at)
				if err != nil || took[i] > *within {
					late.Add(1)
					t.Logf("%s: %v after %s", m.name, err, took[i])
				}
			})
		}
		all.Wait()
		out.Seconds, out.Late, out.Took = time.Since(start).Seconds(), int(late.Load()), spreadOf(took)
		out.JoinserviceCPU, out.APIServerCPU = cpu(t, "joinservice")-join, cpu(t, "kube-apiserver")-api
		for _, s := range services {
			out.MemoryMiB = max(out.MemoryMiB, memory(t, s.cmd.Process.Pid))
		}
		return out
	}
	r.Spread = measure(*within)
	t.Logf("%+v", r.Spread)
	r.AtOnce = measure(0)

	// This is as behind a load balancer that hides them and sends no header, with the limits that docs/limits.md advises to
	// raise.
	for _, one := range services {
		one.stop()
	}
	s.flags = []string{"--source-rate=100", "--source-burst=200", "--source-handshakes=200"}
	for i := range services {
		services[i] = s.replica(t)
	}
	for _, m := range machines {
		m.from = net.IPv4(127, 0, 0, 1)
	}
	r.OneSource = measure(*within)
}

// rush makes machines ask in the same second; rivals ask for names, disks or addresses of some of them. One of the replicas
// is killed after a third of them have joined.
func (s *fixture) rush(t *testing.T, r *results, machines, rivals []*newcomer, services []*replica) {
	t.Helper()
	for i, m := range rivals {
		m.name, m.disk, m.address = "rival-"+m.name, machines[i].disk, machines[i].address
		m.joinRequest = worker(t, named(m.name, m.disk, m.address))
	}
	all := slices.Concat(machines, rivals)
	rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	var in, refused atomic.Int64
	took := make([]time.Duration, len(all))
	start := time.Now()
	killed := make(chan struct{})
	var each sync.WaitGroup
	for i, m := range all {
		each.Go(func() {
			err := s.joinOne(t, m, services)
			took[i] = time.Since(start)
			if err != nil {
				refused.Add(1)
				return
			}
			if in.Add(1) == int64(len(machines)/3) {
				_ = services[1].cmd.Process.Kill()
				close(killed)
			}
		})
	}
	each.Wait()
	<-killed
	r.Rush.Machines, r.Rush.Rivals, r.Rush.Refused, r.Rush.Seconds, r.Rush.Slowest = len(machines), len(rivals), int(refused.Load()), time.Since(start).Seconds(), spreadOf(took).P99/1000
	for _, i := range []int{0, 2} {
		r.Rush.MemoryMiB = max(r.Rush.MemoryMiB, memory(t, services[i].cmd.Process.Pid))
	}
	if int(in.Load()) != len(machines) || int(refused.Load()) != len(rivals) {
		t.Errorf("%d machines are in and %d were refused, want %d and %d", in.Load(), refused.Load(), len(machines), len(rivals))
	}
	l := &v1alpha1.AttestedNodeList{}
	if err := s.Client.List(t.Context(), l); err != nil {
		t.Fatal(err)
	}
	seen := map[string]string{}
	for _, n := range l.Items {
		for _, v := range append([]string{n.Spec.DiskID, n.Spec.MachineID}, n.Spec.Addresses...) {
			if other := seen[v]; v != "" && other != "" {
				t.Errorf("%s has %s, and so has %s", n.Name, v, other)
			}
			seen[v] = n.Name
		}
	}
}

func (r *results) table() string {
	out := &strings.Builder{}
	fmt.Fprintf(out, "On %s, load average %s before the run.\n\n", r.Machine, r.Load)
	fmt.Fprintf(out, "| enrolled nodes | names on the list of nodes that may not write | a node renews its Lease, median (90th percentile), ms | ratio | joins per second, eight at a time | ratio | a ticket, median (99th percentile), ms |\n|---|---|---|---|---|---|---|\n")
	for _, x := range r.Sizes {
		fmt.Fprintf(out, "| %d | %d | %.1f (%.1f) | %.2f | %.1f | %.2f | %.0f (%.0f) |\n", x.Nodes+1, x.Entries, x.Lease.Median, x.Lease.P90, x.Lease.Median/r.Sizes[0].Lease.Median,
			x.Joins.PerSecond, x.Joins.PerSecond/r.Sizes[0].Joins.PerSecond, x.Joins.Took.Median, x.Joins.Took.P99)
	}
	fmt.Fprintf(out, "\nRequests to the API server for one join: %.1f.\n", r.RequestsPerJoin)
	if r.Spread.Seconds > 0 {
		fmt.Fprintf(out, "\n| %d machines attest again, at 3 replicas | seconds | late | joinservice, CPU s | API server, CPU s | median (99th percentile), ms | memory of a replica, MiB |\n|---|---|---|---|---|---|---|\n", r.Nodes)
		for i, x := range []round{r.Spread, r.AtOnce, r.OneSource} {
			fmt.Fprintf(out, "| %s | %.0f | %d | %.0f | %.0f | %.0f (%.0f) | %.0f |\n", []string{"one after another within five minutes", "all at once, after an outage", "within five minutes, from one address, with raised limits"}[i], x.Seconds, x.Late, x.JoinserviceCPU, x.APIServerCPU, x.Took.Median, x.Took.P99, x.MemoryMiB)
		}
	}
	fmt.Fprintf(out, "\n%d machines that ask for a ticket in the same second at 3 replicas, one of which is killed once a third of them are in, and %d rivals for their disks and addresses: all in after %.0f s, %d refused, no value given twice; %.0f MiB for a replica.\n",
		r.Rush.Machines, r.Rush.Rivals, r.Rush.Seconds, r.Rush.Refused, r.Rush.MemoryMiB)
	fmt.Fprint(out, "\n![What the number of nodes costs](performance/scale.svg)\n\n")
	return out.String()
}

// plot draws the cost of the number of nodes.
func (r *results) plot(t *testing.T) error {
	t.Helper()
	data := &strings.Builder{}
	for _, x := range r.Sizes {
		fmt.Fprintln(data, x.Nodes+1, x.Lease.Median, x.Lease.P90, x.Joins.PerSecond)
	}
	path := filepath.Join(filepath.Dir(*document), "performance", "scale.svg")
	cmd := exec.CommandContext(t.Context(), "gnuplot", "-e", `set terminal svg size 900,340; set output "`+path+`"; set multiplot layout 1,2; set xlabel "enrolled nodes"; set key bottom right; set yrange [0:*]; $d << EOD
`+data.String()+`EOD
set title "a node renews its Lease, ms"; plot $d using 1:2 with linespoints title "median", $d using 1:3 with linespoints title "90th percentile"
set title "joins per second"; plot $d using 1:4 with linespoints notitle`)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("gnuplot: %w: %s", err, out)
	}
	return nil
}

// put writes the figures between the marks of the page.
func put(path, text string) error {
	b, err := os.ReadFile(filepath.Clean(path))
	if err != nil {
		return err
	}
	const begin, end = "<!-- scale: begin -->\n", "<!-- scale: end -->"
	head, rest, ok := bytes.Cut(b, []byte(begin))
	_, tail, found := bytes.Cut(rest, []byte(end))
	if !ok || !found {
		return fmt.Errorf("%s has no place for the figures of scale", path)
	}
	return os.WriteFile(path, slices.Concat(head, []byte(begin), []byte(text), []byte(end), tail), 0o644)
}
