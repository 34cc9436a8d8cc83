package tpm2_test

import (
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// BenchmarkVerify verifies evidence of a machine whose AK is known, as a server does for most
// connections: two ECDSA verifications, one for the quote and one for the chain.
func BenchmarkVerify(b *testing.B) {
	ca := attesttest.NewCA(b)
	v := attesttest.Verifier(b, ca)
	m := attesttest.NewMachine(b, ca, attesttest.Options{})
	a := m.Attester(attest.PurposeMachine)
	binding := attest.Binding{1}
	if _, err := attesttest.Claims(b.Context(), a, v, attest.PurposeMachine, binding); err != nil {
		b.Fatal(err)
	}
	ev, err := a.Attest(b.Context(), tpmFormat, binding)
	if err != nil {
		b.Fatal(err)
	}
	raw, err := proto.Marshal(ev)
	if err != nil {
		b.Fatal(err)
	}
	s := attest.NewStatement(attest.PurposeMachine, binding)
	for b.Loop() {
		p, err := v.Verify(b.Context(), ev, s, binding)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := p.Complete(nil); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(len(raw)), "bytes/evidence")
}
