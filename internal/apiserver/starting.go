package apiserver

import (
	"errors"
	"fmt"
	"io"
	"net/http"

	utilnet "k8s.io/apimachinery/pkg/util/net"
)

// ErrStarting is returned instead of an API server's answer 403 (Forbidden) from before it is ready: until it has read the RBAC objects, it refuses all requests
// of all users but those of system:masters.
var ErrStarting = errors.New("the API server is not ready")

// maxRefusal bounds how much of an answer 403 is read, in bytes.
const maxRefusal = 64 << 10

// Started returns a transport that fails with [ErrStarting] for answers 403 of an API server that is not ready, see [k8s.io/client-go/rest.Config.Wrap]. If it is ready
// by then, the refused request is sent once more.
func Started(rt http.RoundTripper) http.RoundTripper { return started{rt} }

type started struct{ http.RoundTripper }

func (s started) RoundTrip(r *http.Request) (*http.Response, error) {
	const readyz = "/readyz"
	resp, err := s.RoundTripper.RoundTrip(r)
	if err != nil || resp.StatusCode != http.StatusForbidden || r.URL.Path == readyz {
		return resp, err
	}
	again := r.Clone(r.Context())
	if r.Body != nil && r.Body != http.NoBody {
		if r.GetBody == nil {
			return resp, nil
		}
		if again.Body, err = r.GetBody(); err != nil {
			return resp, nil //nolint:nilerr // the answer of before is valid
		}
	}
	refusal, _ := io.ReadAll(io.LimitReader(resp.Body, maxRefusal)) // read, so that the connection can be used again, which leads to the same API server
	_ = resp.Body.Close()
	at := *r.URL
	at.Path, at.RawPath, at.RawQuery = readyz, "", ""
	ask := &http.Request{Method: http.MethodGet, URL: &at, Host: r.Host, Header: r.Header.Clone(), Proto: r.Proto, ProtoMajor: r.ProtoMajor, ProtoMinor: r.ProtoMinor}
	ask.Header.Del("Content-Type")
	ready, err := s.RoundTripper.RoundTrip(ask.WithContext(r.Context()))
	if err != nil {
		return nil, err
	}
	_, _ = io.CopyN(io.Discard, ready.Body, maxRefusal)
	_ = ready.Body.Close()
	if ready.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%w: %s answers %q, and the request was refused with %.300q", ErrStarting, readyz, ready.Status, refusal)
	}
	return s.RoundTripper.RoundTrip(again)
}

// CloseIdleConnections is called by [http.Client.CloseIdleConnections].
func (s started) CloseIdleConnections() { utilnet.CloseIdleConnectionsFor(s.RoundTripper) }
