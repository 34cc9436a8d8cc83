package atls_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// metered is a server's attester whose TPM takes some time, and counts activations.
type metered struct {
	attest.Attester
	takes   time.Duration
	answers atomic.Int32
	now     atomic.Int32
	most    atomic.Int32
}

func (m *metered) Respond(ctx context.Context, c *attestv1.Challenge, b attest.Binding) ([]byte, error) {
	m.answers.Add(1)
	if now := m.now.Add(1); now > m.most.Load() {
		m.most.Store(now)
	}
	defer m.now.Add(-1)
	select {
	case <-time.After(m.takes):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	return m.Attester.Respond(ctx, c, b)
}

// garbled answers challenges with random bytes, like a peer that has only copied a certificate.
type garbled struct{ attest.Attester }

func (garbled) Respond(context.Context, *attestv1.Challenge, attest.Binding) ([]byte, error) {
	return make([]byte, 32), nil
}

// from makes a client connect from an address of the loopback network.
func from(cc *atls.ClientConfig, ip string) {
	cc.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		return (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}}).DialContext(ctx, network, addr)
	}
}

// The TPM of a server that asks for evidence answers challenges of accepted machines only.
func TestAChallengeIsAnsweredOnceThePeerIsAccepted(t *testing.T) {
	w := newFixture(t)
	refused := attesttest.NewMachine(t, w.ca, attesttest.Options{Image: "another boot loader"})
	for name, tt := range map[string]struct {
		client  func(*atls.ClientConfig)
		want    attestv1.Reason
		answers int32
	}{
		"an accepted machine":                            {answers: 1},
		"a copied certificate, whose key is not there":   {client: func(c *atls.ClientConfig) { c.Attester = garbled{c.Attester} }, want: attestv1.Reason_REASON_ACTIVATION_FAILED},
		"a genuine machine that the policy refuses":      {client: func(c *atls.ClientConfig) { c.Attester = refused.Attester(attest.PurposeMachine) }, want: attestv1.Reason_REASON_POLICY_REFUSED},
		"evidence that was made for another purpose":     {client: func(c *atls.ClientConfig) { c.Attester = w.client.Attester(attest.PurposeKMS) }, want: attestv1.Reason_REASON_BINDING_MISMATCH},
		"no evidence, where that is a session of a kind": {client: func(c *atls.ClientConfig) { c.Attester = atls.NoAttester }, answers: 1}, // metered: see below
	} {
		t.Run(name, func(t *testing.T) {
			tpm := &metered{Attester: w.server.Attester(attest.PurposeJoinservice)}
			sc, cc := w.serverConfig(t), w.clientConfig(t)
			sc.Attester = tpm
			if tt.client != nil {
				tt.client(&cc)
			}
			_, err := get(t.Context(), dial(t, cc), serve(t, sc, whoami).url)
			if got := attest.ReasonOf(err); tt.want != attestv1.Reason_REASON_UNSPECIFIED && got != tt.want || tt.want == attestv1.Reason_REASON_UNSPECIFIED && err != nil {
				t.Fatalf("%v, want %v", err, tt.want)
			}
			if got := tpm.answers.Load(); got != tt.answers {
				t.Errorf("the TPM answered %d challenges, want %d", got, tt.answers)
			}
		})
	}
}

// raw is a peer that sends arbitrary frames.
type raw struct {
	*tls.Conn
	t *testing.T
}

func (w *fixture) raw(t *testing.T, url, ip string) raw {
	t.Helper()
	d := &tls.Dialer{NetDialer: &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}}, Config: &tls.Config{
		MinVersion: tls.VersionTLS13, NextProtos: []string{atls.ALPN}, InsecureSkipVerify: true,
	}}
	conn, err := d.DialContext(t.Context(), "tcp", strings.TrimPrefix(url, "https://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return raw{conn.(*tls.Conn), t}
}

func (r raw) send(f *attestv1.Frame) {
	r.t.Helper()
	body, err := proto.Marshal(f)
	if err != nil {
		r.t.Fatal(err)
	}
	_, _ = r.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...)) // the server's verdict shows its reaction
}

// verdict reads frames up to the server's verdict.
func (r raw) verdict() attestv1.Reason {
	r.t.Helper()
	for {
		var head [4]byte
		if _, err := io.ReadFull(r, head[:]); err != nil {
			r.t.Fatalf("no verdict: %v", err)
		}
		body := make([]byte, binary.BigEndian.Uint32(head[:]))
		if _, err := io.ReadFull(r, body); err != nil {
			r.t.Fatal(err)
		}
		f := &attestv1.Frame{}
		if err := proto.Unmarshal(body, f); err != nil {
			r.t.Fatal(err)
		}
		if v := f.GetVerdict(); v != nil {
			return v.GetReason()
		}
	}
}

