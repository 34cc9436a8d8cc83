package rpc_test

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/gen/muster/attest/v1/attestv1connect"
	kmsv1 "github.com/muster-k8s/muster/gen/muster/kms/v1"
	"github.com/muster-k8s/muster/gen/muster/kms/v1/kmsv1connect"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
)

func TestARequestThatIsTooLargeIsRefused(t *testing.T) {
	r := run(t, keyService{}, func(c *rpc.Config) { c.MaxRequest = 1000 })
	for name, options := range refusaltest.Protocols {
		c := kmsv1connect.NewKeyServiceClient(r.attested(attest.PurposeJoinservice), r.url, append(rpc.ClientOptions(), options...)...)
		ask := func(size int) error {
			_, err := c.DeriveDiskKey(t.Context(), &kmsv1.DeriveDiskKeyRequest{DiskId: strings.Repeat("x", size)})
			return err
		}
		if err := ask(900); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		places := refusaltest.Call(kmsv1connect.KeyServiceDeriveDiskKeyProcedure)
		places.Audit = append(places.Audit, "machine", r.client.ID().String())
		for _, size := range []int{2000, 1 << 20} {
			err := refusaltest.Refused(t, r.observations(), attestv1.Reason_REASON_REQUEST_INVALID, places, func() error { return ask(size) })
			if err == nil || !strings.Contains(err.Error(), "more than 1000 bytes") {
				t.Errorf("%s: %v does not name the limit", name, err)
			}
		}
	}
}

// stalling sends the beginning of a body, and then nothing until the body is closed.
type stalling struct{ http.RoundTripper }

func (s stalling) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	_ = r.Body.Close()
	body, begin := io.Pipe()
	go func() { _, _ = begin.Write([]byte{0}) }()
	r.Body, r.ContentLength, r.GetBody = body, -1, nil
	return s.RoundTripper.RoundTrip(r)
}

func TestARequestThatIsTooSlowIsRefused(t *testing.T) {
	t.Parallel()
	r := run(t, keyService{}, func(c *rpc.Config) { c.Timeout = time.Second })
	slow := func(c *http.Client) *http.Client {
		c.Transport = stalling{c.Transport}
		return c
	}
	for name, options := range refusaltest.Protocols {
		t.Run(name, func(t *testing.T) {
			c := kmsv1connect.NewKeyServiceClient(slow(r.attested(attest.PurposeJoinservice)), r.url, append(rpc.ClientOptions(), options...)...)
			refusaltest.Refused(t, r.observations(), attestv1.Reason_REASON_DEADLINE, refusaltest.Call(kmsv1connect.KeyServiceDeriveDiskKeyProcedure), func() error {
				_, err := c.DeriveDiskKey(t.Context(), &kmsv1.DeriveDiskKeyRequest{})
				return err
			})
		})
	}
	t.Run("of a plain client", func(t *testing.T) {
		c := attestv1connect.NewEvidenceServiceClient(slow(r.plain(true)), r.url, rpc.ClientOptions()...)
		refusaltest.Refused(t, r.observations(), attestv1.Reason_REASON_DEADLINE, refusaltest.Call(attestv1connect.EvidenceServiceGetEvidenceProcedure), func() error {
			_, err := c.GetEvidence(t.Context(), &attestv1.GetEvidenceRequest{})
			return err
		})
	})
}

// zipped sends a body that is compressed and declared as such.
type zipped struct{ http.RoundTripper }

func (z zipped) RoundTrip(r *http.Request) (*http.Response, error) {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := io.Copy(w, io.LimitReader(zeroes{}, 8<<20)); err != nil {
		return nil, err
	}
	if err := errors.Join(w.Close(), r.Body.Close()); err != nil {
		return nil, err
	}
	r = r.Clone(r.Context())
	r.Header.Set("Content-Encoding", "gzip")
	r.Body, r.ContentLength, r.GetBody = io.NopCloser(&b), int64(b.Len()), nil
	return z.RoundTripper.RoundTrip(r)
}

type zeroes struct{}

