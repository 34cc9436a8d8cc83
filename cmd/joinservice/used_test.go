package main

import (
	"slices"
	"testing"

	"github.com/muster-k8s/muster/internal/membertest"
)

// Certificate requests of a ticket are deleted after their use.
func TestUsedCertificateRequestsAreDeleted(t *testing.T) {
	s := setUp(t, signsSoon)
	filed := func() (n int) {
		for _, r := range s.Requests(t, "muster-joinservice/") {
			if r.Verb == "create" && r.Object.Resource == "certificatesigningrequests" {
				n++
			}
		}
		return n
	}
	before, earlier := filed(), s.CSRs(t) // other tests' requests take longer
	s.ticketFor(t, s.machine(t), worker(t))
	if n := filed() - before; n < 2 { // more if the ticket had to be requested again
		t.Errorf("%d were filed, want two", n)
	}
	membertest.Eventually(t, func() error {
		left := slices.DeleteFunc(s.CSRs(t), func(name string) bool { return slices.Contains(earlier, name) })
		return membertest.Want(len(left) == 0, "left: %v", left)
	})
}
