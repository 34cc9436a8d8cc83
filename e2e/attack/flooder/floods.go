package main

import (
	"context"
	"crypto/ecdh"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"time"

	"golang.org/x/net/http2"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
)

// Procedures that every client may call, or every session, and sizes that listeners accept.
const (
	health      = "/grpc.health.v1.Health/Check"
	watch       = "/grpc.health.v1.Health/Watch"
	initialize  = "/muster.init.v1.InitService/Init"
	reflection  = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
	evidence    = "/muster.attest.v1.EvidenceService/GetEvidence"
	body        = 256 << 10
	plainStream = 16
	allStreams  = 64
	streamPause = 200 * time.Millisecond
)

var floods = slices.Concat(bodies, controls, exchanges, metrics)

// bodies are requests that are never complete, and answers that are never read.
var bodies = []flood{
	{name: "half-bodies-http1", about: "a request of 256 KiB but for its last byte, HTTP/1.1", attack: func(ctx context.Context, c *client) error {
		conn, err := c.plain(ctx, "http/1.1")
		if err != nil {
			return err
		}
		return halfRequest(conn, body)
	}},
	{name: "half-bodies", about: "the same over HTTP/2, one on each connection", attack: halfBodies(1)},
	{name: "half-bodies-streams", about: "the same, on all streams of a connection", attack: halfBodies(plainStream)},
	{name: "half-bodies-session", about: "the same, on all streams of a session that has shown nothing", attack: func(ctx context.Context, c *client) error {
		s, err := c.empty(ctx)
		if err != nil {
			return err
		}
		h, err := newH2(s)
		if err != nil {
			return err
		}
		return h.each(ctx, allStreams, h.halfBody)
	}},
	{name: "reflection", about: "reflection streams whose answers are not read, each with half a message", attack: func(ctx context.Context, c *client) error {
		h, err := c.h2(ctx, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
		if err != nil {
			return err
		}
		return h.each(ctx, plainStream, h.reflect)
	}},
	{name: "half-init", about: "an init of 256 KiB but for its last byte, on all streams of such a session", attack: func(ctx context.Context, c *client) error {
		s, err := c.empty(ctx)
		if err != nil {
			return err
		}
		h, err := newH2(s)
		if err != nil {
			return err
		}
		return h.each(ctx, allStreams, func() error {
			stream, err := h.open(initialize, "application/grpc", "te", "trailers")
			if err != nil {
				return err
			}
			if err := h.send(stream, slices.Concat(binary.BigEndian.AppendUint32([]byte{0}, body), zeroes[:body-1]), false); err != nil {
				return err
			}
			return h.over(stream)
		})
	}},
	{name: "reflection-session", about: "the same on all streams of a session that has shown nothing", attack: func(ctx context.Context, c *client) error {
		s, err := c.empty(ctx)
		if err != nil {
			return err
		}
		h, err := newH2(s, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
		if err != nil {
			return err
		}
		return h.each(ctx, allStreams, h.reflect)
	}},
	{name: "event-log", about: "asks for evidence, which has the event log, and doesn't read it", attack: func(ctx context.Context, c *client) error {
		h, err := c.h2(ctx, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
		if err != nil {
			return err
		}
		return h.each(ctx, 1, func() error {
			stream, err := h.open(evidence, "application/json")
			if err != nil {
				return err
			}
			if err := h.send(stream, fmt.Appendf(nil, `{"nonce":"%s"}`, strings.Repeat("A", 43)+"="), true); err != nil {
				return err
			}
			return h.over(stream)
		})
	}},
	{name: "watch", about: "watches health on all streams", attack: func(ctx context.Context, c *client) error {
		h, err := c.h2(ctx)
		if err != nil {
			return err
		}
		return h.each(ctx, plainStream, func() error {
			stream, err := h.open(watch, "application/grpc", "te", "trailers")
			if err != nil {
				return err
			}
			if err := h.send(stream, envelope(nil), true); err != nil {
				return err
			}
			return h.over(stream)
		})
	}},
	{name: "slow-bodies", about: "a byte of a body every half second, on all streams", attack: func(ctx context.Context, c *client) error {
		h, err := c.h2(ctx)
		if err != nil {
			return err
		}
		return h.each(ctx, plainStream, func() error {
			stream, err := h.open(health, "application/json", "content-length", "4096")
			for i := 0; err == nil && i < 4096; i++ {
				if err = h.send(stream, zeroes[:1], false); err == nil {
					err = pause(ctx, 500*time.Millisecond)
				}
			}
			return err
		})
	}},
	{name: "slow-headers-http1", about: "a byte of a header every half second, HTTP/1.1", attack: func(ctx context.Context, c *client) error {
		conn, err := c.plain(ctx, "http/1.1")
		if err != nil {
			return err
		}
		return drip(ctx, conn, slowHeader, 500*time.Millisecond)
	}},
	{name: "slow-headers", about: "a CONTINUATION of one byte every half second", attack: func(ctx context.Context, c *client) error {
		h, err := c.h2(ctx)
		if err != nil {
			return err
		}
		err = h.write(func(fr *http2.Framer) error {
			return fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: h.fields(health, "application/json")})
		})
		for err == nil {
			if err = h.write(func(fr *http2.Framer) error { return fr.WriteContinuation(1, false, []byte{0x82}) }); err == nil {
				err = pause(ctx, 500*time.Millisecond)
			}
		}
		return err
	}},
}

var slowHeader = []byte("POST " + health + " HTTP/1.1\r\nHost: muster\r\nX: " + strings.Repeat("x", 4096))

// halfRequest is HTTP/1.1.
func halfRequest(conn net.Conn, size int) error {
	if _, err := fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: muster\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", health, size); err != nil {
		return err
	}
	if _, err := conn.Write(zeroes[:size-1]); err != nil {
		return err
	}
	return hold(conn)
}

