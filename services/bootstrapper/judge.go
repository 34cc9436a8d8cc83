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
	"github.com/muster-k8s/muster/trust/tpm"
)

// judges makes what a machine judges joinservices with before it asks them for anything. A
// joinservice presents its cluster's signed policy with its evidence. A machine that knows the
// owner's public key accepts what that policy accepts; one that does not accepts a machine that
// booted the same as itself, under the EK roots of its image. Serials only go up: an older policy
// could accept what the owner has since shut out.
type judges struct {
	ownerKey    ed25519.PublicKey // nil: unknown
	ekRoots     []*x509.Certificate
	bank        tpm.Bank
	pcrs        PCRReader
	newVerifier func([]*x509.Certificate) (attest.Verifier, error)
	// newest refuses a policy that is older than the newest that was accepted, and keeps it if keep.
	newest func(p journal.Policy, keep bool) error
}

// PCRReader reads this machine's own PCRs, which its own TPM need not prove to it.
type PCRReader interface {
	ReadPCR(ctx context.Context, bank tpm.Bank, pcr int) ([]byte, error)
}

// of gives those for joinservices whose node lock is in the state.
func (j judges) of(ctx context.Context, lock attest.Lock) (attest.Verifier, attest.Appraiser, error) {
	if j.ownerKey != nil {
		o := ownersPolicy{key: j.ownerKey, newVerifier: j.newVerifier, lock: lock, newest: j.newest}
		v, err := j.newVerifier(nil) // for its formats; each evidence brings its own roots
		if err != nil {
			return nil, nil, err
		}
		o.formats = v.Formats()
		return o, o, nil
	}
	hash, ok := j.bank.Hash()
	if !ok {
		return nil, nil, attest.Refuse(attestv1.Reason_REASON_MACHINE_CONFIG, "unknown PCR %s", j.bank)
	}
	own := make(map[int][]byte, attest.LockPCR)
	for i := range attest.LockPCR {
		v, err := j.pcrs.ReadPCR(ctx, j.bank, i)
		if err != nil {
			return nil, nil, fmt.Errorf("read own PCR %d: %w", i, err)
		}
		own[i] = v
	}
	same, err := attest.NewSameBoot(hash, own, j.ekRoots)
	if err != nil {
		return nil, nil, err
	}
	v, err := j.newVerifier(j.ekRoots)
	return v, same.For(lock), err
}

// judge gives what a joiner judges with.
func (b *Bootstrapper) judge(ctx context.Context) (attest.Verifier, attest.Appraiser, error) {
	// The machine's cluster, once it has one; before, any: it can't know.
	lock := attest.AnyLock()
	if rec := b.lock.record(); rec.Locked() {
		lock = attest.LockedTo([32]byte(rec.ClusterID))
	}
	if b.ownerKey != nil {
		b.metrics.insecure.DeleteLabelValues(ownerKeyUnknown)
	} else {
		b.metrics.insecure.WithLabelValues(ownerKeyUnknown).Set(1)
	}
	return judges{ownerKey: b.ownerKey, ekRoots: b.cfg.Image.EKRoots, bank: b.bank, pcrs: b.cfg.TPM, newVerifier: b.cfg.NewVerifier, newest: b.lock.newest}.of(ctx, lock)
}

// ownerKeyUnknown is a label of muster_insecure_config.
const ownerKeyUnknown = "owner_key_unknown"

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
