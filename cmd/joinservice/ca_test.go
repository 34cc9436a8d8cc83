package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// While the cluster's CA is rotated, the control plane's file has two. Tickets have those of now.
func TestATicketHasTheClustersAuthorityOfNow(t *testing.T) {
	s := setUp(t)
	if got := s.ticketFor(t, s.machine(t), worker(t)).GetCaCertificate(); !bytes.Equal(got, s.CA()) {
		t.Errorf("the first ticket has %q", got)
	}
	both := bytes.Join([][]byte{s.CA(), []byte(attesttest.NewCA(t).PEM())}, nil)
	if err := os.WriteFile(filepath.Join(s.pki, "ca.crt"), both, 0o600); err != nil {
		t.Fatal(err)
	}
	again := worker(t, named("w2", "5f0c95b6-2a3d-4c7e-9f10-000000000002", "192.168.77.13"))
	if got := s.ticketFor(t, s.machine(t), again).GetCaCertificate(); !bytes.Equal(got, both) {
		t.Error("the second ticket has not the authorities of now")
	}
}
