// Package policy holds the policy in force, and appraises by it.
//
// The owner's AttestationPolicy reaches a [Store] through an informer; the store checks the owner's signature before it
// parses anything, and replaces the policy in force with one atomic write, so that no appraisal ever waits for I/O or reads
// a partial policy. A policy that is not signed, does not parse or has no higher serial changes only the report about it.
// Without a valid policy, no machine is accepted (A3).
package policy

import (
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/objects/signedpolicy"
	"github.com/muster-k8s/muster/trust/attest"
)

// retryWithoutPolicy is the pause that is sent to a machine while there is no policy.
const retryWithoutPolicy = 5 * time.Second

// InForce is a checked policy. It is immutable.
type InForce struct {
	// Policy is the parsed policy.
	Policy *attest.Policy
	// Signed is the policy's bytes and signature as its owner made them.
	Signed *attestv1.SignedPolicy
	// Generation is the metadata.generation of the AttestationPolicy.
	Generation int64
	// Since is when this process put it in force.
	Since time.Time
}

// Report is the result for the newest version of the AttestationPolicy.
type Report struct {
	// Observed is the reported version; nil if there is none.
	Observed *v1alpha1.AttestationPolicy
	// InForce is the policy that is applied now; nil if there is none.
	InForce *InForce
	// Err is why the newest version is not in force; nil if it is.
	Err error
}

// Config lists what a Store needs. All fields are required unless their comments say otherwise.
type Config struct {
	// Owner has the public keys of which one signs each policy.
	Owner attest.OwnerKeys
	// Lowest is the lowest policy serial that this machine's image accepts (B7); 0 for any.
	Lowest  uint64
	Log     *slog.Logger
	Metrics prometheus.Registerer
	// OnReport may be left out: it gets every report in order, for the audit log.
	OnReport func(Report)
}

// Store holds the policy in force. It is safe for concurrent use.
type Store struct {
	owner    attest.OwnerKeys
	lowest   uint64 // of this machine's image
	log      *slog.Logger
	inForce  atomic.Pointer[InForce]
	next     atomic.Pointer[Candidate]
	metrics  metrics
	onReport func(Report)
	mu       sync.Mutex // serializes changes; appraisals do not take it
	floor    uint64     // lower serials are refused
	digest   string     // of the policy with the serial floor: another one with that serial is refused
	report   Report
	reported chan struct{} // closed and replaced with each change
	noted    string        // the annotation that next was read from
}

// Candidate is a policy that the owner has signed but not put in force. It accepts no machine.
type Candidate struct {
	Policy *attest.Policy
	// Digest is the SHA-256 of its text, in hexadecimal digits.
	Digest string
}

type metrics struct {
	generation prometheus.Gauge
	serial     prometheus.Gauge
	rejected   *prometheus.GaugeVec
	insecure   *prometheus.GaugeVec
	collateral *prometheus.GaugeVec
}

// New returns a Store without a policy, or an error that names the missing field of cfg.
func New(cfg Config) (*Store, error) {
	if slices.ContainsFunc(cfg.Owner, func(k ed25519.PublicKey) bool { return len(k) != ed25519.PublicKeySize }) {
		return nil, fmt.Errorf("policy: a public key of the owner has not %d bytes", ed25519.PublicKeySize)
	}
	if len(cfg.Owner) == 0 || cfg.Log == nil || cfg.Metrics == nil {
		return nil, errors.New("policy: owner, log and metrics are required")
	}
	m := metrics{
		generation: prometheus.NewGauge(prometheus.GaugeOpts{Name: "muster_policy_generation", Help: "Generation of the AttestationPolicy in force; 0: none is."}),
		serial:     prometheus.NewGauge(prometheus.GaugeOpts{Name: "muster_policy_serial", Help: "Serial that the owner gave the policy in force."}),
		rejected:   prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "muster_policy_rejected", Help: "1 as long as the newest AttestationPolicy is refused for that reason."}, []string{"reason"}),
		insecure:   prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "muster_insecure_config", Help: "1 for each setting in force that weakens the cluster."}, []string{"reason"}),
		collateral: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "muster_collateral_end_seconds", Help: "When a part of the processor vendors' data in the policy ends, in Unix time."}, []string{"part"}),
	}
	for _, c := range []prometheus.Collector{m.generation, m.serial, m.rejected, m.insecure, m.collateral} {
		if err := cfg.Metrics.Register(c); err != nil {
			return nil, fmt.Errorf("policy: %w", err)
		}
	}
	if cfg.OnReport == nil {
		cfg.OnReport = func(Report) {}
	}
	return &Store{owner: cfg.Owner, lowest: cfg.Lowest, log: cfg.Log, metrics: m, onReport: cfg.OnReport, reported: make(chan struct{})}, nil
}

