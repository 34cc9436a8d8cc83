package rpc

import (
	"context"
	"net/http"

	"connectrpc.com/connect"

	"github.com/muster-k8s/muster/trust/attest"
)

// maxResponse bounds a message from a server, in bytes after decompression. A ticket of a control plane is the largest.
const maxResponse = 4 << 20

// HTTPClient returns a client over t, usually an [atls.Transport]. It follows no redirects: a request goes only to the
// server that was appraised.
func HTTPClient(t http.RoundTripper) *http.Client {
	return &http.Client{
		Transport:     t,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// ClientOptions are for every generated client: they bound answers, and set the code of a refused connection's error to
// that of its reason, so that it is not taken for UNAVAILABLE and retried at once. [ReasonFrom], [RetryAfterFrom] and
// [RemedyFrom] read the errors.
func ClientOptions() []connect.ClientOption {
	return []connect.ClientOption{
		connect.WithReadMaxBytes(maxResponse),
		connect.WithInterceptors(clientErrors{}),
	}
}

type clientErrors struct{}

// WrapUnary implements [connect.Interceptor].
func (clientErrors) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		resp, err := next(ctx, req)
		return resp, refusedDial(err)
	}
}

// WrapStreamingClient implements [connect.Interceptor].
func (clientErrors) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		return refusingConn{next(ctx, spec)}
	}
}

// WrapStreamingHandler implements [connect.Interceptor].
func (clientErrors) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

type refusingConn struct{ connect.StreamingClientConn }

func (c refusingConn) Send(m any) error    { return refusedDial(c.StreamingClientConn.Send(m)) }
func (c refusingConn) Receive(m any) error { return refusedDial(c.StreamingClientConn.Receive(m)) }
func (c refusingConn) CloseRequest() error { return refusedDial(c.StreamingClientConn.CloseRequest()) }
func (c refusingConn) CloseResponse() error {
	return refusedDial(c.StreamingClientConn.CloseResponse())
}

// refusedDial sets the code of a connection's refusal; other errors are unchanged.
func refusedDial(err error) error {
	if !isRefusal(err) {
		return err
	}
	code := connect.CodeInternal
	if w, ok := reasons[attest.ReasonOf(err)]; ok {
		code = w.code
	}
	return connect.NewError(code, err)
}