func (zeroes) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// 8 KiB that would take 8 MiB and a part of a second, which any client could send.
func TestNothingIsUnpackedForACaller(t *testing.T) {
	r := run(t, keyService{}, nil)
	c := r.plain(true)
	c.Transport = zipped{c.Transport}
	_, err := attestv1connect.NewEvidenceServiceClient(c, r.url).GetEvidence(t.Context(), &attestv1.GetEvidenceRequest{})
	if connect.CodeOf(err) != connect.CodeUnimplemented || !strings.Contains(err.Error(), "unknown compression") {
		t.Errorf("%v, want the answer that there is no compression", err)
	}
}

// Data in a request beside its message do not change the call.
func TestWhatARequestCarriesBesideItsMessage(t *testing.T) {
	r := run(t, keyService{}, nil)
	path := kmsv1connect.KeyServiceDeriveDiskKeyProcedure
	query := "?connect=v1&encoding=json&message=" + base64.URLEncoding.EncodeToString([]byte("{}")) + "&base64=1"
	for name, tt := range map[string]struct {
		client *http.Client
		method string
		target string
		header map[string]string
		status int
	}{
		"a GET, as Connect knows it, of a plain client": {r.plain(true), http.MethodGet, path + query, nil, http.StatusMethodNotAllowed},
		"a GET of an attested machine":                  {r.attested(attest.PurposeJoinservice), http.MethodGet, path + query, nil, http.StatusMethodNotAllowed},
		"another method named in a header":              {r.plain(true), http.MethodPost, path, map[string]string{"X-Http-Method-Override": "GET", "Content-Type": "application/json"}, http.StatusUnauthorized},
		"an unknown method":                             {r.attested(attest.PurposeJoinservice), "FROBNICATE", path, nil, http.StatusMethodNotAllowed},
		"another path named in a header": {r.plain(true), http.MethodPost, path, map[string]string{
			"X-Original-Url": "/grpc.health.v1.Health/Check", "X-Rewrite-Url": "/grpc.health.v1.Health/Check", "Content-Type": "application/json",
		}, http.StatusUnauthorized},
		"an unknown content type": {r.attested(attest.PurposeJoinservice), http.MethodPost, path, map[string]string{"Content-Type": "text/xml"}, http.StatusUnsupportedMediaType},
		"a message that is none":  {r.attested(attest.PurposeJoinservice), http.MethodPost, path, map[string]string{"Content-Type": "application/json"}, http.StatusBadRequest},
	} {
		req, err := http.NewRequestWithContext(t.Context(), tt.method, r.url+tt.target, strings.NewReader("<>"))
		if err != nil {
			t.Fatal(err)
		}
		for k, v := range tt.header {
			req.Header.Set(k, v)
		}
		resp, err := tt.client.Do(req)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		_ = resp.Body.Close()
		if resp.StatusCode != tt.status {
			t.Errorf("%s: %s, want %d", name, resp.Status, tt.status)
		}
	}
	// A request that is not an RPC is counted, and has no reason: HTTP refuses it.
	wait(t, "five requests that reached no handler are counted", func() bool {
		return r.metric("muster_rpc_requests_total", "code=not_handled", "procedure="+path, "reason=") == 5
	})
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.url+"/no/such/path", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := r.plain(true).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusNotFound {
		t.Errorf("an unknown path: %s", resp.Status)
	}
	wait(t, "the unknown path is counted", func() bool {
		return r.metric("muster_rpc_requests_total", "code=not_handled", "procedure=unknown", "reason=") == 1
	})
}

// Fields that this version does not know are from a later one: they are ignored.
func TestUnknownFieldsAreIgnored(t *testing.T) {
	r := run(t, keyService{}, nil)
	req := &kmsv1.DeriveDiskKeyRequest{}
	req.ProtoReflect().SetUnknown([]byte{0xfa, 0x7f, 3, 'a', 'b', 'c'}) // field 2047, three bytes
	if b, err := proto.Marshal(req); err != nil || len(b) != 6 {
		t.Fatalf("%x, %v", b, err)
	}
	c := kmsv1connect.NewKeyServiceClient(r.attested(attest.PurposeJoinservice), r.url, rpc.ClientOptions()...)
	if _, err := c.DeriveDiskKey(t.Context(), req); err != nil {
		t.Error(err)
	}
}
