package rpc_test

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"connectrpc.com/grpcreflect"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/protobuf/proto"

	healthv1 "github.com/muster-k8s/muster/gen/grpc/health/v1"
	"github.com/muster-k8s/muster/gen/grpc/health/v1/healthv1connect"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/gen/muster/attest/v1/attestv1connect"
	kmsv1 "github.com/muster-k8s/muster/gen/muster/kms/v1"
	"github.com/muster-k8s/muster/gen/muster/kms/v1/kmsv1connect"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
)

// call is the cost of a plain call, in bytes.
const call = 16<<10 + 3*4<<10

// halfCheck sends the head of a health check over HTTP/1.1, which announces size bytes, and a part of them.
func halfCheck(t *testing.T, addr, ip string, size, sent int) *tls.Conn {
	t.Helper()
	d := &tls.Dialer{NetDialer: &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}}, Config: &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"http/1.1"}}}
	c, err := d.DialContext(t.Context(), "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_, _ = fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: muster\r\nContent-Type: application/proto\r\nContent-Length: %d\r\n\r\n", healthv1connect.HealthCheckProcedure, size)
	_, _ = c.Write(make([]byte, sent))
	return c.(*tls.Conn)
}

// answerOf returns what the server answers before it closes the connection.
func answerOf(c net.Conn) string {
	_ = c.SetReadDeadline(time.Now().Add(patience))
	answer, _ := io.ReadAll(c)
	return string(answer)
}

func TestAPlainRequestIsSmallAndComesSoon(t *testing.T) {
	t.Parallel()
	r := run(t, keyService{}, func(c *rpc.Config) { c.Timeout = 2 * patience }) // a whole call may take longer than its request
	large := halfCheck(t, r.addr, "127.0.0.2", 256<<10, 8<<10)
	slow := halfCheck(t, r.addr, "127.0.0.3", 1024, 8)
	if got := answerOf(large); !strings.Contains(got, "REQUEST_INVALID") {
		t.Errorf("a request of 256 KiB: %q", got)
	}
	if got := answerOf(slow); !strings.Contains(got, "DEADLINE") {
		t.Errorf("half a request: %q", got)
	}
}

// Half-sent requests fill the memory for callers without evidence; a source that uses none is served nevertheless, and the
// limit of one source keeps it from filling the memory.
func TestHalfSentRequestsLeaveRoomForOtherSources(t *testing.T) {
	r := run(t, keyService{}, func(c *rpc.Config) {
		c.ATLS.Limits.Bytes, c.ATLS.Limits.BytesPerSource = 10*call, 4*call
	})
	var wg sync.WaitGroup
	defer wg.Wait()
	var gone atomic.Int32
	for source := range 4 {
		for range 4 {
			c := halfCheck(t, r.addr, fmt.Sprintf("127.0.4.%d", 1+source), 1024, 8)
			wg.Go(func() {
				_, _ = io.Copy(io.Discard, c)
				gone.Add(1)
			})
			defer func() { _ = c.Close() }()
		}
	}
	check := func(ip string) error {
		_, err := healthv1connect.NewHealthClient(r.plainFrom(ip), r.url).Check(t.Context(), &healthv1.HealthCheckRequest{})
		return err
	}
	wait(t, "those for which there is no room are gone", func() bool { return gone.Load() >= 6 })
	for i := range 5 {
		if err := check(fmt.Sprintf("127.0.5.%d", 1+i)); err != nil {
			t.Errorf("a source that holds nothing: %v", err)
		}
	}
}

