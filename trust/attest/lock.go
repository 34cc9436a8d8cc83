package attest

import (
	"bytes"
	"crypto"
	"fmt"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
)

// LockPCR is the register that holds the node lock. No policy lists it: the verifier computes its
// expected value.
const LockPCR = 15

// Lock is a state of the node lock: [Unlocked], [LockedTo] a cluster, or [AnyLock].
type Lock struct {
	kind      lockKind
	clusterID [32]byte
}

type lockKind int

const (
	lockInvalid lockKind = iota // the zero value matches nothing (A3)
	lockOpen
	lockCluster
	lockAny
)

// Unlocked is the state of a machine that joined no cluster since it was booted: PCR 15 is zero.
func Unlocked() Lock { return Lock{kind: lockOpen} }

// LockedTo is the state of a machine that belongs to that cluster.
func LockedTo(clusterID [32]byte) Lock { return Lock{kind: lockCluster, clusterID: clusterID} }

// AnyLock matches every value. It is for machines that do not know the cluster when they appraise a
// joinservice, at init, join or unlock.
func AnyLock() Lock { return Lock{kind: lockAny} }

// lockDigest returns the digest that is extended into [LockPCR] to lock a machine to a cluster:
// H(cluster ID), with the bank's hash (B1).
func lockDigest(bank crypto.Hash, clusterID [32]byte) []byte {
	h := bank.New()
	h.Write(clusterID[:])
	return h.Sum(nil)
}

// LockValue returns [LockPCR] of a machine that is locked to the cluster: extend(0,
// H(cluster ID)) with the bank's hash.
func LockValue(bank crypto.Hash, clusterID [32]byte) []byte {
	h := bank.New()
	h.Write(make([]byte, bank.Size()))
	h.Write(lockDigest(bank, clusterID))
	return h.Sum(nil)
}

// CheckLock checks that the claims have one of the states. It refuses if no state is given (A3).
func CheckLock(c Claims, states ...Lock) error {
	if !c.valid() {
		return Refuse(attestv1.Reason_REASON_LOCK_FOREIGN, "no claims")
	}
	bank, seen := c.Bank(), c.PCR(LockPCR)
	for _, s := range states {
		switch s.kind {
		case lockAny:
			return nil
		case lockOpen:
			if bytes.Equal(seen, make([]byte, bank.Size())) {
				return nil
			}
		case lockCluster:
			if bytes.Equal(seen, LockValue(bank, s.clusterID)) {
				return nil
			}
		case lockInvalid:
		}
	}
	return Refuse(attestv1.Reason_REASON_LOCK_FOREIGN, "PCR %d is %x, none of the %d expected states: the machine belongs to another cluster, or to none; reboot it to clear the lock", LockPCR, seen, len(states))
}

func (l Lock) String() string {
	switch l.kind {
	case lockOpen:
		return "unlocked"
	case lockCluster:
		return fmt.Sprintf("locked to %x", l.clusterID)
	case lockAny:
		return "any"
	case lockInvalid:
	}
	return "invalid"
}
