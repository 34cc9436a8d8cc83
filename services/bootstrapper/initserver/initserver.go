// Package initserver serves init.v1: the machine's owner makes it the first node of a new cluster, or adopts the existing
// cluster of this control plane.
//
// It competes with package joinclient for the node lock. An init continues without its callers, which may disconnect and call again.
package initserver

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"sync"

	"connectrpc.com/connect"
	"github.com/prometheus/client_golang/prometheus"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/gen/muster/init/v1/initv1connect"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/required"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/services/bootstrapper/clusterobjects"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/nodelock"
	"github.com/muster-k8s/muster/services/bootstrapper/provision"
	"github.com/muster-k8s/muster/trust/attest"
)

// Config lists what a [Server] needs. All fields are required.
type Config struct {
	// Node is the machine.
	Node *provision.Node
	// WriteClusterState writes Muster's objects into the cluster: [clusterobjects.Write].
	WriteClusterState func(ctx context.Context, kubeconfig []byte, s clusterobjects.State) error
	// Metrics registers muster_init_attempts_total.
	Metrics prometheus.Registerer
}

// Server is the handler of init.v1's InitService.
type Server struct {
	node              *provision.Node
	writeClusterState func(ctx context.Context, kubeconfig []byte, s clusterobjects.State) error
	inits             *prometheus.CounterVec

	running  chan struct{}   // closed once Start has set ctx
	ctx      context.Context //nolint:containedctx // of Start: an init outlives its client's connection
	work     sync.WaitGroup
	finished chan struct{}
	sent     chan struct{}
	sentOnce sync.Once

	mu    sync.Mutex // guards the fields below
	wrong int        // wrong init secrets so far, at most maxAttempts
	run   *initRun   // the running or finished init; nil if there is none
}

// New returns a Server, which handles calls after Start.
func New(cfg Config) (*Server, error) {
	if err := required.Fields("initserver.New", cfg); err != nil {
		return nil, err
	}
	s := &Server{
		node: cfg.Node, writeClusterState: cfg.WriteClusterState, running: make(chan struct{}), finished: make(chan struct{}), sent: make(chan struct{}),
		inits: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "muster_init_attempts_total", Help: "Inits that were asked for or ended, by reason; ACCEPTED: the machine became the first node.",
		}, []string{"reason"}),
	}
	if err := cfg.Metrics.Register(s.inits); err != nil {
		return nil, fmt.Errorf("initserver: %w", err)
	}
	return s, nil
}

// Start allows inits, which end when ctx does. It is called once.
func (s *Server) Start(ctx context.Context) {
	s.ctx = ctx
	close(s.running)
}

// Wait returns once no init is running. The context of Start must have ended.
func (s *Server) Wait() {
	s.mu.Lock()   // an init that was admitted meanwhile is in work now
	s.mu.Unlock() //nolint:staticcheck // a barrier
	s.work.Wait()
}

// Finished returns a channel that is closed once an init has made this machine a node.
func (s *Server) Finished() <-chan struct{} { return s.finished }

// Sent returns a channel that is closed once the owner was sent the init's result.
func (s *Server) Sent() <-chan struct{} { return s.sent }

var _ initv1connect.InitServiceHandler = (*Server)(nil)

// Init implements [initv1connect.InitServiceHandler]: it checks the request, and reports the progress of the init until its end. The init continues if
// the caller disconnects.
func (s *Server) Init(ctx context.Context, req *initv1.InitRequest, stream *connect.ServerStream[initv1.InitResponse]) error {
	return s.serveOwner(ctx, journal.KindInit, req, nil, stream.Send)
}

// Adopt implements [initv1connect.InitServiceHandler]: as Init, on a machine that is already a control plane.
func (s *Server) Adopt(ctx context.Context, req *initv1.AdoptRequest, stream *connect.ServerStream[initv1.AdoptResponse]) error {
	return s.serveOwner(ctx, journal.KindAdopt, req.GetOrder(), nil, func(m *initv1.InitResponse) error {
		return stream.Send(&initv1.AdoptResponse{Event: m})
	})
}

// Restore implements [initv1connect.InitServiceHandler]: as Init, with the state of a cluster that has lost all control planes.
func (s *Server) Restore(ctx context.Context, req *initv1.RestoreRequest, stream *connect.ServerStream[initv1.RestoreResponse]) error {
	from, err := parseBackup(req.GetBackup())
	if err != nil {
		s.inits.WithLabelValues(attest.ReasonName(rpc.ReasonOf(err))).Inc() // R1
		return err
	}
	return s.serveOwner(ctx, journal.KindInit, req.GetOrder(), from, func(m *initv1.InitResponse) error {
		return stream.Send(&initv1.RestoreResponse{Event: m})
	})
}

