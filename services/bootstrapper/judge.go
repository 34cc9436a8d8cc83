package bootstrapper

import (
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/x509"
	"fmt"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/trust/attest"
)

// judge is how a joiner judges the machine of a joinservice before it asks for anything.
// The joinservice presents its cluster's signed policy with its evidence. A joiner that
// knows the owner's public key accepts what that policy accepts; one that does not accepts
// a machine that booted the same as itself, under the EK roots of its image.
// Serials only go up: an older policy could accept what the owner has since shut out.
func (b *Bootstrapper) judge(ctx context.Context) (attest.Verifier, attest.Appraiser, error) {
	// The machine's cluster, once it has one; before, any: it can't know.
	lock := attest.AnyLock()
	if rec := b.lock.record(); rec.Locked() {
		lock = attest.LockedTo([32]byte(rec.ClusterID))
	}
	if b.ownerKey != nil {
		b.metrics.insecure.DeleteLabelValues(ownerKeyUnknown)
		o := ownersPolicy{key: b.ownerKey, newVerifier: b.cfg.NewVerifier, lock: lock, newest: b.lock.newest}
		v, err := b.cfg.NewVerifier(nil) // for its formats; each evidence brings its own roots
		if err != nil {
			return nil, nil, err
		}
		o.formats = v.Formats()
		return o, o, nil
	}
	b.metrics.insecure.WithLabelValues(ownerKeyUnknown).Set(1)
	own, err := b.ownBoot(ctx)
	if err != nil {
		return nil, nil, err
	}
	same, err := attest.NewSameBoot(b.lock.hash, own, b.cfg.Image.EKRoots)
	if err != nil {
		return nil, nil, err
	}
	v, err := b.cfg.NewVerifier(b.cfg.Image.EKRoots)
	return v, same.For(lock), err
}

// ownerKeyUnknown is a label of muster_insecure_config.
const ownerKeyUnknown = "owner_key_unknown"

// ownBoot reads this machine's own PCRs, which its own TPM need not prove to it.
func (b *Bootstrapper) ownBoot(ctx context.Context) (map[int][]byte, error) {
	own := make(map[int][]byte, attest.LockPCR)
	for i := range attest.LockPCR {
		v, err := b.cfg.TPM.ReadPCR(ctx, b.bank, i)
		if err != nil {
			return nil, fmt.Errorf("read own PCR %d: %w", i, err)
		}
		own[i] = v
	}
	return own, nil
}

// ownersPolicy verifies and appraises by the policy that comes with the evidence, if the
// owner signed it.
type ownersPolicy struct {
	key         ed25519.PublicKey
	newVerifier func([]*x509.Certificate) (attest.Verifier, error)
	lock        attest.Lock
	formats     []attestv1.Format
	// newest refuses policies that are older than what was accepted, and remembers p if asked.
	newest func(p journal.Policy, keep bool) error
}

// Formats implements [attest.Verifier].
func (o ownersPolicy) Formats() []attestv1.Format { return o.formats }

// Verify implements [attest.Verifier] with the EK roots of the policy.
func (o ownersPolicy) Verify(ctx context.Context, ev *attestv1.Evidence, s attest.Statement, bind attest.Binding) (attest.Pending, error) {
	p, err := o.open(ev.GetSignedPolicy())
	if err != nil {
		return nil, err
	}
	v, err := o.newVerifier(p.EKRoots())
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
	a, err := p.Appraise(c, o.lock)
	if err != nil {
		return attest.Appraisal{}, err
	}
	// On the disk before it is relied on, so that a crash cannot bring the old one back.
	if err := o.newest(o.name(c.SignedPolicy(), p), true); err != nil {
		return attest.Appraisal{}, err
	}
	return a, nil
}

func (o ownersPolicy) name(s *attestv1.SignedPolicy, p *attest.Policy) journal.Policy {
	sum := sha256.Sum256(s.GetPolicy())
	return journal.Policy{OwnerKey: journal.Hex(o.key), Serial: p.Serial(), Digest: sum[:]}
}

func (o ownersPolicy) open(s *attestv1.SignedPolicy) (*attest.Policy, error) {
	if s == nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_POLICY_SIGNATURE, "the joinservice presents no policy")
	}
	p, err := attest.OpenPolicy(o.key, s)
	if err != nil {
		return nil, err
	}
	return p, o.newest(o.name(s, p), false)
}
