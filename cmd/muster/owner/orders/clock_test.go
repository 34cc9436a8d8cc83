package orders

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/trust/attest"
)

// An order of a clock that is ahead is executed when nobody waits for it any more; one of a clock that is behind is never delivered.
func TestNoOrderIsSignedByAWrongClock(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	l := ownertest.NewLifecycle(t)
	l.Node(t, "w1", 1, v1alpha1.RoleWorker)
	for _, ahead := range []time.Duration{-6 * time.Minute, 20 * time.Minute} { // the API server's clock
		l.ServerClock(t, ahead)
		ctx := &ownertest.Expiring{Context: ctx, Over: make(chan struct{})}
		_, err := Execute(ctx, l.Dir, "w1", ownerorder.ActionReboot, nil, ctx.Expire)
		if attest.ReasonOf(err) != attestv1.Reason_REASON_CLOCK_SKEW || !strings.Contains(problem.Remedy(err), "Set the wrong clock") {
			t.Errorf("%s: %v: %s", ahead, err, problem.Remedy(err))
		}
		if _, there := ownertest.EnrollmentOf(t, "w1").Annotations[v1alpha1.OwnerOrder]; there {
			t.Errorf("%s: the machine gets an order", ahead)
		}
	}
	l.ServerClock(t, 4*time.Minute)
	late := &ownertest.Expiring{Context: ctx, Over: make(chan struct{})}
	if _, err := Execute(late, l.Dir, "w1", ownerorder.ActionReboot, nil, late.Expire); err == nil || !strings.Contains(err.Error(), `the order "reboot" to w1 is withdrawn`) { // so it was given
		t.Errorf("a small difference: %v", err)
	}
}
