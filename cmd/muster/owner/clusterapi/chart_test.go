package clusterapi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/url"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/internal/apiserver"
	"github.com/muster-k8s/muster/internal/kubetest"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
)

// appliedThoughConnectionsBreak installs the chart. An API server that was just started on a small machine drops connections and comes back.
func appliedThoughConnectionsBreak(t *testing.T, api *kubetest.Cluster) {
	t.Helper()
	text, err := os.ReadFile(api.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	var cuts atomic.Int64
	host := strings.TrimPrefix(api.Admin.Host, "https://")
	text = []byte(strings.ReplaceAll(string(text), host, cutting(t, host, &cuts)))
	c, err := Connect(text)
	if err != nil {
		t.Fatal(err)
	}
	r, err := c.InstallChart(t.Context(), values, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if r.Info.Status != "deployed" || cuts.Load() < mostCuts {
		t.Errorf("revision %d is %s after %d cuts", r.Version, r.Info.Status, cuts.Load())
	}
	t.Logf("revision %d after %d cuts", r.Version, cuts.Load())
}

const mostCuts = 5

var values = Values{
	OwnerKeys:        []string{strings.Repeat("A", 43) + "="},
	JoinserviceImage: "registry.example/joinservice@sha256:" + strings.Repeat("1", 64), KMSImage: "registry.example/kms@sha256:" + strings.Repeat("2", 64),
}

// needs returns the objects that the namespace must have before the chart; the list of nodes that may not write is
// the first.
func needs() []client.Object {
	in := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: Namespace, Name: name} }
	return []client.Object{
		&corev1.ConfigMap{ObjectMeta: in(nodeaccess.ConfigMap), Data: map[string]string{nodeaccess.KeySuspended: "\nnode9\n"}},
		&corev1.ConfigMap{ObjectMeta: in("muster-cluster")},
		&corev1.Secret{ObjectMeta: in("muster-kms-root")},
	}
}

// cutting is an address that cuts its first connections, each later than the one before.
func cutting(t *testing.T, to string, cuts *atomic.Int64) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() {
				defer in.Close()
				out, err := net.Dial("tcp", to)
				if err != nil {
					return
				}
				defer out.Close()
				stop := context.AfterFunc(t.Context(), func() { _, _ = in.Close(), out.Close() })
				defer stop()
				all.Go(func() { _, _ = io.Copy(in, out); _ = in.Close() })
				if n := cuts.Load(); n < mostCuts {
					if _, err := io.CopyN(out, in, 8<<10*(n+1)); !errors.Is(err, io.EOF) {
						cuts.Add(1)
					}
					return
				}
				_, _ = io.Copy(out, in)
			})
		}
	})
	t.Cleanup(func() { _ = l.Close(); all.Wait() })
	return l.Addr().String()
}

func TestWhichErrorsPass(t *testing.T) {
	for err, want := range map[error]bool{
		fmt.Errorf("unexpected error when reading response body: %w", io.ErrUnexpectedEOF):                            true,
		errors.New(`helm: error validating "": error validating data: failed to download openapi: unexpected EOF`):    true,
		&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}:                                                           true,
		&url.Error{Op: "Get", URL: "https://x", Err: fmt.Errorf("%w (/readyz: 403)", apiserver.ErrStarting)}:          true,
		apierrors.NewServiceUnavailable("etcd elects"):                                                                true,
		errors.Join(errors.New("helm"), &url.Error{Op: "Patch", URL: "https://x", Err: io.EOF}):                       true,
		apierrors.NewForbidden(corev1.Resource("secrets"), "x", errors.New("no")):                                     false,
		errors.New("the policy has no network with the machine's address"):                                            false,
		apierrors.NewInvalid(corev1.SchemeGroupVersion.WithKind("Node").GroupKind(), "x", nil):                        false,
		&meta.NoKindMatchError{GroupKind: corev1.SchemeGroupVersion.WithKind("x").GroupKind(), SearchedVersions: nil}: true,
	} {
		if got := passes(err); got != want {
			t.Errorf("%v: passes %v, want %v", err, got, want)
		}
	}
}
