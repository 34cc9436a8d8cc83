// Package recovery lets the owner open a control plane's state disk when no joinservice can.
//
// The caller appraises this machine, and does not attest itself: the owner's workstation has no TPM. It sends the key of this machine's disk and the ID of
// the disk's cluster, signed with the owner's key, whose public key the image measured. The signature binds disk, key and cluster, so that the machine is
// never locked (PCR 15) to this cluster with an attacker's disk. The key is valid if it opens the disk, so an attacker would have to guess 256 bits. The
// request also has the lists of software that the running system compares the disk with (B8), under the same signature.
//
// Unattested clients must not keep the owner out. So no address is locked out permanently: each has a number of attempts a minute, one at a time, and keeps
// its position when it is refused because the queue is full; see queue. The machine's own attempts to rejoin continue meanwhile, and both use the same
// function to try a key.
package recovery

import (
	"context"
	"encoding/json"
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
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
	"github.com/muster-k8s/muster/trust/peerlimit"
)

// The error of Config.Try wraps one of these unless the disk itself failed.
var (
	// ErrWrongKey means that the key does not open the disk.
	ErrWrongKey = errors.New("the key does not open the disk")
	// ErrOpen means that the disk was open before the key was tried.
	ErrOpen = errors.New("the disk is open already")
)

const (
	// maxRequest bounds a request, in bytes: two lists of software, an endpoint, and 134 for a key, an ID and a signature with their tags.
	maxRequest = 2*ownerorder.MaxList + 1<<10
	// requestTimeout bounds the time for receiving a request.
	requestTimeout = 10 * time.Second
	// tryTimeout bounds one attempt with a key.
	tryTimeout = 2 * time.Minute
	// grace is how long calls may take once the disk is open: the machine is about to boot, and does not wait longer for unattested clients.
	grace = 2 * time.Second
	// idleTimeout bounds how long a connection stays open without a call.
	idleTimeout = 5 * time.Second
	// callTimeout bounds a call, and so how long a client may leave its answer unread. A client that waits longer in the queue calls again, and keeps
	// its place.
	callTimeout = 3 * time.Minute
)

// Limits have lower rates than those of a service in the cluster: the only caller is the machine's owner. Only a request with long lists needs one of the
// large sessions.
var Limits = atls.Limits{
	SetUp: 256, SetUpPerSource: 4, Open: 256, OpenPerSource: 8, Rate: 2, Burst: 16, Total: 32, Bytes: 12 << 20, BytesPerSource: 3 << 20, ConnBytes: 16 << 10,
	Large: 16, LargePerSource: 4, LargeBytes: 64 << 10,
}

// Config lists what a Server needs. All fields are required, but only one of OwnerKeys and NoOwnerKey is set.
type Config struct {
	// DiskID names this machine's state disk.
	DiskID keys.DiskID
	// OwnerKeys are the owner's public keys, which verify requests (B1).
	OwnerKeys attest.OwnerKeys
	// NoOwnerKey is insecure, and required if there are no OwnerKeys: then requests are not signed, and a client with the disk's key chooses its cluster.
	NoOwnerKey bool
	// Try opens the disk with a key. Its error wraps [ErrWrongKey] if the key is wrong, and [ErrOpen] if the disk was open; all others are faults of the
	// disk. This package never makes two calls at once; Try must serialize calls from elsewhere itself.
	//
	// The machine locks itself to the cluster (PCR 15) before anything of the opened disk is used, so that an attacker's disk never runs in an unlocked
	// machine. Before that, it stores what the disk is to be compared with (B8).
	Try func(ctx context.Context, key keys.Disk, cluster keys.ClusterID, desired component.Desired) error
	// Attester makes evidence of the purpose machine.
	Attester attest.Attester
	// Challenges shares the TPM among callers, also those of the process's other servers.
	Challenges *peerlimit.Queue
	// Calls counts connections and calls; a process has one for all of its servers.
	Calls *rpc.Metrics
	// Metrics registers the server's own metrics.
	Metrics prometheus.Registerer
	// Log receives the details that callers do not get.
	Log *slog.Logger
}