var tpmOffer = &attestv1.Frame{Message: &attestv1.Frame_Offer{Offer: &attestv1.Offer{Gives: []attestv1.Format{attestv1.Format_FORMAT_TPM2}, Accepts: []attestv1.Format{attestv1.Format_FORMAT_TPM2}}}}

func TestAChallengeBeforeEvidenceIsRefused(t *testing.T) {
	w := newFixture(t)
	tpm := &metered{Attester: w.server.Attester(attest.PurposeJoinservice)}
	sc := w.serverConfig(t)
	sc.Attester = tpm
	r := w.raw(t, serve(t, sc, whoami).url, "127.0.0.1")
	r.send(tpmOffer)
	r.send(&attestv1.Frame{Message: &attestv1.Frame_Challenge{Challenge: &attestv1.Challenge{CredentialBlob: make([]byte, 64), EncryptedSecret: make([]byte, 64)}}})
	if got := r.verdict(); got != attestv1.Reason_REASON_FRAME_INVALID {
		t.Errorf("%v, want FRAME_INVALID", got)
	}
	if tpm.answers.Load() != 0 {
		t.Error("the TPM answered")
	}
}

// Challenges of unattested peers use the TPM one at a time, and for a part of the time; machines that attest, and a new
// owner's program, do not wait for all of them.
func TestChallengesOfUnattestedPeersLeaveTheTPMToOthers(t *testing.T) {
	w := newFixture(t)
	tpm := &metered{Attester: w.server.Attester(attest.PurposeJoinservice), takes: 50 * time.Millisecond}
	sc := w.serverConfig(t)
	sc.Attester = tpm
	s := serve(t, sc, whoami)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	for i := range 40 {
		cc := w.clientConfig(t)
		cc.Attester = atls.NoAttester
		from(&cc, fmt.Sprintf("127.0.9.%d", 1+i%20))
		wg.Go(func() {
			for ctx.Err() == nil {
				cc.Verifier = attesttest.Verifier(t, w.ca) // knows no AK, so it challenges
				tr, err := atls.NewTransport(cc)
				if err != nil {
					t.Error(err)
					return
				}
				_, _ = get(ctx, &http.Client{Transport: tr}, s.url)
				_ = tr.Close()
			}
		})
	}
	waitFor(t, "unattested peers are answered", func() bool { return tpm.answers.Load() >= 3 }) // the flood has arrived
	for i := range 10 {
		cc := w.clientConfig(t)
		from(&cc, fmt.Sprintf("127.0.8.%d", 1+i))
		if i%2 == 0 {
			cc.Attester = atls.NoAttester
		}
		cc.Verifier = attesttest.Verifier(t, w.ca)
		// It asks again if it was too slow, or its connection broke.
		for end := time.Now().Add(atls.Patience); ; {
			_, err := get(t.Context(), dial(t, cc), s.url)
			if err == nil {
				break
			}
			_, refused := errors.AsType[*attest.Refusal](err)
			if refused && attest.ReasonOf(err) != attestv1.Reason_REASON_DEADLINE || time.Now().After(end) {
				t.Errorf("an honest peer, attesting: %v: %v", i%2 != 0, err)
				break
			}
		}
	}
	if most := tpm.most.Load(); most > 2 {
		t.Errorf("%d challenges were answered at one time, want one of an attested peer and one of another", most)
	}
}

// retrying refuses, and asks for a long wait.
type retrying struct{ attest.Attester }

func (retrying) Attest(context.Context, attestv1.Format, attest.Binding) (*attestv1.Evidence, error) {
	return nil, attest.RefuseFor(10*time.Minute, attestv1.Reason_REASON_BUSY, "come back tomorrow")
}

