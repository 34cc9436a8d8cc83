package attest

import (
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/internal/refusal"
)

// Refusal is an error with one reason, which is the same in the error detail, metric, log and audit
// record (R1).
type Refusal = refusal.Refusal

// Refuse returns a Refusal; format and args are those of [fmt.Errorf].
func Refuse(reason attestv1.Reason, format string, args ...any) error {
	return refusal.New(reason, format, args...)
}

// RefuseFor returns a Refusal that asks the peer to retry after d.
func RefuseFor(d time.Duration, reason attestv1.Reason, format string, args ...any) error {
	return refusal.RefuseFor(d, reason, format, args...)
}

// ReasonOf returns the reason of the outermost Refusal in err's tree: ACCEPTED for nil, INTERNAL if
// there is none.
func ReasonOf(err error) attestv1.Reason { return refusal.ReasonOf(err) }

// ReasonName returns a reason as logs, metrics and audit records write it: POLICY_REFUSED. For a
// number that this version does not know it returns UNKNOWN_n.
func ReasonName(r attestv1.Reason) string { return refusal.ReasonName(r) }