// Server implements muster.recover.v1.
type Server struct {
	cfg       Config
	queue     *queue
	idle      time.Duration // see idleTimeout
	call      time.Duration // see callTimeout
	grace     time.Duration // the constant of that name, or longer in a test
	attempts  *prometheus.CounterVec
	nonce     ownerorder.Nonce
	recovered chan struct{}
	once      sync.Once
}

var _ recoverv1connect.RecoverServiceHandler = (*Server)(nil)

// New returns a Server, or an error that names the missing field of cfg.
func New(cfg Config) (*Server, error) {
	if cfg.DiskID.String() == "" || cfg.Try == nil || cfg.Attester == nil || cfg.Challenges == nil || cfg.Calls == nil || cfg.Metrics == nil || cfg.Log == nil {
		return nil, errors.New("recovery: DiskID, Try, Attester, Challenges, Calls, Metrics and Log are required")
	}
	if (len(cfg.OwnerKeys) == 0) != cfg.NoOwnerKey {
		return nil, errors.New("recovery: want either OwnerKeys or NoOwnerKey")
	}
	s := &Server{
		cfg: cfg, queue: newQueue(time.Now, betweenAttempts), idle: idleTimeout, call: callTimeout, grace: grace, nonce: ownerorder.NewNonce(), recovered: make(chan struct{}),
		attempts: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "muster_recovery_attempts_total", Help: "Recovery requests by reason code; ACCEPTED means that the disk was opened.",
		}, []string{"reason"}),
	}
	if err := cfg.Metrics.Register(s.attempts); err != nil {
		return nil, fmt.Errorf("recovery: %w", err)
	}
	return s, nil
}

// Recovered is closed once a caller's key has opened the disk, and the caller was notified or two seconds have passed.
func (s *Server) Recovered() <-chan struct{} { return s.recovered }

// Service returns the handler that Run serves, for use in another server, which then limits connections itself.
func (s *Server) Service() rpc.Service {
	return rpc.Serve[recoverv1connect.RecoverServiceHandler](recoverv1connect.RecoverServiceName, s, recoverv1connect.NewRecoverServiceHandler)
}

// Run serves on l until ctx ends; running calls then have two seconds to be answered.
func (s *Server) Run(ctx context.Context, l net.Listener) error {
	health := rpc.NewHealth()
	server, err := rpc.NewServer(rpc.Config{
		Listener: l, Health: health, Metrics: s.cfg.Calls, Log: s.cfg.Log,
		MaxRequest: maxRequest, Timeout: requestTimeout, StreamTimeout: s.call, IdleTimeout: s.idle, Grace: s.grace,
		// The caller is the owner's program, which has no TPM: it appraises this machine, and authenticates itself by the owner's signature and the key.
		ATLS:     atls.ServerConfig{Attester: s.cfg.Attester, Appraiser: atls.NoAppraiser, Limits: Limits, Challenges: s.cfg.Challenges},
		Services: []rpc.Service{s.Service()},
	})
	if err != nil {
		return err
	}
	health.SetAll(true)
	s.cfg.Log.InfoContext(ctx, "waiting for a recovery by the owner; rejoin attempts continue", "recover", l.Addr().String(), "disk", s.cfg.DiskID.String())
	return server.Run(ctx)
}

// Describe implements [recoverv1connect.RecoverServiceHandler].
func (s *Server) Describe(context.Context, *recoverv1.DescribeRequest) (*recoverv1.DescribeResponse, error) {
	return &recoverv1.DescribeResponse{DiskId: s.cfg.DiskID.String(), Nonce: s.nonce[:]}, nil
}

// Recover implements [recoverv1connect.RecoverServiceHandler].
func (s *Server) Recover(ctx context.Context, req *recoverv1.RecoverRequest, stream *connect.ServerStream[recoverv1.RecoverResponse]) error {
	err := s.recover(ctx, req, func(state recoverv1.State) error {
		return stream.Send(&recoverv1.RecoverResponse{State: state, DiskId: s.cfg.DiskID.String()})
	})
	s.attempts.WithLabelValues(attest.ReasonName(rpc.ReasonOf(err))).Inc() // R1
	return err
}

