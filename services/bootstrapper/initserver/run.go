package initserver

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/services/bootstrapper/console"
	"github.com/muster-k8s/muster/trust/attest"
)

// maxText bounds a progress text, in characters.
const maxText = 200

// maxHistory bounds the progress that a run keeps; later progress replaces the last entry.
const maxHistory = 500

// initRun is one init: its progress so far, and its result. It continues without its clients.
type initRun struct {
	order   *initOrder
	started time.Time
	log     *slog.Logger
	screen  *console.Console

	mu      sync.Mutex
	history []*initv1.Progress
	changed chan struct{} // closed and replaced with every change
	result  *initv1.InitResult
	err     error
	ended   bool
}

func newInitRun(o *initOrder, log *slog.Logger, screen *console.Console) *initRun {
	return &initRun{order: o, started: time.Now(), log: log, screen: screen, changed: make(chan struct{})}
}

func (r *initRun) report(phase initv1.Phase, text string) {
	if c := []rune(text); len(c) > maxText {
		text = string(c[:maxText])
	}
	r.log.Info("progress", "phase", phase.String(), "text", text)
	r.screen.Print(text)
	p := &initv1.Progress{Phase: phase, Text: text, Elapsed: durationpb.New(time.Since(r.started))}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.history) == maxHistory {
		r.history[maxHistory-1] = p
	} else {
		r.history = append(r.history, p)
	}
	r.wake()
}

// wake is called with the mutex held.
func (r *initRun) wake() {
	close(r.changed)
	r.changed = make(chan struct{})
}

func (r *initRun) end(result *initv1.InitResult, err error) {
	if reason := attest.ReasonOf(err); err != nil { // the output of kubeadm is only for the owner
		r.screen.Print("the init has failed: " + attest.ReasonName(reason) + ". " + rpc.RemedyOf(reason))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.result, r.err, r.ended = result, err, true
	clear(r.order.rawRoot)
	clear(r.order.rawSalt)
	if r.order.restore != nil {
		clear(r.order.restore.fileKey)
	}
	r.order.root, r.order.rawRoot, r.order.rawSalt = nil, nil, nil // K3: no longer than needed
	r.wake()
}

func (r *initRun) failed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.ended && r.err != nil
}

// follow sends the progress so far and all later progress, and the result as the last message.
func (r *initRun) follow(ctx context.Context, send func(*initv1.InitResponse) error) error {
	for next := 0; ; {
		r.mu.Lock()
		news := r.history[min(next, len(r.history)):]
		ended, result, err, changed := r.ended, r.result, r.err, r.changed
		r.mu.Unlock()
		for _, p := range news {
			if err := send(&initv1.InitResponse{Message: &initv1.InitResponse_Progress{Progress: p}}); err != nil {
				return err
			}
			next++
		}
		if ended && err != nil {
			return err
		}
		if ended {
			return send(&initv1.InitResponse{Message: &initv1.InitResponse_Result{Result: result}})
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
