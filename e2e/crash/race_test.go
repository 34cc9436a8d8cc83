package crash

import (
	"bytes"
	"context"
	"crypto"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/trust/attest"
)

// takesTheLock are the effects of a process while it takes the node lock, in this order. From the second on, the
// journal contains its owner.
var takesTheLock = []string{
	"the journal is about to say locking", "the journal says locking", "PCR 15 is about to be extended", "PCR 15 is extended",
	"the journal is about to say locked", "the journal says locked",
}

// Where a process that has the lock is held until the other side was refused, and where an init is held that was
// admitted and has not asked for the lock yet.
const (
	initGoesOn, joinGoesOn = "kubeadm init begins", "kubeadm join begins"
	initAdmitted           = "taking the node lock"
)

// contest is one machine that an owner's init and a joinservice's ticket reach, in an order that the test sets.
type contest struct {
	h    *host
	j    *joinservice
	id   [32]byte // of the init's cluster
	l    *life
	open func()    // lets the ticket out
	got  chan call // the result of the owner's call
}

// begin starts the machine's bootstrapper, to be held at the names, and waits until it has asked for a ticket,
// if asks. The ticket stays with the joinservice until open is called.
func (c *contest) begin(t *testing.T, asks bool, hold ...string) {
	t.Helper()
	c.open = c.j.shut()
	c.h.hold(hold...)
	c.l = c.h.start(-1)
	if asks {
		eventually(t, "a ticket is asked for", func() bool { n, _ := c.j.soFar(); return n > 0 })
	}
}

// callInit has the owner call.
func (c *contest) callInit(t *testing.T) {
	t.Helper()
	addr, req := c.l.addr(t), (*initv1.InitRequest)(nil)
	req, _ = request(c.h.mirror)
	c.j.signs(req, c.id)
	c.got = make(chan call, 1)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	go func(l *life, got chan<- call) {
		defer cancel()
		result, err := l.callInit(ctx, addr, req, c.id)
		got <- call{result, err}
	}(c.l, c.got)
}

// initHas releases the ticket, if one was requested, once an init has the lock and before it goes on; the ticket is
// returned, and the machine ends as the first node.
func (c *contest) initHas(t *testing.T, tickets int) {
	t.Helper()
	c.h.held(initGoesOn)
	c.open()
	eventually(t, "the ticket comes back", func() bool { _, n := c.j.soFar(); return n == tickets })
	c.h.release(initGoesOn)
	got := <-c.got
	if got.err != nil {
		t.Errorf("init won, and its caller got %v", got.err)
	}
	c.ends(t, journal.KindInit, c.id)
	if issued, returned := c.j.counts(); issued != tickets || returned != tickets {
		t.Errorf("%d tickets were issued and %d came back, want %d", issued, returned, tickets)
	}
}

// joinHas waits for the refusal of the owner's call once a join has the lock and before it goes on; the machine ends
// as a node of the joinservice's cluster, and no ticket is returned.
func (c *contest) joinHas(t *testing.T, want ...string) {
	t.Helper()
	c.h.held(joinGoesOn)
	if got := <-c.got; got.result != nil || !slices.Contains(want, reasonOf(got.err)) {
		t.Errorf("join won, and the init's caller got %v, want %v", got.err, want)
	}
	c.h.release(joinGoesOn)
	c.ends(t, journal.KindJoin, joinCluster)
	if _, returned := c.j.counts(); returned != 0 {
		t.Errorf("join won, and %d tickets came back", returned)
	}
}

// ends checks that journal, PCR 15, kubeadm and units agree (B2).
func (c *contest) ends(t *testing.T, kind journal.Kind, id [32]byte) {
	t.Helper()
	if err := c.l.end(); err != nil {
		t.Fatalf("the bootstrapper ended with %v\n%s", err, c.l.log)
	}
	other := "kubeadm join begins"
	if kind == journal.KindJoin {
		other = "kubeadm init begins"
	}
	if c.h.count(other) > 0 {
		t.Errorf("%s won, and %s", kind, other)
	}
	if err := c.h.isNode(kind, id); err != nil {
		t.Error(err)
	}
}

