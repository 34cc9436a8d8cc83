package discovery

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/x509"
	"fmt"
	"sync"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/tpm"
)

// Verification makes the verifiers of joinservices. A joinservice presents its cluster's policy, signed with one of the owner's keys, with its evidence. A
// machine with that public key accepts a joinservice that this policy accepts and lists as a control plane (A7). Serials only increase: an older policy could accept a
// machine that the owner has since removed. A machine without the key accepts no joinservice, unless its image sets insecure.noOwnerKey: then it accepts
// a machine that booted the same as itself, under the EK roots of its image.
type Verification struct {
	OwnerKeys   attest.OwnerKeys // nil: unknown; see [OwnerKeys]
	NoOwnerKey  bool             // as in [metadata.Image]
	EKRoots     []*x509.Certificate
	Bank        tpm.Bank
	PCRs        PCRReader
	NewVerifier func([]*x509.Certificate) (attest.Verifier, error)
	// Lowest is the least serial that a policy may have, as in [metadata.Image]; 0 for any.
	Lowest uint64
	// Newest refuses a policy that is older than the newest accepted one, and stores it if keep. owner is OwnerKeys.
	Newest func(p journal.Policy, owner attest.OwnerKeys, keep bool) error
}

// OwnerKeys returns the owner's keys that a machine with this image and journal obeys: those of the image. With insecure.noOwnerKey they are those of an
// earlier image, under which it joined; nil if there are none.
func OwnerKeys(image *metadata.Image, rec journal.Record) (keys attest.OwnerKeys) {
	if len(image.OwnerKeys) > 0 || !image.NoOwnerKey {
		return image.OwnerKeys
	}
	for _, k := range rec.OwnerKeys {
		keys = append(keys, ed25519.PublicKey(k))
	}
	return keys
}

// PCRReader reads this machine's own PCRs, which need no proof.
type PCRReader interface {
	ReadPCR(ctx context.Context, bank tpm.Bank, pcr int) ([]byte, error)
}

// Of returns the verifier and the appraiser of joinservices whose node lock is in that state.
func (j Verification) Of(ctx context.Context, lock attest.Lock) (attest.Verifier, attest.Appraiser, error) {
	if len(j.OwnerKeys) > 0 {
		o := ownersPolicy{owner: j.OwnerKeys, newVerifier: j.NewVerifier, lock: lock, lowest: j.Lowest, newest: j.Newest}
		v, err := j.NewVerifier(nil) // for its formats; each evidence has its own roots
		if err != nil {
			return nil, nil, err
		}
		o.formats = v.Formats()
		return o, o, nil
	}
	if !j.NoOwnerKey {
		return nil, nil, attest.Refuse(attestv1.Reason_REASON_MACHINE_CONFIG, "image configuration: %w", metadata.ErrNoOwner) // A3, A7
	}
	hash, ok := j.Bank.Hash()
	if !ok {
		return nil, nil, attest.Refuse(attestv1.Reason_REASON_MACHINE_CONFIG, "unknown PCR %s", j.Bank)
	}
	own := make(map[int][]byte, attest.LockPCR)
	for i := range attest.LockPCR {
		v, err := j.PCRs.ReadPCR(ctx, j.Bank, i)
		if err != nil {
			return nil, nil, fmt.Errorf("read own PCR %d: %w", i, err)
		}
		own[i] = v
	}
	same, err := attest.NewSameBoot(hash, own, j.EKRoots)
	if err != nil {
		return nil, nil, err
	}
	v, err := j.NewVerifier(j.EKRoots)
	return v, same.For(lock), err
}

// ownersPolicy verifies and appraises by the policy that comes with the evidence, if the owner signed it.
type ownersPolicy struct {
	owner       attest.OwnerKeys
	newVerifier func([]*x509.Certificate) (attest.Verifier, error)
	lock        attest.Lock
	formats     []attestv1.Format
	lowest      uint64
	// newest refuses policies that are older than the accepted one, and stores p if keep.
	newest func(p journal.Policy, owner attest.OwnerKeys, keep bool) error
}

