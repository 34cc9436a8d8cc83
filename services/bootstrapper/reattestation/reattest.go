// Package reattestation attests a node's machine to the joinservices of its cluster at intervals, since its kubelet's certificates are only renewed with
// a recent attestation result (J7).
package reattestation

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/required"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/services/bootstrapper/bootsecret"
	"github.com/muster-k8s/muster/services/bootstrapper/catrust"
	"github.com/muster-k8s/muster/services/bootstrapper/discovery"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/kubelet"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/nodelock"
	"github.com/muster-k8s/muster/services/bootstrapper/orders"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/tpm"
)

// maxInterval is the longest pause that a joinservice may request.
const maxInterval = time.Hour

// Timing are the waits of an [Attester]; see [DefaultTiming].
type Timing struct {
	// Interval is the pause after a success, unless the joinservice requests one that is above zero and at most 1 h.
	Interval time.Duration
	// RetryMin and RetryMax bound the pause after a failure.
	RetryMin, RetryMax time.Duration
	// Stagger is the head start of one joinservice before the next. Dial bounds the wait for a connection, Call one whole attempt.
	Stagger, Dial, Call time.Duration
}

// DefaultTiming are the waits of production.
var DefaultTiming = Timing{
	Interval: 5 * time.Minute, RetryMin: 10 * time.Second, RetryMax: 2 * time.Minute,
	Stagger: 250 * time.Millisecond, Dial: 10 * time.Second, Call: 30 * time.Second,
}

// Config lists what an [Attester] needs. All fields are required.
type Config struct {
	// Image is the image's measured configuration.
	Image *metadata.Image
	// Metadata reads the machine's metadata, Journal its journal; both are called for each attempt.
	Metadata func() (*metadata.Machine, error)
	Journal  func() (journal.Record, error)
	// Root is the root of the file system: "/" on a machine. The expiry of the kubelet's certificates below it is reported, and what became of the owner's
	// order; a new order is stored below it.
	Root string
	// Policy stores the newest policy by which a joinservice was accepted: [journal.AttesterPolicy].
	Policy nodelock.Journal
	// TPM is the machine's TPM.
	TPM discovery.PCRReader
	// Attester makes evidence of the purpose machine.
	Attester attest.Attester
	// NewVerifier returns a verifier that trusts the roots.
	NewVerifier func(roots []*x509.Certificate) (attest.Verifier, error)
	// Timing are the waits.
	Timing Timing
	// Metrics registers muster_reattestations_total, muster_reattestation_last_success_timestamp_seconds, muster_insecure_config and
	// muster_state_disk_findings.
	Metrics prometheus.Registerer
	Log     *slog.Logger
}

// Attester attests a node's machine to the joinservices of its cluster at intervals, since its kubelet's certificates are only renewed with a recent
// verdict (J7).
type Attester struct {
	cfg   Config
	bank  tpm.Bank
	total *prometheus.CounterVec
	last  prometheus.Gauge
	order discovery.Order
	// reported is what a joinservice has recorded of the latest order.
	reported *joinv1.OrderReport

	verifiers oneVerifier
}

// New returns an Attester, or an error that names the missing or wrong field of cfg.
func New(cfg Config) (*Attester, error) {
	if err := required.Fields("reattest.New", cfg); err != nil {
		return nil, err
	}
	bank, err := tpm.ParseBank(cfg.Image.TPM.Bank)
	if err != nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_MACHINE_CONFIG, "image configuration: %w", err)
	}
	r := &Attester{
		cfg: cfg, bank: bank, verifiers: oneVerifier{make: cfg.NewVerifier},
		total: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "muster_reattestations_total", Help: "Attempts to attest this machine to its cluster again, by reason; ACCEPTED: the verdict is recorded.",
		}, []string{"reason"}),
		last: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "muster_reattestation_last_success_timestamp_seconds", Help: "When this machine was last accepted, in seconds since 1970; 0: not since the attester started.",
		}),
	}
	changed := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "muster_state_disk_findings", Help: "Files of the state disk that were removed or rewritten in this boot, since the cluster does not list them.",
	}, func() float64 { return machine.Findings(cfg.Root) })
	for _, c := range []prometheus.Collector{r.total, r.last, changed} {
		if err := cfg.Metrics.Register(c); err != nil {
			return nil, fmt.Errorf("bootstrapper: %w", err)
		}
	}
	return r, metadata.ReportInsecure(cfg.Metrics, cfg.Image, cfg.Log)
}