// dies kills the process where it is held, as a power cut does, with or without a new boot.
func (c *contest) dies(t *testing.T, reboot bool) {
	t.Helper()
	c.l.kill()
	if c.got != nil {
		if got := <-c.got; got.err == nil {
			t.Error("the init's caller got a result of a process that was killed")
		}
	}
	c.j.counts()
	if reboot {
		c.h.reboot()
	}
}

// B2: an owner's init and a joinservice's ticket reach the same machine. Both win: at each step of taking the node
// lock the other one comes, and at each the process lives or is killed. Exactly one of them takes the machine: the
// journal, PCR 15 and kubeadm name the same one, the other is refused, and its ticket is returned.
func TestOfInitAndJoinExactlyOneWins(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	j := newJoinservice(t, b)
	_, id := request(b.mirror)
	try := func(name string, run func(t *testing.T, c *contest)) {
		t.Run(name, func(t *testing.T) {
			c := &contest{h: b.newHost(t, first(j.addr), j.ownerKey), j: j, id: id}
			j.counts()
			defer func() {
				c.open() // a test that failed leaves no request behind
				if t.Failed() {
					t.Logf("%s\n%s", strings.Join(c.h.effects(), "\n"), c.l.log)
				}
			}()
			run(t, c)
		})
	}
	for i, at := range takesTheLock {
		taken, reboot := i > 0, i%2 == 1
		try("a ticket comes while an init takes the lock: "+at, func(t *testing.T, c *contest) {
			c.begin(t, true, at, initGoesOn)
			c.callInit(t)
			c.h.held(at)
			c.open()
			c.h.release(at)
			c.initHas(t, 1)
		})
		try("an init comes while a join takes the lock: "+at, func(t *testing.T, c *contest) {
			c.begin(t, true, at, joinGoesOn)
			c.open()
			c.h.held(at)
			c.callInit(t)
			c.h.release(at)
			c.joinHas(t, "NODE_LOCKED", "LOCK_FOREIGN") // by the machine, or by the caller, which checks PCR 15
		})
		try("an init was admitted before a join takes the lock: "+at, func(t *testing.T, c *contest) {
			c.begin(t, true, initAdmitted, at, joinGoesOn)
			c.callInit(t)
			c.h.held(initAdmitted)
			c.open()
			c.h.held(at)
			c.h.release(initAdmitted)
			c.h.release(at)
			c.joinHas(t, "NODE_LOCKED")
		})
		try("killed while an init takes the lock: "+at, func(t *testing.T, c *contest) {
			c.begin(t, true, at)
			c.callInit(t)
			c.h.held(at)
			c.open()
			c.dies(t, reboot)
			if taken {
				c.begin(t, false, initGoesOn)
				c.callInit(t)
				c.initHas(t, 0) // and no ticket is asked for
				return
			}
			c.begin(t, true, joinGoesOn)
			c.open()
			c.h.held(joinGoesOn)
			c.callInit(t)
			c.joinHas(t, "LOCK_FOREIGN")
		})
		try("killed while a join takes the lock: "+at, func(t *testing.T, c *contest) {
			c.begin(t, true, initAdmitted, at)
			c.callInit(t)
			c.h.held(initAdmitted)
			c.open()
			c.h.held(at)
			c.h.release(initAdmitted)
			c.dies(t, reboot)
			if taken {
				c.begin(t, true, joinGoesOn)
				c.open()
				c.h.held(joinGoesOn)
				c.callInit(t)
				c.joinHas(t, "LOCK_FOREIGN")
				return
			}
			c.begin(t, true, initGoesOn)
			c.callInit(t)
			c.initHas(t, 1)
		})
	}
}

