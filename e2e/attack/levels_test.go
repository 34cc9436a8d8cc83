package attack

import (
	"net/http"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/emptypb"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/atls"
)

// call calls any RPC with an empty message and gives the reason of its error, ACCEPTED if
// the call got past its access level.
func call(t *testing.T, c *http.Client, addr, procedure string, stream bool, o ...connect.ClientOption) attestv1.Reason {
	t.Helper()
	generic := connect.NewClient[emptypb.Empty, emptypb.Empty](c, "https://"+addr+procedure, append(rpc.ClientOptions(), o...)...)
	var err error
	if stream {
		s, serr := generic.CallServerStream(t.Context(), connect.NewRequest(&emptypb.Empty{}))
		if err = serr; err == nil {
			if !s.Receive() {
				err = s.Err()
			}
			_ = s.Close()
		}
	} else {
		_, err = generic.CallUnary(t.Context(), connect.NewRequest(&emptypb.Empty{}))
	}
	reason := rpc.ReasonFrom(err)
	if err == nil || connect.CodeOf(err) == connect.CodeUnimplemented || reason == attestv1.Reason_REASON_REQUEST_INVALID {
		return accepted // reached its handler
	}
	if reason == attestv1.Reason_REASON_UNSPECIFIED {
		t.Errorf("%s: %v", procedure, err)
	}
	return reason
}

// Every RPC that there is, called by everybody: a plain HTTPS client, one with a session
// that did not attest, an attested machine.
func TestEveryRPCFromEveryLevel(t *testing.T) {
	x := newTarget(t, nil)
	callers := map[string]struct {
		client *http.Client
		level  rpc.Level
	}{
		"plain":    {plain(t), rpc.Plain},
		"session":  {x.transport(t, func(c *atls.ClientConfig) { c.Attester = atls.NoAttester }), rpc.Session},
		"attested": {x.transport(t, nil), rpc.Attested},
	}
	protocols := map[string][]connect.ClientOption{"Connect": nil, "gRPC": {connect.WithGRPC()}, "gRPC-Web": {connect.WithGRPCWeb()}}
	tried := 0
	protoregistry.GlobalFiles.RangeFiles(func(f protoreflect.FileDescriptor) bool {
		if !strings.HasPrefix(string(f.Package()), "muster.") && f.Package() != "grpc.health.v1" {
			return true
		}
		for i := range f.Services().Len() {
			s := f.Services().Get(i)
			for j := range s.Methods().Len() {
				m := s.Methods().Get(j)
				procedure := "/" + string(s.FullName()) + "/" + string(m.Name())
				need, ok := rpc.LevelOf(procedure)
				if !ok {
					t.Errorf("%s has no level", procedure)
					continue
				}
				for who, c := range callers {
					want := accepted
					switch {
					case c.level < need && c.level == rpc.Plain:
						want = attestv1.Reason_REASON_SESSION_REQUIRED
					case c.level < need:
						want = attestv1.Reason_REASON_PEER_NOT_ATTESTED
					}
					for name, o := range protocols {
						if got := call(t, c.client, x.addr, procedure, m.IsStreamingServer(), o...); got != want {
							t.Errorf("%s by %s over %s: %v, want %v", procedure, who, name, got, want)
						}
						tried++
					}
				}
			}
		}
		return true
	})
	if tried < 8*3*3 {
		t.Errorf("only %d calls were tried", tried)
	}
}

// Nothing that a request says of itself raises its level.
func TestHeadersDoNotRaiseALevel(t *testing.T) {
	x := newTarget(t, nil)
	c := plain(t)
	c.Transport = adding{c.Transport, map[string]string{
		"X-Forwarded-For": "127.0.0.1", "X-Forwarded-Proto": "https", "Forwarded": "for=127.0.0.1;proto=https",
		"X-Client-Cert": "machine", "Authorization": "Bearer machine", "X-Muster-Peer": x.client.ID().String(),
	}}
	for _, path := range []string{
		"/muster.join.v1.JoinService/IssueJoinTicket", "//muster.join.v1.JoinService/IssueJoinTicket",
		"/grpc.health.v1.Health/../muster.join.v1.JoinService/IssueJoinTicket", "/muster.join.v1.JoinService/%49ssueJoinTicket",
	} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://"+x.addr+path, strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		resp, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode == http.StatusOK || resp.StatusCode == http.StatusNotImplemented {
			t.Errorf("%s: %s, so a handler was reached", path, resp.Status)
		}
	}
}

type adding struct {
	http.RoundTripper
	headers map[string]string
}

func (a adding) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	for k, v := range a.headers {
		r.Header.Set(k, v)
	}
	return a.RoundTripper.RoundTrip(r)
}
