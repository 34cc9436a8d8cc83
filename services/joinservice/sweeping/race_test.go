package sweeping

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/services/joinservice/enroll"
	"github.com/muster-k8s/muster/services/joinservice/servicetest"
	"github.com/muster-k8s/muster/trust/attest"
)

// schedule lets one of several tickets make one request at a time, in an order that follows from a seed. Informers and
// enforcers run concurrently, without an order.
type schedule struct {
	rng    *rand.Rand
	faults float64 // share of requests that fail, before or after the API server has executed them
	ready  chan *actor
	done   chan *actor
}

type actor struct {
	s    *schedule
	slot chan fault
	dead bool
}

type fault int

const (
	noFault fault = iota
	requestLost
	answerLost
	killed // after the request was executed
)

type actorKey struct{}

var errLost = errors.New("the connection broke")

// quiet is how long a ticket may make no request before the others go on. On a slow machine fewer of them have a choice then.
const quiet = 20 * time.Millisecond

// run runs the tickets until they end.
func (s *schedule) run(ctx context.Context, tickets ...func(context.Context)) {
	s.ready, s.done = make(chan *actor), make(chan *actor)
	for _, f := range tickets {
		a := &actor{s: s, slot: make(chan fault)}
		go func() {
			f(context.WithValue(ctx, actorKey{}, a))
			s.done <- a
		}()
	}
	var waiting []*actor
	for busy, alive := len(tickets), len(tickets); alive > 0; {
		// A ticket that waits for an informer makes no request meanwhile; the others go on then.
		for patience := time.After(quiet); busy > 0; {
			select {
			case a := <-s.ready:
				waiting, busy = append(waiting, a), busy-1
				continue
			case <-s.done:
				alive, busy = alive-1, busy-1
				continue
			case <-patience:
			}
			if len(waiting) > 0 {
				break
			}
			patience = time.After(quiet)
		}
		if len(waiting) == 0 {
			continue
		}
		next := s.rng.IntN(len(waiting))
		f := noFault
		if s.rng.Float64() < s.faults {
			f = fault(1 + s.rng.IntN(3))
		}
		waiting[next].slot <- f
		waiting, busy = slices.Delete(waiting, next, next+1), busy+1
	}
}

// scheduled is a client whose requests wait for their slot, if a ticket makes them.
type scheduled struct{ client.Client }

func gate(ctx context.Context, request func() error) error {
	a, ok := ctx.Value(actorKey{}).(*actor)
	if !ok {
		return request()
	}
	if a.dead {
		return errLost
	}
	a.s.ready <- a
	switch <-a.slot {
	case requestLost:
		return errLost
	case answerLost:
		return errors.Join(request(), errLost)
	case killed:
		a.dead = true
		return errors.Join(request(), errLost)
	case noFault:
	}
	return request()
}

func (c scheduled) Get(ctx context.Context, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
	return gate(ctx, func() error { return c.Client.Get(ctx, key, o, opts...) })
}

func (c scheduled) Create(ctx context.Context, o client.Object, opts ...client.CreateOption) error {
	return gate(ctx, func() error { return c.Client.Create(ctx, o, opts...) })
}

func (c scheduled) Update(ctx context.Context, o client.Object, opts ...client.UpdateOption) error {
	return gate(ctx, func() error { return c.Client.Update(ctx, o, opts...) })
}

func (c scheduled) Delete(ctx context.Context, o client.Object, opts ...client.DeleteOption) error {
	return gate(ctx, func() error { return c.Client.Delete(ctx, o, opts...) })
}

func (c scheduled) Patch(ctx context.Context, o client.Object, p client.Patch, opts ...client.PatchOption) error {
	return gate(ctx, func() error { return c.Client.Patch(ctx, o, p, opts...) })
}

func (c scheduled) Status() client.SubResourceWriter {
	return scheduledStatus{c.Client.Status()}
}

type scheduledStatus struct{ client.SubResourceWriter }

func (c scheduledStatus) Update(ctx context.Context, o client.Object, opts ...client.SubResourceUpdateOption) error {
	return gate(ctx, func() error { return c.SubResourceWriter.Update(ctx, o, opts...) })
}

// trial is one ticket of a race and its result.
type trial struct {
	id      string
	claim   enroll.Claim
	fails   bool // after it was enrolled
	returns bool // after it was issued
	k       *replica

	enrolled, issued, returned bool
}

func (r *trial) run(ctx context.Context) {
	e, err := r.k.Enroll(ctx, r.claim)
	if err != nil {
		return
	}
	r.enrolled = true
	salt, err := r.k.SaltOrNew(ctx, r.claim)
	if err == nil {
		err = r.k.AssignDisk(ctx, r.claim, salt)
	}
	if err != nil || r.fails {
		return
	}
	if e.Record(ctx, r.claim, servicetest.Ticket(r.id), servicetest.Signed(r.id), servicetest.Signed(r.id)) != nil {
		return
	}
	r.issued = true
	if r.returns {
		_, err := r.k.ReturnTicket(ctx, r.claim.Machine, r.id)
		r.returned = err == nil
	}
}

