// Package recovery lets the owner open a control plane's state disk when no joinservice can.
//
// The caller has judged this machine, and does not attest. It sends the key of this machine's own disk and the ID of the cluster that the
// disk belongs to, signed with the owner's key that the image measured. The signature says that disk, key and cluster belong together, so that nobody
// can have a disk of their own pass for this cluster's (PCR 15). What opens the disk is the proof of the key, so there is nothing to guess but 256 bits.
//
// What strangers could do is to keep the owner from the door. So nobody is locked out: each network
// address has tries by the minute, one turn at a time, and keeps its place in the queue when it is
// sent away; see turns. The machine's own tries to rejoin go on beside all of this, and a key is tried by the
// one function that both share.
package recovery

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"connectrpc.com/connect"
	"github.com/prometheus/client_golang/prometheus"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	recoverv1 "github.com/muster-k8s/muster/gen/muster/recover/v1"
	"github.com/muster-k8s/muster/gen/muster/recover/v1/recoverv1connect"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/admission"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// What the error of Config.Try wraps if no fault of the disk's is the cause.
var (
	// ErrWrongKey says that the key opens nothing.
	ErrWrongKey = errors.New("the key does not open the disk")
	// ErrOpen says that the disk was open before the key was tried.
	ErrOpen = errors.New("the disk is open already")
)

const (
	// maxRequest bounds a request, in bytes: a key, an ID and a signature with their tags are 134.
	maxRequest = 1 << 10
	// requestTimeout bounds how long a request may take to come in.
	requestTimeout = 10 * time.Second
	// tryTimeout bounds one try of a key.
	tryTimeout = 2 * time.Minute
	// grace is how long calls may take once the disk is open: the machine is about to boot, and strangers
	// are not what it waits for.
	grace = 2 * time.Second
	// idleTimeout bounds how long a connection is open without a call.
	idleTimeout = 5 * time.Second
	// callTimeout bounds a call, and so how long a caller may leave its answer unread. A caller that waits in
	// the queue for longer comes back, and keeps its place there.
	callTimeout = 3 * time.Minute
)

// Limits have lower rates than those of a service in the cluster: the machine's owner is one caller.
var Limits = atls.Limits{SetUp: 256, SetUpPerSource: 4, Open: 256, OpenPerSource: 8, Rate: 2, Burst: 16, Total: 32, Bytes: 12 << 20, BytesPerSource: 3 << 20, ConnBytes: 16 << 10}

// Config lists what a Server needs. All fields but one of OwnerKey and NoOwnerKey are required.
type Config struct {
	// DiskID names this machine's state disk.
	DiskID keys.DiskID
	// OwnerKey is the owner's public key, with which requests are signed (B1).
	OwnerKey ed25519.PublicKey
	// NoOwnerKey is insecure, and required if there is no OwnerKey: then nobody signs, and who has a disk's key names its cluster.
	NoOwnerKey bool
	// Try opens the disk with a key. Its error wraps [ErrWrongKey] if the key opens nothing, and [ErrOpen]
	// if the disk was open; any other is the disk's fault. It is never called twice at one time from
	// here; what else calls it is its own to put in order.
	//
	// The machine locks itself to the cluster (PCR 15) before anything of the opened disk is used, so that a disk made by
	// somebody else never runs in a machine that passes for unlocked.
	Try func(ctx context.Context, key keys.Disk, cluster keys.ClusterID) error
	// Attester makes evidence of the purpose machine.
	Attester attest.Attester
	// Challenges shares the TPM among callers, and with those of the process's other servers.
	Challenges *admission.Queue
	// Calls counts connections and calls; a process has one for all of its servers.
	Calls *rpc.Metrics
	// Metrics takes the server's own.
	Metrics prometheus.Registerer
	// Log takes what callers are not told.
	Log *slog.Logger
}

// Server implements muster.recover.v1.
type Server struct {
	cfg       Config
	turns     *turns
	idle      time.Duration // see idleTimeout
	call      time.Duration // see callTimeout
	attempts  *prometheus.CounterVec
	recovered chan struct{}
	once      sync.Once
}

var _ recoverv1connect.RecoverServiceHandler = (*Server)(nil)

// New returns a Server, or says which part of cfg is missing.
func New(cfg Config) (*Server, error) {
	if cfg.DiskID.String() == "" || cfg.Try == nil || cfg.Attester == nil || cfg.Challenges == nil || cfg.Calls == nil || cfg.Metrics == nil || cfg.Log == nil {
		return nil, errors.New("recovery: DiskID, Try, Attester, Challenges, Calls, Metrics and Log are required")
	}
	if (cfg.OwnerKey == nil) != cfg.NoOwnerKey {
		return nil, errors.New("recovery: want either OwnerKey or NoOwnerKey")
	}
	s := &Server{
		cfg: cfg, turns: newQueue(time.Now, betweenAttempts), idle: idleTimeout, call: callTimeout, recovered: make(chan struct{}),
		attempts: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "muster_recovery_attempts_total", Help: "Recoveries that were asked for, by reason; ACCEPTED: the disk is open.",
		}, []string{"reason"}),
	}
	if err := cfg.Metrics.Register(s.attempts); err != nil {
		return nil, fmt.Errorf("recovery: %w", err)
	}
	return s, nil
}

// Recovered is closed once a caller's key has opened the disk, and the caller was told, or did not listen for two seconds.
func (s *Server) Recovered() <-chan struct{} { return s.recovered }

