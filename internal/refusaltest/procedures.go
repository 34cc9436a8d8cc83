package refusaltest

import (
	"context"
	"crypto/tls"
	"net/http"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/muster-k8s/muster/internal/rpc"
)

// Procedure is an RPC that is linked in.
type Procedure struct {
	// Path is the path of the call, as in "/muster.kms.v1.KeyService/DeriveDiskKey".
	Path string
	// Stream is whether its answer is a stream.
	Stream bool
}

// Procedures returns the RPCs of those services, or of all of Muster's and health, in order. They come from the
// descriptors, so that a new RPC is included.
func Procedures(services ...string) []Procedure {
	var out []Procedure
	protoregistry.GlobalFiles.RangeFiles(func(f protoreflect.FileDescriptor) bool {
		for i := range f.Services().Len() {
			s := f.Services().Get(i)
			name := string(s.FullName())
			ours := strings.HasPrefix(name, "muster.") || strings.HasPrefix(name, "grpc.health.v1.")
			if len(services) == 0 && !ours || len(services) > 0 && !slices.Contains(services, name) {
				continue
			}
			for j := range s.Methods().Len() {
				m := s.Methods().Get(j)
				out = append(out, Procedure{"/" + name + "/" + string(m.Name()), m.IsStreamingServer()})
			}
		}
		return true
	})
	slices.SortFunc(out, func(a, b Procedure) int { return strings.Compare(a.Path, b.Path) })
	return out
}

// Call calls it with an empty message.
func (p Procedure) Call(ctx context.Context, c *http.Client, url string, o ...connect.ClientOption) error {
	generic := connect.NewClient[emptypb.Empty, emptypb.Empty](c, url+p.Path, append(rpc.ClientOptions(), o...)...)
	if !p.Stream {
		_, err := generic.CallUnary(ctx, connect.NewRequest(&emptypb.Empty{}))
		return err
	}
	s, err := generic.CallServerStream(ctx, connect.NewRequest(&emptypb.Empty{}))
	if err != nil {
		return err
	}
	defer func() { _ = s.Close() }()
	if s.Receive() {
		return nil // any answer is enough
	}
	return s.Err()
}

// Plain returns a client that uses plain HTTPS, as curl and grpcurl do.
func Plain(t testing.TB) *http.Client {
	t.Helper()
	tr := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ForceAttemptHTTP2: true}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}
