package attack

import (
	"context"
	"crypto/ed25519"
	"crypto/x509"
	"errors"
	"log/slog"
	"net"
	"testing"

	"connectrpc.com/connect"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/internal/service/evidence"
	"github.com/muster-k8s/muster/services/bootstrapper/discovery"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/tpm"
)

// A7: root on a worker has everything that a joinservice presents: a genuine machine of the cluster, its attester's
// socket of the purpose joinservice, and the policy in force. A machine that connects to it sends it no request.
func TestAWorkerPosesAsAJoinservice(t *testing.T) {
	public, owner, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	clusterID := [32]byte{7}
	for name, tt := range map[string]struct {
		listed func(x *target) []*attesttest.Machine
		want   attestv1.Reason // 0: the request is sent
	}{
		"a worker":                       {func(x *target) []*attesttest.Machine { return []*attesttest.Machine{x.client} }, attestv1.Reason_REASON_SERVER_NOT_LISTED},
		"a policy that lists nobody":     {func(*target) []*attesttest.Machine { return nil }, attestv1.Reason_REASON_SERVER_NOT_LISTED},
		"a control plane, for the proof": {func(x *target) []*attesttest.Machine { return []*attesttest.Machine{x.client, x.server} }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			var signed *attestv1.SignedPolicy
			x := newTarget(t, func(c *rpc.Config) {
				presenting, err := evidence.WithPolicy(c.ATLS.Attester, func() *attestv1.SignedPolicy { return signed })
				if err != nil {
					t.Fatal(err)
				}
				c.ATLS.Attester, c.ATLS.Appraiser = presenting, atls.NoAppraiser // the attacker accepts every client
			})
			x.server.LockTo(clusterID)
			signed = attest.SignPolicy(owner, attesttest.Policy(t, x.ca, []*attesttest.Machine{x.server}, attesttest.ControlPlanes(tt.listed(x)...)))
			joiner := attesttest.NewMachine(t, x.ca, attesttest.Options{})
			memory := &discovery.Memory{}
			ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
			defer cancel()
			asks := func() error {
				first, err := new(net.Dialer).DialContext(ctx, "tcp", x.addr)
				if err != nil {
					return err
				}
				defer first.Close()
				s, err := discovery.Open(ctx, discovery.SessionConfig{
					Attester: joiner.Attester(attest.PurposeMachine), Lock: attest.AnyLock(), Dial: patience, Log: slog.New(slog.DiscardHandler),
					Verification: discovery.Verification{OwnerKeys: attest.OwnerKeys{public}, Bank: tpm.SHA256, PCRs: joiner, NewVerifier: func([]*x509.Certificate) (attest.Verifier, error) {
						return attesttest.Verifier(t, x.ca), nil
					}, Newest: memory.Newest},
				}, x.addr, first)
				if err != nil {
					return err
				}
				defer s.Close()
				_, err = s.IssueJoinTicket(ctx, &joinv1.IssueJoinTicketRequest{NodeName: "node3"})
				if connect.CodeOf(err) == connect.CodeUnimplemented {
					return nil // its handler was reached
				}
				return err
			}
			err := insist(t, asks)
			refusal, refused := errors.AsType[*attest.Refusal](err)
			switch {
			case tt.want == 0 && (cutShort(err) || refused && !refusal.Remote):
				t.Errorf("the real one was not asked: %v", err)
			case tt.want != 0 && (!refused || refusal.Remote || refusal.Reason != tt.want):
				t.Errorf("%v, want %s", err, attest.ReasonName(tt.want))
			}
			// A refusal is also not remembered: its policy is no lower limit for the real one.
			if err := memory.Newest(journal.Policy{OwnerKey: journal.Hex(public), Serial: 1, Digest: []byte{1}}, attest.OwnerKeys{public}, false); (err == nil) != (tt.want != 0) {
				t.Errorf("remembered: %v", err)
			}
		})
	}
}
