// Package refusal has the error type of package attest, for the packages below it.
package refusal

import (
	"errors"
	"fmt"
	"strings"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
)

// Refusal is an error with one reason, which is the same in the error detail, metric, log and audit
// record (R1).
type Refusal struct {
	// Reason is the only part that is sent to an unauthenticated peer.
	Reason attestv1.Reason
	// RetryAfter is how long to wait before a retry; 0 if a retry cannot help.
	RetryAfter time.Duration
	// Remote reports that the peer refused us, not we the peer.
	Remote bool
	// Err has the details, for our own log only; nil for a remote refusal.
	Err error
}

// Error returns "REASON: details".
func (r *Refusal) Error() string {
	s := ReasonName(r.Reason)
	if r.Remote {
		s = "refused by the peer: " + s
	}
	if r.Err != nil {
		s += ": " + r.Err.Error()
	}
	return s
}

// Unwrap returns the details.
func (r *Refusal) Unwrap() error { return r.Err }

// New returns a Refusal; format and args are those of [fmt.Errorf].
func New(reason attestv1.Reason, format string, args ...any) error {
	return &Refusal{Reason: reason, Err: fmt.Errorf(format, args...)}
}

// RefuseFor returns a Refusal that asks the peer to retry after d.
func RefuseFor(d time.Duration, reason attestv1.Reason, format string, args ...any) error {
	return &Refusal{Reason: reason, RetryAfter: d, Err: fmt.Errorf(format, args...)}
}

// ReasonOf returns the reason of the outermost Refusal in err's tree: ACCEPTED for nil, INTERNAL if
// there is none.
func ReasonOf(err error) attestv1.Reason {
	if err == nil {
		return attestv1.Reason_REASON_ACCEPTED
	}
	if r, ok := errors.AsType[*Refusal](err); ok {
		return r.Reason
	}
	return attestv1.Reason_REASON_INTERNAL
}

// ReasonName returns a reason as logs, metrics and audit records write it: POLICY_REFUSED. For a
// number that this version does not know it returns UNKNOWN_n.
func ReasonName(r attestv1.Reason) string {
	name, ok := attestv1.Reason_name[int32(r)]
	if !ok {
		return fmt.Sprintf("UNKNOWN_%d", int32(r))
	}
	return strings.TrimPrefix(name, "REASON_")
}
