package crash

import (
	"bytes"
	"context"
	"crypto"
	"fmt"
	"strings"
	"testing"
	"time"

	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/trust/attest"
)

// B2: an owner's init and a joinservice's ticket reach the same machine at moments of chance;
// in a third of the runs its bootstrapper is killed as well, at a moment of chance. Exactly one of
// them takes the machine: the journal, PCR 15 and kubeadm say the same one, the other is told
// so, and its ticket comes back.
func TestOfInitAndJoinExactlyOneWins(t *testing.T) {
	t.Parallel()
	chance := seeded(t)
	b := newBench(t)
	j := newJoinservice(t, b)
	_, initCluster := request(b.mirror)
	won := map[journal.Kind]int{}
	kills, losers := 0, 0
	n := runs(20, 200)
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
	if won[journal.KindInit] == 0 || won[journal.KindJoin] == 0 {
		t.Error("it was no race: one of the two never won")
	}
}

type race struct {
	h           *host
	j           *joinservice
	initCluster [32]byte
	initAfter   time.Duration // from the moment that the machine listens
	killAfter   time.Duration // 0: not

	kills, losers int
}

// call is what the owner's call came to.
type call struct {
	result *initv1.InitResult
	err    error
}

func (r *race) run(t *testing.T) (journal.Kind, error) {
	t.Helper()
	r.j.counts()
	req, _ := request(r.h.mirror)
	var got call
	for range livesAtMost {
		l := r.h.start(-1)
		if r.killAfter > 0 && r.kills == 0 {
			timer := time.AfterFunc(r.killAfter, l.kill)
			defer timer.Stop()
		}
		if addr := l.addr(t); addr != "" && got.result == nil {
			select {
			case <-time.After(r.initAfter):
			case <-l.over:
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			got.result, got.err = r.h.callInit(ctx, addr, req, r.initCluster)
			cancel()
		}
		err := l.end()
		if err == nil {
			return r.judge(got)
		}
		if !l.killed() {
			return "", fmt.Errorf("the bootstrapper ended with %w\n%s", err, l.log)
		}
		r.kills++
	}
	return "", fmt.Errorf("no winner after %d lives", livesAtMost)
}

// judge says who won, and what is wrong with that.
func (r *race) judge(got call) (journal.Kind, error) {
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