// Evidence that its caller does not read is charged to the caller's source until the answer is written.
func TestUnreadEvidenceIsCharged(t *testing.T) {
	for _, tt := range []struct {
		more int64 // beyond the evidence: PCRs and signature may be a little shorter
		want attestv1.Reason
	}{{-64, attestv1.Reason_REASON_BUSY}, {64, attestv1.Reason_REASON_ACCEPTED}} {
		r := run(t, keyService{}, func(c *rpc.Config) {
			with, err := c.ATLS.Attester.Attest(t.Context(), attestv1.Format_FORMAT_TPM2, attest.Binding{})
			if err != nil {
				t.Fatal(err)
			}
			c.ATLS.Limits.BytesPerSource = call + 3*int64(proto.Size(with)) + tt.more
		})
		c := attestv1connect.NewEvidenceServiceClient(r.plainFrom("127.0.0.2"), r.url)
		_, err := c.GetEvidence(t.Context(), &attestv1.GetEvidenceRequest{Nonce: make([]byte, 32)})
		if rpc.ReasonFrom(err) != tt.want {
			t.Errorf("%+d bytes: %v, want %s", tt.more, err, tt.want)
		}
	}
}

// An HTTP/1.1 client with many requests on one connection is asked to reconnect before it is cut off.
func TestAPlainConnectionIsWoundUpBeforeItIsCutOff(t *testing.T) {
	r := run(t, keyService{}, nil)
	client := r.plainFrom("127.0.0.2")
	for i := range 100 {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, r.url+"/"+fmt.Sprint(i), http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-Padding", fmt.Sprintf("%01000d", i))
		resp, err := client.Do(req)
		if err != nil {
			t.Fatalf("request %d: %v", i, err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
	}
}

// A peer that did not attest can start only a limited number of requests on one connection, also if it cancels each at
// once.
func TestCallsOfAConnectionAreBounded(t *testing.T) {
	var l *accepted
	r := run(t, keyService{}, func(c *rpc.Config) {
		l = &accepted{Listener: c.Listener}
		c.Listener = l
	})
	for name, canceled := range map[string]bool{"answered": false, "canceled": true} {
		t.Run(name, func(t *testing.T) {
			before := r.calls()
			o := openHTTP2(t, r.addr)
			for stream := uint32(1); stream < 600; stream += 2 {
				o.request(stream, "/x", nil)
				if canceled {
					o.must(o.WriteRSTStream(stream, http2.ErrCodeCancel))
				} else {
					o.must(o.WriteData(stream, true, nil))
				}
				o.must(o.WritePing(false, [8]byte{}))
				if !o.sent() {
					break
				}
			}
			if began := r.calls() - before; began < 4 || began > 32 {
				t.Errorf("%v requests began on one connection, want 4 to 32", began)
			}
		})
	}
	// An attested peer can start any number.
	kms := kmsv1connect.NewKeyServiceClient(r.attested(attest.PurposeJoinservice), r.url)
	before := l.all()
	for range 100 {
		if _, err := kms.DeriveClusterId(t.Context(), &kmsv1.DeriveClusterIdRequest{}); err != nil {
			t.Fatal(err)
		}
	}
	if n := l.all() - before; n != 1 {
		t.Errorf("an attested machine needed %d connections for 100 calls", n)
	}
}

// A peer that is refused repeatedly does not fill the log, and hides no other peer's refusal.
func TestRefusalsOfUnattestedPeersAreRationedInTheLog(t *testing.T) {
	r := run(t, keyService{}, func(c *rpc.Config) { c.ATLS.Limits.Total = 10000 })
	clients := map[string]*http.Client{"127.0.0.2": r.plainFrom("127.0.0.2"), "127.0.0.3": r.plainFrom("127.0.0.3")}
	for name, line := range map[string]struct {
		message string
		refused func(ip string)
	}{
		"calls": {"call refused", func(ip string) {
			kms := kmsv1connect.NewKeyServiceClient(clients[ip], r.url)
			if _, err := kms.DeriveDiskKey(t.Context(), &kmsv1.DeriveDiskKeyRequest{}); rpc.ReasonFrom(err) == attestv1.Reason_REASON_UNSPECIFIED {
				t.Fatalf("a plain client: %v, want a refusal", err)
			}
		}},
		"sessions": {"peer refused", func(ip string) {
			d := &tls.Dialer{
				NetDialer: &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}},
				Config:    &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13, NextProtos: []string{atls.ALPN}},
			}
			c, err := d.DialContext(t.Context(), "tcp", r.addr)
			if err != nil {
				t.Fatal(err)
			}
			_, _ = c.Write([]byte{0, 0, 0, 1, 0xff})
			_ = answerOf(c)
			_ = c.Close()
		}},
	} {
		t.Run(name, func(t *testing.T) {
			began := time.Now()
			for range 100 {
				line.refused("127.0.0.2")
			}
			line.refused("127.0.0.3")
			lines := func(ip string) (n int) {
				for l := range strings.Lines(r.log.String()) {
					if strings.Contains(l, `"level":"WARN"`) && strings.Contains(l, line.message) && strings.Contains(l, `"remote":"`+ip+`:`) {
						n++
					}
				}
				return n
			}
			wait(t, "the other's refusal has a line", func() bool { return lines("127.0.0.3") == 1 })
			if n, most := lines("127.0.0.2"), 65+int(time.Since(began).Seconds()); n < 32 || n > most {
				t.Errorf("100 refusals have %d lines, want 32 to %d", n, most)
			}
		})
	}
}

