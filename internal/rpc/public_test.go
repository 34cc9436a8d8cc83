package rpc_test

import (
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"connectrpc.com/grpcreflect"

	healthv1 "github.com/muster-k8s/muster/gen/grpc/health/v1"
	"github.com/muster-k8s/muster/gen/grpc/health/v1/healthv1connect"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/gen/muster/attest/v1/attestv1connect"
	"github.com/muster-k8s/muster/gen/muster/kms/v1/kmsv1connect"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

func TestHealthIsServedToAnybody(t *testing.T) {
	r := run(t, keyService{}, nil)
	for name, client := range map[string]*http.Client{"attested": r.attested(attest.PurposeJoinservice), "session": r.attested(""), "HTTP/1.1": r.plain(false), "HTTP/2": r.plain(true)} {
		for service, want := range map[string]healthv1.HealthCheckResponse_ServingStatus{
			"":                          healthv1.HealthCheckResponse_NOT_SERVING,
			kmsv1connect.KeyServiceName: healthv1.HealthCheckResponse_NOT_SERVING,
		} {
			got, err := healthv1connect.NewHealthClient(client, r.url).Check(t.Context(), &healthv1.HealthCheckRequest{Service: service})
			if err != nil || got.GetStatus() != want {
				t.Errorf("%s: %q is %v, %v; want %v", name, service, got, err, want)
			}
		}
		_, err := healthv1connect.NewHealthClient(client, r.url).Check(t.Context(), &healthv1.HealthCheckRequest{Service: "no.such.Service"})
		if connect.CodeOf(err) != connect.CodeNotFound {
			t.Errorf("%s: an unknown service: %v, want not_found", name, err)
		}
	}
	r.health.SetAll(true)
	got, err := healthv1connect.NewHealthClient(r.plain(true), r.url, connect.WithGRPC()).Check(t.Context(), &healthv1.HealthCheckRequest{})
	if err != nil || got.GetStatus() != healthv1.HealthCheckResponse_SERVING {
		t.Errorf("over gRPC: %v, %v", got, err)
	}
}

func TestWatchTellsEachChangeUntilTheServerStops(t *testing.T) {
	r := run(t, keyService{}, func(c *rpc.Config) { c.Grace = 2 * patience }) // a watcher ends before
	stream, err := healthv1connect.NewHealthClient(r.plain(true), r.url, connect.WithGRPC()).Watch(t.Context(), &healthv1.HealthCheckRequest{Service: kmsv1connect.KeyServiceName})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stream.Close() }()
	next := func(want healthv1.HealthCheckResponse_ServingStatus) {
		t.Helper()
		if !stream.Receive() || stream.Msg().GetStatus() != want {
			t.Fatalf("%v, %v; want %v", stream.Msg(), stream.Err(), want)
		}
	}
	next(healthv1.HealthCheckResponse_NOT_SERVING)
	r.health.Set(kmsv1connect.KeyServiceName, true)
	next(healthv1.HealthCheckResponse_SERVING)
	r.health.Set("another.Service", true) // changes nothing here
	r.health.Set(kmsv1connect.KeyServiceName, true)
	began := time.Now()
	stopped := make(chan error, 1)
	go func() { stopped <- r.stop() }()
	next(healthv1.HealthCheckResponse_NOT_SERVING)
	if stream.Receive() || connect.CodeOf(stream.Err()) != connect.CodeUnavailable {
		t.Errorf("%v, want unavailable", stream.Err())
	}
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > patience {
		t.Errorf("a watcher held up the stop for %s", took)
	}
}

