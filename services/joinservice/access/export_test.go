package access

import (
	"context"
	"time"

	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
)

// Unsee makes the view that of a replica which has not seen any entry yet.
func (a *List) Unsee() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.list = nodeaccess.New(false)
}

// LookAgain reads the clocks although they were read just now.
func (a *List) LookAgain(ctx context.Context) {
	a.clocks.mu.Lock()
	a.clocks.looked = time.Now().Add(-clocksEvery)
	a.clocks.mu.Unlock()
	a.LookAtClocks(ctx)
}

// Stop makes a control plane one whose Lease has not changed for long.
func (a *List) Stop(name string) {
	a.clocks.mu.Lock()
	defer a.clocks.mu.Unlock()
	is := a.clocks.of[name]
	is.seen = is.seen.Add(-clockRuns)
	a.clocks.of[name] = is
}
