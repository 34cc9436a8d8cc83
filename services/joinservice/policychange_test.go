package joinservice

import (
	"bytes"
	"fmt"
	"regexp"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// A connection stays open while the owner puts a stricter policy in force. What the peer has shown was accepted by the policy before, and
// gets neither a ticket, nor the key of a disk, nor a verdict, nor certificates.
func TestAConnectionOfBeforeIsAppraisedByThePolicyInForce(t *testing.T) {
	l := newLone(t, true, func(*attesttest.Machine) {})
	wanted := ticketRequest(t)
	serial := uint64(1)
	inForce := func(machines ...*attesttest.Machine) {
		serial++
		shared.SetPolicy(t, attesttest.Policy(t, l.ca, []*attesttest.Machine{l.cp1}, attesttest.ControlPlanes(l.cp1), func(p *attestv1.Policy) {
			p.Serial = serial
			for _, m := range machines {
				p.Tpm2.MachineIds = append(p.Tpm2.MachineIds, m.ID().String())
			}
		}))
		line := regexp.MustCompile(fmt.Sprintf(`"policy in force".*"serial":%d\b`, serial))
		membertest.Eventually(t, func() error { return membertest.Want(line.Match(l.observations.Log()), "no log line %s", line) })
	}
	for _, tt := range []struct {
		name, event, metric string
		ask                 func(*testing.T) error
		passes              attestv1.Reason // the result under a policy that accepts it: this joinservice has neither a key service nor a lock
	}{
		{"ticket", "ticket refused", "muster_join_tickets_total", func(t *testing.T) error {
			_, err := l.IssueJoinTicket(t.Context(), &joinv1.IssueJoinTicketRequest{NodeName: "w1", Role: joinv1.Role_ROLE_WORKER, DiskId: disk1, BootSecret: bytes.Repeat([]byte{1}, 32)})
			return err
		}, attestv1.Reason_REASON_REQUEST_INVALID},
		{"key of its disk", "rejoin refused", "muster_rejoin_tickets_total", l.rejoin, attestv1.Reason_REASON_KMS_UNAVAILABLE},
		{"verdict", "verdict refused", "muster_rpc_requests_total", l.reattest, attestv1.Reason_REASON_LOCK_FOREIGN},
		{"certificates", "renewal refused", "muster_rpc_requests_total", func(t *testing.T) error {
			_, err := l.RenewNodeCertificates(t.Context(), &joinv1.RenewNodeCertificatesRequest{KubeletClientCsr: wanted.GetKubeletClientCsr(), KubeletServingCsr: wanted.GetKubeletServingCsr(), BootSecret: bytes.Repeat([]byte{1}, 32)})
			return err
		}, attestv1.Reason_REASON_LOCK_FOREIGN},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ask := func() error { return tt.ask(t) }
			places := l.places(tt.event, tt.metric)
			inForce(l.cp1, l.machine)
			refusaltest.Refused(t, l.observations, tt.passes, places, ask)
			inForce(l.cp1)
			refusaltest.Refused(t, l.observations, attestv1.Reason_REASON_POLICY_REFUSED, places, ask)
		})
	}
}