func TestWhoCanAnswerForAServerHoldsAClientUpForSeconds(t *testing.T) {
	w := newFixture(t)
	sc := w.serverConfig(t)
	sc.Attester = retrying{sc.Attester}
	_, err := get(t.Context(), dial(t, w.clientConfig(t)), serve(t, sc, whoami).url)
	var r *attest.Refusal
	if !errors.As(err, &r) || !r.Remote || r.RetryAfter != 5*time.Second {
		t.Errorf("%v, want BUSY for 5 s", err)
	}
	// And without any evidence, frame by frame.
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	cert := selfSigned(t)
	var wg sync.WaitGroup
	wg.Go(func() {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		tc := tls.Server(conn, &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{cert}, NextProtos: []string{atls.ALPN}})
		hostile := raw{tc, t}
		hostile.send(&attestv1.Frame{Message: &attestv1.Frame_Offer{Offer: &attestv1.Offer{}}})
		hostile.send(&attestv1.Frame{Message: &attestv1.Frame_Verdict{Verdict: &attestv1.Verdict{Reason: attestv1.Reason_REASON_BUSY, RetryAfter: durationpb.New(time.Hour)}}})
		_, _ = io.Copy(io.Discard, tc)
		_ = tc.Close()
	})
	_, err = get(t.Context(), dial(t, w.clientConfig(t)), "https://"+l.Addr().String())
	if r, ok := errors.AsType[*attest.Refusal](err); ok && r.RetryAfter > 5*time.Second {
		t.Errorf("%v holds us up for %s", err, r.RetryAfter)
	} else if err == nil {
		t.Error("a server without evidence was accepted")
	}
	_ = l.Close()
	wg.Wait()
}

// An unattested peer reaches its byte limit long before it has filled any buffer.
func TestWhatAnUnattestedConnectionSendsIsBounded(t *testing.T) {
	w := newFixture(t)
	sc := w.serverConfig(t)
	s := serve(t, sc, whoami)
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ForceAttemptHTTP2: true}}
	t.Cleanup(client.CloseIdleConnections)
	post := func(n int) error {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.url, bytes.NewReader(make([]byte, n)))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Do(req)
		if err != nil {
			return err
		}
		_, err = io.Copy(io.Discard, resp.Body)
		return errors.Join(err, resp.Body.Close())
	}
	if err := post(64 << 10); err == nil {
		t.Error("64 KiB passed where 16 KiB may")
	}
	// A client that asks often is not cut off: its connections are closed with GOAWAY in time.
	for range 40 {
		if err := post(4 << 10); err != nil {
			t.Fatalf("a small request: %v", err)
		}
	}
	// An attested peer may send any amount.
	cc := w.clientConfig(t)
	honest := dial(t, cc)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.url, bytes.NewReader(make([]byte, 1<<20)))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := honest.Do(req)
	if err != nil {
		t.Fatalf("1 MiB of an attested machine: %v", err)
	}
	_ = resp.Body.Close()
}

// Where a large request presents a secret, only a few sessions may send one at a time; the others have the usual limit.
func TestFewSessionsSendMuch(t *testing.T) {
	w := newFixture(t)
	sc := w.serverConfig(t)
	sc.Appraiser = atls.NoAppraiser
	sc.Limits = atls.Limits{ConnBytes: 16 << 10, Large: 2, LargePerSource: 1, LargeBytes: 64 << 10}
	read, answer := make(chan struct{}), make(chan struct{})
	s := serve(t, sc, func(w http.ResponseWriter, r *http.Request) {
		n, err := io.Copy(io.Discard, r.Body)
		if n == r.ContentLength && err == nil && n > 16<<10 {
			read <- struct{}{}
			<-answer
		}
		w.WriteHeader(http.StatusOK)
	})
	post := func(ip string, n int) error {
		cc := w.clientConfig(t)
		cc.Attester = atls.NoAttester
		from(&cc, ip)
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.url, bytes.NewReader(make([]byte, n)))
		if err != nil {
			return err
		}
		resp, err := dial(t, cc).Do(req)
		if err != nil {
			return err
		}
		_, err = io.Copy(io.Discard, resp.Body)
		return errors.Join(err, resp.Body.Close())
	}
	var wg sync.WaitGroup
	for _, ip := range []string{"127.0.0.2", "127.0.0.3"} {
		wg.Go(func() {
			if err := post(ip, 60<<10); err != nil {
				t.Errorf("60 KiB from %s: %v", ip, err)
			}
		})
		<-read
		if err := post("127.0.0.2", 60<<10); err == nil {
			t.Error("a source sends much over two sessions at one time, where it may over one")
		}
		if err := post("127.0.0.2", 4<<10); err != nil {
			t.Errorf("a small request meanwhile: %v", err)
		}
	}
	close(answer)
	wg.Wait()
	if err := post("127.0.0.4", 256<<10); err == nil {
		t.Error("256 KiB passed where 80 KiB may")
	}
}

