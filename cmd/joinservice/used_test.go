package main

import (
	"testing"

	"github.com/muster-k8s/muster/internal/membertest"
)

// Certificate requests of a ticket are deleted after their use.
func TestUsedCertificateRequestsAreDeleted(t *testing.T) {
	s := setUp(t)
	s.ticketFor(t, s.machine(t), worker(t))
	if filed := s.CSRs(t); len(filed) != 2 {
		t.Errorf("filed: %v, want two", filed)
	}
	membertest.Eventually(t, func() error {
		left := s.CSRs(t)
		return membertest.Want(len(left) == 0, "left: %v", left)
	})
}
