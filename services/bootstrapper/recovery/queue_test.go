package recovery

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"pgregory.net/rapid"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

func address(n int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)}), 32)
}

// caller is the model of a call that entered.
type caller struct {
	from netip.Prefix
	s    *source
	mine *slot
}

// For every sequence of calls: one key is tried at a time, the queue is short, and it is free once all have gone.
func TestOneKeyIsTriedAtATime(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		now := time.Now()
		q := newQueue(func() time.Time { return now }, 0)
		var holder *caller
		waiting := map[*slot]*caller{}
		collect := func() {
			for m, h := range waiting {
				select {
				case err := <-m.ready:
					delete(waiting, m)
					if err != nil {
						if attest.ReasonOf(err) != attestv1.Reason_REASON_BUSY {
							rt.Fatal(err)
						}
						continue
					}
					if holder != nil {
						rt.Fatal("two keys are tried at one time")
					}
					holder = h
				default:
				}
			}
		}
		enter := func(rt *rapid.T) {
			h := &caller{from: address(rapid.IntRange(1, 40).Draw(rt, "source"))}
			var err error
			h.s, h.mine, err = q.enter(h.from)
			switch {
			case err != nil && attest.ReasonOf(err) == attestv1.Reason_REASON_TOO_MANY_ATTEMPTS && q.sources[h.from].left >= 1:
				rt.Fatal("refused although it has a try left")
			case err != nil:
			case h.mine != nil:
				waiting[h.mine] = h
			case holder != nil:
				rt.Fatal("two keys are tried at one time")
			default:
				holder = h
			}
			collect()
		}
		leave := func(rt *rapid.T) {
			if holder == nil {
				return
			}
			s := holder.s
			holder = nil
			q.leave(s, rapid.Bool().Draw(rt, "wrong"))
			collect()
		}
		giveUp := func(*rapid.T) {
			for m := range waiting {
				_ = q.giveUp(m, context.Canceled)
				delete(waiting, m)
				break
			}
			collect()
		}
		rt.Repeat(map[string]func(*rapid.T){
			"enter": enter, "enter again": enter, "leave": leave, "give up": giveUp,
			"time passes": func(rt *rapid.T) {
				now = now.Add(time.Duration(rapid.IntRange(0, 90).Draw(rt, "seconds")) * time.Second)
			},
			"": func(rt *rapid.T) {
				if len(q.waiting) > maxWaiting || len(q.waiting) != len(waiting) || q.busy != (holder != nil) {
					rt.Fatalf("%d wait, %d are known to; busy: %v", len(q.waiting), len(waiting), q.busy)
				}
				for i := 1; i < len(q.waiting); i++ {
					if q.waiting[i].source.since.Before(q.waiting[i-1].source.since) {
						rt.Fatal("the queue is not in the order of who asked first")
					}
				}
			},
		})
		for holder != nil {
			leave(rt)
		}
		if q.busy || len(q.waiting) > 0 {
			rt.Fatal("the queue is not free")
		}
	})
}

// Many addresses ask all the time, each much more often than the owner: they delay the owner by at most one attempt each.
func TestManyAddressesDoNotKeepOneOut(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		others := rapid.IntRange(1, 100).Draw(rt, "others")
		every := rapid.IntRange(1, 5).Draw(rt, "the owner asks every … rounds")
		shuffle := rand.New(rand.NewPCG(rapid.Uint64().Draw(rt, "seed"), 0))
		now := time.Now()
		q := newQueue(func() time.Time { return now }, 0)
		owner := address(1 << 20)
		var mine *slot
		var holder *source
		slotsOf := map[*slot]*source{}
		for round := range others + maxWaiting + 10 {
			for range 3 {
				for _, i := range shuffle.Perm(others) {
					s, m, err := q.enter(address(i))
					if err == nil && m == nil {
						holder = s
					} else if m != nil {
						slotsOf[m] = s
					}
				}
			}
			if round%every == 0 && mine == nil {
				s, m, err := q.enter(owner)
				if err == nil && m == nil {
					return
				}
				if m != nil {
					mine = m
					slotsOf[m] = s
				}
			}
			now = now.Add(time.Second)
			if holder != nil {
				s := holder
				holder = nil
				q.leave(s, true)
			}
			for m, s := range slotsOf {
				select {
				case err := <-m.ready:
					delete(slotsOf, m)
					switch {
					case m == mine && err == nil:
						return
					case m == mine:
						mine = nil // its place is kept
					case err == nil:
						holder = s
					}
				default:
				}
			}
		}
		rt.Fatalf("the owner has no slot after %d attempts", others+maxWaiting+10)
	})
}

func TestSourcesAreForgottenBeforeTheyFillTheMemory(t *testing.T) {
	now := time.Now()
	q := newQueue(func() time.Time { return now }, 0)
	for i := range maxSources + 200 {
		s, _, err := q.enter(address(i))
		if err != nil {
			t.Fatal(err)
		}
		q.leave(s, i%2 == 0)
		if i%7 == 0 {
			now = now.Add(time.Millisecond)
		}
	}
	if len(q.sources) > maxSources {
		t.Errorf("%d sources are remembered", len(q.sources))
	}
	now = now.Add(time.Hour)
	if _, _, err := q.enter(address(1 << 22)); err != nil {
		t.Fatal(err)
	}
	if len(q.sources) > 1 {
		t.Errorf("%d sources are remembered after an hour", len(q.sources))
	}
}

// After a wrong key there is a pause before the next attempt of any source.
func TestAWrongKeyIsFollowedByAPause(t *testing.T) {
	const pause = 50 * time.Millisecond
	q := newQueue(time.Now, pause)
	done, err := q.take(t.Context(), address(1), func() {})
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	done(true)
	waited := false
	done, err = q.take(t.Context(), address(2), func() { waited = true })
	if err != nil || !waited || time.Since(began) < pause {
		t.Errorf("%v, waited %v, after %s", err, waited, time.Since(began))
	}
	done(false)
	done, err = q.take(t.Context(), address(2), func() { t.Error("a key that was not wrong makes others wait") })
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	if _, err := q.take(ctx, address(3), cancel); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want that it gave up", err)
	}
	done(false)
}