// recover notifies the caller of the progress with its key. A caller may read late or never, so another goroutine tries the key, and no slow client delays
// the queue.
func (s *Server) recover(ctx context.Context, req *recoverv1.RecoverRequest, notify func(recoverv1.State) error) error {
	r, err := ownerorder.ParseRecovery(req, s.cfg.DiskID, s.nonce, s.cfg.OwnerKeys)
	if err != nil {
		return err
	}
	desired, err := desiredOf(r.Software)
	if err != nil {
		return err
	}
	ctx, hangUp := context.WithCancel(ctx)
	defer hangUp()
	states := make(chan recoverv1.State, len(recoverv1.State_name)) // each state is sent once: it is never full
	var outcome error
	go func() {
		defer close(states)
		outcome = s.serve(ctx, r, desired, func(state recoverv1.State) { states <- state })
	}()
	var failed error
	for state := range states {
		if failed != nil {
			continue // an attempt with a key always runs to its end
		}
		if failed = notify(state); failed != nil {
			hangUp() // a client that hangs up in the queue costs no attempt
		} else if state == recoverv1.State_STATE_OPENED {
			s.opened()
		}
	}
	if outcome != nil {
		return outcome
	}
	return failed
}

// serve waits for the call's place in the queue and tries its key.
func (s *Server) serve(ctx context.Context, r ownerorder.Recovery, desired component.Desired, notify func(recoverv1.State)) error {
	// A call that is tried or waits keeps its connection: the queue bounds their number.
	if session, ok := atls.SessionFrom(ctx); ok {
		defer session.Keep()()
	}
	notify(recoverv1.State_STATE_RECEIVED)
	done, err := s.queue.take(ctx, peerlimit.SourceOfAddress(remoteOf(ctx)), func() { notify(recoverv1.State_STATE_WAITING) })
	if err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		done(false)
		return err
	}
	notify(recoverv1.State_STATE_TRYING)
	err = s.try(ctx, r, desired)
	done(errors.Is(err, ErrWrongKey))
	switch {
	case err == nil:
		s.cfg.Log.InfoContext(ctx, "the owner's key opened the state disk", "disk", s.cfg.DiskID.String())
		notify(recoverv1.State_STATE_OPENED)
		// The disk is open, whether or not the caller still reads.
		time.AfterFunc(s.grace, s.opened)
		return nil
	case errors.Is(err, ErrOpen):
		notify(recoverv1.State_STATE_OPEN_ALREADY)
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

// try completes the attempt even if its caller hangs up: no other call would finish a half-done opening.
func (s *Server) try(ctx context.Context, r ownerorder.Recovery, desired component.Desired) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), tryTimeout)
	defer cancel()
	return s.cfg.Try(ctx, r.Key, r.Cluster, desired)
}

// desiredOf returns what the disk is compared with (B8), or REQUEST_INVALID. Earlier versions of muster send no software; their owners must still be able to
// open the disk, which is then not compared.
func desiredOf(s *ownerorder.Software) (component.Desired, error) {
	if s == nil {
		return component.Desired{Uncompared: component.UncomparedRecovery}, nil
	}
	refuse := func(field string, err error) (component.Desired, error) {
		return component.Desired{}, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "software.%s: %w", field, err)
	}
	d := component.Desired{Recovered: true, Replace: s.Replace, Adopted: s.Adopted, Endpoint: s.Endpoint}
	if err := metadata.CheckHostPort(s.Endpoint); err != nil {
		return refuse("endpoint", err)
	}
	var err error
	if d.List, err = parseList(s.List); err != nil {
		return refuse("list", err)
	}
	if s.Other != "" {
		other, err := parseList(s.Other)
		if err != nil {
			return refuse("other", err)
		}
		d.Other = &other
	}
	return d, nil
}

func parseList(text string) (versions.List, error) {
	if !json.Valid([]byte(text)) { // YAML has aliases, and without an owner's key in the image an unauthenticated client may send it
		return versions.List{}, errors.New("it is not valid JSON")
	}
	list, err := versions.Parse([]byte(text))
	if err != nil {
		return versions.List{}, err
	}
	_, err = component.ParseSoftware(list.Wire(), list.Images) // B8, B9
	return list, err
}

// remoteOf returns the caller's address; empty if it has none.
func remoteOf(ctx context.Context) string {
	call, ok := connect.CallInfoForHandlerContext(ctx)
	if !ok {
		return ""
	}
	return call.Peer().Addr
}
