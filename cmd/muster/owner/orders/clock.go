package orders

import (
	"context"
	"fmt"
	"time"

	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/trust/attest"
)

// checkClock refuses with CLOCK_SKEW if this computer's clock and the API server's differ by more than [ownerorder.MaxAhead]: an order would never be
// delivered, or be executed after the command that sent it has ended. Orders are not signed with the API server's time: an attacker who controls it
// could get an order signed that is valid later.
func checkClock(ctx context.Context, kube *clusterapi.Client) error {
	asked := time.Now()
	theirs, err := kube.ServerTime(ctx)
	if err != nil {
		return err
	}
	now := time.Now()
	if asked.Sub(theirs) <= ownerorder.MaxAhead+time.Second && theirs.Sub(now) <= ownerorder.MaxAhead { // theirs has whole seconds
		return nil
	}
	return problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_CLOCK_SKEW, "this computer's clock is at %s, the API server's at %s", now.UTC().Format(time.RFC3339), theirs.UTC().Format(time.RFC3339)),
		fmt.Sprintf("No order was signed. Set the wrong clock by NTP, and run the same command again: an order is valid for %s from the time of this computer.", Validity))
}
