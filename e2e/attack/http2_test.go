package attack

import (
	"bytes"
	"io"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/rpc"
)

// request is a HEADERS frame that asks for health.
func request(t *testing.T, w io.Writer, stream uint32) {
	t.Helper()
	var block bytes.Buffer
	enc := hpack.NewEncoder(&block)
	for _, f := range [][2]string{{":method", "POST"}, {":scheme", "http"}, {":authority", "muster"}, {":path", "/grpc.health.v1.Health/Check"}, {"content-type", "application/json"}} {
		if err := enc.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]}); err != nil {
			t.Fatal(err)
		}
	}
	fr := http2.NewFramer(w, nil)
	if err := fr.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: block.Bytes(), EndHeaders: true}); err != nil {
		t.Fatal(err)
	}
	if err := fr.WriteData(stream, true, []byte("{}")); err != nil {
		t.Fatal(err)
	}
}

// settle runs the exchange and returns the writer for the bytes behind it.
func settle(t *testing.T, x *target) (w *wire, opening *bytes.Buffer) {
	t.Helper()
	w = open(t, x.addr, nil)
	w.send(t, &attestv1.Offer{})
	for range 2 { // the server's offer and verdict
		if _, _, err := w.receive(); err != nil {
			t.Fatal(err)
		}
	}
	opening = new(bytes.Buffer)
	opening.Write(encode(t, &attestv1.Verdict{Reason: accepted}))
	opening.WriteString(http2.ClientPreface)
	if err := http2.NewFramer(opening, nil).WriteSettings(); err != nil {
		t.Fatal(err)
	}
	return w, opening
}

// answers reads frames until the stream has ended, and returns its status and whether the server has sent GOAWAY by
// then.
func answers(t *testing.T, fr *http2.Framer, stream uint32) (status string, goAway bool) {
	t.Helper()
	fr.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	for {
		f, err := fr.ReadFrame()
		if err != nil {
			t.Fatalf("stream %d has status %q, GOAWAY %v: %v", stream, status, goAway, err)
		}
		switch f := f.(type) {
		case *http2.GoAwayFrame:
			goAway = true
		case *http2.MetaHeadersFrame:
			if f.StreamID == stream {
				status = f.PseudoValue("status")
			}
		}
		if h := f.Header(); h.StreamID == stream && h.Flags.Has(http2.FlagDataEndStream) {
			return status, goAway
		}
	}
}

// The bytes behind the last frame of the exchange are HTTP/2's, even in one TLS record with
// it: the server reads exactly.
func TestTheExchangeAndHTTP2InOneRecord(t *testing.T) {
	x := newTarget(t, nil)
	w, opening := settle(t, x)
	request(t, opening, 1)
	raw(t, w, opening.Bytes())
	if status, goAway := answers(t, http2.NewFramer(w, w), 1); status != "200" || goAway {
		t.Errorf("status %s, GOAWAY %v", status, goAway)
	}
}

// An expired verdict ends the connection by GOAWAY, after the answer.
func TestAnAgedVerdictIsWoundUpByGOAWAY(t *testing.T) {
	x := newTarget(t, func(c *rpc.Config) { c.ATLS.MaxAge = time.Nanosecond })
	w, opening := settle(t, x)
	request(t, opening, 1)
	raw(t, w, opening.Bytes())
	fr := http2.NewFramer(w, w)
	status, goAway := answers(t, fr, 1)
	if status != "200" {
		t.Errorf("status %s", status)
	}
	for !goAway {
		f, err := fr.ReadFrame()
		if err != nil {
			t.Fatalf("no GOAWAY: %v", err)
		}
		_, goAway = f.(*http2.GoAwayFrame)
	}
}

// Behind the exchange only HTTP/2 is served: no HTTP/1, no second exchange.
func TestNothingButHTTP2IsServedBehindTheExchange(t *testing.T) {
	x := newTarget(t, nil)
	for name, behind := range map[string]string{
		"HTTP/1.1":          "POST /grpc.health.v1.Health/Check HTTP/1.1\r\nHost: muster\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
		"an upgrade to h2c": "GET / HTTP/1.1\r\nHost: muster\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\n",
		"a second exchange": string(encode(t, &attestv1.Offer{Gives: tpm2})) + strings.Repeat("\x00", 32),
	} {
		w, opening := settle(t, x)
		verdict := len(encode(t, &attestv1.Verdict{Reason: accepted}))
		raw(t, w, append(opening.Bytes()[:verdict:verdict], behind...))
		if got, err := io.ReadAll(w); len(got) > 0 {
			t.Errorf("%s: the server answers %q, %v", name, got, err)
		}
	}
}
