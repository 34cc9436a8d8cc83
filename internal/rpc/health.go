package rpc

import (
	"context"
	"errors"
	"sync"

	"connectrpc.com/connect"

	healthv1 "github.com/muster-k8s/muster/gen/grpc/health/v1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/peerlimit"
)

// sourceFrom returns the source of a call.
func sourceFrom(ctx context.Context) peerlimit.Source {
	if c, ok := ctx.Value(callKey{}).(*call); ok {
		return c.source
	}
	return peerlimit.Source{}
}

// Health implements grpc.health.v1.Health. Services that were not set are unknown; the empty name stands for the whole
// process. Its zero value is not usable.
type Health struct {
	mu      sync.Mutex
	status  map[string]healthv1.HealthCheckResponse_ServingStatus
	changed chan struct{} // closed and replaced at each change
	stopped bool
	watches *peerlimit.Limiter[peerlimit.Source]
}

// maxWatches bounds how many callers may watch at the same time, sourceWatches how many from one source: each costs a
// stream and a goroutine for an unlimited time, and any client may call.
const (
	maxWatches    = 128
	sourceWatches = 16
)

// NewHealth returns a Health that knows the whole process, as not serving yet.
func NewHealth() *Health {
	return &Health{
		status:  map[string]healthv1.HealthCheckResponse_ServingStatus{"": healthv1.HealthCheckResponse_NOT_SERVING},
		changed: make(chan struct{}),
		watches: peerlimit.NewLimiter[peerlimit.Source](maxWatches, sourceWatches),
	}
}

// Set sets whether a service, by its full name, can serve.
func (h *Health) Set(service string, serving bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.stopped {
		return
	}
	h.set(service, serving)
}

// SetAll sets it for every known service.
func (h *Health) SetAll(serving bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.stopped {
		return
	}
	for service := range h.status {
		h.set(service, serving)
	}
}

// set must be called with the lock held.
func (h *Health) set(service string, serving bool) {
	s := healthv1.HealthCheckResponse_NOT_SERVING
	if serving {
		s = healthv1.HealthCheckResponse_SERVING
	}
	if old, ok := h.status[service]; ok && old == s {
		return
	}
	h.status[service] = s
	close(h.changed)
	h.changed = make(chan struct{})
}

// stop sets permanently that nothing can serve, and ends every Watch.
func (h *Health) stop() {
	h.SetAll(false)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.stopped {
		return
	}
	h.stopped = true
	close(h.changed)
	h.changed = make(chan struct{})
}

func (h *Health) look(service string) (s healthv1.HealthCheckResponse_ServingStatus, known, stopped bool, changed <-chan struct{}) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s, known = h.status[service]
	return s, known, h.stopped, h.changed
}

// Check implements [healthv1connect.HealthHandler].
func (h *Health) Check(_ context.Context, req *healthv1.HealthCheckRequest) (*healthv1.HealthCheckResponse, error) {
	s, known, _, _ := h.look(req.GetService())
	if !known {
		return nil, connect.NewError(connect.CodeNotFound, errors.New("no such service"))
	}
	return &healthv1.HealthCheckResponse{Status: s}, nil
}

// Watch implements [healthv1connect.HealthHandler]: it sends the present status and each change, until the caller
// disconnects or the server stops. At most 128 callers may watch at the same time, 16 from one source; others are refused
// with BUSY, or displace one of a source that has more.
func (h *Health) Watch(ctx context.Context, req *healthv1.HealthCheckRequest, stream *connect.ServerStream[healthv1.HealthCheckResponse]) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	place, err := h.watches.Take(sourceFrom(ctx), 1, cancel)
	if err != nil {
		return attest.Refuse(attestv1.Reason_REASON_BUSY, "watch the health: %w", err)
	}
	defer place.Release()
	last := healthv1.HealthCheckResponse_UNKNOWN
	for {
		s, known, stopped, changed := h.look(req.GetService())
		if !known {
			s = healthv1.HealthCheckResponse_SERVICE_UNKNOWN
		}
		if s != last {
			if err := stream.Send(&healthv1.HealthCheckResponse{Status: s}); err != nil {
				return connect.NewError(connect.CodeCanceled, err)
			}
			last = s
		}
		if stopped {
			return connect.NewError(connect.CodeUnavailable, errors.New("the server is stopping"))
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
