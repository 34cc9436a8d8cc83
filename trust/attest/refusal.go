package attest

import (
	"errors"
	"fmt"
	"strings"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
)

// Refusal is an error with the one reason that error detail, metric, log and audit record
// share (R1).
type Refusal struct {
	// Reason is what a stranger learns.
	Reason attestv1.Reason
	// RetryAfter is how long to wait before trying again; 0 if that cannot help.
	RetryAfter time.Duration
	// Remote says that the peer refused us, rather than we the peer.
	Remote bool
	// Err has the details, for our own log only; nil for a remote refusal.
	Err error
}

// Error gives "REASON: details".
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

// Unwrap gives the details.
func (r *Refusal) Unwrap() error { return r.Err }

// Refuse makes a Refusal; format and args are those of [fmt.Errorf].
func Refuse(reason attestv1.Reason, format string, args ...any) error {
	return &Refusal{Reason: reason, Err: fmt.Errorf(format, args...)}
}

// RefuseFor makes a Refusal that asks to try again after d.
func RefuseFor(d time.Duration, reason attestv1.Reason, format string, args ...any) error {
	return &Refusal{Reason: reason, RetryAfter: d, Err: fmt.Errorf(format, args...)}
}

// ReasonOf gives the reason of the outermost Refusal in err's tree: ACCEPTED for nil,
// INTERNAL for an error that is none.
func ReasonOf(err error) attestv1.Reason {
	if err == nil {
		return attestv1.Reason_REASON_ACCEPTED
	}
	if r, ok := errors.AsType[*Refusal](err); ok {
		return r.Reason
	}
	return attestv1.Reason_REASON_INTERNAL
}

// ReasonName gives a reason as logs, metrics and audit records write it:
// POLICY_REFUSED. A number that this version does not know gives UNKNOWN_n.
func ReasonName(r attestv1.Reason) string {
	name, ok := attestv1.Reason_name[int32(r)]
	if !ok {
		return fmt.Sprintf("UNKNOWN_%d", int32(r))
	}
	return strings.TrimPrefix(name, "REASON_")
}
