package attesttest_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/tpm"
	"github.com/muster-k8s/muster/trust/tpm/tpmtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestMachineKeepsTheContractOfATPM(t *testing.T) {
	tpmtest.Contract(t, func(t testing.TB) tpm.Device {
		return attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{})
	})
	tpmtest.BareContract(t, func(t testing.TB) tpm.Device {
		return attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{Bare: true})
	})
}

func TestMachineIsAcceptedByTheRealVerifierAndPolicy(t *testing.T) {
	for name, ca := range map[string]*attesttest.CA{
		"issued by the root":        attesttest.NewCA(t),
		"issued by an intermediate": attesttest.NewCA(t).Intermediate(t, nil),
		"issued two levels down":    attesttest.NewCA(t).Intermediate(t, nil).Intermediate(t, nil),
	} {
		t.Run(name, func(t *testing.T) {
			m := attesttest.NewMachine(t, ca, attesttest.Options{SecureBoot: true})
			c, err := attesttest.Claims(t.Context(), m.Attester(attest.PurposeMachine), attesttest.Verifier(t, ca), attest.PurposeMachine, attest.Binding{1})
			if err != nil {
				t.Fatal(err)
			}
			if c.Machine() != m.ID() {
				t.Errorf("machine %s, want %s", c.Machine(), m.ID())
			}
			if fw, err := c.Firmware(); err != nil || !fw.SecureBoot || len(fw.Drivers) > 0 {
				t.Errorf("%+v, %v", fw, err)
			}
			policy := attesttest.ParsedPolicy(t, ca, []*attesttest.Machine{m})
			if _, err := policy.Appraise(c, attest.Unlocked()); err != nil {
				t.Error(err)
			}
			m.LockTo([32]byte{9})
			c, err = attesttest.Claims(t.Context(), m.Attester(attest.PurposeKMS), attesttest.Verifier(t, ca), attest.PurposeKMS, attest.Binding{2})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := policy.Appraise(c, attest.LockedTo([32]byte{9})); err != nil {
				t.Error(err)
			}
		})
	}
}
