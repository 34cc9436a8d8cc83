package attest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/internal/checked"
)

// claimsOf returns the claims that a verifier makes of facts.
func claimsOf(f *checked.Facts) Claims { return NewClaims(checked.Seal(*f)) }

func TestReasons(t *testing.T) {
	if ReasonOf(nil) != attestv1.Reason_REASON_ACCEPTED || ReasonOf(errors.New("x")) != attestv1.Reason_REASON_INTERNAL {
		t.Error("defaults")
	}
	err := fmt.Errorf("dial: %w", Refuse(attestv1.Reason_REASON_BANNED, "since %s", "yesterday"))
	if ReasonOf(err) != attestv1.Reason_REASON_BANNED || err.Error() != "dial: BANNED: since yesterday" {
		t.Error(err)
	}
	if got := ReasonName(9999); got != "UNKNOWN_9999" {
		t.Error(got)
	}
}

// Invariant A3.
func TestEmptyClaimsSayNothing(t *testing.T) {
	var c Claims
	_, err := c.Firmware()
	if c.Format() != 0 || c.Bank() != 0 || c.PCR(0) != nil || c.Machine() != (MachineID{}) || c.EKKind() != "" || c.EKPublic() != nil || c.Root() != nil || c.AKName() != nil || c.AKKind() != "" ||
		c.Clock() != (Clock{}) || c.FirmwareVersion() != 0 || err == nil || c.Events() != nil || c.EvidenceDigest() != ([32]byte{}) || c.SignedPolicy() != nil {
		t.Error("the zero Claims say something")
	}
	root, _ := ca(t, "operator")
	for _, i := range []int{-1, 16} {
		if v := claimsOf(facts(root)).PCR(i); v != nil {
			t.Errorf("PCR %d is %x", i, v)
		}
	}
}

func TestContextWithoutPeerHasNone(t *testing.T) {
	if _, ok := PeerFrom(context.Background()); ok {
		t.Error("a peer out of nothing")
	}
	if _, ok := PeerFrom(WithPeer(context.Background(), Peer{})); ok {
		t.Error("the zero peer counts as attested")
	}
}

func TestParseMachineIDIsStringsInverse(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		id := MachineID(rapid.SliceOfN(rapid.Byte(), 32, 32).Draw(t, "id"))
		got, err := ParseMachineID(id.String())
		if err != nil || got != id {
			t.Fatalf("%v %v", got, err)
		}
	})
	for _, s := range []string{"", "ab", strings.Repeat("AB", 32), strings.Repeat("g0", 32), strings.Repeat("00", 33)} {
		if _, err := ParseMachineID(s); err == nil {
			t.Errorf("%q was read", s)
		}
	}
}
