package atls

import (
	"errors"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// verdictCodes are the reasons that a Verdict may carry (docs/attested-tls.md, section 9). A
// response to an RPC may carry others, because only an accepted peer sends it, whereas any peer can
// send a Verdict.
var verdictCodes = map[attestv1.Reason]bool{
	attestv1.Reason_REASON_ACCEPTED: true, attestv1.Reason_REASON_FORMAT_NONE: true, attestv1.Reason_REASON_PEER_WILL_NOT_ATTEST: true,
	attestv1.Reason_REASON_FRAME_INVALID: true, attestv1.Reason_REASON_EVIDENCE_MALFORMED: true, attestv1.Reason_REASON_BINDING_MISMATCH: true,
	attestv1.Reason_REASON_SIGNATURE_INVALID: true, attestv1.Reason_REASON_AK_TEMPLATE: true, attestv1.Reason_REASON_EK_UNTRUSTED: true,
	attestv1.Reason_REASON_ACTIVATION_FAILED: true, attestv1.Reason_REASON_EVENTLOG_REPLAY: true, attestv1.Reason_REASON_CLOCK_WENT_BACK: true,
	attestv1.Reason_REASON_POLICY_REFUSED: true, attestv1.Reason_REASON_LOCK_FOREIGN: true, attestv1.Reason_REASON_SERVER_NOT_LISTED: true,
	attestv1.Reason_REASON_POLICY_INVALID: true, attestv1.Reason_REASON_POLICY_SIGNATURE: true, attestv1.Reason_REASON_NOT_READY: true,
	attestv1.Reason_REASON_BANNED: true, attestv1.Reason_REASON_BUSY: true, attestv1.Reason_REASON_DEADLINE: true, attestv1.Reason_REASON_INTERNAL: true,
	attestv1.Reason_REASON_HARDWARE_UNTRUSTED: true, attestv1.Reason_REASON_HARDWARE_COLLATERAL: true, attestv1.Reason_REASON_HARDWARE_TCB: true,
}

// verdictCode returns the reason that is sent to the peer for our refusal: INTERNAL
// if no Verdict may carry r.
func verdictCode(r attestv1.Reason) attestv1.Reason {
	if !verdictCodes[r] {
		return attestv1.Reason_REASON_INTERNAL
	}
	return r
}

// ExchangeError means that no session was established. It wraps the cause: an [attest.Refusal], or
// a network error.
type ExchangeError struct {
	// Accepted reports whether this side had accepted the peer's evidence before: only then is the
	// sender of a refusal known.
	Accepted bool
	// Err is the cause.
	Err error
}

// Error returns the text of the cause, and marks a refusal by a peer that has not proven its
// identity.
func (e *ExchangeError) Error() string {
	if r, ok := errors.AsType[*attest.Refusal](e.Err); ok && r.Remote && !e.Accepted {
		return e.Err.Error() + " (it has not proven what it is)"
	}
	return e.Err.Error()
}

// Unwrap returns the cause.
func (e *ExchangeError) Unwrap() error { return e.Err }

// Unproven reports whether err means that no session was established, with a peer that had not
// proven its identity. A network attacker that answers in the peer's place can cause any such
// error, without a TPM.
func Unproven(err error) bool {
	e, ok := errors.AsType[*ExchangeError](err)
	return ok && !e.Accepted
}

// UnprovenRefusal reports whether err is a refusal by such a peer. A server may refuse a client
// before it has proven its own identity, so this need not be an attack; but neither the reason nor
// the remedy for it can be trusted.
func UnprovenRefusal(err error) bool {
	r, ok := errors.AsType[*attest.Refusal](err)
	return ok && r.Remote && Unproven(err)
}