// Service is what Run serves, for a server of another make; places for connections are that one's.
func (s *Server) Service() rpc.Service {
	return rpc.Serve[recoverv1connect.RecoverServiceHandler](recoverv1connect.RecoverServiceName, s, recoverv1connect.NewRecoverServiceHandler)
}

// Run serves on l until ctx ends; calls that are under way then have two seconds to be answered in.
func (s *Server) Run(ctx context.Context, l net.Listener) error {
	health := rpc.NewHealth()
	server, err := rpc.NewServer(rpc.Config{
		Listener: l, Health: health, Metrics: s.cfg.Calls, Log: s.cfg.Log,
		MaxRequest: maxRequest, Timeout: requestTimeout, StreamTimeout: s.call, IdleTimeout: s.idle, Grace: grace,
		// The caller is the owner's program, which has no TPM: it judges us, and shows that it may by
		// the owner's signature and the key.
		ATLS:     atls.ServerConfig{Attester: s.cfg.Attester, Appraiser: atls.NoAppraiser, Limits: Limits, Challenges: s.cfg.Challenges},
		Services: []rpc.Service{s.Service()},
	})
	if err != nil {
		return err
	}
	health.SetAll(true)
	s.cfg.Log.InfoContext(ctx, "waiting for the owner's recovery beside the tries to rejoin", "recover", l.Addr().String(), "disk", s.cfg.DiskID.String())
	return server.Run(ctx)
}

// Describe implements [recoverv1connect.RecoverServiceHandler].
func (s *Server) Describe(context.Context, *recoverv1.DescribeRequest) (*recoverv1.DescribeResponse, error) {
	return &recoverv1.DescribeResponse{DiskId: s.cfg.DiskID.String()}, nil
}

// Recover implements [recoverv1connect.RecoverServiceHandler].
func (s *Server) Recover(ctx context.Context, req *recoverv1.RecoverRequest, stream *connect.ServerStream[recoverv1.RecoverResponse]) error {
	err := s.recover(ctx, req, func(state recoverv1.State) error {
		return stream.Send(&recoverv1.RecoverResponse{State: state, DiskId: s.cfg.DiskID.String()})
	})
	s.attempts.WithLabelValues(attest.ReasonName(rpc.ReasonOf(err))).Inc() // R1
	return err
}

// recover tells the caller how far its key is. A caller takes what it is told when it pleases, and never if it
// pleases, so its key goes its way beside that: who holds the turn, or a place in the queue, waits for no caller.
func (s *Server) recover(ctx context.Context, req *recoverv1.RecoverRequest, tell func(recoverv1.State) error) error {
	r, err := ownerorder.ParseRecovery(req, s.cfg.DiskID, s.cfg.OwnerKey)
	if err != nil {
		return err
	}
	ctx, hangUp := context.WithCancel(ctx)
	defer hangUp()
	states := make(chan recoverv1.State, len(recoverv1.State_name)) // each is sent once: it is never full
	var outcome error
	go func() {
		defer close(states)
		outcome = s.serve(ctx, r, func(state recoverv1.State) { states <- state })
	}()
	var told error
	for state := range states {
		if told != nil {
			continue // what it is tried with is tried to its end
		}
		if told = tell(state); told != nil {
			hangUp() // whoever hung up in the queue costs no try
		} else if state == recoverv1.State_STATE_OPENED {
			s.opened()
		}
	}
	if outcome != nil {
		return outcome
	}
	return told
}

// serve waits for the caller's turn and tries its key.
func (s *Server) serve(ctx context.Context, r ownerorder.Recovery, tell func(recoverv1.State)) error {
	// A call that is tried, or waits for its turn, keeps its connection: there are as many as turns lets in.
	if session, ok := atls.SessionFrom(ctx); ok {
		defer session.Keep()()
	}
	tell(recoverv1.State_STATE_RECEIVED)
	done, err := s.turns.take(ctx, admission.SourceOfAddress(remoteOf(ctx)), func() { tell(recoverv1.State_STATE_WAITING) })
	if err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		done(false)
		return err
	}
	tell(recoverv1.State_STATE_TRYING)
	err = s.try(ctx, r.Key, r.Cluster)
	done(errors.Is(err, ErrWrongKey))
	switch {
	case err == nil:
		s.cfg.Log.InfoContext(ctx, "the owner's key opened the state disk", "disk", s.cfg.DiskID.String())
		tell(recoverv1.State_STATE_OPENED)
		// Whether the caller still listens changes nothing: the disk is open.
		time.AfterFunc(grace, s.opened)
		return nil
	case errors.Is(err, ErrOpen):
		tell(recoverv1.State_STATE_OPEN_ALREADY)
		return nil
	case errors.Is(err, ErrWrongKey):
		return attest.Refuse(attestv1.Reason_REASON_RECOVERY_SECRET_INVALID, "the key does not open disk %s", s.cfg.DiskID)
	}
	if _, ok := errors.AsType[*attest.Refusal](err); ok {
		return err
	}
	return attest.Refuse(attestv1.Reason_REASON_STATE_DISK, "%w", err)
}

func (s *Server) opened() { s.once.Do(func() { close(s.recovered) }) }

// try tries the key to its end, whether or not its caller waits for it: a half-done opening would be
// nobody's.
func (s *Server) try(ctx context.Context, key keys.Disk, cluster keys.ClusterID) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), tryTimeout)
	defer cancel()
	return s.cfg.Try(ctx, key, cluster)
}

// remoteOf gives the caller's address; empty: a call from nowhere.
func remoteOf(ctx context.Context) string {
	call, ok := connect.CallInfoForHandlerContext(ctx)
	if !ok {
		return ""
	}
	return call.Peer().Addr
}
