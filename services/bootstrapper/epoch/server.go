package epoch

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	recoverv1 "github.com/muster-k8s/muster/gen/muster/recover/v1"
	"github.com/muster-k8s/muster/gen/muster/recover/v1/recoverv1connect"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/required"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/services/bootstrapper/recovery"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// Waiting is a machine whose disk is not the newest and that waits for its owner. All fields are required but Owner.
type Waiting struct {
	// Standing is the state of disk and TPM when the machine found that its disk is not the newest.
	Standing Standing
	// Keeper is the machine's keeper.
	Keeper Keeper
	// Cluster and Machine identify the machine.
	Cluster keys.ClusterID
	Machine attest.MachineID
	// Owner has the owner's public keys; nil if the image has none, and no order is accepted.
	Owner attest.OwnerKeys
	// Attester makes evidence of the purpose machine.
	Attester attest.Attester
	// Calls counts connections and calls.
	Calls *rpc.Metrics
	Log   *slog.Logger

	accepted  chan struct{}
	once      sync.Once
	mu        sync.Mutex // one order at a time
	nonceOnce sync.Once
	nonce     ownerorder.Nonce
}

var _ recoverv1connect.EpochServiceHandler = (*Waiting)(nil)

const (
	maxRequest     = 1 << 10
	requestTimeout = 10 * time.Second
	beginTimeout   = 30 * time.Second
	grace          = 2 * time.Second
	idleTimeout    = 5 * time.Second
)

// Wait serves on l until the owner has accepted the disk, and returns nil then.
func (w *Waiting) Wait(ctx context.Context, l net.Listener) error {
	if err := required.Fields("epoch.Waiting", w, "Owner"); err != nil {
		return errors.Join(err, l.Close())
	}
	w.accepted = make(chan struct{})
	health := rpc.NewHealth()
	server, err := rpc.NewServer(rpc.Config{
		Listener: l, Health: health, Metrics: w.Calls, Log: w.Log, MaxRequest: maxRequest, Timeout: requestTimeout, IdleTimeout: idleTimeout, Grace: grace,
		// The caller is the owner's program, which has no TPM: it appraises this machine, and authenticates itself by the owner's signature.
		ATLS:     atls.ServerConfig{Attester: w.Attester, Appraiser: atls.NoAppraiser, Limits: recovery.Limits, Challenges: atls.NewChallengeQueue()},
		Services: []rpc.Service{w.Service()},
	})
	if err != nil {
		return errors.Join(err, l.Close())
	}
	health.SetAll(true)
	w.Log.InfoContext(ctx, "waiting for the owner to look at this state disk", "recover", l.Addr().String())
	serving, stop := context.WithCancel(ctx)
	defer stop()
	done := make(chan error, 1)
	go func() { done <- server.Run(serving) }()
	select {
	case err := <-done:
		return errors.Join(errors.New("the owner's order can't be received any more"), err)
	case <-w.accepted:
	}
	stop()
	if err := <-done; err != nil {
		w.Log.WarnContext(ctx, "the listener for the owner's order ended with an error; the boot continues", "err", err)
	}
	return ctx.Err()
}

// Service returns the handler that Wait serves.
func (w *Waiting) Service() rpc.Service {
	return rpc.Serve[recoverv1connect.EpochServiceHandler](recoverv1connect.EpochServiceName, w, recoverv1connect.NewEpochServiceHandler)
}

// DescribeEpoch implements [recoverv1connect.EpochServiceHandler].
func (w *Waiting) DescribeEpoch(_ context.Context, _ *recoverv1.DescribeEpochRequest) (*recoverv1.DescribeEpochResponse, error) {
	out := w.Standing.wire()
	nonce := w.challenge()
	out.Nonce = nonce[:]
	return out, nil
}

// challenge returns the nonce in the owner's signed order, so that the order is valid only for this boot (B7).
func (w *Waiting) challenge() ownerorder.Nonce {
	w.nonceOnce.Do(func() { w.nonce = ownerorder.NewNonce() })
	return w.nonce
}

func (s Standing) wire() *recoverv1.DescribeEpochResponse {
	out := &recoverv1.DescribeEpochResponse{TpmCounter: s.Counter}
	if r := s.Record; r != nil {
		out.Epoch, out.PolicySerial, out.Bans, out.BannedMachines, out.DiskCounter = r.Epoch, r.PolicySerial, r.Bans, r.BannedMachines, r.Counter
	}
	return out
}

// AcceptEpoch implements [recoverv1connect.EpochServiceHandler].
func (w *Waiting) AcceptEpoch(ctx context.Context, req *recoverv1.AcceptEpochRequest) (*recoverv1.AcceptEpochResponse, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	// The first checks use no TPM command: the client may be unauthenticated.
	is := w.Standing.wire()
	order := ownerorder.Epoch{Cluster: w.Cluster, Machine: w.Machine, Epoch: is.GetEpoch(), DiskCounter: is.GetDiskCounter(), TPMCounter: is.GetTpmCounter(), Nonce: w.challenge()}
	if err := order.Verify(req, w.Owner); err != nil { // B7
		return nil, err
	}
	s, err := w.Keeper.Check(ctx)
	if err != nil {
		return nil, err
	}
	if s.Err == nil { // already accepted by an earlier order, although its answer may have been an error
		w.goOn()
		return &recoverv1.AcceptEpochResponse{}, nil
	}
	if now := s.wire(); now.GetEpoch() != is.GetEpoch() || now.GetDiskCounter() != is.GetDiskCounter() || now.GetTpmCounter() != is.GetTpmCounter() { // B7
		return nil, attest.Refuse(attestv1.Reason_REASON_CLUSTER_ROLLED_BACK, "disk or TPM have changed since this machine started: reboot it")
	}
	r := Record{Written: time.Now()}
	if s.Record != nil {
		r = *s.Record
	}
	// The order is carried out even if the client disconnects: half of it would leave another value in the TPM than the order has.
	begin, cancel := context.WithTimeout(context.WithoutCancel(ctx), beginTimeout)
	defer cancel()
	if err := w.Keeper.Begin(begin, r); err != nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_STATE_DISK, "note that the owner has accepted epoch %d: %w", r.Epoch, err)
	}
	w.Log.WarnContext(ctx, "the owner has accepted an older state disk", "epoch", r.Epoch, "policy_serial", r.PolicySerial)
	w.goOn()
	return &recoverv1.AcceptEpochResponse{}, nil
}

// goOn ends the wait. Every handler that answers that the disk is accepted calls it: otherwise the machine would still wait for an owner who was
// notified of the end (B3).
func (w *Waiting) goOn() { w.once.Do(func() { close(w.accepted) }) }