// errNoNode means that there is nothing to attest yet: the bootstrapper is not done.
var errNoNode = errors.New("this machine is no node yet")

// Run attests until ctx ends. It continues after failures: the services of this machine need its process for their own evidence.
func (r *Attester) Run(ctx context.Context) error {
	t := r.cfg.Timing
	pauses := discovery.NewPauses(t.RetryMin, t.RetryMax)
	for {
		interval, err := r.once(ctx)
		var wait time.Duration
		switch {
		case ctx.Err() != nil:
			return nil //nolint:nilerr // stopped by its caller
		case err == nil:
			pauses = discovery.NewPauses(t.RetryMin, t.RetryMax)
			wait = interval - rand.N(interval/5+1) //nolint:gosec // spreads load, protects nothing
			r.total.WithLabelValues(attest.ReasonName(attestv1.Reason_REASON_ACCEPTED)).Inc()
			r.last.SetToCurrentTime()
		case errors.Is(err, errNoNode):
			wait = t.RetryMin
		default:
			reason := attest.ReasonName(discovery.ReasonOf(err))
			r.total.WithLabelValues(labelOf(err)).Inc()
			wait = pauses.Next(err)
			r.cfg.Log.WarnContext(ctx, "this machine could not attest to its cluster", "reason", reason, "err", err, "remedy", rpc.RemedyFrom(err), "again_in", wait.String())
		}
		if retry.Wait(ctx, wait) != nil {
			return nil //nolint:nilerr // stopped by its caller
		}
	}
}

// refusesNode are the reasons with which a cluster refuses a machine as a node.
var refusesNode = map[attestv1.Reason]bool{
	attestv1.Reason_REASON_POLICY_REFUSED: true, attestv1.Reason_REASON_BANNED: true, attestv1.Reason_REASON_NOT_ENROLLED: true,
	attestv1.Reason_REASON_CLOCK_WENT_BACK: true, attestv1.Reason_REASON_MACHINE_CLONED: true, attestv1.Reason_REASON_LOCK_FOREIGN: true, attestv1.Reason_REASON_EK_UNTRUSTED: true,
	attestv1.Reason_REASON_HARDWARE_UNTRUSTED: true, attestv1.Reason_REASON_HARDWARE_COLLATERAL: true, attestv1.Reason_REASON_HARDWARE_TCB: true,
}

// labelOf returns the metric's reason. Alerts take a plain name of [refusesNode] as the cluster's refusal of this machine, so no other peer may cause
// one: a refusal by a peer that was not attested as a joinservice has the prefix UNPROVEN_, and a refusal by this machine of the peer has the prefix
// JOINSERVICE_.
func labelOf(err error) string {
	reason := discovery.ReasonOf(err)
	name := attest.ReasonName(reason)
	refusal, ok := errors.AsType[*attest.Refusal](err)
	switch {
	case atls.UnprovenRefusal(err):
		return "UNPROVEN_" + name
	case ok && !refusal.Remote && refusesNode[reason]:
		return "JOINSERVICE_" + name
	}
	return name
}

// oneVerifier keeps the verifier of the latest roots, and with it the attestation keys that it knows. A joinservice with a known key need not answer a
// challenge, and it answers challenges only to machines that it has accepted: so one with a known key has proven itself before it refuses.
type oneVerifier struct {
	make func(roots []*x509.Certificate) (attest.Verifier, error)

	mu    sync.Mutex
	roots []*x509.Certificate
	made  attest.Verifier // nil: none yet
}