// Set takes the newest version of the AttestationPolicy. It puts it in force, or keeps the previous one and reports why.
func (s *Store) Set(p *v1alpha1.AttestationPolicy) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.setCandidate(p.Annotations[v1alpha1.PolicyCandidate])
	if old := s.report.Observed; old != nil && old.UID == p.UID && old.Generation == p.Generation {
		s.report.Observed = p // only its metadata or status changed
		return
	}
	next, err := s.open(p)
	if err != nil {
		s.publish(Report{Observed: p, InForce: s.inForce.Load(), Err: err})
		return
	}
	s.floor, s.digest = next.Policy.Serial(), digest(next.Signed)
	s.inForce.Store(next)
	s.publish(Report{Observed: p, InForce: next})
}

// Remove removes the policy: no machine is accepted any more.
func (s *Store) Remove(*v1alpha1.AttestationPolicy) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.setCandidate("")
	s.inForce.Store(nil)
	s.publish(Report{Err: attest.Refuse(attestv1.Reason_REASON_NOT_READY, "AttestationPolicy %q was deleted", v1alpha1.PolicyName)})
}

// setCandidate reads the annotation of that value. Its caller holds the lock.
func (s *Store) setCandidate(note string) {
	if note == s.noted {
		return
	}
	s.noted = note
	s.next.Store(nil)
	if note == "" {
		return
	}
	encoded, text, _ := strings.Cut(note, " ")
	signature, err := base64.StdEncoding.DecodeString(encoded)
	signed := &attestv1.SignedPolicy{Policy: []byte(text), Signature: signature}
	var parsed *attest.Policy
	if err == nil {
		parsed, err = attest.OpenCandidate(s.owner, signed)
	}
	if err != nil {
		s.log.Warn("the candidate of the policy is refused", "reason", attest.ReasonName(attest.ReasonOf(err)), "err", err)
		return
	}
	s.next.Store(&Candidate{parsed, digest(signed)})
}

// Candidate returns the policy that the owner may put in force later; nil if there is none.
func (s *Store) Candidate() *Candidate { return s.next.Load() }

func (s *Store) open(p *v1alpha1.AttestationPolicy) (*InForce, error) {
	signed, err := signedpolicy.Decode(p)
	if err != nil {
		return nil, err
	}
	parsed, err := attest.OpenPolicy(s.owner, signed)
	if err != nil {
		return nil, err
	}
	if parsed.Serial() < s.lowest { // B7
		return nil, attest.Refuse(attestv1.Reason_REASON_POLICY_INVALID, "serial %d is below %d, the lowest that this control plane's image accepts (lowestPolicySerial): the cluster was rolled back, or the policy needs a higher serial", parsed.Serial(), s.lowest)
	}
	// After a restart, the status has the serial and digest that this process no longer knows.
	floor, known := s.floor, s.digest
	if seen := p.Status.Serial; seen > 0 && (uint64(seen) > floor || known == "") {
		floor, known = uint64(seen), p.Status.PolicyDigest
	}
	if parsed.Serial() < floor || parsed.Serial() > math.MaxInt64 {
		return nil, attest.Refuse(attestv1.Reason_REASON_POLICY_INVALID, "serial %d is below %d, which was in force already: increment it with every change", parsed.Serial(), floor)
	}
	if parsed.Serial() == floor && known != "" && digest(signed) != known {
		return nil, attest.Refuse(attestv1.Reason_REASON_POLICY_INVALID, "another policy with the serial %d was in force already: increment it with every change", floor)
	}
	return &InForce{Policy: parsed, Signed: signed, Generation: p.Generation, Since: time.Now()}, nil
}

func digest(s *attestv1.SignedPolicy) string {
	sum := sha256.Sum256(s.GetPolicy())
	return hex.EncodeToString(sum[:])
}

// publish writes r to log, metrics and report. Its caller holds the lock.
func (s *Store) publish(r Report) {
	s.metrics.rejected.Reset()
	s.metrics.insecure.Reset()
	s.metrics.collateral.Reset()
	s.metrics.generation.Set(0)
	s.metrics.serial.Set(0)
	if r.InForce != nil {
		s.metrics.generation.Set(float64(r.InForce.Generation))
		s.metrics.serial.Set(float64(r.InForce.Policy.Serial()))
		for _, name := range r.InForce.Policy.Insecure() {
			s.metrics.insecure.WithLabelValues(name).Set(1)
		}
		for _, e := range r.InForce.Policy.CollateralEnds() {
			s.metrics.collateral.WithLabelValues(e.Name).Set(float64(e.Time.Unix()))
		}
	}
	if r.Err != nil {
		reason := attest.ReasonName(attest.ReasonOf(r.Err))
		s.metrics.rejected.WithLabelValues(reason).Set(1)
		s.log.Error("policy refused; what was in force before stays in force", "reason", reason, "err", r.Err, "anyInForce", r.InForce != nil)
	} else {
		s.log.Info("policy in force", "generation", r.InForce.Generation, "serial", r.InForce.Policy.Serial())
		for _, name := range r.InForce.Policy.Insecure() {
			s.log.Warn("the policy weakens the cluster", "switch", name)
		}
	}
	s.onReport(r)
	s.report = r
	close(s.reported)
	s.reported = make(chan struct{})
}

