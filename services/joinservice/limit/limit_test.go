package limit

import (
	"fmt"
	"testing"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// However a machine spreads its requests, it gets no more than its rate; after the pause of a refusal it is served.
func TestOneMachineGetsNoMoreThanItsRate(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		r := Rate{Burst: rapid.IntRange(1, 20).Draw(rt, "burst"), Every: time.Duration(rapid.IntRange(1, 60).Draw(rt, "every")) * time.Second}
		b := New[string](r)
		began := time.Unix(1000, 0)
		now, got := began, 0
		for range rapid.IntRange(1, 200).Draw(rt, "requests") {
			now = now.Add(time.Duration(rapid.IntRange(0, 90_000).Draw(rt, "ms")) * time.Millisecond)
			err := b.Take("loud", now)
			if err == nil {
				got++
				continue
			}
			wait := rpc.RetryAfterFrom(err)
			if attest.ReasonOf(err) != attestv1.Reason_REASON_BUSY || wait <= 0 || wait > r.Every {
				rt.Fatalf("refused with %v, to come again in %s", err, wait)
			}
			if now = now.Add(wait); b.Take("loud", now) != nil {
				rt.Fatalf("it came again after the pause of %s", wait)
			}
			got++
		}
		if most := r.Most(now.Sub(began)); got > most {
			rt.Fatalf("%d within %s, want at most %d", got, now.Sub(began), most)
		}
		if err := b.Take("quiet", now); err != nil {
			rt.Fatalf("another machine waits for it: %v", err)
		}
	})
}

// A policy may accept any number of machines.
func TestOnlySoManyMachinesAreRemembered(t *testing.T) {
	b, now := New[string](Rate{Burst: 1, Every: time.Hour}), time.Unix(1000, 0)
	for i := range 3 * maxMachines {
		if err := b.Take(fmt.Sprint(i), now); err != nil {
			t.Fatal(err)
		}
	}
	if n := b.machines.Len(); n != maxMachines {
		t.Errorf("%d machines are remembered, want %d", n, maxMachines)
	}
	if err := b.Take(fmt.Sprint(3*maxMachines-1), now); err == nil {
		t.Error("the one that asked last is forgotten")
	}
}