// race returns a random set of tickets, with names, machines and disks of that seed only.
func race(rng *rand.Rand, seed uint64, replicas []*replica) []*trial {
	var out []*trial
	for i := range 2 + rng.IntN(4) {
		machine := attest.MachineID{1 + byte(rng.IntN(2))}
		binary.BigEndian.PutUint64(machine[8:], seed)
		r := &trial{
			id: fmt.Sprintf("%016x%016x", seed, i), k: replicas[rng.IntN(len(replicas))],
			fails: rng.IntN(3) > 0, returns: rng.IntN(4) == 0,
			claim: enroll.Claim{
				Machine: machine, Node: fmt.Sprintf("w%d-%x", rng.IntN(2), seed), Role: v1alpha1.RoleWorker, DiskMode: v1alpha1.DiskModePlain,
				Disk:      fmt.Sprintf("5f0c95b6-2a3d-4c7e-9f1%d-%012x", rng.IntN(2), seed&0xffffffffffff),
				Addresses: []netip.Addr{netip.AddrFrom4([4]byte{10, byte(seed >> 8), byte(seed), byte(1 + rng.IntN(2))})},
				Boot:      enroll.Boot{Verified: time.Now()},
			},
		}
		if len(out) > 0 && rng.IntN(2) == 0 { // the same machine asks again, elsewhere
			r.claim = out[rng.IntN(len(out))].claim
		}
		out = append(out, r)
	}
	return out
}

// outcome is the API server's state of the names of one seed.
type outcome struct {
	nodes     map[string]*v1alpha1.AttestedNode
	suspended map[string]bool
	disks     map[string]string
}

func outcomeOf(t *testing.T, trials []*trial) outcome {
	t.Helper()
	s := outcome{map[string]*v1alpha1.AttestedNode{}, map[string]bool{}, map[string]string{}}
	list, seen := servicetest.Shared.Access(t), map[string]bool{}
	for _, r := range trials { // most of them share a name or a disk
		if name := r.claim.Node; !seen[name] {
			seen[name] = true
			if n := servicetest.Shared.Node(t, name); n != nil {
				s.nodes[name] = n
			}
			if list.Entry(name).Suspended {
				s.suspended[name] = true
			}
		}
		if _, seen := s.disks[r.claim.Disk]; !seen {
			s.disks[r.claim.Disk] = servicetest.Shared.DiskOf(t, r.claim.Disk)
		}
	}
	return s
}

// consistent checks what holds after any race, whatever failed in it: no value has two owners (J2, J4), an issued ticket is
// recorded, and nodes whose tickets were returned may not write.
func (s outcome) consistent(trials []*trial) error {
	owners := map[string]string{}
	want := map[string]bool{}
	var errs []error
	for _, n := range s.nodes {
		if n.Status.Ticket == nil && n.Status.ReleasedAt == nil { // no machine got anything for it
			continue
		}
		for _, unique := range append([]string{"machine " + n.Spec.MachineID, "disk " + n.Spec.DiskID}, n.Spec.Addresses...) {
			if other, taken := owners[unique]; taken {
				errs = append(errs, fmt.Errorf("%s belongs to %s and %s", unique, other, n.Name))
			}
			owners[unique] = n.Name
		}
		if n.Status.ReleasedAt != nil {
			want[n.Name] = true
		}
	}
	if !maps.Equal(want, s.suspended) {
		errs = append(errs, fmt.Errorf("%v may not write, and released are %v", s.suspended, want))
	}
	for _, r := range trials {
		n := s.nodes[r.claim.Node]
		if r.issued && (n == nil || n.Spec.MachineID != r.claim.Machine.String() || n.Spec.DiskID != r.claim.Disk) {
			errs = append(errs, fmt.Errorf("ticket %s is out, and its enrollment is %+v", r.id, n))
		}
		if r.issued && s.disks[r.claim.Disk] != r.claim.Machine.String() {
			errs = append(errs, fmt.Errorf("ticket %s is out, and its disk is machine %q's", r.id, s.disks[r.claim.Disk]))
		}
		if r.issued && !returnedBy(trials, r.claim.Machine) && n != nil && n.Status.Ticket == nil {
			errs = append(errs, fmt.Errorf("ticket %s is out, and does not stand", r.id))
		}
	}
	return errors.Join(errs...)
}

func returnedBy(trials []*trial, m attest.MachineID) bool {
	return slices.ContainsFunc(trials, func(r *trial) bool { return r.issued && r.returns && r.claim.Machine == m })
}

