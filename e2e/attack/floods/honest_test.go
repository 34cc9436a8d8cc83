package floods

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	healthv1 "github.com/muster-k8s/muster/gen/grpc/health/v1"
	"github.com/muster-k8s/muster/gen/grpc/health/v1/healthv1connect"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/gen/muster/init/v1/initv1connect"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/keys"
)

const (
	// honest is the number of machines that ask while a flood runs.
	honest = 20
	// owners is the number of owners that ask a machine with a slow TPM that is no member of a cluster: there is one.
	owners = 5
	// quietApart is the time between two of them in the run before it.
	quietApart = 500 * time.Millisecond
	// unnoticed is the wait at a listener without tickets that a client does not notice.
	unnoticed = 200 * time.Millisecond
)

// patience is how long a client tries before it counts as not served, and how long one call may take. A short run
// measures nothing, and passes on a busy computer too.
func patience() (all, call time.Duration) {
	if *long {
		return time.Minute, 30 * time.Second
	}
	return 10 * time.Minute, 5 * time.Minute
}

// outcome is the result of the honest machines.
type outcome struct {
	served, attempts int
	times            []time.Duration // of those that were served, from their first attempt on
	last             error
}

// p99 is the nearest rank: of 20, the slowest.
func (o *outcome) p99() time.Duration {
	if len(o.times) == 0 {
		return 0
	}
	slices.Sort(o.times)
	return o.times[(len(o.times)*99+99)/100-1]
}