func halfBodies(streams int) func(context.Context, *client) error {
	return func(ctx context.Context, c *client) error {
		h, err := c.h2(ctx)
		if err != nil {
			return err
		}
		return h.each(ctx, streams, h.halfBody)
	}
}

func (h *h2) halfBody() error {
	stream, err := h.open(health, "application/json", "content-length", fmt.Sprint(body))
	if err != nil {
		return err
	}
	if err := h.send(stream, zeroes[:body-1], false); err != nil {
		return err
	}
	return h.over(stream)
}

// reflect asks for a file of the schema, and begins another request.
func (h *h2) reflect() error {
	stream, err := h.open(reflection, "application/grpc", "te", "trailers")
	if err != nil {
		return err
	}
	const symbol = "muster.attest.v1.EvidenceService"
	ask := append([]byte{4<<3 | 2, byte(len(symbol))}, symbol...) // file_containing_symbol
	whole := slices.Concat(slices.Repeat(envelope(ask), 64), binary.BigEndian.AppendUint32([]byte{0}, body))
	if err := h.send(stream, whole, false); err != nil {
		return err
	}
	if err := h.send(stream, zeroes[:body-1], false); err != nil {
		return err
	}
	return h.over(stream)
}

// exchanges stop in the middle of the exchange before HTTP.
var exchanges = []flood{
	{name: "idle-tcp", about: "connections that send nothing", attack: func(_ context.Context, c *client) error { return hold(c) }},
	{name: "idle", about: "connections of HTTP/2 that ask for nothing", attack: func(ctx context.Context, c *client) error {
		h, err := c.h2(ctx)
		if err != nil {
			return err
		}
		return h.ended()
	}},
	{name: "idle-session", about: "sessions that have shown nothing and ask for nothing", attack: func(ctx context.Context, c *client) error {
		s, err := c.empty(ctx)
		if err != nil {
			return err
		}
		h, err := newH2(s)
		if err != nil {
			return err
		}
		return h.ended()
	}},
	{name: "half-hello", about: "a ClientHello of 64 KiB but for its last record", attack: func(_ context.Context, c *client) error {
		for i := range 4 {
			b := append([]byte{22, 3, 1, 0x3f, 0xff}, zeroes[:0x3fff]...) // a record of the handshake
			if i == 0 {
				copy(b[5:], []byte{1, 0, 0xff, 0xff}) // client_hello, 65535 bytes
			}
			if i == 3 {
				b = b[:len(b)-64]
			}
			if _, err := c.Write(b); err != nil {
				return err
			}
		}
		return hold(c)
	}},
	{name: "half-handshake", about: "TLS handshakes that the client doesn't end", attack: func(ctx context.Context, c *client) error {
		inner := *c
		inner.Conn = mute{c.Conn, ctx}
		_, err := inner.plain(ctx, alpn)
		return err
	}},
	{name: "handshakes", about: "TLS handshakes, and nothing else", open: 64, attack: func(ctx context.Context, c *client) error {
		_, err := c.plain(ctx, "h2")
		return err
	}},
	{name: "half-offer", about: "a frame of 64 KiB but for its last byte", attack: func(ctx context.Context, c *client) error {
		s, err := c.session(ctx)
		if err != nil {
			return err
		}
		if err := s.begun(64 << 10); err != nil {
			return err
		}
		return hold(s)
	}},
	{name: "half-evidence", about: "evidence of 1 MiB but for its last byte", attack: func(ctx context.Context, c *client) error {
		s, err := c.session(ctx)
		if err != nil {
			return err
		}
		if err := s.offer(tpm2, nil); err != nil {
			return err
		}
		if err := s.until(func(f *attestv1.Frame) bool { return f.GetOffer() != nil }); err != nil {
			return err
		}
		if err := s.begun(1 << 20); err != nil {
			return err
		}
		return hold(s)
	}},
	{name: "challenge", about: "shows nothing, and challenges the server's TPM", open: 256, attack: challenge(nil)},
	{name: "challenge-useless", about: "the same with evidence that is worth nothing", open: 256, attack: challenge(tpm2)},
}

