package rpc

import (
	"errors"
	"net/http"
	"sync"
	"time"
)

// bounds ends what a call reads and what it writes once its time is over.
//
// The deadlines of HTTP/2's streams are timers of the connection. One that is set while the stream closes, as of a call that is canceled at once, holds all that
// the connection had until its time, also after the connection is closed (Go 1.26). So deadlines are set when they are reached, and these timers end with the call.
type bounds struct {
	mu          sync.Mutex
	c           *http.ResponseController // nil: the call is over, and w is no more ours
	read, write *time.Timer
}

// passed is a deadline that is over at once.
var passed = time.Unix(1, 0)

// newBounds bounds the time of what a call reads and writes; 0 of write: it is not bounded. It must not fail open, so a connection that knows no deadlines is
// an error.
func newBounds(w http.ResponseWriter, read, write time.Duration) (*bounds, error) {
	b := &bounds{c: http.NewResponseController(w)}
	// The call before it on a connection of HTTP/1.1 may have left some.
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
			_ = set(b.c, passed) // it could at first
		}
	}
}

// keep gives what is still read until then. What is over stays over.
func (b *bounds) keep(until time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.c != nil && b.read.Stop() {
		b.read.Reset(time.Until(until))
	}
}

// end is called when the call's handler has returned.
func (b *bounds) end() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.c = nil
	b.read.Stop()
	if b.write != nil {
		b.write.Stop()
	}
}