// ask has n honest machines ask until each is served, one every apart, or until the service is gone.
func (s *fixture) ask(t *testing.T, p *process, n int, apart time.Duration, one func(t *testing.T, source string, n int) func(context.Context) error) *outcome {
	t.Helper()
	o := &outcome{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	alive, gone := context.WithCancel(t.Context())
	defer gone()
	wg.Go(func() {
		select {
		case <-p.done:
			gone()
		case <-alive.Done():
		}
	})
	var asking sync.WaitGroup
	limit, _ := patience()
	tick := time.NewTicker(apart)
	defer tick.Stop()
	for i := range n {
		s.made++
		try := one(t, fmt.Sprintf("127.32.0.%d", i+1), s.made)
		asking.Go(func() {
			ctx, cancel := context.WithTimeout(alive, limit)
			defer cancel()
			began := time.Now()
			pause := retry.Backoff{Min: 500 * time.Millisecond, Max: 4 * time.Second}
			for {
				err := try(ctx)
				mu.Lock()
				o.attempts++
				if err == nil {
					o.served++
					o.times = append(o.times, time.Since(began))
				} else {
					o.last = err
				}
				mu.Unlock()
				if err == nil || retry.Wait(ctx, pause.Next(0)) != nil {
					return
				}
			}
		})
		select {
		case <-tick.C:
		case <-alive.Done():
		}
	}
	asking.Wait()
	gone()
	wg.Wait()
	return o
}

// joiner is a new machine that asks for a ticket; its disk is encrypted, so that the key service is used too.
func (s *fixture) joiner(t *testing.T, source string, n int) func(context.Context) error {
	t.Helper()
	m := attesttest.NewMachine(t, s.ca, attesttest.Options{})
	name := fmt.Sprintf("w%d", n)
	subject := pkix.Name{CommonName: "system:node:" + name, Organization: []string{"system:nodes"}}
	req := &joinv1.IssueJoinTicketRequest{
		NodeName: name, Role: joinv1.Role_ROLE_WORKER, DiskId: fmt.Sprintf("5f0c95b6-2a3d-4c7e-9f10-%012x", n), DiskMode: joinv1.DiskMode_DISK_MODE_LUKS,
		KubeletClientCsr: csr(t, &x509.CertificateRequest{Subject: subject}),
		KubeletServingCsr: csr(t, &x509.CertificateRequest{
			Subject: subject, DNSNames: []string{name}, IPAddresses: []net.IP{net.IPv4(10, byte(n>>16), byte(n>>8), byte(n)).To4()},
		}),
		BootSecret: bytes.Repeat([]byte{1}, keys.Size),
	}
	cfg := atls.ClientConfig{
		Attester: m.Attester(attest.PurposeMachine), Verifier: s.verifier(t), PeerPurpose: attest.PurposeJoinservice, Appraiser: presented{}, DialContext: from(source),
	}
	_, limit := patience()
	return func(ctx context.Context) error {
		transport, err := atls.NewTransport(cfg)
		if err != nil {
			return err
		}
		defer func() { _ = transport.Close() }()
		ctx, cancel := context.WithTimeout(ctx, limit)
		defer cancel()
		ticket, err := joinv1connect.NewJoinServiceClient(rpc.HTTPClient(transport), "https://"+s.ports["joinservice"], rpc.ClientOptions()...).IssueJoinTicket(ctx, req)
		if err == nil && len(ticket.GetDiskKey()) == 0 {
			err = fmt.Errorf("a ticket without a disk key")
		}
		return err
	}
}

func csr(t *testing.T, template *x509.CertificateRequest) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, template, key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

// presented appraises a joinservice by the policy that it presents, as a machine does that knows its owner's key.
type presented struct{}

func (presented) Appraise(_ context.Context, c attest.Claims) (attest.Appraisal, error) {
	policy, err := attest.OpenPolicy(attest.OwnerKeys{shared.Public}, c.SignedPolicy())
	if err != nil {
		return attest.Appraisal{}, err
	}
	return policy.AppraiseServer(c, attest.LockedTo(shared.ID))
}

// owner asks a machine for its health over a session, after appraising the machine, as every command of the owner
// begins.
func (s *fixture) owner(port string) func(t *testing.T, source string, n int) func(context.Context) error {
	return s.session(func(ctx context.Context, client *http.Client) error {
		_, err := healthv1connect.NewHealthClient(client, "https://"+s.ports[port], rpc.ClientOptions()...).Check(ctx, &healthv1.HealthCheckRequest{})
		return err
	})
}

// initializer sends a large init. It is served once the init server has read the whole request, and has found that it
// asks for no cluster.
func (s *fixture) initializer(t *testing.T, source string, n int) func(context.Context) error {
	t.Helper()
	return s.session(func(ctx context.Context, client *http.Client) error {
		stream, err := initv1connect.NewInitServiceClient(client, "https://"+s.ports["init"], rpc.ClientOptions()...).
			Init(ctx, &initv1.InitRequest{InitSecret: make([]byte, 200<<10)})
		if err != nil {
			return err
		}
		if stream.Receive() {
			return errors.New("an init of nothing is under way")
		}
		if err = stream.Err(); rpc.ReasonFrom(err) == attestv1.Reason_REASON_REQUEST_INVALID {
			err = nil
		}
		return errors.Join(err, stream.Close())
	})(t, source, n)
}

// session uses a session with an appraised machine.
func (s *fixture) session(do func(context.Context, *http.Client) error) func(t *testing.T, source string, n int) func(context.Context) error {
	return func(t *testing.T, source string, _ int) func(context.Context) error {
		cfg := atls.ClientConfig{
			Attester: atls.NoAttester, Verifier: s.verifier(t), PeerPurpose: attest.PurposeMachine, Appraiser: genuine{}, DialContext: from(source),
		}
		_, limit := patience()
		return func(ctx context.Context) error {
			transport, err := atls.NewTransport(cfg)
			if err != nil {
				return err
			}
			defer func() { _ = transport.Close() }()
			ctx, cancel := context.WithTimeout(ctx, limit)
			defer cancel()
			return do(ctx, rpc.HTTPClient(transport))
		}
	}
}

// genuine accepts every genuine machine.
type genuine struct{}

func (genuine) Appraise(context.Context, attest.Claims) (attest.Appraisal, error) {
	return attest.Appraisal{}, nil
}

// scraper reads metrics.
func (s *fixture) scraper(port string) func(t *testing.T, source string, n int) func(context.Context) error {
	return func(_ *testing.T, source string, _ int) func(context.Context) error {
		return func(ctx context.Context) error {
			transport := &http.Transport{DialContext: from(source), DisableKeepAlives: true}
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+s.ports[port]+"/metrics", http.NoBody)
			if err != nil {
				return err
			}
			resp, err := (&http.Client{Transport: transport, Timeout: 10 * time.Second}).Do(req)
			if err != nil {
				return err
			}
			if resp.StatusCode != http.StatusOK {
				err = fmt.Errorf("metrics: %s", resp.Status)
			}
			_ = resp.Body.Close()
			return err
		}
	}
}
