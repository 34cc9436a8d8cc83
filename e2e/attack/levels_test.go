package attack

import (
	"net/http"
	"strings"
	"testing"

	"connectrpc.com/connect"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/atls"
)

// Every existing RPC, called by every kind of client: a plain HTTPS client, one with a session that did not attest,
// an attested machine (J1).
func TestEveryRPCFromEveryLevel(t *testing.T) {
	all := refusaltest.Procedures()
	if len(all) < 8 {
		t.Fatalf("only %d RPCs are linked in", len(all))
	}
	for _, p := range all {
		need, ok := rpc.LevelOf(p.Path)
		if !ok {
			t.Errorf("%s has no level", p.Path)
			continue
		}
		x := newTarget(t, nil) // each with its own limit of records
		callers := map[string]struct {
			client *http.Client
			level  rpc.Level
			want   attestv1.Reason // of a call that its level does not allow
		}{
			"plain":    {refusaltest.Plain(t), rpc.Plain, attestv1.Reason_REASON_SESSION_REQUIRED},
			"session":  {x.transport(t, func(c *atls.ClientConfig) { c.Attester = atls.NoAttester }), rpc.Session, attestv1.Reason_REASON_PEER_NOT_ATTESTED},
			"attested": {x.transport(t, nil), rpc.Attested, attestv1.Reason_REASON_UNSPECIFIED},
		}
		for who, c := range callers {
			for protocol, options := range refusaltest.Protocols {
				call := func() error { return p.Call(t.Context(), c.client, "https://"+x.addr, options...) }
				t.Run(strings.TrimPrefix(p.Path, "/")+" by "+who+" over "+protocol, func(t *testing.T) {
					if c.level < need {
						refusaltest.Refused(t, x.witnesses, c.want, refusaltest.Call(p.Path), call)
					} else if err := call(); err != nil && connect.CodeOf(err) != connect.CodeUnimplemented && rpc.ReasonFrom(err) != attestv1.Reason_REASON_REQUEST_INVALID {
						t.Errorf("it does not reach its handler: %v", err)
					}
				})
			}
		}
	}
}

// No content of a request raises its level (J1).
func TestHeadersDoNotRaiseALevel(t *testing.T) {
	x := newTarget(t, nil)
	c := refusaltest.Plain(t)
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
