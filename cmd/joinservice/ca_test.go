package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"k8s.io/client-go/util/cert"

	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/trust/attest"
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

// The owner drops an authority by what nodes report.
func TestANodeReportsWhatItTrustsAndGetsWhatItLacks(t *testing.T) {
	s := setUp(t)
	m := s.node(t)
	list, err := cert.ParseCertsPEM(s.CA())
	if err != nil {
		t.Fatal(err)
	}
	own, other := sha256.Sum256(list[0].Raw), bytes.Repeat([]byte{1}, 32)
	for _, tt := range []struct {
		reports, kubelet [][]byte
		sent             []byte
	}{
		{[][]byte{own[:]}, [][]byte{own[:]}, nil},
		{[][]byte{other}, [][]byte{other, own[:]}, s.CA()},
		{nil, nil, s.CA()},
	} {
		resp, err := s.dial(t, m.Attester(attest.PurposeMachine)).Reattest(t.Context(), &joinv1.ReattestRequest{BootSecret: oneSecret, Authorities: tt.reports, KubeletAuthorities: tt.kubelet})
		if err != nil || !bytes.Equal(resp.GetCaCertificate(), tt.sent) {
			t.Errorf("%x: it gets %s, %v", tt.reports, resp.GetCaCertificate(), err)
		}
		hexes := func(list [][]byte) (out []string) {
			for _, d := range list {
				out = append(out, hex.EncodeToString(d))
			}
			return out
		}
		if st := s.Node(t, "w1").Status; !slices.Equal(st.Authorities, hexes(tt.reports)) || !slices.Equal(st.KubeletAuthorities, hexes(tt.kubelet)) {
			t.Errorf("%x: the owner sees %q and %q", tt.reports, st.Authorities, st.KubeletAuthorities)
		}
	}
}
