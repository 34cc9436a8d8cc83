package discovery

import (
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/atls"
)

// Attempts is what an unauthenticated client may learn of a machine's attempts: reasons, times and endpoints, never an error's text, which is for the
// log (R1). Its zero value has none.
type Attempts struct {
	mu        sync.Mutex
	reason    attestv1.Reason // of the latest failed attempt
	unproven  bool            // it is from a peer that was not attested as a joinservice
	last      time.Time
	next      time.Time // zero: now, or never
	failed    uint32
	endpoints []string
}

// Fail records a failure before a joinservice was asked.
func (t *Attempts) Fail(reason attestv1.Reason) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.reason, t.unproven, t.last = reason, false, time.Now()
}

// Refused records an attempt to reach a joinservice that failed with err.
func (t *Attempts) Refused(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.reason, t.unproven, t.last = ReasonOf(err), atls.UnprovenRefusal(err), time.Now()
	t.failed++
}

// Wait records that the next attempt begins in d.
func (t *Attempts) Wait(d time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.next = time.Now().Add(d)
}

// Begin records that an attempt with these endpoints is running.
func (t *Attempts) Begin(endpoints []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.next, t.endpoints = time.Time{}, slices.Clone(endpoints)
}

// Report copies the record into a status; again is whether there will be another attempt.
func (t *Attempts) Report(out *initv1.GetStatusResponse, again bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	out.FailedAttempts, out.JoinEndpoints = t.failed, slices.Clone(t.endpoints)
	if !t.last.IsZero() {
		out.LastReason, out.LastReasonUnproven, out.LastAttempt = t.reason, t.unproven, timestamppb.New(t.last)
	}
	if !t.next.IsZero() && again {
		out.NextAttempt = timestamppb.New(t.next)
	}
}

// RemedyOf returns what the owner can do about the last reason of a status that has the machine's role, one sentence; empty if there is no such reason, or if it has no general
// remedy. A refusal by a peer that was not attested as a joinservice has one remedy, whatever its reason.
func RemedyOf(s *initv1.GetStatusResponse) string {
	if s.GetLastReasonUnproven() {
		return rpc.RemedyUnproven
	}
	return rpc.RemedyFor(s.GetLastReason(), s.GetRole())
}
