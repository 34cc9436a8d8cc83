package rpc_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	kmsv1 "github.com/muster-k8s/muster/gen/muster/kms/v1"
	"github.com/muster-k8s/muster/gen/muster/kms/v1/kmsv1connect"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
)

func TestACallKnowsItsCallerAndIsCountedAndLogged(t *testing.T) {
	r := run(t, keyService{}, nil)
	c := kmsv1connect.NewKeyServiceClient(r.attested(attest.PurposeJoinservice), r.url, rpc.ClientOptions()...)
	resp, err := c.DeriveDiskKey(t.Context(), &kmsv1.DeriveDiskKeyRequest{})
	if err != nil || string(resp.GetKey()) != r.client.ID().String() {
		t.Fatalf("%v, %v; want the client's machine", resp, err)
	}
	procedure := kmsv1connect.KeyServiceDeriveDiskKeyProcedure
	if got := r.metric("muster_rpc_requests_total", "code=ok", "procedure="+procedure, "reason=ACCEPTED"); got != 1 {
		t.Errorf("%v calls are counted", got)
	}
	if got := r.metric("muster_atls_setups_total", "outcome=accepted", "reason=", "side=server"); got != 1 {
		t.Errorf("%v connections are counted", got)
	}
	found := false
	for line := range strings.Lines(r.log.String()) {
		var entry map[string]any
		if err := json.Unmarshal([]byte(line), &entry); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		if entry["msg"] == "a key is derived" {
			found = entry["machine"] == r.client.ID().String() && entry["procedure"] == procedure
		}
	}
	if !found {
		t.Errorf("the call's logger does not name the caller:\n%s", r.log)
	}
}

func TestErrorsOfHandlersLeaveByTheTable(t *testing.T) {
	for name, tt := range map[string]struct {
		do     func(context.Context) error
		code   connect.Code
		reason attestv1.Reason
		retry  time.Duration
	}{
		"refused on purpose": {
			do:   func(context.Context) error { return attest.Refuse(attestv1.Reason_REASON_WORKLOAD_NODE, "hush") },
			code: connect.CodePermissionDenied, reason: attestv1.Reason_REASON_WORKLOAD_NODE,
		},
		"try again later": {
			do: func(context.Context) error {
				return attest.RefuseFor(4*time.Second, attestv1.Reason_REASON_ROOT_SEALED, "hush")
			},
			code: connect.CodeUnavailable, reason: attestv1.Reason_REASON_ROOT_SEALED, retry: 4 * time.Second,
		},
		"not foreseen": {
			do:   func(context.Context) error { return errors.New("hush") },
			code: connect.CodeInternal, reason: attestv1.Reason_REASON_INTERNAL,
		},
		"a panic": {
			do:   func(context.Context) error { panic("hush") },
			code: connect.CodeInternal, reason: attestv1.Reason_REASON_INTERNAL,
		},
		"a handler that takes too long": {
			do:   func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
			code: connect.CodeDeadlineExceeded, reason: attestv1.Reason_REASON_DEADLINE,
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := run(t, keyService{disk: func(ctx context.Context, _ *kmsv1.DeriveDiskKeyRequest) (*kmsv1.DeriveDiskKeyResponse, error) {
				return nil, tt.do(ctx)
			}}, func(c *rpc.Config) {
				if tt.code == connect.CodeDeadlineExceeded {
					c.Timeout = 200 * time.Millisecond
				}
			})
			c := kmsv1connect.NewKeyServiceClient(r.attested(attest.PurposeJoinservice), r.url, rpc.ClientOptions()...)
			_, err := c.DeriveDiskKey(t.Context(), &kmsv1.DeriveDiskKeyRequest{})
			if connect.CodeOf(err) != tt.code || rpc.ReasonFrom(err) != tt.reason || rpc.RetryAfterFrom(err) != tt.retry {
				t.Errorf("%v with %v after %s, want %s with %v after %s", err, rpc.ReasonFrom(err), rpc.RetryAfterFrom(err), tt.code, tt.reason, tt.retry)
			}
			if strings.Contains(err.Error(), "hush") {
				t.Errorf("the cause left: %v", err)
			}
			labels := []string{"code=" + tt.code.String(), "procedure=" + kmsv1connect.KeyServiceDeriveDiskKeyProcedure, "reason=" + attest.ReasonName(tt.reason)}
			if got := r.metric("muster_rpc_requests_total", labels...); got != 1 {
				t.Errorf("%v calls with %v", got, labels)
			}
			if name != "a handler that takes too long" && !strings.Contains(r.log.String(), "hush") {
				t.Errorf("our log does not have the cause:\n%s", r.log)
			}
		})
	}
}

func TestARefusedConnectionHasTheCodeOfItsReason(t *testing.T) {
	r := run(t, keyService{}, nil)
	c := kmsv1connect.NewKeyServiceClient(r.attested(attest.PurposeMachine), r.url, rpc.ClientOptions()...)
	_, err := c.DeriveDiskKey(t.Context(), &kmsv1.DeriveDiskKeyRequest{})
	if rpc.ReasonFrom(err) != attestv1.Reason_REASON_BINDING_MISMATCH || connect.CodeOf(err) == connect.CodeUnavailable {
		t.Errorf("%v, want BINDING_MISMATCH, and not unavailable", err)
	}
	wait(t, "the refusal is counted", func() bool {
		return r.metric("muster_atls_setups_total", "outcome=refused", "reason=BINDING_MISMATCH", "side=server") == 1
	})
}