// The number of answers to a plain client on one connection is bounded also where net/http answers by itself, and in one
// stream.
func TestAPlainConnectionHasFewAnswers(t *testing.T) {
	r := run(t, keyService{}, nil)
	for name, write := range map[string]func(o *opened, stream uint32){
		"OPTIONS *": func(o *opened, stream uint32) {
			o.block.Reset()
			for _, f := range [][2]string{{":method", "OPTIONS"}, {":scheme", "https"}, {":authority", "muster"}, {":path", "*"}} {
				o.must(o.encoder.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]}))
			}
			o.must(o.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: o.block.Bytes(), EndHeaders: true, EndStream: true}))
		},
		"header fields that are too long": func(o *opened, stream uint32) {
			o.block.Reset()
			for _, f := range [][2]string{{":method", "GET"}, {":scheme", "https"}, {":authority", "muster"}, {":path", "/"}, {"x", strings.Repeat("x", 3500)}, {"x", strings.Repeat("x", 3500)}, {"x", strings.Repeat("x", 3500)}} {
				o.must(o.encoder.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]}))
			}
			o.must(o.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: o.block.Bytes(), EndHeaders: true, EndStream: true}))
		},
	} {
		t.Run(name, func(t *testing.T) {
			o := openHTTP2(t, r.addr)
			answers := 0
			for stream := uint32(1); stream < 6000; stream += 2 {
				write(o, stream)
				o.must(o.WritePing(false, [8]byte{}))
				if !o.sent() {
					break
				}
				answers++
			}
			if answers > 800 {
				t.Errorf("%d answers on one connection", answers)
			}
			t.Logf("%d answers", answers)
		})
	}
	t.Run("one stream of reflection", func(t *testing.T) {
		stream := grpcreflect.NewClient(r.plain(true), r.url, connect.WithGRPC()).NewStream(t.Context())
		n := 0
		for ; n < 100; n++ {
			if _, err := stream.ListServices(); err != nil {
				break
			}
		}
		_, _ = stream.Close()
		if n != 16 {
			t.Errorf("%d requests of one stream are answered, want 16", n)
		}
	})
	t.Run("a request that breaks the protocol is no fault of ours", func(t *testing.T) {
		client := r.plain(true)
		for _, path := range []string{healthv1connect.HealthWatchProcedure, "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"} {
			for range 20 {
				req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.url+path, strings.NewReader("\x01\x00\x00\x00\x01x"))
				if err != nil {
					t.Fatal(err)
				}
				req.Header.Set("Content-Type", "application/grpc")
				resp, err := client.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				_, _ = io.Copy(io.Discard, resp.Body)
				_ = resp.Body.Close()
			}
		}
		if strings.Contains(r.log.String(), `"level":"ERROR"`) {
			t.Error("an unattested peer writes errors into the log")
		}
		if n := r.metric("muster_rpc_requests_total", "code=internal", "procedure="+healthv1connect.HealthWatchProcedure, "reason=INTERNAL"); n > 0 {
			t.Errorf("%v calls are counted as internal", n)
		}
	})
}
