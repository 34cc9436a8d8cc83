package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// h2 is the client's side of an HTTP/2 connection. It respects the peer's flow control, so that the peer accepts what
// it sends, and answers SETTINGS and PING, so that the connection is kept.
type h2 struct {
	conn net.Conn

	mu      sync.Mutex // guards all below, and writing
	changed *sync.Cond
	fr      *http2.Framer
	enc     *hpack.Encoder
	block   bytes.Buffer
	next    uint32
	window  int64            // what the connection may still send
	initial int64            // what a new stream may send
	streams map[uint32]int64 // the open ones, with the number of bytes that each may still send
	err     error
}

// plain does the TLS handshake, and negotiates a protocol.
func (c *client) plain(ctx context.Context, protocol string) (*tls.Conn, error) {
	conn := tls.Client(c, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{protocol}, ServerName: "muster"})
	return conn, conn.HandshakeContext(ctx)
}

// h2 opens HTTP/2 over plain HTTPS.
func (c *client) h2(ctx context.Context, settings ...http2.Setting) (*h2, error) {
	conn, err := c.plain(ctx, "h2")
	if err != nil {
		return nil, err
	}
	return newH2(conn, settings...)
}

// newH2 sends the preface, and reads from then on.
func newH2(conn net.Conn, settings ...http2.Setting) (*h2, error) {
	h := &h2{conn: conn, next: 1, window: 65535, initial: 65535, streams: map[uint32]int64{}}
	h.changed = sync.NewCond(&h.mu)
	h.enc = hpack.NewEncoder(&h.block)
	h.fr = http2.NewFramer(conn, conn)
	h.fr.AllowIllegalWrites = true
	if _, err := io.WriteString(conn, http2.ClientPreface); err != nil {
		return nil, err
	}
	if err := h.fr.WriteSettings(settings...); err != nil {
		return nil, err
	}
	go h.read()
	return h, nil
}

// read processes the peer's frames until the connection ends.
func (h *h2) read() {
	for {
		f, err := h.fr.ReadFrame()
		h.mu.Lock()
		if err == nil {
			err = h.follow(f)
		}
		h.err = err
		h.changed.Broadcast()
		h.mu.Unlock()
		if err != nil {
			_ = h.conn.Close()
			return
		}
	}
}

func (h *h2) follow(f http2.Frame) error {
	id := f.Header().StreamID
	switch f := f.(type) {
	case *http2.SettingsFrame:
		if f.IsAck() {
			return nil
		}
		if v, ok := f.Value(http2.SettingInitialWindowSize); ok {
			for s := range h.streams {
				h.streams[s] += int64(v) - h.initial
			}
			h.initial = int64(v)
		}
		return h.fr.WriteSettingsAck()
	case *http2.PingFrame:
		if !f.IsAck() {
			return h.fr.WritePing(true, f.Data)
		}
	case *http2.WindowUpdateFrame:
		if id == 0 {
			h.window += int64(f.Increment)
		} else if _, ok := h.streams[id]; ok {
			h.streams[id] += int64(f.Increment)
		}
	case *http2.RSTStreamFrame:
		delete(h.streams, id)
	case *http2.GoAwayFrame:
		return fmt.Errorf("GOAWAY: %s", f.ErrCode)
	default:
		if f.Header().Flags.Has(http2.FlagDataEndStream) && (f.Header().Type == http2.FrameData || f.Header().Type == http2.FrameHeaders) {
			delete(h.streams, id)
		}
	}
	return nil
}

// fields of a request; extra are pairs.
func (h *h2) fields(path, contentType string, extra ...string) []byte {
	h.block.Reset()
	all := append([]string{":method", "POST", ":scheme", "https", ":authority", "muster", ":path", path, "content-type", contentType}, extra...)
	for i := 0; i+1 < len(all); i += 2 {
		_ = h.enc.WriteField(hpack.HeaderField{Name: all[i], Value: all[i+1]}) // into memory
	}
	return bytes.Clone(h.block.Bytes())
}

// open begins a request.
func (h *h2) open(path, contentType string, extra ...string) (stream uint32, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.err != nil {
		return 0, h.err
	}
	stream = h.next
	h.next += 2
	h.streams[stream] = h.initial
	return stream, h.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: h.fields(path, contentType, extra...), EndHeaders: true})
}

var errClosed = errors.New("the stream is closed")

// send sends b as far as the peer's window allows.
func (h *h2) send(stream uint32, b []byte, end bool) error {
	for first := true; first || len(b) > 0; first = false {
		n, err := h.sendSome(stream, b, end)
		if err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

func (h *h2) sendSome(stream uint32, b []byte, end bool) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for {
		own, open := h.streams[stream]
		switch {
		case h.err != nil:
			return 0, h.err
		case !open:
			return 0, errClosed
		case len(b) == 0 || own > 0 && h.window > 0:
			n := int(min(int64(len(b)), own, h.window, 16<<10))
			n = max(n, 0)
			h.streams[stream] -= int64(n)
			h.window -= int64(n)
			return n, h.fr.WriteData(stream, end && n == len(b), b[:n])
		}
		h.changed.Wait()
	}
}

// over waits until the peer has ended a stream, or the connection.
func (h *h2) over(stream uint32) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	for h.err == nil {
		if _, open := h.streams[stream]; !open {
			return nil
		}
		h.changed.Wait()
	}
	return h.err
}

// ended waits until the connection has.
func (h *h2) ended() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	for h.err == nil {
		h.changed.Wait()
	}
	return h.err
}

// each runs a function on n streams at a time, and again when it has ended, until the connection ends.
func (h *h2) each(ctx context.Context, n int, do func() error) error {
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			for {
				if err := do(); err != nil && !errors.Is(err, errClosed) {
					return
				}
				if pause(ctx, streamPause) != nil {
					return
				}
			}
		})
	}
	err := h.ended()
	wg.Wait()
	return err
}

// write sends frames unchanged, also invalid ones.
func (h *h2) write(frames func(*http2.Framer) error) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.err != nil {
		return h.err
	}
	return frames(h.fr)
}

// envelope is a message of gRPC with its length before it.
func envelope(b []byte) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(b))), b...)
}
