package lan

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"
)

const (
	checkInterval = time.Second
	// checkTimeout is longer than a busy API server takes: closing its connections would add to its load.
	checkTimeout = 5 * time.Second
	// failuresToDown is how many checks in a row fail before a back end is down: one may be load.
	failuresToDown = 3
)

// health is the result of the checks of each back end, with its connections.
type health struct {
	mu       sync.Mutex
	up       map[string]bool
	failures map[string]int
	sessions map[string]map[*session]bool
}

// session is one forwarded connection.
type session struct{ close func() }

// order puts back ends that are up before those that are not, beginning with a different one each
// time.
func (h *health) order(backends []string, first int) []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	var up, rest []string
	for i := range backends {
		b := backends[(first+i)%len(backends)]
		if h.up[b] {
			up = append(up, b)
		} else {
			rest = append(rest, b)
		}
	}
	return append(up, rest...)
}

// enter records a connection to a back end, until leave is called.
func (h *health) enter(backend string, closeBoth func()) (leave func()) {
	s := &session{closeBoth}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.sessions == nil {
		h.sessions = map[string]map[*session]bool{}
	}
	if h.sessions[backend] == nil {
		h.sessions[backend] = map[*session]bool{}
	}
	h.sessions[backend][s] = true
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.sessions[backend], s)
	}
}

// found processes the result of a check, and reports whether the back end went up or down by it. When it goes down
// its connections are closed: their other ends would wait for a machine that is gone.
func (h *health) found(backend string, err error) (changed, up bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.up == nil {
		h.up, h.failures = map[string]bool{}, map[string]int{}
	}
	was := h.up[backend]
	if err == nil {
		h.up[backend], h.failures[backend] = true, 0
		return !was, true
	}
	h.failures[backend]++
	if h.failures[backend] < failuresToDown || !was {
		return false, was
	}
	h.up[backend] = false
	for s := range h.sessions[backend] {
		s.close()
	}
	return true, false
}

// check checks all back ends again and again until ctx ends.
func (f *Forwarder) check(ctx context.Context) {
	tick := time.NewTicker(checkInterval)
	defer tick.Stop()
	for {
		var wg sync.WaitGroup
		for _, b := range f.Backends() {
			wg.Go(func() {
				one, cancel := context.WithTimeout(ctx, checkTimeout)
				defer cancel()
				err := f.Healthy(one, b)
				if ctx.Err() != nil {
					return
				}
				if changed, up := f.health.found(b, err); changed {
					f.Log.Info("control plane", "address", b, "up", up, "err", err)
				}
			})
		}
		wg.Wait()
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// APIServerReady asks an API server whether it is ready, as load balancers do: anonymous clients may ask. The
// server's identity does not matter here, so its certificate is not checked.
func APIServerReady(ctx context.Context, addr string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+addr+"/readyz", nil)
	if err != nil {
		return err
	}
	t := &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	resp, err := t.RoundTrip(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, io.LimitReader(resp.Body, 1<<10)); err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("readyz: %s", resp.Status)
	}
	return nil
}
