package rpc

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

func TestEveryReasonHasACode(t *testing.T) {
	for n, name := range attestv1.Reason_name {
		r := attestv1.Reason(n)
		w, ok := reasons[r]
		if r == attestv1.Reason_REASON_UNSPECIFIED || r == attestv1.Reason_REASON_ACCEPTED {
			if ok {
				t.Errorf("%s is no refusal, but has a code", name)
			}
			continue
		}
		if !ok || w.code == 0 {
			t.Errorf("%s has no code: add it to the table in errors.go", name)
		}
		if len(w.remedy) > 300 {
			t.Errorf("%s: the schema allows a remedy of 300 characters, this one has %d", name, len(w.remedy))
		}
		if w.remedy != "" && !strings.HasSuffix(w.remedy, ".") {
			t.Errorf("%s: the remedy is no sentence: %q", name, w.remedy)
		}
	}
}

// A worker that was forgotten must not be enrolled as a control plane.
func TestARemedyIsForTheRoleOfTheMachine(t *testing.T) {
	const reason = attestv1.Reason_REASON_NOT_ENROLLED
	worker := RemedyFor(reason, "worker")
	if strings.Contains(worker, "control-plane") || !strings.Contains(worker, "`muster enroll NAME --role worker --machine-id ID --disk-id UUID`") || len(worker) > 300 {
		t.Errorf("a worker: %q", worker)
	}
	for _, role := range []string{"control-plane", "", "x"} {
		if got := RemedyFor(reason, role); got != RemedyOf(reason) || !strings.Contains(got, "`muster enroll NAME --role control-plane --machine-id ID`") {
			t.Errorf("%q: %q", role, got)
		}
	}
	if got := RemedyFor(attestv1.Reason_REASON_NAME_TAKEN, "worker"); got != RemedyOf(attestv1.Reason_REASON_NAME_TAKEN) || !strings.Contains(got, "`muster replace NAME --tpm ID`") {
		t.Errorf("another reason: %q", got)
	}
}

// Machines are refused with these reasons also for a hardware report that their host or image does not make.
func TestRemediesNameHardwareReports(t *testing.T) {
	for reason, want := range map[attestv1.Reason]string{
		attestv1.Reason_REASON_POLICY_REFUSED:     "docs/hardware-reports.md",
		attestv1.Reason_REASON_HARDWARE_UNTRUSTED: "If the certificate of the report's key is missing",
	} {
		if got := RemedyOf(reason); !strings.Contains(got, want) {
			t.Errorf("%s: %q does not say %q", attest.ReasonName(reason), got, want)
		}
	}
}

