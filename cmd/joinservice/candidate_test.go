package main

import (
	"encoding/base64"
	"fmt"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// candidate writes a policy that is not in force beside the one that is; nil removes it.
func (s *fixture) candidate(t *testing.T, policy []byte) {
	t.Helper()
	membertest.Eventually(t, func() error { // joinservice writes the status
		p := &v1alpha1.AttestationPolicy{}
		if err := s.Client.Get(t.Context(), types.NamespacedName{Name: v1alpha1.PolicyName}, p); err != nil {
			return err
		}
		delete(p.Annotations, v1alpha1.PolicyCandidate)
		if policy != nil {
			metav1.SetMetaDataAnnotation(&p.ObjectMeta, v1alpha1.PolicyCandidate, base64.StdEncoding.EncodeToString(attest.SignCandidate(s.Owner, policy).GetSignature())+" "+string(policy))
		}
		return s.Client.Update(t.Context(), p)
	})
}

// The owner sees what the next policy would say of a running node, before it says anything.
func TestANodeIsAlsoAppraisedByTheNextPolicy(t *testing.T) {
	s := setUp(t)
	m := s.node(t)
	next := func(t *testing.T, fits func(*v1alpha1.CandidateVerdict) bool) {
		t.Helper()
		membertest.Eventually(t, func() error { // joinservice learns of the candidate by a watch
			if _, err := s.reattest(t, m); err != nil {
				return err
			}
			st := s.Node(t, "w1").Status
			if !st.LastVerdict.Accepted || st.PolicySerial != 1 {
				t.Fatalf("the verdict is %+v, of serial %d", st.LastVerdict, st.PolicySerial)
			}
			return membertest.Want(fits(st.Candidate), "by the next policy: %+v", st.Candidate)
		})
	}
	other := attesttest.NewMachine(t, s.ca, attesttest.Options{Image: "other"})
	s.candidate(t, attesttest.Policy(t, s.ca, []*attesttest.Machine{other}, func(p *attestv1.Policy) { p.Serial = 2 }))
	next(t, func(c *v1alpha1.CandidateVerdict) bool {
		return c != nil && !c.Accepted && c.Reason == "POLICY_REFUSED" && c.Message != "" && !c.Time.IsZero()
	})
	s.candidate(t, attesttest.Policy(t, s.ca, []*attesttest.Machine{m}, func(p *attestv1.Policy) { p.Serial = 3 }))
	next(t, func(c *v1alpha1.CandidateVerdict) bool {
		return c != nil && c.Accepted && c.Reason == "ACCEPTED" && c.Message == ""
	})
	s.candidate(t, nil)
	next(t, func(c *v1alpha1.CandidateVerdict) bool { return c == nil })
}

// The owner replaces collateral that has ended: until the new one is in force, all nodes are refused, and the owner asks whether that is
// the end of it.
func TestARefusedNodeIsAlsoAppraisedByTheNextPolicy(t *testing.T) {
	s := setUp(t, recordsSoon)
	m := attesttest.NewMachine(t, s.ca, attesttest.Options{Hardware: milan(t, "vcek.der")})
	s.ticketFor(t, m, worker(t))
	m.LockTo(s.ID)
	if _, err := s.reattested(t, m); err != nil {
		t.Fatal(err)
	}
	s.inForce(t, s.policy(t, requireMilan))
	for _, tt := range []struct {
		reason string
		serial uint64
		change func(*attestv1.Policy)
	}{
		{"ACCEPTED", 3, func(*attestv1.Policy) {}},
		{"HARDWARE_COLLATERAL", 4, requireMilan},
	} {
		s.candidate(t, attesttest.Policy(t, s.ca, []*attesttest.Machine{m}, tt.change, func(p *attestv1.Policy) { p.Serial = tt.serial }))
		membertest.Eventually(t, func() error { // joinservice learns of the candidate by a watch
			if _, err := s.reattest(t, m); rpc.ReasonFrom(err) != attestv1.Reason_REASON_HARDWARE_COLLATERAL {
				return fmt.Errorf("want a refusal for the collateral: %w", err)
			}
			st := s.Node(t, "w1").Status
			v, c := st.LastVerdict, st.Candidate
			return membertest.Want(!v.Accepted && v.Reason == "HARDWARE_COLLATERAL" && c != nil && c.Reason == tt.reason && c.Accepted == (tt.reason == "ACCEPTED"), "%+v, by the next policy %+v", v, c)
		})
	}
}

// A vendor has raised a TCB, and the owner asks what its data would do before they are in force: an accepted node stays accepted, and has the
// reason of the refusal to come. AMD's lists were not captured, so that reason is what the candidate's collateral lacks; each TCB is compared
// in trust/attest.
func TestAnAcceptedNodeIsToldOfTheRefusalByRaisedCollateral(t *testing.T) {
	s := setUp(t, recordsSoon)
	m := attesttest.NewMachine(t, s.ca, attesttest.Options{Hardware: milan(t, "vcek.der")})
	s.ticketFor(t, m, worker(t))
	m.LockTo(s.ID)
	raised := func(p *attestv1.Policy) {
		requireMilan(p)
		p.Hardware.SevSnp.MinTcb[0].Microcode = new(uint32(255))
	}
	for i, tt := range []struct {
		reason string
		change func(*attestv1.Policy)
	}{{"HARDWARE_COLLATERAL", raised}, {"ACCEPTED", func(*attestv1.Policy) {}}} {
		s.candidate(t, attesttest.Policy(t, s.ca, []*attesttest.Machine{m}, tt.change, func(p *attestv1.Policy) { p.Serial = uint64(i) + 2 }))
		membertest.Eventually(t, func() error { // joinservice learns of the candidate by a watch
			if _, err := s.reattest(t, m); err != nil {
				return err
			}
			st := s.Node(t, "w1").Status
			if !st.LastVerdict.Accepted || st.PolicySerial != 1 {
				t.Fatalf("the verdict is %+v, of serial %d", st.LastVerdict, st.PolicySerial)
			}
			c := st.Candidate
			return membertest.Want(c != nil && c.Reason == tt.reason && c.Accepted == (tt.reason == "ACCEPTED"), "by the next policy %+v", c)
		})
	}
}