// failed reports whether an enrollment without an issued ticket is left.
func (s outcome) failed() bool {
	for _, n := range s.nodes {
		if n.Status.Ticket == nil && n.Status.ReleasedAt == nil {
			return true
		}
	}
	return false
}

// races is how many races one test runs.
const races = 120

// seeds returns that of MUSTER_SEED, or n new ones.
func seeds(t *testing.T, n int) []uint64 {
	t.Helper()
	if text := os.Getenv("MUSTER_SEED"); text != "" {
		seed, err := strconv.ParseUint(text, 0, 64)
		if err != nil {
			t.Fatal(err)
		}
		return []uint64{seed}
	}
	out := make([]uint64, n)
	for i := range out {
		out[i] = uint64(rand.Uint32())
	}
	return out
}

func racing(t *testing.T, now func() time.Time) []*replica {
	t.Helper()
	servicetest.Shared.Reset(t)
	var out []*replica
	for range 2 {
		k := newReplica(t, func(k *servicetest.Rooms) {
			k.State.Cluster.Client, k.State.Now = scheduled{k.State.Cluster.Client}, now
		})
		enforce(t, k.Enforcer)
		out = append(out, k)
	}
	return out
}

func TestTicketsThatRaceAtTwoReplicasLeaveWhatStands(t *testing.T) {
	replicas := racing(t, time.Now)
	var total struct{ enrolled, issued, returned int }
	for _, seed := range seeds(t, races) {
		rng := rand.New(rand.NewPCG(seed, 1))
		trials := race(rng, seed, replicas)
		var tickets []func(context.Context)
		for _, r := range trials {
			tickets = append(tickets, r.run)
		}
		(&schedule{rng: rng}).run(t.Context(), tickets...)
		membertest.Eventually(t, func() error { // the enforcers may be at work
			s := outcomeOf(t, trials)
			if err := s.consistent(trials); err != nil {
				return fmt.Errorf("MUSTER_SEED=%d: %w", seed, err)
			}
			return nil
		})
		for _, r := range trials {
			count(&total.enrolled, r.enrolled)
			count(&total.issued, r.issued)
			count(&total.returned, r.returned)
		}
	}
	t.Logf("%+v", total)
	if os.Getenv("MUSTER_SEED") == "" && (total.issued == 0 || total.returned == 0 || total.enrolled == total.issued) {
		t.Errorf("the races try too little: %+v", total)
	}
}

// Requests and answers get lost, and replicas are killed between any two of them: even then no value has two owners, and
// the rest is removed later.
func TestWhatFailuresLeaveIsCleanedByRule(t *testing.T) {
	hand := servicetest.NewClock()
	replicas := racing(t, hand.Now)
	var sweepers []*Sweeper
	for _, k := range replicas {
		s, err := NewSweeper(k.State, k.List, k.Requests, k.Enrollments, Config{VanishedAfter: time.Hour, ReleaseAfter: 25 * time.Hour, VerdictMaxAge: 15 * time.Minute, Metrics: prometheus.NewRegistry()})
		if err != nil {
			t.Fatal(err)
		}
		sweepers = append(sweepers, s)
	}
	sweep := func(d time.Duration) {
		hand.Pass(d)
		for _, s := range sweepers {
			s.pass(t.Context())
		}
	}
	var all []*trial
	left := 0
	for _, seed := range seeds(t, races) {
		rng := rand.New(rand.NewPCG(seed, 2))
		trials := race(rng, seed, replicas)
		var tickets []func(context.Context)
		for _, r := range trials {
			tickets = append(tickets, r.run)
		}
		(&schedule{rng: rng, faults: 0.15}).run(t.Context(), tickets...)
		var s outcome
		membertest.Eventually(t, func() error {
			sweep(0)
			s = outcomeOf(t, trials)
			if err := s.consistent(trials); err != nil {
				return fmt.Errorf("MUSTER_SEED=%d: %w", seed, err)
			}
			return nil
		})
		if s.failed() { // too early for the sweeper
			left++
		}
		all = append(all, trials...)
	}
	t.Logf("after %d of the races there was something to clean", left)
	membertest.Eventually(t, func() error { // no Node ever appears
		sweep(13 * time.Hour)
		var nodes v1alpha1.AttestedNodeList
		if err := servicetest.Shared.Client.List(t.Context(), &nodes); err != nil {
			return err
		}
		if len(nodes.Items) > 0 {
			return fmt.Errorf("left: %+v", nodes.Items)
		}
		list := servicetest.Shared.Access(t)
		for _, r := range all {
			if list.Entry(r.claim.Node).Suspended {
				return fmt.Errorf("%s is suspended", r.claim.Node)
			}
		}
		return nil
	})
}

func count(n *int, is bool) {
	if is {
		*n++
	}
}
