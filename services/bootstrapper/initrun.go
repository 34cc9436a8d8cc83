package bootstrapper

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"k8s.io/apimachinery/pkg/runtime"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/internal/clusterinfo"
	"github.com/muster-k8s/muster/internal/etcdencryption"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/services/bootstrapper/clusterstate"
	"github.com/muster-k8s/muster/services/bootstrapper/console"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// maxText bounds a progress text, in characters.
const maxText = 200

// maxHistory bounds what a run remembers; later progress replaces the last entry.
const maxHistory = 500

// initRun is one init: what it told so far, and how it ended. It has its own life; clients
// come and go.
type initRun struct {
	order   *initOrder
	started time.Time
	log     *slog.Logger
	screen  *console.Console

	mu      sync.Mutex
	history []*initv1.Progress
	changed chan struct{} // closed and replaced with every change
	result  *initv1.InitResult
	err     error
	ended   bool
}

func newInitRun(o *initOrder, log *slog.Logger, screen *console.Console) *initRun {
	return &initRun{order: o, started: time.Now(), log: log, screen: screen, changed: make(chan struct{})}
}

func (r *initRun) tell(phase initv1.Phase, text string) {
	if c := []rune(text); len(c) > maxText {
		text = string(c[:maxText])
	}
	r.log.Info("progress", "phase", phase.String(), "text", text)
	r.screen.Say(text)
	p := &initv1.Progress{Phase: phase, Text: text, Elapsed: durationpb.New(time.Since(r.started))}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.history) == maxHistory {
		r.history[maxHistory-1] = p
	} else {
		r.history = append(r.history, p)
	}
	r.wake()
}

// wake is called with the mutex held.
func (r *initRun) wake() {
	close(r.changed)
	r.changed = make(chan struct{})
}

func (r *initRun) end(result *initv1.InitResult, err error) {
	if reason := attest.ReasonOf(err); err != nil { // what kubeadm printed is for the owner alone
		r.screen.Say("the init has failed: " + attest.ReasonName(reason) + ". " + rpc.RemedyOf(reason))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.result, r.err, r.ended = result, err, true
	clear(r.order.rawRoot)
	clear(r.order.rawSalt)
	r.order.root, r.order.rawRoot, r.order.rawSalt = nil, nil, nil // K3: no longer than needed
	r.wake()
}

func (r *initRun) failed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.ended && r.err != nil
}

