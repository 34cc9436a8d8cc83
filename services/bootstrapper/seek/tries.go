package seek

import (
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
)

// Tries is what the owner may be told of a machine's tries: reasons, times and whom it asks,
// never an error's text, which is for the log (R1). Its zero value knows of none.
type Tries struct {
	mu        sync.Mutex
	reason    attestv1.Reason // of the latest that failed
	last      time.Time
	next      time.Time // zero: now, or never
	failed    uint32
	endpoints []string
}

// Fail notes a try that failed; counts is whether a joinservice was to be asked.
func (t *Tries) Fail(reason attestv1.Reason, counts bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.reason, t.last = reason, time.Now()
	if counts {
		t.failed++
	}
}

// Wait notes that the next try begins in d.
func (t *Tries) Wait(d time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.next = time.Now().Add(d)
}

// Begin notes that a try of these endpoints is under way.
func (t *Tries) Begin(endpoints []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.next, t.endpoints = time.Time{}, slices.Clone(endpoints)
}

// Tell puts what was noted into a status; again is whether there will be another try.
func (t *Tries) Tell(out *initv1.GetStatusResponse, again bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	out.FailedTries, out.JoinEndpoints = t.failed, slices.Clone(t.endpoints)
	if !t.last.IsZero() {
		out.LastReason, out.LastTry = t.reason, timestamppb.New(t.last)
	}
	if !t.next.IsZero() && again {
		out.NextTry = timestamppb.New(t.next)
	}
}
