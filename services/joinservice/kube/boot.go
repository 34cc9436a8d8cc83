package kube

import (
	"cmp"
	"context"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// maxClockBack is how far the clock of a quote may be behind one of the same boot that was recorded: evidence may be a minute
// old when it is used, and what a machine asks for at the same time is not recorded in order.
const maxClockBack = 2 * time.Minute

// maxLate is how long after evidence was verified the machine's next boot can have been recorded while the evidence was still used: evidence may be a minute old, and
// clocks of control planes may differ by another.
const maxLate = time.Minute + maxSkew

// Boot is what evidence says of the boot that it was made in, and what its connection knows of it.
type Boot struct {
	// Reset and Restart are the TPM's counters, Clock is its clock.
	Reset, Restart uint32
	Clock          time.Duration
	// Secret is what the machine has made for this boot.
	Secret keys.BootSecret
	// Address is where the machine is.
	Address string
	// Verified is when the evidence was.
	Verified time.Time
	// over is the boot that was the last recorded one when [Kube.awaitEnd] found that no earlier one runs; nil: it has not looked.
	over *bootID
}

func (b Boot) String() string {
	return fmt.Sprintf("boot %d/%d at %s", b.Reset, b.Restart, cmp.Or(b.Address, "an unknown address"))
}

// bootID tells recorded boots apart; zero: none is recorded.
type bootID struct{ reset, restart, since int64 }

func idOf(b *v1alpha1.Boot) bootID {
	if b == nil {
		return bootID{}
	}
	return bootID{b.ResetCount, b.RestartCount, b.Since.UnixMicro()}
}

// Clone is why a machine is refused that has the TPM state of another one, or an older state of its own.
type Clone struct {
	// Node is the name that the machine is enrolled under, Machine its ID.
	Node, Machine string
	// Why says how that is known, with both addresses.
	Why string
}

func (c *Clone) Error() string { return c.Why }

// cloned refuses a boot: last is what is known of the machine.
func cloned(n *v1alpha1.AttestedNode, last *v1alpha1.Boot, now Boot, why string) error {
	known := "no boot is recorded"
	if last != nil {
		known = fmt.Sprintf("boot %d/%d at %s is known since %s", last.ResetCount, last.RestartCount, cmp.Or(last.Address, "an unknown address"), utc(last.Since.Time))
	}
	return attest.Refuse(attestv1.Reason_REASON_MACHINE_CLONED, "%w", &Clone{Node: n.Name, Machine: n.Spec.MachineID, Why: fmt.Sprintf("%s (resets/restarts) is refused, %s: %s", now, why, known)})
}

// compareBoots compares a boot with the last one that is known of its machine (J11): a later one is accepted, the same one with
// the same secret only, and an earlier one never. The TPM's clock counts within one boot alone, and whether it is safe not at
// all: after a power cut it begins anew, and is safe again within seconds. The error's text is completed by [cloned].
func compareBoots(last v1alpha1.Boot, now Boot) (later bool, why string, reason attestv1.Reason) {
	switch cmp.Or(cmp.Compare(int64(now.Reset), last.ResetCount), cmp.Compare(int64(now.Restart), last.RestartCount)) {
	case 1:
		return true, "", attestv1.Reason_REASON_ACCEPTED
	case -1:
		// Late evidence of a machine that has booted since. Evidence is valid for a minute, so an earlier boot that attests after that is a copy's, or
		// its original's, even if joinservice's clock was ahead when the last boot was recorded.
		if late := last.Since.Sub(now.Verified); late >= 0 && late <= maxLate {
			return false, "the evidence was made before the machine's next boot", attestv1.Reason_REASON_VERDICT_OLD
		}
		return false, "it is an earlier boot than the last one", attestv1.Reason_REASON_MACHINE_CLONED
	}
	hash := now.Secret.Hash()
	switch {
	case subtle.ConstantTimeCompare([]byte(hex.EncodeToString(hash[:])), []byte(last.SecretHash)) != 1:
		return false, "it has another boot secret than the last one, which counts the same", attestv1.Reason_REASON_MACHINE_CLONED
	case time.Duration(last.Clock)*time.Millisecond-now.Clock > maxClockBack:
		return false, "within one boot, its TPM's clock went back", attestv1.Reason_REASON_CLOCK_WENT_BACK
	}
	return false, "", attestv1.Reason_REASON_ACCEPTED
}

// checkBoot says whether the boot is a later one than the status knows. Its errors are refusals: MACHINE_CLONED,
// CLOCK_WENT_BACK, VERDICT_OLD.
func checkBoot(n *v1alpha1.AttestedNode, s *v1alpha1.AttestedNodeStatus, b Boot) (later bool, err error) {
	if s.Boot == nil { // enrolled by the owner, or by a version that did not record boots
		if s.ResetCount != nil && int64(b.Reset) < *s.ResetCount {
			return false, clockWentBack(n, int64(b.Reset), *s.ResetCount)
		}
		return true, nil
	}
	later, why, reason := compareBoots(*s.Boot, b)
	if reason == attestv1.Reason_REASON_MACHINE_CLONED {
		return false, cloned(n, s.Boot, b, why)
	}
	if reason != attestv1.Reason_REASON_ACCEPTED {
		return false, attest.Refuse(reason, "%s: %s", b, why)
	}
	return later, nil
}

// unproven says whether the boot could be that of a copy whose original still runs: it is a later one than is recorded, or the recorded one, for which
// nobody has looked whether the boot before it had ended (J11).
func unproven(s *v1alpha1.AttestedNodeStatus, later bool) bool {
	return ran(s) && (later || s.Boot != nil && !s.Boot.EarlierEnded)
}

// ran says whether the enrollment's machine may have run before.
func ran(s *v1alpha1.AttestedNodeStatus) bool {
	return s.Boot != nil || s.ResetCount != nil || s.Ticket != nil || s.LastVerdict != nil
}

// record takes the boot into the status, which is written by compare-and-swap: of two machines that are about to be taken for
// the same one, the second finds what the first has written (J11). A boot that is to get a ticket, a key or a certificate must be one whose
// predecessor [Kube.awaitEnd] has found to have ended, now or before.
func (b Boot) record(n *v1alpha1.AttestedNode, s *v1alpha1.AttestedNodeStatus, forKey bool) error {
	later, err := checkBoot(n, s, b)
	if err != nil {
		return err
	}
	ended := !unproven(s, later) || b.over != nil && *b.over == idOf(s.Boot)
	if forKey && !ended {
		return clusterview.Unavailable("record the boot of node "+n.Name, errors.New("another boot of the machine was recorded at the same time"))
	}
	hash := b.Secret.Hash()
	next := v1alpha1.Boot{
		ResetCount: int64(b.Reset), RestartCount: int64(b.Restart), Clock: b.Clock.Milliseconds(), SecretHash: hex.EncodeToString(hash[:]),
		Address: b.Address, Since: metav1.NewMicroTime(b.Verified), EarlierEnded: ended,
	}
	if !later {
		next.Clock, next.Since = max(next.Clock, s.Boot.Clock), s.Boot.Since
	}
	s.Boot, s.ResetCount = &next, new(next.ResetCount)
	return nil
}

// reasonCloned is the reason of the condition and of the event.
const reasonCloned = "MachineCloned"

// ReportClone has the machine's AttestedNode name both machines. Like all that is for people, it may be lost, and the log says so.
func (k *Kube) ReportClone(ctx context.Context, c *Clone) {
	n := k.cluster.Nodes.ByName(c.Node)
	if n == nil || n.Spec.MachineID != c.Machine {
		return
	}
	next := metav1.Condition{Type: v1alpha1.ConditionCloned, Status: metav1.ConditionTrue, Reason: reasonCloned, Message: c.Why, ObservedGeneration: n.Generation}
	if was := meta.FindStatusCondition(n.Status.Conditions, next.Type); was != nil && was.Status == next.Status && was.Message == next.Message {
		return
	}
	ctx, cancel := clusterview.Outlive(ctx)
	defer cancel()
	if err := k.writeStatus(ctx, n.DeepCopy(), func(s *v1alpha1.AttestedNodeStatus) error {
		meta.SetStatusCondition(&s.Conditions, next)
		return nil
	}); err != nil {
		k.log.ErrorContext(ctx, "that a machine was cloned could not be written to its AttestedNode", "node", c.Node, "machine", c.Machine, "why", c.Why, "err", err)
	}
	k.tell(ctx, n, eventWarning, reasonCloned, c.Why)
}
