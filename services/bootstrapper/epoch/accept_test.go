package epoch

import (
	"context"
	"crypto/ed25519"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	recoverv1 "github.com/muster-k8s/muster/gen/muster/recover/v1"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// cutting is a counter whose power is cut after some more increments; negative: never. on, if set, is called with each increment.
type cutting struct {
	*attesttest.Machine
	left int
	on   func()
}

func (c *cutting) IncrementCounter(ctx context.Context) (uint64, error) {
	if c.left == 0 {
		return 0, errPower
	}
	c.left--
	if c.on != nil {
		c.on()
	}
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	return c.Machine.IncrementCounter(ctx)
}

// B7: an order is valid for one boot of the machine. The owner accepts an older copy. At each point of that, the host cuts the power, keeps a copy of
// the disk, and restores another disk that was valid before. Only an order makes the kept copy the newest.
func TestAnAcceptedCopyIsGoodForNoOtherBoot(t *testing.T) {
	for cut := range renewal + 2 {
		for _, crash := range []int{-1, 0, 1} { // of the write before, after so many increments; negative: none
			c := &cutting{Machine: attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{}), left: -1}
			k := Keeper{Dir: t.TempDir(), TPM: c}
			file := filepath.Join(k.Dir, fileName)
			read := func() []byte {
				t.Helper()
				b, err := os.ReadFile(file)
				do(t, err)
				return b
			}
			do(t, k.Begin(t.Context(), Record{Epoch: 1}))
			do(t, k.Advance(t.Context(), Record{Epoch: 2}))
			older := read()
			do(t, k.Advance(t.Context(), Record{Epoch: 3, Bans: []string{"node4"}}))
			if crash >= 0 { // at a boot: its disk may be ahead of the counter
				c.left = crash
				if err := k.Renew(t.Context()); !errors.Is(err, errPower) {
					t.Fatal(err)
				}
			}
			newest := read()
			do(t, os.WriteFile(file, older, 0o600))
			c.left = cut
			err := k.Begin(t.Context(), Record{Epoch: 2}) // by the owner's order for this boot
			c.left = -1
			kept := read()
			if err == nil {
				stands(t, k, 2)
				do(t, os.WriteFile(file, newest, 0o600))
				refuses(t, k, "what was the newest before")
				continue
			}
			for _, next := range [][]byte{newest, older} {
				do(t, os.WriteFile(file, next, 0o600))
				s, err := k.Check(t.Context())
				do(t, err)
				if s.Err == nil {
					do(t, k.Renew(t.Context())) // as at each boot
				}
			}
			do(t, os.WriteFile(file, kept, 0o600))
			s, err := k.Check(t.Context())
			do(t, err)
			if s.Err == nil && s.Record.Epoch == 2 {
				t.Errorf("cut after %d increments, a crash before after %d: epoch 2, without the ban, is the newest without an order", cut, crash)
			}
		}
	}
}

// waiting returns a machine that waits for its owner, since its disk is an older copy, and the owner's order for it.
func waiting(t *testing.T, tpm Counter, id [32]byte) (*Waiting, *recoverv1.AcceptEpochRequest) {
	t.Helper()
	k := Keeper{Dir: t.TempDir(), TPM: tpm}
	do(t, k.Begin(t.Context(), Record{Epoch: 1}))
	old, err := os.ReadFile(filepath.Join(k.Dir, fileName))
	do(t, err)
	do(t, k.Advance(t.Context(), Record{Epoch: 2}))
	do(t, os.WriteFile(filepath.Join(k.Dir, fileName), old, 0o600))
	s, err := k.Check(t.Context())
	do(t, err)
	pub, priv, err := ed25519.GenerateKey(nil)
	do(t, err)
	w := &Waiting{Standing: s, Keeper: k, Cluster: [32]byte{1}, Machine: id, Owner: attest.OwnerKeys{pub}, Log: slog.New(slog.DiscardHandler), accepted: make(chan struct{})}
	d, err := w.DescribeEpoch(t.Context(), &recoverv1.DescribeEpochRequest{})
	do(t, err)
	order := ownerorder.Epoch{Cluster: w.Cluster, Machine: w.Machine, Epoch: d.GetEpoch(), DiskCounter: d.GetDiskCounter(), TPMCounter: d.GetTpmCounter(), Nonce: ownerorder.Nonce(d.GetNonce())}
	return w, order.Wire(priv)
}

func (w *Waiting) goesOn() bool {
	select {
	case <-w.accepted:
		return true
	default:
		return false
	}
}

// B3: the answer to the owner is true. An order whose answer was an error can be sent again, whether or not it was carried out.
func TestAnOrderThatIsAnsweredAsDoneLetsTheMachineGoOn(t *testing.T) {
	for name, carriedOut := range map[string]bool{"it was not carried out": false, "it was": true} {
		t.Run(name, func(t *testing.T) {
			c := &cutting{Machine: attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{}), left: -1}
			w, order := waiting(t, c, c.ID())
			c.left = 0
			if _, err := w.AcceptEpoch(t.Context(), order); err == nil || w.goesOn() {
				t.Fatalf("%v, goes on: %v", err, w.goesOn())
			}
			c.left = -1
			if carriedOut { // the file has its name, and its folder could not be synced
				do(t, w.Keeper.Begin(t.Context(), *w.Standing.Record))
			}
			if _, err := w.AcceptEpoch(t.Context(), order); err != nil || !w.goesOn() {
				t.Errorf("%v, goes on: %v", err, w.goesOn())
			}
			stands(t, w.Keeper, 1)
		})
	}
}

func TestAnOrderIsCarriedOutThoughItsSenderGoesAway(t *testing.T) {
	c := &cutting{Machine: attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{}), left: -1}
	w, order := waiting(t, c, c.ID())
	ctx, leave := context.WithCancel(t.Context())
	c.on = leave
	if _, err := w.AcceptEpoch(ctx, order); err != nil || !w.goesOn() {
		t.Errorf("%v, goes on: %v", err, w.goesOn())
	}
	c.on = nil
	stands(t, w.Keeper, 1)
}
