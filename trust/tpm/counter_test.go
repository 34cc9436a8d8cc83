package tpm_test

import (
	"errors"
	"testing"

	gotpm "github.com/google/go-tpm/tpm2"

	"github.com/muster-k8s/muster/trust/tpm"
	"github.com/muster-k8s/muster/trust/tpm/tpmtest"
)

// An attacker with access to the TPM can delete the counter and define an index that can be set to
// any value: it is refused (B7).
func TestAnIndexThatCanBeSetIsNoCounter(t *testing.T) {
	e := tpmtest.SWTPM(t)
	dev, bare := e.Open(), raw(t, e)
	value, err := dev.DefineCounter(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	owner := gotpm.AuthHandle{Handle: gotpm.TPMRHOwner, Auth: gotpm.PasswordAuth(nil)}
	remove := func() {
		t.Helper()
		public, err := gotpm.NVReadPublic{NVIndex: tpm.CounterIndex}.Execute(bare)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := (gotpm.NVUndefineSpace{AuthHandle: owner, NVIndex: gotpm.NamedHandle{Handle: tpm.CounterIndex, Name: public.NVName}}).Execute(bare); err != nil {
			t.Fatal(err)
		}
	}
	remove()
	if _, err := dev.Counter(t.Context()); !errors.Is(err, tpm.ErrNoCounter) {
		t.Errorf("deleted: %v, want ErrNoCounter", err)
	}
	tpmtest.WriteNV(t, bare, uint32(tpm.CounterIndex), []byte{0, 0, 0, 0, 0, 0, 0, byte(value)})
	if got, err := dev.Counter(t.Context()); !errors.Is(err, tpm.ErrForeignCounter) {
		t.Errorf("an index of a value of choice: %d, %v, want ErrForeignCounter", got, err)
	}
	if _, err := dev.IncrementCounter(t.Context()); !errors.Is(err, tpm.ErrForeignCounter) {
		t.Errorf("incremented: %v, want ErrForeignCounter", err)
	}
	remove()
	for name, change := range map[string]func(*gotpm.TPMSNVPublic){
		"a counter that is kept in memory":   func(p *gotpm.TPMSNVPublic) { p.Attributes.Orderly = true },
		"a counter that its owner can write": func(p *gotpm.TPMSNVPublic) { p.Attributes.OwnerWrite = true },
		"a counter with another algorithm":   func(p *gotpm.TPMSNVPublic) { p.NameAlg = gotpm.TPMAlgSHA384 },
		"a counter with a policy":            func(p *gotpm.TPMSNVPublic) { p.AuthPolicy = gotpm.TPM2BDigest{Buffer: make([]byte, 32)} },
	} {
		other := gotpm.TPMSNVPublic{NVIndex: tpm.CounterIndex, NameAlg: gotpm.TPMAlgSHA256, DataSize: 8,
			Attributes: gotpm.TPMANV{NT: gotpm.TPMNTCounter, AuthRead: true, AuthWrite: true, OwnerRead: true, NoDA: true}}
		change(&other)
		if _, err := (gotpm.NVDefineSpace{AuthHandle: owner, PublicInfo: gotpm.New2B(other)}).Execute(bare); err != nil {
			t.Fatal(name, err)
		}
		public, err := gotpm.NVReadPublic{NVIndex: tpm.CounterIndex}.Execute(bare)
		if err != nil {
			t.Fatal(name, err)
		}
		if _, err := (gotpm.NVIncrement{
			AuthHandle: gotpm.AuthHandle{Handle: tpm.CounterIndex, Name: public.NVName, Auth: gotpm.PasswordAuth(nil)}, NVIndex: gotpm.NamedHandle{Handle: tpm.CounterIndex, Name: public.NVName},
		}).Execute(bare); err != nil {
			t.Fatal(name, err)
		}
		if got, err := dev.Counter(t.Context()); !errors.Is(err, tpm.ErrForeignCounter) {
			t.Errorf("%s: %d, %v, want ErrForeignCounter", name, got, err)
		}
		remove()
	}
	again, err := dev.DefineCounter(t.Context())
	if err != nil || again <= value {
		t.Errorf("made anew: %d, %v, want more than %d", again, err, value)
	}
	e.Restart()
	if got, err := dev.Counter(t.Context()); err != nil || got != again {
		t.Errorf("after a power cut: %d, %v, want %d", got, err, again)
	}
}
