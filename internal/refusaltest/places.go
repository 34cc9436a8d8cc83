package refusaltest

import (
	"net/http"
	"strings"
	"testing"

	"connectrpc.com/connect"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/rpc"
)

// Connection returns the places of a connection that a service refuses in the exchange.
func Connection() Places {
	return Places{
		Metric: []string{"muster_atls_setups_total", "side", "server", "outcome", "refused"},
		Log:    []string{"msg", "peer refused"},
		Audit:  []string{"event", "connection refused"},
	}
}

// Call returns the places of a call that is refused before it reaches its handler.
func Call(procedure string) Places {
	return Places{
		Metric: []string{"muster_rpc_requests_total", "procedure", procedure},
		Log:    []string{"msg", "call refused", "procedure", procedure},
		Audit:  []string{"event", "call refused"},
	}
}

// Protocols are those over which every RPC is served.
var Protocols = map[string][]connect.ClientOption{"Connect": nil, "gRPC": {connect.WithGRPC()}, "gRPC-Web": {connect.WithGRPCWeb()}}

// EveryProcedure calls each RPC of the services (see [Procedures]) that a client's connection may not call, over each
// protocol, and expects a refusal with that reason.
func EveryProcedure(t *testing.T, s Service, c *http.Client, url string, want attestv1.Reason, services ...string) {
	t.Helper()
	all := Procedures(services...)
	if len(all) == 0 {
		t.Fatalf("%v have no RPC", services)
	}
	for _, p := range all {
		if level, _ := rpc.LevelOf(p.Path); want == attestv1.Reason_REASON_PEER_NOT_ATTESTED && level == rpc.Session {
			continue // the client has shown what this one needs
		}
		for protocol, options := range Protocols {
			t.Run(strings.TrimPrefix(p.Path, "/")+" over "+protocol, func(t *testing.T) {
				places := Call(p.Path)
				if s.Audit == nil {
					places.Audit = nil
				}
				_ = Refused(t, s, want, places, func() error { return p.Call(t.Context(), c, url, options...) })
			})
		}
	}
}
