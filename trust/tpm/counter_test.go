package tpm_test

import (
	"errors"
	"testing"

	gotpm "github.com/google/go-tpm/tpm2"

	"github.com/muster-k8s/muster/trust/tpm"
	"github.com/muster-k8s/muster/trust/tpm/tpmtest"
)

// Whoever has the TPM in hand can delete the counter and put an index there that takes any value: that is not believed.
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
	orderly := gotpm.TPMSNVPublic{NVIndex: tpm.CounterIndex, NameAlg: gotpm.TPMAlgSHA256, DataSize: 8,
		Attributes: gotpm.TPMANV{NT: gotpm.TPMNTCounter, AuthRead: true, AuthWrite: true, OwnerRead: true, NoDA: true, Orderly: true}}
	if _, err := (gotpm.NVDefineSpace{AuthHandle: owner, PublicInfo: gotpm.New2B(orderly)}).Execute(bare); err != nil {
		t.Fatal(err)
	}
	if got, err := dev.Counter(t.Context()); !errors.Is(err, tpm.ErrForeignCounter) {
		t.Errorf("a counter that is kept in memory: %d, %v, want ErrForeignCounter", got, err)
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
