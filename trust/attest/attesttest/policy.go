package attesttest

import (
	"context"
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
)

// Verifier returns a real verifier that trusts ca.
func Verifier(t testing.TB, ca *CA) *tpm2.Verifier {
	t.Helper()
	v, err := tpm2.NewVerifier(tpm2.VerifierConfig{Roots: func() []*x509.Certificate { return ca.Roots() }, Now: time.Now})
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// Policy returns a policy in JSON that accepts the images and firmware of the machines, in the
// roles worker and control-plane, with addresses in 192.168.77.0/24 and 10.0.0.0/8. Each change is
// applied before it is encoded.
func Policy(t testing.TB, ca *CA, machines []*Machine, changes ...func(*attestv1.Policy)) []byte {
	t.Helper()
	if len(machines) == 0 {
		t.Fatal("attesttest: a policy for no machine")
	}
	rules := &attestv1.Tpm2Policy{
		EkRoots: []*attestv1.EkRoot{{Pem: ca.PEM(), Operator: true, Key: string(attest.EKP256)}},
		Bank:    machines[0].Bank().String(),
	}
	for i, m := range machines {
		image := &attestv1.Image{Name: fmt.Sprintf("image-%d", i), Pcrs: values(m, 4, 8, 9, 11, 12, 13, 14)}
		class := &attestv1.MachineClass{Name: fmt.Sprintf("class-%d", i), Pcrs: values(m, 0, 2, 3, 7)}
		if !slices.ContainsFunc(rules.GetImages(), func(o *attestv1.Image) bool { return same(o.GetPcrs(), image.GetPcrs()) }) {
			rules.Images = append(rules.Images, image)
		}
		if !slices.ContainsFunc(rules.GetClasses(), func(o *attestv1.MachineClass) bool { return same(o.GetPcrs(), class.GetPcrs()) }) {
			rules.Classes = append(rules.Classes, class)
		}
	}
	p := &attestv1.Policy{
		Version:   2,
		Serial:    1,
		Tpm2:      rules,
		Roles:     []string{"worker", "control-plane"},
		NodeCidrs: []string{"192.168.77.0/24", "10.0.0.0/8"},
	}
	for _, change := range changes {
		change(p)
	}
	b, err := protojson.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// values returns the machine's values of these PCRs.
func values(m *Machine, pcrs ...int) (out []*attestv1.PcrValue) {
	for _, i := range pcrs {
		out = append(out, &attestv1.PcrValue{Index: uint32(i), Value: hex.EncodeToString(m.PCRs()[i])})
	}
	return out
}

func same(a, b []*attestv1.PcrValue) bool {
	return slices.EqualFunc(a, b, func(x, y *attestv1.PcrValue) bool {
		return x.GetIndex() == y.GetIndex() && x.GetValue() == y.GetValue()
	})
}

// ControlPlanes returns a change for [Policy] that lists the machines as control planes, and no others.
func ControlPlanes(machines ...*Machine) func(*attestv1.Policy) {
	return func(p *attestv1.Policy) {
		p.ControlPlanes = nil
		for _, m := range machines {
			p.ControlPlanes = append(p.ControlPlanes, m.ID().String())
		}
	}
}

// ParsedPolicy is [Policy], parsed.
func ParsedPolicy(t testing.TB, ca *CA, machines []*Machine, changes ...func(*attestv1.Policy)) *attest.Policy {
	t.Helper()
	p, err := attest.ParsePolicy(Policy(t, ca, machines, changes...))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// Claims passes evidence of a machine through the whole exchange with a fresh binding, without a
// connection, and returns the verifier's claims.
func Claims(ctx context.Context, a attest.Attester, v attest.Verifier, p attest.Purpose, b attest.Binding) (attest.Claims, error) {
	ev, err := a.Attest(ctx, attestv1.Format_FORMAT_TPM2, b)
	if err != nil {
		return attest.Claims{}, err
	}
	pending, err := v.Verify(ctx, ev, attest.NewStatement(p, b), b)
	if err != nil {
		return attest.Claims{}, err
	}
	if pending.Challenge() == nil {
		return pending.Complete(nil)
	}
	mac, err := a.Respond(ctx, pending.Challenge(), b)
	if err != nil {
		return attest.Claims{}, err
	}
	return pending.Complete(&attestv1.Response{Mac: mac})
}