// Formats implements [attest.Verifier].
func (o ownersPolicy) Formats() []attestv1.Format { return o.formats }

// Verify implements [attest.Verifier] with the EK roots of the policy.
func (o ownersPolicy) Verify(ctx context.Context, ev *attestv1.Evidence, s attest.Statement, bind attest.Binding) (attest.Pending, error) {
	p, err := o.open(ev.GetSignedPolicy())
	if err != nil {
		return nil, err
	}
	v, err := o.newVerifier(p.Roots())
	if err != nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_INTERNAL, "%w", err)
	}
	return v.Verify(ctx, ev, s, bind)
}

// Appraise implements [attest.Appraiser].
func (o ownersPolicy) Appraise(_ context.Context, c attest.Claims) (attest.Appraisal, error) {
	p, err := o.open(c.SignedPolicy())
	if err != nil {
		return attest.Appraisal{}, err
	}
	a, err := p.AppraiseServer(c, o.lock) // A7
	if err != nil {
		return attest.Appraisal{}, err
	}
	// The policy is on the disk before it is relied on, so that a crash can't bring the old one back.
	if err := o.newest(name(c.SignedPolicy(), p), o.owner, true); err != nil {
		return attest.Appraisal{}, err
	}
	return a, nil
}

func name(s *attestv1.SignedPolicy, p *attest.Policy) journal.Policy {
	sum := sha256.Sum256(s.GetPolicy())
	return journal.Policy{OwnerKey: journal.Hex(p.Signer()), Serial: p.Serial(), Digest: sum[:]}
}

func (o ownersPolicy) open(s *attestv1.SignedPolicy) (*attest.Policy, error) {
	if s == nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_POLICY_SIGNATURE, "the joinservice presents no policy")
	}
	p, err := attest.OpenPolicy(o.owner, s)
	if err != nil {
		return nil, err
	}
	if p.Serial() < o.lowest { // B7
		return nil, attest.Refuse(attestv1.Reason_REASON_POLICY_INVALID, "the joinservice presents a policy with the serial %d, and this machine's image accepts %d or more (lowestPolicySerial): the cluster was rolled back, or needs a policy with a higher serial", p.Serial(), o.lowest)
	}
	return p, o.newest(name(s, p), o.owner, false)
}

// StateFolder holds the journal and the state disk's folder.
const StateFolder = "/var/lib/muster"

// StartOver is the remedy that erases a machine's journal, with its whole state disk, without a login.
const StartOver = "run `muster reset NODE` if it is a node, or erase the first MiB of its state disk and boot it (docs/state-disk.md)"

// NotOlder returns an error if p is older than the newest known policy of the same owner, who has the keys; nil if none is known.
func NotOlder(known *journal.Policy, p journal.Policy, owner attest.OwnerKeys) error {
	if known == nil || !compared(*known, p, owner) {
		return nil
	}
	const way = "apply a policy with a higher serial; if this machine should join another cluster of the same owner, " + StartOver
	switch {
	case p.Serial < known.Serial:
		return attest.Refuse(attestv1.Reason_REASON_POLICY_INVALID, "the joinservice presents a policy with the serial %d, but this machine has accepted one with %d: %s", p.Serial, known.Serial, way)
	case p.Serial == known.Serial && !bytes.Equal(p.Digest, known.Digest):
		return attest.Refuse(attestv1.Reason_REASON_POLICY_INVALID, "the joinservice presents another policy with the serial %d than this machine has accepted: %s", p.Serial, way)
	}
	return nil
}

// Memory is for machines that can't read their journal yet: it knows only the newest policy of this process. Its zero value knows none.
type Memory struct {
	mu     sync.Mutex
	policy *journal.Policy
}

// Policy returns the newest policy; nil if there was none.
func (m *Memory) Policy() *journal.Policy {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.policy
}

// Newest is for [Verification].
func (m *Memory) Newest(p journal.Policy, owner attest.OwnerKeys, keep bool) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := NotOlder(m.policy, p, owner); err != nil || !keep {
		return err
	}
	m.policy = &p
	return nil
}