func (o *oneVerifier) of(roots []*x509.Certificate) (attest.Verifier, error) {
	if len(roots) == 0 { // a verifier without roots verifies nothing
		return o.make(nil)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.made != nil && slices.EqualFunc(o.roots, roots, (*x509.Certificate).Equal) {
		return o.made, nil
	}
	v, err := o.make(roots)
	if err == nil {
		o.roots, o.made = roots, v
	}
	return v, err
}

// once makes one attempt, and returns the pause that the joinservice requests.
func (r *Attester) once(ctx context.Context) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Timing.Call)
	defer cancel()
	rec, err := r.cfg.Journal()
	if err != nil {
		return 0, attest.Refuse(attestv1.Reason_REASON_NODE_LOCKED, "%w", err)
	}
	if rec.Step != journal.StepDone {
		return 0, errNoNode
	}
	// The bootstrapper extends it in each boot, which may be later: until then, a joinservice refuses this machine as that of another cluster.
	lock, err := r.cfg.TPM.ReadPCR(ctx, r.bank, attest.LockPCR)
	if err != nil {
		return 0, fmt.Errorf("read the node lock: %w", err)
	}
	if bytes.Equal(lock, make([]byte, len(lock))) {
		return 0, errNoNode
	}
	meta, err := r.cfg.Metadata()
	if err != nil {
		return 0, attest.Refuse(attestv1.Reason_REASON_MACHINE_CONFIG, "machine metadata: %w", err)
	}
	if err := r.order.Update(ctx, meta, discovery.Own(meta), r.cfg.Log); err != nil {
		return 0, err
	}
	if len(r.order.List()) == 0 {
		return 0, attest.Refuse(attestv1.Reason_REASON_MACHINE_CONFIG, "machine metadata: joinEndpoints names no joinservice: list one, or the node's certificates will not be renewed")
	}
	endpoint, first, err := discovery.Race(ctx, r.order.List(), r.cfg.Timing.Stagger, r.cfg.Timing.Dial)
	if err != nil {
		return 0, fmt.Errorf("%w: %w", discovery.ErrUnreachable, err)
	}
	defer first.Close()
	interval, err := r.by(ctx, endpoint, first, rec)
	if err != nil {
		r.order.Failed(endpoint)
		return 0, fmt.Errorf("%s: %w", endpoint, err)
	}
	r.order.Served(endpoint)
	return interval, nil
}

// by attests to one joinservice, over a new connection, so that the recorded verdict is fresh.
func (r *Attester) by(ctx context.Context, endpoint string, first net.Conn, rec journal.Record) (time.Duration, error) {
	client, err := discovery.Open(ctx, discovery.SessionConfig{
		Attester: r.cfg.Attester, Lock: attest.LockedTo([32]byte(rec.ClusterID)), Dial: r.cfg.Timing.Dial, Log: slog.New(slog.DiscardHandler), // it would be a line for each attempt
		Verification: discovery.Verification{
			OwnerKeys: discovery.OwnerKeys(r.cfg.Image, rec), NoOwnerKey: r.cfg.Image.NoOwnerKey, Lowest: r.cfg.Image.LowestPolicySerial, EKRoots: r.cfg.Image.EKRoots, Bank: r.bank, PCRs: r.cfg.TPM, NewVerifier: r.verifiers.of,
			Newest: discovery.Floor{File: r.cfg.Policy, Known: rec.Policy}.Newest,
		},
	}, endpoint, first)
	if err != nil {
		return 0, err
	}
	defer client.Close()
	req := kubelet.Report(r.cfg.Root)
	catrust.Report(r.cfg.Root, req)
	secret, err := bootsecret.Load(r.cfg.Root)
	if err != nil {
		return 0, err
	}
	req.BootSecret = secret.Expose() // J11
	for _, key := range r.cfg.Image.OwnerKeys {
		req.OwnerKeys = append(req.OwnerKeys, key)
	}
	report, err := orders.Report(r.cfg.Root)
	if err != nil {
		r.cfg.Log.ErrorContext(ctx, "what became of the owner's order cannot be reported", "err", err)
	}
	if !proto.Equal(report, r.reported) {
		req.Order = report
	}
	resp, err := client.Reattest(ctx, req)
	if err != nil {
		return 0, err
	}
	r.reported = report
	if err := orders.NoteRecorded(r.cfg.Root, report, resp.GetOrder()); err != nil {
		r.cfg.Log.ErrorContext(ctx, "that the cluster knows of the owner's order cannot be noted", "err", err)
	}
	if resp.GetOrder() != nil { // B11: verified by the process that executes it
		r.reported = nil // the joinservice may have lost the report
		if err := orders.Deliver(r.cfg.Root, resp.GetOrder()); err != nil {
			r.cfg.Log.ErrorContext(ctx, "the owner's order cannot be stored", "endpoint", endpoint, "err", err)
		}
	}
	if len(resp.GetCaCertificate()) > 0 {
		if err := catrust.Deliver(r.cfg.Root, req, resp); err != nil {
			r.cfg.Log.ErrorContext(ctx, "the cluster's authorities cannot be stored", "endpoint", endpoint, "err", err)
		}
	}
	interval := resp.GetInterval().AsDuration()
	if !resp.GetInterval().IsValid() || interval <= 0 || interval > maxInterval {
		interval = r.cfg.Timing.Interval
	}
	r.cfg.Log.InfoContext(ctx, "this machine has attested to its cluster", "endpoint", endpoint, "policy_serial", resp.GetPolicySerial(), "interval", interval.String())
	return interval, nil
}