func (s *Server) serveOwner(ctx context.Context, kind journal.Kind, req *initv1.InitRequest, from *restoreOrder, send func(*initv1.InitResponse) error) error {
	select {
	case <-s.running:
	case <-ctx.Done():
		return ctx.Err()
	}
	run, err := s.admit(kind, req, from)
	if err != nil {
		s.inits.WithLabelValues(attest.ReasonName(rpc.ReasonOf(err))).Inc() // R1
		return err
	}
	if err := run.follow(ctx, send); err != nil {
		return err
	}
	s.sentOnce.Do(func() { close(s.sent) })
	return nil
}

// admit decides whether a request may start an init: it checks the request first, then the secret, then the lock.
func (s *Server) admit(kind journal.Kind, req *initv1.InitRequest, from *restoreOrder) (*initRun, error) {
	meta, err := s.node.Metadata()
	if err != nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_MACHINE_CONFIG, "machine metadata: %w", err)
	}
	if meta.InitSecretHash == nil || meta.Role != metadata.RoleControlPlane {
		return nil, attest.Refuse(attestv1.Reason_REASON_INIT_NOT_ALLOWED, "the metadata of %s have no initSecretHash, or not the role %s", meta.Name, metadata.RoleControlPlane)
	}
	if err := s.node.Image.KnowsOwner(); err != nil { // a node without the owner's key can't verify any joinservice (A7)
		return nil, attest.Refuse(attestv1.Reason_REASON_MACHINE_CONFIG, "image configuration: %w", err)
	}
	order, err := parseInit(kind, req, from)
	if err != nil {
		return nil, err
	}
	order.meta = meta
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.checkSecret(req.GetInitSecret(), meta.InitSecretHash); err != nil {
		return nil, err
	}
	if err := s.checkOwner(kind, order, req); err != nil { // B10
		return nil, err
	}
	if s.ctx.Err() != nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_NOT_READY, "the bootstrapper is stopping")
	}
	if r := s.run; r != nil && !r.failed() {
		if r.order.keyDigest != order.keyDigest || r.order.kind != order.kind {
			return nil, attest.Refuse(attestv1.Reason_REASON_NODE_LOCKED, "%s of this machine is under way, and it is another one", nodelock.Taker(r.order.kind))
		}
		if r.order.digest != order.digest {
			return nil, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "an init with this idempotency key is under way, but with another request")
		}
		return r, nil
	}
	if rec := s.node.Lock.Record(); rec.Locked() {
		// The cluster ID is compared once it is derived.
		if err := nodelock.MayResume(rec, journal.Record{Kind: kind, KeyDigest: order.keyDigest[:], ClusterID: rec.ClusterID}); err != nil {
			return nil, err
		}
	}
	s.run = newInitRun(order, s.node.Log, s.node.Console)
	run := s.run
	s.work.Go(func() { s.initialize(s.ctx, run) })
	return run, nil
}

// checkSecret is called with mu held. The right secret is always admitted: it has 256 bits, so guessing is hopeless, and a lockout would only let
// unauthenticated clients keep the owner out. The first few wrong secrets are logged one by one, later ones are only counted.
func (s *Server) checkSecret(secret []byte, want *[32]byte) error {
	got := sha256.Sum256(secret)
	if subtle.ConstantTimeCompare(got[:], want[:]) == 1 {
		return nil
	}
	if s.wrong == maxAttempts {
		return attest.Refuse(attestv1.Reason_REASON_TOO_MANY_ATTEMPTS, "more than %d wrong init secrets", maxAttempts)
	}
	s.wrong++
	s.node.Log.Warn("wrong init secret", "count", s.wrong, "logged_at_most", maxAttempts)
	return attest.Refuse(attestv1.Reason_REASON_INIT_SECRET_INVALID, "wrong init secret %d of %d that are logged", s.wrong, maxAttempts)
}

// checkOwner verifies the owner's signature for this machine and the request's cluster (B10). The metadata are not measured, and a writer of them
// chooses the init secret. Without the signature, an attacker could begin a cluster on a machine that attests as accepted, and run programs there as
// root.
func (s *Server) checkOwner(kind journal.Kind, o *initOrder, req *initv1.InitRequest) error {
	if s.node.Image.NoOwnerKey {
		return nil
	}
	signed := ownerorder.Init{Cluster: o.root.ClusterID([secretSize]byte(req.GetMeasurementSalt())), Machine: s.node.MachineID, Adopt: kind == journal.KindAdopt}
	if o.restore != nil {
		signed.Backup = o.restore.sha256
	}
	return signed.Verify(req.GetOwnerSignature(), s.node.Image.OwnerKeys)
}