func TestWatchersAreLimited(t *testing.T) {
	r := run(t, keyService{}, nil)
	c := healthv1connect.NewHealthClient(r.plain(true), r.url, connect.WithGRPC())
	watch := func() (*connect.ServerStreamForClient[healthv1.HealthCheckResponse], error) {
		s, err := c.Watch(t.Context(), &healthv1.HealthCheckRequest{})
		if err != nil {
			return nil, err
		}
		if !s.Receive() {
			return nil, errors.Join(s.Err(), s.Close())
		}
		return s, nil
	}
	var watchers []*connect.ServerStreamForClient[healthv1.HealthCheckResponse]
	for i := range 16 {
		s, err := watch()
		if err != nil {
			t.Fatalf("watcher %d: %v", i+1, err)
		}
		watchers = append(watchers, s)
		defer func() { _ = s.Close() }()
	}
	if _, err := watch(); rpc.ReasonFrom(err) != attestv1.Reason_REASON_BUSY || connect.CodeOf(err) != connect.CodeResourceExhausted {
		t.Errorf("one more: %v, want BUSY", err)
	}
	other, err := healthv1connect.NewHealthClient(r.plainFrom("127.0.0.2"), r.url, connect.WithGRPC()).Watch(t.Context(), &healthv1.HealthCheckRequest{})
	if err != nil || !other.Receive() {
		t.Fatalf("a watcher of another source: %v", err)
	}
	defer func() { _ = other.Close() }()
	if _, err := c.Check(t.Context(), &healthv1.HealthCheckRequest{}); err != nil {
		t.Errorf("a check beside them: %v", err)
	}
	_ = watchers[0].Close()
	wait(t, "the place of one that went is free", func() bool {
		s, err := watch()
		if err == nil {
			_ = s.Close()
		}
		return err == nil
	})
}

// The settings of RFC 9113, section 6.5.2, are the first frame that a server sends.
func TestAPlainConnectionHasFewStreams(t *testing.T) {
	r := run(t, keyService{}, nil)
	d := tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}}}
	c, err := d.DialContext(t.Context(), "tcp", r.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(c, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"); err != nil {
		t.Fatal(err)
	}
	head := make([]byte, 9)
	if _, err := io.ReadFull(c, head); err != nil || head[3] != 4 {
		t.Fatalf("%x, %v; want SETTINGS", head, err)
	}
	settings := make([]byte, int(head[1])<<8|int(head[2]))
	if _, err := io.ReadFull(c, settings); err != nil {
		t.Fatal(err)
	}
	for ; len(settings) >= 6; settings = settings[6:] {
		if binary.BigEndian.Uint16(settings) == 3 { // MAX_CONCURRENT_STREAMS
			if n := binary.BigEndian.Uint32(settings[2:]); n != 8 {
				t.Errorf("%d streams, want 8", n)
			}
			return
		}
	}
	t.Error("the number of streams is not limited")
}

func TestReflectionListsWhatIsServed(t *testing.T) {
	r := run(t, keyService{}, nil)
	stream := grpcreflect.NewClient(r.plain(true), r.url, connect.WithGRPC()).NewStream(t.Context())
	defer func() { _, _ = stream.Close() }()
	names, err := stream.ListServices()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, n := range names {
		got = append(got, string(n))
	}
	slices.Sort(got)
	want := []string{healthv1connect.HealthName, attestv1connect.EvidenceServiceName, kmsv1connect.KeyServiceName}
	if !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	files, err := stream.FileContainingSymbol("muster.kms.v1.KeyService")
	if err != nil || len(files) == 0 {
		t.Errorf("no descriptor: %v", err)
	}
}

// This is the command in docs/debug.md.
func TestCurlAsksForHealth(t *testing.T) {
	curl, err := exec.LookPath("curl")
	if err != nil {
		t.Fatalf("install curl: %v", err)
	}
	r := run(t, keyService{}, nil)
	r.health.SetAll(true)
	for _, version := range []string{"--http1.1", "--http2"} {
		out, err := exec.CommandContext(t.Context(), curl, "--silent", "--show-error", "--insecure", "--max-time", "300", version,
			"--header", "Content-Type: application/json", "--data", "{}", r.url+"/grpc.health.v1.Health/Check").CombinedOutput()
		if err != nil || strings.TrimSpace(string(out)) != `{"status":"SERVING"}` {
			t.Errorf("%s: %s, %v", version, out, err)
		}
		out, err = exec.CommandContext(t.Context(), curl, "--silent", "--show-error", "--insecure", "--max-time", "300", version,
			"--header", "Content-Type: application/json", "--data", "{}", "--write-out", " %{http_code}", r.url+kmsv1connect.KeyServiceDeriveDiskKeyProcedure).CombinedOutput()
		if err != nil || !strings.HasSuffix(string(out), " 401") || !strings.Contains(string(out), "SESSION_REQUIRED") {
			t.Errorf("%s: %s, %v; want SESSION_REQUIRED", version, out, err)
		}
	}
}

