package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"k8s.io/client-go/tools/clientcmd"

	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// When the cluster's CA is rotated, Kubernetes replaces its file in a running pod. Tickets have the new one.
func TestATicketHasTheClustersAuthorityOfNow(t *testing.T) {
	s := setUp(t)
	file := filepath.Join(t.TempDir(), "ca.crt")
	write := func(content []byte) {
		t.Helper()
		if err := os.WriteFile(file, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(s.CA())
	c, err := clientcmd.LoadFromFile(s.kubeconf)
	if err != nil {
		t.Fatal(err)
	}
	for _, cluster := range c.Clusters {
		cluster.CertificateAuthorityData, cluster.CertificateAuthority = nil, file
	}
	if err := clientcmd.WriteToFile(*c, s.kubeconf); err != nil {
		t.Fatal(err)
	}
	s.audit = filepath.Join(t.TempDir(), "audit.jsonl") // the other replica keeps its own
	s.serveJoin(t)
	if got := s.ticketFor(t, s.machine(t), worker(t)).GetCaCertificate(); !bytes.Equal(got, s.CA()) {
		t.Errorf("the first ticket has %q", got)
	}
	both := bytes.Join([][]byte{s.CA(), []byte(attesttest.NewCA(t).PEM())}, nil)
	write(both)
	again := worker(t, named("w2", "5f0c95b6-2a3d-4c7e-9f10-000000000002", "192.168.77.13"))
	if got := s.ticketFor(t, s.machine(t), again).GetCaCertificate(); !bytes.Equal(got, both) {
		t.Error("the second ticket has not the authorities of now")
	}
}