// follow sends what was told so far and what comes, and the result as the last message.
func (r *initRun) follow(ctx context.Context, send func(*initv1.InitResponse) error) error {
	for next := 0; ; {
		r.mu.Lock()
		news := r.history[min(next, len(r.history)):]
		ended, result, err, changed := r.ended, r.result, r.err, r.changed
		r.mu.Unlock()
		for _, p := range news {
			if err := send(&initv1.InitResponse{Message: &initv1.InitResponse_Progress{Progress: p}}); err != nil {
				return err
			}
			next++
		}
		if ended && err != nil {
			return err
		}
		if ended {
			return send(&initv1.InitResponse{Message: &initv1.InitResponse_Result{Result: result}})
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// initialize runs one init to its end.
func (b *Bootstrapper) initialize(ctx context.Context, r *initRun) {
	result, err := b.becomeFirst(ctx, r)
	err = namedDisk(err)
	reason := attest.ReasonName(rpc.ReasonOf(err)) // R1
	b.metrics.inits.WithLabelValues(reason).Inc()
	if err != nil {
		b.tries.Fail(rpc.ReasonOf(err))
		b.log.ErrorContext(ctx, "init failed", "reason", reason, "err", err)
	} else {
		b.log.InfoContext(ctx, "this machine is the first node of its cluster", "seconds", time.Since(r.started).Seconds())
	}
	r.end(result, err)
	if err == nil {
		close(b.finished) // once: a run that did not fail is never replaced
	}
}

// becomeFirst is the order of an init. Each step is noted in the journal, and is safe to
// take again (B3).
func (b *Bootstrapper) becomeFirst(ctx context.Context, r *initRun) (*initv1.InitResult, error) {
	o := r.order
	rec := b.lock.record()
	// The caller chose the salt, so that it knows what PCR 15 may become.
	salt, resumed := [32]byte(o.request.GetMeasurementSalt()), rec.Locked()
	id := o.root.ClusterID(salt)
	if resumed && id != keys.ClusterID(rec.ClusterID) {
		return nil, invalid("root_secret, salt, measurement_salt: this machine was locked by an init with others; use the directory of that cluster")
	}
	if o.kind == journal.KindAdopt {
		// First of all: the wrong machine is not locked, and nothing on it is touched.
		if err := b.isControlPlane(o); err != nil {
			return nil, err
		}
	}
	r.tell(initv1.Phase_PHASE_WAITING, "taking the node lock")
	err := b.lock.acquire(ctx, journal.Record{
		Kind: o.kind, ClusterID: id[:], MeasurementSalt: salt[:], KeyDigest: o.keyDigest[:], RequestDigest: o.digest[:],
		NodeName: o.meta.Name, DiskID: b.diskID.String(),
	})
	if err != nil {
		return nil, err
	}
	r.tell(initv1.Phase_PHASE_LOCKED, "the machine is locked to cluster "+id.String()[:16])
	if rec.Step < journal.StepDone {
		// A request that was changed since kubeadm ran needs kubeadm to run again.
		changed := resumed && string(rec.RequestDigest) != string(o.digest[:])
		if err := b.firstNode(ctx, r, id, salt, changed); err != nil {
			return nil, err
		}
	}
	kubeconfig, err := os.ReadFile(b.on(adminConf))
	if err != nil {
		return nil, fmt.Errorf("administrator's kubeconfig: %w", err)
	}
	r.tell(initv1.Phase_PHASE_DONE, "this machine is a node")
	out := &initv1.InitResult{
		Kubeconfig: kubeconfig, ClusterId: id[:], MachineId: b.machineID[:], NodeName: o.meta.Name, DiskId: b.diskID.String(),
	}
	for _, a := range o.meta.Addresses {
		out.Addresses = append(out.Addresses, a.String())
	}
	return out, nil
}

func (b *Bootstrapper) firstNode(ctx context.Context, r *initRun, id keys.ClusterID, salt [32]byte, changed bool) error {
	o := r.order
	key, err := o.root.Disk(b.diskID, keys.DiskSalt(o.request.GetDiskSalt()))
	if err != nil {
		return err
	}
	if err := b.openDisk(ctx, key, r.tell); err != nil {
		return err
	}
	if o.kind == journal.KindInit {
		if err := b.makeCluster(ctx, r, changed); err != nil {
			return err
		}
	} else if err := b.serveAdopted(ctx); err != nil {
		return err
	}
	var proxy []runtime.Object
	if o.kind == journal.KindInit {
		if proxy, err = b.proxy(ctx, o); err != nil {
			return err
		}
	}
	r.tell(initv1.Phase_PHASE_KUBEADM, "writing the cluster's own objects")
	kubeconfig, err := os.ReadFile(b.on(adminConf))
	if err != nil {
		return fmt.Errorf("administrator's kubeconfig: %w", err)
	}
	wctx, cancel := context.WithTimeout(ctx, b.cfg.Timing.ClusterState)
	defer cancel()
	err = b.cfg.WriteClusterState(wctx, kubeconfig, clusterstate.State{
		Root: o.rawRoot, Salt: o.rawSalt,
		Info: clusterinfo.Info{
			ClusterID: id, MeasurementSalt: salt, KubernetesVersion: o.request.GetKubernetesVersion(),
			ControlPlaneEndpoint: o.request.GetControlPlaneEndpoint(), APIServerSANs: kubeadm.APIServerSANs(b.image, o.request.GetApiServerSans()),
			Components: o.software.list.Components, Images: o.software.list.Images, Adopted: o.kind == journal.KindAdopt,
		},
		Proxy: proxy,
	})
	if err != nil {
		return attest.Refuse(attestv1.Reason_REASON_API_UNAVAILABLE, "the cluster's own objects: %w", err)
	}
	r.tell(initv1.Phase_PHASE_CLUSTER_STATE, "the cluster's own objects are written")
	return b.finish(ctx)
}

// makeCluster installs Kubernetes and runs kubeadm, if that was not done for the same request before. The API server runs then.
func (b *Bootstrapper) makeCluster(ctx context.Context, r *initRun, changed bool) error {
	if err := b.install(ctx, r.order.software, true, r.tell); err != nil {
		return err
	}
	if b.lock.record().Step >= journal.StepKubeadmRan && !changed {
		if err := b.notRolledBack(ctx); err != nil { // B7: before etcd and the API server start
			return err
		}
		return b.serveAgain(ctx)
	}
	if err := b.clean(ctx, r.tell, stayOut); err != nil {
		return err
	}
	return b.kubeadmInit(ctx, r.order, r.tell)
}

func (b *Bootstrapper) initConfig(o *initOrder) ([]byte, error) {
	return kubeadm.Init(b.image, kubeadm.Cluster{
		Name: o.request.GetClusterName(), Version: o.request.GetKubernetesVersion(), Endpoint: o.request.GetControlPlaneEndpoint(),
		PodCIDRs: o.request.GetPodCidrs(), ServiceCIDRs: o.request.GetServiceCidrs(), APIServerSANs: o.request.GetApiServerSans(),
		ControlPlaneNode: nodeOf(o.meta), Images: o.software.images,
	})
}

func (b *Bootstrapper) kubeadmInit(ctx context.Context, o *initOrder, tell say) error {
	config, err := b.initConfig(o)
	if err != nil {
		return err
	}
	if err := b.writeAuthz(); err != nil {
		return err
	}
	key := etcdencryption.Config(o.root.EtcdEncryption())
	if err := machine.WriteFile(b.on(etcdencryption.File), key, 0o600, 0o755); err != nil {
		return err
	}
	err = b.lock.update(func(r *journal.Record) {
		r.Step, r.RequestDigest = max(r.Step, journal.StepConfigured), o.digest[:]
	})
	if err != nil {
		return err
	}
	tell(initv1.Phase_PHASE_CONFIGURED, "kubeadm's configuration is written")
	if err := b.firstKubelet(ctx, o, config); err != nil {
		return err
	}
	return b.runKubeadm(ctx, "init", config, o.software.images, tell, stayOut)
}