// mute reads nothing, neither TLS nor TCP.
type mute struct {
	net.Conn
	ctx context.Context //nolint:containedctx // of the flood
}

func (m mute) Read([]byte) (int, error) { <-m.ctx.Done(); return 0, m.ctx.Err() }

// challenge asks for the server's evidence, and then makes its TPM work once more.
func challenge(gives []attestv1.Format) func(context.Context, *client) error {
	return func(ctx context.Context, c *client) error {
		s, err := c.session(ctx)
		if err != nil {
			return err
		}
		if err := s.offer(gives, tpm2); err != nil {
			return err
		}
		if err := s.until(func(f *attestv1.Frame) bool { return f.GetEvidence() != nil }); err != nil {
			return err
		}
		if err := s.challenge(); err != nil {
			return err
		}
		if gives != nil { // late, so that the challenge is answered first
			_ = s.send(&attestv1.Frame{Message: &attestv1.Frame_Evidence{Evidence: &attestv1.Evidence{Format: attestv1.Format_FORMAT_TPM2}}})
		}
		return s.until(func(f *attestv1.Frame) bool { return f.GetResponse() != nil })
	}
}

// A credential in the format of Part 1, section 24, for no key: its integrity is wrong, which the TPM detects last.
var credentialBlob, encryptedSecret = credential()

func credential() (blob, secret []byte) {
	key, err := ecdh.P256().GenerateKey(rand.Reader)
	if err != nil {
		panic(err) // no randomness
	}
	point := key.PublicKey().Bytes() // 4 || x || y
	secret = slices.Concat([]byte{0, 32}, point[1:33], []byte{0, 32}, point[33:])
	return slices.Concat([]byte{0, 32}, zeroes[:32], zeroes[:34]), secret
}

// metrics are floods of the plain HTTP/1 listeners.
var metrics = []flood{
	{name: "metrics-idle", about: "connections that send nothing, to metrics", attack: func(_ context.Context, c *client) error { return hold(c) }},
	{name: "metrics-slow-headers", about: "a byte of a header every half second, to metrics", attack: func(ctx context.Context, c *client) error {
		return drip(ctx, c, slowHeader, 500*time.Millisecond)
	}},
	{name: "metrics-half-headers", about: "headers of 16 KiB that do not end, to metrics", attack: func(_ context.Context, c *client) error {
		if _, err := io.WriteString(c, "GET /metrics HTTP/1.1\r\nHost: muster\r\nX: "+strings.Repeat("x", 15<<10)); err != nil {
			return err
		}
		return hold(c)
	}},
	{name: "metrics-slow-bodies", about: "half a body, to metrics", attack: func(_ context.Context, c *client) error { return halfRequest(c, body) }},
	{name: "metrics-requests", about: "reads metrics again and again", open: 32, attack: func(ctx context.Context, c *client) error {
		go func() { _ = hold(c) }()
		for {
			select {
			case <-pace():
			case <-ctx.Done():
				return ctx.Err()
			}
			if _, err := io.WriteString(c, strings.Repeat("GET /metrics HTTP/1.1\r\nHost: muster\r\n\r\n", 10)); err != nil {
				return err
			}
		}
	}},
	{name: "metrics-unread", about: "asks for metrics and doesn't read them", attack: func(_ context.Context, c *client) error {
		if t, ok := c.Conn.(*net.TCPConn); ok {
			_ = t.SetReadBuffer(2048)
		}
		for {
			if _, err := io.WriteString(c, "GET /metrics HTTP/1.1\r\nHost: muster\r\n\r\n"); err != nil {
				return err
			}
		}
	}},
}
