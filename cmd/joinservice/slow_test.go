package main

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/kubetest"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/service/clusterview"
)

// J11: whichever of two machines with one TPM state came first, the other one gets no key while the first one's kubelet
// runs, though its Lease is renewed later than at its interval: the API server is slow, and another client has changed the
// Lease, so that the kubelet needs three requests.
func TestACopyGetsNoKeyWhileTheAPIServerIsSlow(t *testing.T) {
	const (
		pause    = time.Second             // of each request
		interval = 1500 * time.Millisecond // of the kubelet, two thirds of the watch, as by default
	)
	for name, copyFirst := range map[string]bool{"the original runs": false, "its copy runs": true} {
		t.Run(name, func(t *testing.T) {
			quick := setUp(t, sweepsSoon)
			original := quick.virtual(t)
			s := quick.beside(t, pause, "--lease-watch=2250ms")
			runs, boots := original, original.copied("127.0.0.3")
			if copyFirst {
				runs, boots = boots, runs
			}
			s.opens(t, runs)
			if copyFirst { // a TPM counts a boot when it is used: the copy has booted once more than the original
				boots.reboot()
				s.lock(t, boots)
				boots.reboot()
			}
			renew := s.kubeletLease(t, s.over(t, pause))
			l := &coordinationv1.Lease{}
			if err := s.Client.Get(t.Context(), client.ObjectKey{Namespace: corev1.NamespaceNodeLease, Name: "w1"}, l); err != nil {
				t.Fatal(err)
			}
			l.Labels = map[string]string{"changed": "true"}
			if err := s.Client.Update(t.Context(), l); err != nil {
				t.Fatal(err)
			}
			looks := func() int {
				return strings.Count(s.join.Log.String(), "checking whether the kubelet of its previous boot still renews")
			}
			s.cloned(t, attestv1.Reason_REASON_MACHINE_CLONED, "rejoin refused", boots.address, runs.address, func() error {
				before, refused := looks(), make(chan error, 1)
				go func() { refused <- s.key(t, boots, s.join.Addr) }()
				membertest.Eventually(t, func() error { return membertest.Want(looks() > before || len(refused) > 0, "it does not wait yet") })
				<-time.After(interval) // the kubelet has renewed it just before
				if err := renew(t.Context()); !apierrors.IsConflict(err) {
					t.Errorf("the kubelet's first request: %v, want a conflict", err)
				}
				if err := renew(t.Context()); err != nil {
					t.Error(err)
				}
				return <-refused
			})
		})
	}
}

// beside starts a second joinservice with these flags. Each of its requests to the API server takes that much longer.
func (s *fixture) beside(t *testing.T, pause time.Duration, flags ...string) *fixture {
	t.Helper()
	next := &fixture{Cluster: s.Cluster, ca: s.ca, cp1: s.cp1, kms: s.kms, rootDir: s.rootDir, pki: s.pki, token: s.token, sockets: s.sockets, flags: flags, timing: s.timing, image: s.image, listed: s.listed, planned: s.planned}
	dir := t.TempDir()
	next.audit, next.kubeconf = filepath.Join(dir, "audit.jsonl"), filepath.Join(dir, "kubeconfig")
	api, err := s.As(t.Context(), namespace, "joinservice")
	if err != nil {
		t.Fatal(err)
	}
	if pause > 0 {
		api.Host = delayed(t, api.Host, pause)
	}
	if err := kubetest.WriteKubeconfig(next.kubeconf, api); err != nil {
		t.Fatal(err)
	}
	next.serveJoin(t)
	return next
}

// over returns an administrator's client. Each of its requests takes that much longer.
func (s *fixture) over(t *testing.T, pause time.Duration) client.Client {
	t.Helper()
	api := rest.CopyConfig(s.Admin)
	api.Host = delayed(t, api.Host, pause)
	c, err := client.New(api, client.Options{Scheme: clusterview.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// delayed listens, and forwards requests to an API server after a pause; it returns its own URL.
func delayed(t *testing.T, api string, pause time.Duration) string {
	t.Helper()
	server, err := url.Parse(api)
	if err != nil {
		t.Fatal(err)
	}
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var work sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		_ = l.Close()
		work.Wait()
	})
	work.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := new(net.Dialer).DialContext(ctx, "tcp", server.Host)
			if err != nil {
				_ = in.Close()
				continue
			}
			ended := func() { _, _ = in.Close(), out.Close() }
			done := context.AfterFunc(ctx, ended)
			sent := make(chan part, 1024)
			work.Go(func() {
				defer close(sent)
				receive(ctx, in, pause, sent)
			})
			work.Go(func() {
				defer ended()
				for p := range sent {
					select {
					case <-time.After(time.Until(p.due)):
					case <-ctx.Done():
						return
					}
					if _, err := out.Write(p.data); err != nil {
						return
					}
				}
			})
			work.Go(func() {
				defer done()
				defer ended()
				_, _ = io.Copy(in, out)
			})
		}
	})
	return "https://" + l.Addr().String()
}

// part is what is to be forwarded at a time.
type part struct {
	due  time.Time
	data []byte
}

// receive reads until the connection ends, and does not wait for what it has read to be forwarded.
func receive(ctx context.Context, in io.Reader, pause time.Duration, to chan<- part) {
	b := make([]byte, 64<<10)
	for {
		n, err := in.Read(b)
		select {
		case to <- part{time.Now().Add(pause), bytes.Clone(b[:n])}:
		case <-ctx.Done():
			return
		}
		if err != nil {
			return
		}
	}
}
