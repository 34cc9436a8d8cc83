package joinservice

import (
	"time"

	"github.com/muster-k8s/muster/services/joinservice/limit"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/peerlimit"
)

// The rates of one machine at one joinservice. A machine that fails and tries again as the bootstrapper does, after at most
// 30 s, uses up the burst after many minutes. Then it waits for at most a minute each time. Only grants count: refusals
// have their own rates in the audit log.
var (
	ticketRate   = limit.Rate{Burst: 20, Every: time.Minute}      // IssueJoinTicket
	rejoinRate   = limit.Rate{Burst: 20, Every: time.Minute}      // IssueRejoinTicket
	renewalRate  = limit.Rate{Burst: 20, Every: time.Minute}      // RenewNodeCertificates
	returnRate   = limit.Rate{Burst: 20, Every: time.Minute}      // ReturnJoinTicket
	reattestRate = limit.Rate{Burst: 20, Every: 10 * time.Second} // Reattest: every 20 s at the shortest --verdict-max-age
	orderRate    = limit.Rate{Burst: 20, Every: time.Minute}      // records of what a machine reports of orders
	rotatedRate  = limit.Rate{Burst: 20, Every: time.Minute}      // GetRotatedKey
	leaseRate    = limit.Rate{Burst: 20, Every: 5 * time.Second}  // RenewJoinLease: every 13 s
)

// The rates at which sources that have not attested may call RenewAdministrator, in calls a second. The owner's program
// calls every two seconds. A call costs the check of a signature, about 0.05 ms, and a refusal is recorded within the limit
// of unattested refusals.
const (
	adminRate  = 1
	adminBurst = 10
	adminTotal = 16
)

// How many requests with writes to the Kubernetes API one joinservice serves at the same time, and how long the next one
// waits for a slot. A ticket is eight requests to the API server, an attestation is one. More at the same time would make
// each slower, and all machines together no faster.
const (
	ticketSlots  = 16
	verdictSlots = 32
	slotWait     = 5 * time.Second
)

// limits are those of the RPCs.
type limits struct {
	// granting is for tickets and certificates, recording for attestations: neither delays the other.
	granting, recording                                                        *limit.Work
	admin                                                                      *peerlimit.Rate
	tickets, rejoins, certificates, returns, verdicts, orders, leases, rotated *limit.ByMachine[attest.MachineID]
}

func newLimits(now time.Time) limits {
	of := limit.New[attest.MachineID]
	return limits{
		granting: limit.NewWork(ticketSlots, slotWait), recording: limit.NewWork(verdictSlots, slotWait),
		admin:   peerlimit.NewRate(adminRate, adminBurst, adminTotal, now),
		tickets: of(ticketRate), rejoins: of(rejoinRate), certificates: of(renewalRate), returns: of(returnRate), verdicts: of(reattestRate), orders: of(orderRate), leases: of(leaseRate), rotated: of(rotatedRate),
	}
}