// Before its handshake has ended a peer may send less than TLS would accept.
func TestAnEndlessHelloIsCutOff(t *testing.T) {
	w := newFixture(t)
	sc := w.serverConfig(t)
	sc.Patient() // its slowness is not what ends it
	s := serve(t, sc, whoami)
	conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", strings.TrimPrefix(s.url, "https://"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	// The first 48 KiB of a ClientHello of 64 KiB, in records of 16 KiB.
	hello := append([]byte{1, 0, 0xff, 0}, make([]byte, 48<<10)...)
	for len(hello) > 0 {
		n := min(len(hello), 16<<10)
		record := append([]byte{22, 3, 1, byte(n >> 8), byte(n)}, hello[:n]...)
		if _, err := conn.Write(record); err != nil {
			break // it is cut off
		}
		hello = hello[n:]
	}
	_ = conn.SetReadDeadline(time.Now().Add(atls.Patience))
	if _, err := io.Copy(io.Discard, conn); errors.Is(err, context.DeadlineExceeded) || isTimeout(err) {
		t.Error("it is still open")
	}
}

func isTimeout(err error) bool {
	var n net.Error
	return errors.As(err, &n) && n.Timeout()
}

// A hundred sources take all places; one more still gets a place.
func TestSourcesWithTheMostConnectionsGiveWay(t *testing.T) {
	w := newFixture(t)
	sc := w.serverConfig(t)
	sc.Limits.SetUp, sc.Limits.SetUpPerSource, sc.Limits.Open, sc.Limits.OpenPerSource = 40, 8, 40, 8
	s := serve(t, sc, whoami)
	addr := strings.TrimPrefix(s.url, "https://")
	for i := range 80 { // silent, from 10 sources
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(fmt.Sprintf("127.0.7.%d", 1+i%10))}}
		conn, err := d.DialContext(t.Context(), "tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
	}
	for i := range 20 { // sessions that stay open, from 5 sources
		r := w.raw(t, s.url, fmt.Sprintf("127.0.6.%d", 1+i%5))
		r.send(&attestv1.Frame{Message: &attestv1.Frame_Offer{Offer: &attestv1.Offer{}}})
		r.send(&attestv1.Frame{Message: &attestv1.Frame_Verdict{Verdict: &attestv1.Verdict{Reason: attestv1.Reason_REASON_ACCEPTED}}})
		if got := r.verdict(); got != attestv1.Reason_REASON_ACCEPTED {
			t.Fatal(got)
		}
	}
	for _, attester := range []attest.Attester{w.client.Attester(attest.PurposeMachine), atls.NoAttester} {
		cc := w.clientConfig(t)
		cc.Attester = attester
		from(&cc, "127.0.5.1")
		if _, err := get(t.Context(), dial(t, cc), s.url); err != nil {
			t.Errorf("a source that holds nothing: %v", err)
		}
	}
}

// A ban closes the connections of a machine that reads nothing, without waiting for it, not even for a TLS alert.
func TestABanDoesNotWaitForAPeerThatDoesNotRead(t *testing.T) {
	w := newFixture(t)
	inner, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	full := &atomic.Bool{}
	l, err := atls.NewListener(stuckListener{inner, full}, w.serverConfig(t))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	tr, err := atls.NewTransport(w.clientConfig(t))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tr.Close() }()
	var wg sync.WaitGroup
	wg.Go(func() { _, _ = get(t.Context(), &http.Client{Transport: tr}, "https://"+inner.Addr().String()) })
	if _, err := l.Attested().Accept(); err != nil {
		t.Fatal(err)
	}
	full.Store(true)
	closed := make(chan int, 1)
	go func() { closed <- l.CloseMachine(w.client.ID()) }()
	select {
	case n := <-closed:
		if n != 1 {
			t.Errorf("%d connections closed, want 1", n)
		}
	case <-time.After(atls.Patience): // a TLS alert would wait without end: the connection ignores the deadlines of writes
		t.Error("a ban waits for its machine to read")
	}
	wg.Wait()
}

// stuckListener's connections accept no more writes once full is set, until they are closed.
type stuckListener struct {
	net.Listener
	full *atomic.Bool
}

func (l stuckListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &stuckConn{Conn: c, full: l.full, closed: make(chan struct{})}, nil
}

type stuckConn struct {
	net.Conn
	full   *atomic.Bool
	once   sync.Once
	closed chan struct{}
}

func (c *stuckConn) Write(b []byte) (int, error) {
	if c.full.Load() {
		<-c.closed
		return 0, net.ErrClosed
	}
	return c.Conn.Write(b)
}

func (c *stuckConn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}
