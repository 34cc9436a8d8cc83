package labtest

import (
	"context"
	"strings"
	"testing"
	"time"
)

// TakeOrders has nodes attest as soon as they have an order with an action, and not only after five minutes. kubectl runs on the owner's workstation. The
// function that it returns ends that.
func (c *Cluster) TakeOrders(t *testing.T, kubectl func(context.Context, ...string) (string, error), action string, nodes ...string) (end func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for seen := map[string]bool{}; ; {
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
			for _, n := range nodes {
				order, err := kubectl(ctx, "get", "attestednode", n, "-o", `jsonpath={.metadata.annotations.muster\.dev/order}`)
				if err != nil || seen[order] || !strings.Contains(order, `"action":"`+action+`"`) {
					continue // an API server restarts
				}
				seen[order] = true
				if _, err := c.At(ctx, n, "", "systemctl", "restart", "muster-attester"); err != nil && ctx.Err() == nil { // it attests at its start
					t.Errorf("%s: restart the attester: %v", n, err)
				}
			}
		}
	}()
	return func() { cancel(); <-done }
}
