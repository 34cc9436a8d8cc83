package rpc

import (
	"errors"
	"net/http"
	"sync"
	"time"
)

// bounds ends the reads and writes of a call at its deadline.
//
// The deadlines of HTTP/2's streams are timers of the connection. A timer that is set while the stream closes, for
// example of a call that is canceled at once, keeps all memory of the connection until it fires, even after the
// connection is closed (Go 1.26). So deadlines are set only when they are reached, and these timers end with the call.
type bounds struct {
	mu          sync.Mutex
	c           *http.ResponseController // nil after the call has ended; then w must not be used
	read, write *time.Timer
	http1       bool
}

// passed is a deadline in the past.
var passed = time.Unix(1, 0)

// newBounds bounds the time of a call's reads and writes; write is not bounded if it is 0. It must not fail open, so a
// connection that does not support deadlines is an error.
func newBounds(w http.ResponseWriter, r *http.Request, read, write time.Duration) (*bounds, error) {
	b := &bounds{c: http.NewResponseController(w), http1: r.ProtoMajor == 1}
	// The previous call on a connection of HTTP/1.1 may have left deadlines.
	if err := errors.Join(b.c.SetReadDeadline(time.Time{}), b.c.SetWriteDeadline(time.Time{})); err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.read = time.AfterFunc(read, b.reached((*http.ResponseController).SetReadDeadline))
	if write > 0 {
		b.write = time.AfterFunc(write, b.reached((*http.ResponseController).SetWriteDeadline))
	}
	return b, nil
}

func (b *bounds) reached(set func(*http.ResponseController, time.Time) error) func() {
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.c != nil {
			_ = set(b.c, passed) // supported when it was checked above
		}
	}
}

// keep ends reads at that time, unless they have ended.
func (b *bounds) keep(until time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.c != nil && b.read.Stop() {
		b.read.Reset(time.Until(until))
	}
}

// end is called when the call's handler has returned. net/http then reads the rest of an HTTP/1.1 request, and sends the
// rest of its answer: the connection's own deadlines bound that, and end with it.
func (b *bounds) end() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.http1 {
		now := time.Now()
		_ = errors.Join(b.c.SetReadDeadline(now.Add(plainRequestTimeout)), b.c.SetWriteDeadline(now.Add(plainWriteTimeout))) // supported when it was checked above
	}
	b.c = nil
	b.read.Stop()
	if b.write != nil {
		b.write.Stop()
	}
}

// answer records whether a handler has written a part of an answer's body.
type answer struct {
	http.ResponseWriter

	wrote bool
}

// Write implements [http.ResponseWriter].
func (a *answer) Write(p []byte) (int, error) {
	a.wrote = a.wrote || len(p) > 0
	return a.ResponseWriter.Write(p)
}

// Flush implements [http.Flusher].
func (a *answer) Flush() { _ = http.NewResponseController(a.ResponseWriter).Flush() }

// Unwrap is for [http.ResponseController].
func (a *answer) Unwrap() http.ResponseWriter { return a.ResponseWriter }

// send sends what the handler has written, while the call's time still runs. net/http would do that after the handler has
// returned, and wait as long as an HTTP/2 peer opens no window for it.
func (a *answer) send() {
	if a.wrote {
		a.Flush()
	}
}
