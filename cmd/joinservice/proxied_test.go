package main

import (
	"context"
	"net"
	"strings"
	"testing"

	"github.com/pires/go-proxyproto"

	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// For a machine behind a load balancer, the source for limits and for reports of clones is the machine's own address, if
// the owner has listed the load balancer. Clients that are not listed cannot choose a source.
func TestBehindALoadBalancerTheMachineIsTheSource(t *testing.T) {
	s := setUp(t, func(s *fixture) { s.flags = []string{"--proxy-protocol-from=127.0.0.9,10.1.0.0/16"} })
	m := s.machine(t)
	from := func(balancer string) joinv1connect.JoinServiceClient {
		transport, err := atls.NewTransport(atls.ClientConfig{
			Attester: m.Attester(attest.PurposeMachine), Verifier: attesttest.Verifier(t, s.ca), PeerPurpose: attest.PurposeJoinservice, Appraiser: presented{s},
			DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
				c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(balancer)}}).DialContext(ctx, network, addr)
				if err != nil {
					return nil, err
				}
				_, err = proxyproto.HeaderProxyFromAddrs(2, &net.TCPAddr{IP: net.ParseIP("192.0.2.77"), Port: 4711}, c.RemoteAddr()).WriteTo(c)
				return c, err
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = transport.Close() })
		return joinv1connect.NewJoinServiceClient(rpc.HTTPClient(transport), "https://"+s.join.Addr, rpc.ClientOptions()...)
	}
	if _, err := from("127.0.0.10").IssueJoinTicket(t.Context(), worker(t).IssueJoinTicketRequest); err == nil {
		t.Error("an address that is not listed named a source")
	}
	if _, err := from("127.0.0.9").IssueJoinTicket(t.Context(), worker(t).IssueJoinTicketRequest); err != nil {
		t.Fatal(err)
	}
	if b := s.Node(t, "w1").Status.Boot; b == nil || b.Address != "192.0.2.77" {
		t.Errorf("the machine's boot is %+v", b)
	}
}

func TestFlagsThatLetNobodyInAreRefused(t *testing.T) {
	for _, bad := range []string{"--source-rate=0", "--source-burst=0", "--source-handshakes=-1", "--proxy-protocol-from=lb.example.org"} {
		name, _, _ := strings.Cut(bad, "=")
		if err := run(t.Context(), []string{bad, "--listen=127.0.0.1:0", "--metrics=127.0.0.1:0"}, t.Output()); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}