// Current returns the policy in force, or a refusal with NOT_READY.
func (s *Store) Current() (*InForce, error) {
	if p := s.inForce.Load(); p != nil {
		return p, nil
	}
	return nil, attest.RefuseFor(retryWithoutPolicy, attestv1.Reason_REASON_NOT_READY, "no AttestationPolicy %q is in force: apply one that the owner signed", v1alpha1.PolicyName) // A3
}

// Roots lists the EK roots of the policy in force, none if there is none (A3).
func (s *Store) Roots() []*x509.Certificate {
	if p := s.inForce.Load(); p != nil {
		return p.Policy.Roots()
	}
	return nil
}

// Signed returns the policy in force as its owner signed it; nil if there is none.
func (s *Store) Signed() *attestv1.SignedPolicy {
	if p := s.inForce.Load(); p != nil {
		return p.Signed
	}
	return nil
}

// Generation returns that of the AttestationPolicy in force; 0 if there is none.
func (s *Store) Generation() int64 {
	if p := s.inForce.Load(); p != nil {
		return p.Generation
	}
	return 0
}

// Latest returns the newest report, and a channel that is closed when there is a newer one.
func (s *Store) Latest() (Report, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.report, s.reported
}

// Guard returns a verifier that refuses with NOT_READY while no policy is in force; v would report every machine as
// untrusted.
func (s *Store) Guard(v attest.Verifier) attest.Verifier { return guarded{v, s} }

type guarded struct {
	attest.Verifier
	store *Store
}

func (g guarded) Verify(ctx context.Context, ev *attestv1.Evidence, st attest.Statement, b attest.Binding) (attest.Pending, error) {
	if _, err := g.store.Current(); err != nil {
		return nil, err
	}
	return g.Verifier.Verify(ctx, ev, st, b)
}

// Appraiser is an [attest.Appraiser] by the policy in force.
type Appraiser struct {
	store    *Store
	banned   func(attest.Claims) bool
	locks    func() ([]attest.Lock, error)
	appraise func(*attest.Policy, attest.Claims, ...attest.Lock) (attest.Appraisal, error)
}

// NewAppraiser returns an Appraiser that refuses banned machines, and those whose node lock is in none of the states.
func (s *Store) NewAppraiser(banned func(attest.Claims) bool, locks func() ([]attest.Lock, error)) (*Appraiser, error) {
	return s.newAppraiser(banned, locks, (*attest.Policy).Appraise)
}

// NewServerAppraiser is NewAppraiser for the machines of joinservices and kms: it also refuses those that the policy does
// not list as control planes, with SERVER_NOT_LISTED (A7).
func (s *Store) NewServerAppraiser(banned func(attest.Claims) bool, locks func() ([]attest.Lock, error)) (*Appraiser, error) {
	return s.newAppraiser(banned, locks, (*attest.Policy).AppraiseServer)
}

func (s *Store) newAppraiser(banned func(attest.Claims) bool, locks func() ([]attest.Lock, error), appraise func(*attest.Policy, attest.Claims, ...attest.Lock) (attest.Appraisal, error)) (*Appraiser, error) {
	if banned == nil || locks == nil {
		return nil, errors.New("policy: an appraiser needs bans and lock states")
	}
	return &Appraiser{store: s, banned: banned, locks: locks, appraise: appraise}, nil
}

// Policy returns the policy in force and the accepted states of the node lock, for texts. Only [Appraiser.Appraise] decides.
func (j *Appraiser) Policy() (*attest.Policy, []attest.Lock, error) {
	p, err := j.store.Current()
	if err != nil {
		return nil, nil, err
	}
	locks, err := j.locks()
	return p.Policy, locks, err
}

// Candidate is [Store.Candidate].
func (j *Appraiser) Candidate() *Candidate { return j.store.Candidate() }

// Appraise implements [attest.Appraiser]. In addition to the refusals of [attest.Policy.Appraise] it returns BANNED and
// NOT_READY.
func (j *Appraiser) Appraise(_ context.Context, c attest.Claims) (attest.Appraisal, error) {
	if j.banned(c) {
		return attest.Appraisal{}, attest.Refuse(attestv1.Reason_REASON_BANNED, "machine %s is banned or its enrollment being deleted, or its TPM is as another machine", c.Machine())
	}
	p, err := j.store.Current()
	if err != nil {
		return attest.Appraisal{}, err
	}
	locks, err := j.locks()
	if err != nil {
		return attest.Appraisal{}, err
	}
	a, err := j.appraise(p.Policy, c, locks...)
	if err != nil {
		return attest.Appraisal{}, err
	}
	a.Generation = p.Generation
	return a, nil
}