func TestPublicEvidenceIsSharedAndRationed(t *testing.T) {
	r := run(t, keyService{}, nil)
	c := attestv1connect.NewEvidenceServiceClient(r.plain(true), r.url)
	var sources []attestv1connect.EvidenceServiceClient
	for i := range 10 {
		client := r.plainFrom(fmt.Sprintf("127.0.1.%d", 1+i))
		// All its calls must share one connection, or each would need a handshake.
		if _, err := healthv1connect.NewHealthClient(client, r.url).Check(t.Context(), &healthv1.HealthCheckRequest{}); err != nil {
			t.Fatal(err)
		}
		sources = append(sources, attestv1connect.NewEvidenceServiceClient(client, r.url))
	}
	nonce := func(i int) []byte { return bytes.Repeat([]byte{byte(i + 1)}, 32) }
	for n, want := range map[int]attestv1.Reason{0: attestv1.Reason_REASON_REQUEST_INVALID, 31: attestv1.Reason_REASON_REQUEST_INVALID, 33: attestv1.Reason_REASON_REQUEST_INVALID} {
		if _, err := c.GetEvidence(t.Context(), &attestv1.GetEvidenceRequest{Nonce: make([]byte, n)}); rpc.ReasonFrom(err) != want {
			t.Errorf("a nonce of %d bytes: %v", n, err)
		}
	}
	quotes, began := r.server.Quotes(), time.Now()
	var wg sync.WaitGroup
	var mu sync.Mutex
	reasons := map[attestv1.Reason]int{}
	verifier := attesttest.Verifier(t, r.ca)
	for i := range 80 {
		wg.Go(func() {
			resp, err := sources[i%10].GetEvidence(t.Context(), &attestv1.GetEvidenceRequest{Nonce: nonce(i)})
			mu.Lock()
			reasons[rpc.ReasonFrom(err)]++
			mu.Unlock()
			if err != nil {
				if rpc.RetryAfterFrom(err) != time.Second {
					t.Errorf("%v does not say when to try again", err)
				}
				return
			}
			b := attest.Binding(nonce(i))
			if _, err := verifier.Verify(t.Context(), resp.GetEvidence(), attest.NewStatement(attest.PurposePublic, b), b); err != nil {
				t.Errorf("the evidence is not over the caller's nonce: %v", err)
			}
			if _, err := verifier.Verify(t.Context(), resp.GetEvidence(), attest.NewStatement(attest.PurposeMachine, b), b); attest.ReasonOf(err) != attestv1.Reason_REASON_BINDING_MISMATCH {
				t.Errorf("public evidence passes for a machine's: %v", err)
			}
			if len(resp.GetEvidence().GetTpm2().GetEvents()) == 0 {
				t.Error("no event log came")
			}
		})
	}
	wg.Wait()
	made, allowed := r.server.Quotes()-quotes, 1+int(time.Since(began)/time.Second)
	if made > allowed {
		t.Errorf("%d quotes in %s", made, time.Since(began))
	}
	accepted, busy := reasons[attestv1.Reason_REASON_ACCEPTED], reasons[attestv1.Reason_REASON_BUSY]
	if accepted == 0 || accepted+busy != 80 || accepted > made*64 {
		t.Errorf("%d quotes for 80 callers: %v", made, reasons)
	}
}