// B2: the same at random times; in a third of the runs the bootstrapper is killed as well. Either may win: it depends
// on which is faster.
func TestOfInitAndJoinAtMomentsOfChanceOneWins(t *testing.T) {
	t.Parallel()
	chance := seeded(t)
	b := newBench(t)
	j := newJoinservice(t, b)
	_, initCluster := request(b.mirror)
	won := map[journal.Kind]int{}
	kills, losers := 0, 0
	n := runs(4, 200)
	for i := range n {
		r := &race{h: b.newHost(t, first(j.addr), j.ownerKey), j: j, initCluster: initCluster, initAfter: within(chance, 80*time.Millisecond)}
		j.mu.Lock()
		j.delay = within(chance, 80*time.Millisecond)
		j.mu.Unlock()
		if i%3 == 2 {
			r.killAfter = 100*time.Millisecond + within(chance, 500*time.Millisecond)
		}
		winner, err := r.run(t)
		if err != nil {
			t.Fatalf("run %d (init after %s, ticket after %s, killed after %s): %v\n%s", i, r.initAfter, j.delay, r.killAfter, err, strings.Join(r.h.effects(), "\n"))
		}
		won[winner]++
		kills += r.kills
		losers += r.losers
	}
	t.Logf("%d runs: init won %d, join won %d; killed %d times; %d losers were there to be told", n, won[journal.KindInit], won[journal.KindJoin], kills, losers)
}

type race struct {
	h           *host
	j           *joinservice
	initCluster [32]byte
	initAfter   time.Duration // from the moment that the machine listens
	killAfter   time.Duration // 0: not

	kills, losers int
}

// call is the result of the owner's call.
type call struct {
	result *initv1.InitResult
	err    error
}

func (r *race) run(t *testing.T) (journal.Kind, error) {
	t.Helper()
	r.j.counts()
	req, _ := request(r.h.mirror)
	r.j.signs(req, r.initCluster)
	var got call
	for range livesAtMost {
		l := r.h.start(-1)
		if r.killAfter > 0 && r.kills == 0 {
			timer := time.AfterFunc(r.killAfter, l.kill)
			defer timer.Stop()
		}
		// One that was killed before it noted that its result was sent waits for a call again.
		if addr := l.addr(t); addr != "" && (got.result == nil || !r.h.record().ResultSent) {
			select {
			case <-time.After(r.initAfter):
			case <-l.over:
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			result, err := l.callInit(ctx, addr, req, r.initCluster)
			cancel()
			if got.result == nil {
				got = call{result, err}
			}
		}
		err := l.end()
		if err == nil {
			return r.outcome(got)
		}
		if !l.killed() {
			return "", fmt.Errorf("the bootstrapper ended with %w\n%s", err, l.log)
		}
		r.kills++
	}
	return "", fmt.Errorf("no winner after %d lives", livesAtMost)
}

// outcome returns the winner, or an error if the end state is wrong.
func (r *race) outcome(got call) (journal.Kind, error) {
	rec := r.h.record()
	issued, returned := r.j.counts()
	lock := r.h.lockValue()
	byInit := bytes.Equal(lock, attest.LockValue(crypto.SHA256, r.initCluster))
	byJoin := bytes.Equal(lock, attest.LockValue(crypto.SHA256, joinCluster))
	inits, joins := r.h.count("kubeadm init begins"), r.h.count("kubeadm join begins")
	id := r.initCluster
	switch rec.Kind {
	case journal.KindInit:
		if !byInit || inits == 0 || joins > 0 {
			return rec.Kind, fmt.Errorf("the journal says init; PCR 15 init %v, join %v; kubeadm init %d, join %d", byInit, byJoin, inits, joins)
		}
		if got.result == nil {
			return rec.Kind, fmt.Errorf("init won, and its caller got %w", got.err)
		}
		if r.kills == 0 && issued != returned {
			return rec.Kind, fmt.Errorf("init won, %d tickets were issued and %d came back", issued, returned)
		}
		r.losers += issued
	case journal.KindJoin:
		if !byJoin || joins == 0 || inits > 0 {
			return rec.Kind, fmt.Errorf("the journal says join; PCR 15 init %v, join %v; kubeadm init %d, join %d", byInit, byJoin, inits, joins)
		}
		if got.result != nil || got.err == nil {
			return rec.Kind, fmt.Errorf("join won, and the init's caller got a result")
		}
		if returned > 0 {
			return rec.Kind, fmt.Errorf("join won, and %d tickets were given back", returned)
		}
		if reasonOf(got.err) == "NODE_LOCKED" {
			r.losers++
		}
		id = joinCluster
	case journal.KindNone, journal.KindAdopt:
		return "", fmt.Errorf("nobody won")
	}
	return rec.Kind, r.h.isNode(rec.Kind, id)
}