func TestACallerLearnsWhatTheTableSays(t *testing.T) {
	secret := errors.New("PCR 9 is 1234, and 10.1.2.3 is down")
	upstream := connect.NewWireError(connect.CodeNotFound, secret)
	for name, tt := range map[string]struct {
		err    error
		code   connect.Code
		reason attestv1.Reason
		text   string // exactly
	}{
		"a refusal whose text is for the caller": {
			err:  attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "disk_id is no UUID"),
			code: connect.CodeInvalidArgument, reason: attestv1.Reason_REASON_REQUEST_INVALID, text: "REQUEST_INVALID: disk_id is no UUID",
		},
		"a refusal whose text is for our log": {
			err:  attest.Refuse(attestv1.Reason_REASON_POLICY_REFUSED, "%w", secret),
			code: connect.CodePermissionDenied, reason: attestv1.Reason_REASON_POLICY_REFUSED, text: "POLICY_REFUSED",
		},
		"a refusal deep inside": {
			err:  fmt.Errorf("issue a ticket: %w", attest.Refuse(attestv1.Reason_REASON_NAME_TAKEN, "%w", secret)),
			code: connect.CodeAlreadyExists, reason: attestv1.Reason_REASON_NAME_TAKEN, text: "NAME_TAKEN",
		},
		"an unforeseen error": {
			err:  fmt.Errorf("read the enrollment: %w", secret),
			code: connect.CodeInternal, reason: attestv1.Reason_REASON_INTERNAL, text: "INTERNAL",
		},
		"an error of another service": {
			err:  upstream,
			code: connect.CodeInternal, reason: attestv1.Reason_REASON_INTERNAL, text: "INTERNAL",
		},
		"a refusal by another service of us": {
			err:  &attest.Refusal{Reason: attestv1.Reason_REASON_POLICY_REFUSED, Remote: true},
			code: connect.CodeInternal, reason: attestv1.Reason_REASON_INTERNAL, text: "INTERNAL",
		},
		"a reason that is in no table": {
			err:  attest.Refuse(attestv1.Reason(9999), "%w", secret),
			code: connect.CodeInternal, reason: attestv1.Reason_REASON_INTERNAL, text: "INTERNAL",
		},
		"a deadline": {
			err:  fmt.Errorf("ask the API server: %w", context.DeadlineExceeded),
			code: connect.CodeDeadlineExceeded, reason: attestv1.Reason_REASON_DEADLINE, text: "DEADLINE",
		},
		"a caller that hung up": {
			err:  fmt.Errorf("ask the API server: %w", context.Canceled),
			code: connect.CodeCanceled, reason: attestv1.Reason_REASON_DEADLINE, text: "context canceled",
		},
		"an error made here for the wire": {
			err:  connect.NewError(connect.CodeNotFound, errors.New("no such service")),
			code: connect.CodeNotFound, text: "no such service",
		},
	} {
		t.Run(name, func(t *testing.T) {
			out := Error(tt.err)
			var ce *connect.Error
			if !errors.As(out, &ce) || ce.Code() != tt.code || ce.Message() != tt.text {
				t.Errorf("%v, want %s: %s", out, tt.code, tt.text)
			}
			if got := ReasonFrom(out); got != tt.reason {
				t.Errorf("reason %v, want %v", got, tt.reason)
			}
			own := tt.reason // the reason in the service's own metric, log and audit record (R1)
			if own == attestv1.Reason_REASON_UNSPECIFIED {
				own = attestv1.Reason_REASON_INTERNAL
			}
			if got := ReasonOf(tt.err); got != own {
				t.Errorf("the service's own reason is %v, want %v", got, own)
			}
		})
	}
	if Error(nil) != nil {
		t.Error("no error became one")
	}
}

func TestAClientReadsReasonRemedyAndRetry(t *testing.T) {
	busy := attest.RefuseFor(3*time.Second, attestv1.Reason_REASON_BUSY, "too many")
	for name, tt := range map[string]struct {
		err    error
		reason attestv1.Reason
		retry  time.Duration
		remedy string
	}{
		"no error":                    {reason: attestv1.Reason_REASON_ACCEPTED},
		"an error of the network":     {err: errors.New("connection reset")},
		"an answer of the server":     {err: Error(busy), reason: attestv1.Reason_REASON_BUSY, retry: 3 * time.Second, remedy: reasons[attestv1.Reason_REASON_BUSY].remedy},
		"a refusal of the connection": {err: connect.NewError(connect.CodeUnavailable, fmt.Errorf("dial: %w", busy)), reason: attestv1.Reason_REASON_BUSY, retry: 3 * time.Second, remedy: reasons[attestv1.Reason_REASON_BUSY].remedy},
		"a server that asks for ages": {
			err:    Error(attest.RefuseFor(1000*time.Hour, attestv1.Reason_REASON_BUSY, "too many")),
			reason: attestv1.Reason_REASON_BUSY, retry: maxRetryAfter, remedy: reasons[attestv1.Reason_REASON_BUSY].remedy,
		},
	} {
		if got := ReasonFrom(tt.err); got != tt.reason {
			t.Errorf("%s: reason %v, want %v", name, got, tt.reason)
		}
		if got := RetryAfterFrom(tt.err); got != tt.retry {
			t.Errorf("%s: retry after %s, want %s", name, got, tt.retry)
		}
		if got := RemedyFrom(tt.err); got != tt.remedy {
			t.Errorf("%s: remedy %q, want %q", name, got, tt.remedy)
		}
	}
	if got := refusedDial(connect.NewError(connect.CodeUnavailable, busy)); connect.CodeOf(got) != connect.CodeResourceExhausted {
		t.Errorf("a refused connection is %v, want what its reason is", got)
	}
}
