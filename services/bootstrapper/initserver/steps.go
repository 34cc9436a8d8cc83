package initserver

import (
	"context"
	"fmt"
	"os"
	"time"

	"k8s.io/apimachinery/pkg/runtime"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/objects/etcdencryption"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/clusterca"
	"github.com/muster-k8s/muster/services/bootstrapper/clusterobjects"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/kubelet"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/provision"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// initialize runs one init to its end.
func (s *Server) initialize(ctx context.Context, r *initRun) {
	result, err := s.becomeFirst(ctx, r)
	err = provision.DiskError(err)
	reason := attest.ReasonName(rpc.ReasonOf(err)) // R1
	s.inits.WithLabelValues(reason).Inc()
	if err != nil {
		s.node.Attempts.Fail(rpc.ReasonOf(err))
		s.node.Log.ErrorContext(ctx, "init failed", "reason", reason, "err", err)
	} else {
		s.node.Log.InfoContext(ctx, "this machine is the first node of its cluster", "seconds", time.Since(r.started).Seconds())
	}
	r.end(result, err)
	if err == nil {
		close(s.finished) // once: a run that did not fail is never replaced
	}
}

// becomeFirst runs the steps of an init in order. Each step is recorded in the journal, and is safe to repeat (B3).
func (s *Server) becomeFirst(ctx context.Context, r *initRun) (*initv1.InitResult, error) {
	o := r.order
	rec := s.node.Lock.Record()
	// The caller chose the salt, so that it can compute the value of PCR 15.
	salt, resumed := [32]byte(o.request.GetMeasurementSalt()), rec.Locked()
	id := o.root.ClusterID(salt)
	if resumed && id != keys.ClusterID(rec.ClusterID) {
		return nil, invalid("root_secret, salt, measurement_salt: this machine was locked by an init with others; use the directory of that cluster")
	}
	if o.kind == journal.KindAdopt {
		// This comes first, so that the wrong machine is neither locked nor changed.
		if err := s.isControlPlane(o); err != nil {
			return nil, err
		}
	}
	r.report(initv1.Phase_PHASE_WAITING, "taking the node lock")
	err := s.node.Lock.Acquire(ctx, journal.Record{
		Kind: o.kind, ClusterID: id[:], MeasurementSalt: salt[:], KeyDigest: o.keyDigest[:], RequestDigest: o.digest[:],
		NodeName: o.meta.Name, DiskID: s.node.DiskID.String(),
	})
	if err != nil {
		return nil, err
	}
	r.report(initv1.Phase_PHASE_LOCKED, "the machine is locked to cluster "+id.String()[:16])
	if rec.Step < journal.StepDone {
		// If the request has changed since kubeadm ran, kubeadm has to run again.
		changed := resumed && string(rec.RequestDigest) != string(o.digest[:])
		if err := s.firstNode(ctx, r, id, salt, changed); err != nil {
			return nil, err
		}
	}
	kubeconfig, err := os.ReadFile(s.node.On(machine.AdminConf))
	if err != nil {
		return nil, fmt.Errorf("administrator's kubeconfig: %w", err)
	}
	r.report(initv1.Phase_PHASE_DONE, "this machine is a node")
	out := &initv1.InitResult{
		Kubeconfig: kubeconfig, ClusterId: id[:], MachineId: s.node.MachineID[:], NodeName: o.meta.Name, DiskId: s.node.DiskID.String(),
	}
	for _, a := range o.meta.Addresses {
		out.Addresses = append(out.Addresses, a.String())
	}
	return out, nil
}

func (s *Server) firstNode(ctx context.Context, r *initRun, id keys.ClusterID, salt [32]byte, changed bool) error {
	o := r.order
	key, err := o.root.Disk(s.node.DiskID, keys.DiskSalt(o.request.GetDiskSalt()))
	if err != nil {
		return err
	}
	if err := s.node.OpenDisk(ctx, key, r.report); err != nil {
		return err
	}
	if o.kind == journal.KindInit {
		if err := s.makeCluster(ctx, r, changed); err != nil {
			return err
		}
	} else if err := s.serveAdopted(ctx); err != nil {
		return err
	}
	var proxy []runtime.Object
	if o.kind == journal.KindInit {
		if proxy, err = s.proxy(ctx, o); err != nil {
			return err
		}
	}
	r.report(initv1.Phase_PHASE_KUBEADM, "writing the cluster's own objects")
	kubeconfig, err := os.ReadFile(s.node.On(machine.AdminConf))
	if err != nil {
		return fmt.Errorf("administrator's kubeconfig: %w", err)
	}
	wctx, cancel := context.WithTimeout(ctx, s.node.Timing.ClusterState)
	defer cancel()
	err = s.writeClusterState(wctx, kubeconfig, clusterobjects.State{
		Root: o.rawRoot, Salt: o.rawSalt,
		Info: clusterinfo.Info{
			ClusterID: id, MeasurementSalt: salt, KubernetesVersion: o.request.GetKubernetesVersion(),
			ControlPlaneEndpoint: o.request.GetControlPlaneEndpoint(), APIServerSANs: kubeadm.APIServerSANs(s.node.Kubeadm, o.request.GetApiServerSans()),
			Components: o.software.List.Components, Images: o.software.List.Images, Adopted: o.kind == journal.KindAdopt,
		},
		Proxy: proxy,
	})
	if err != nil {
		return attest.Refuse(attestv1.Reason_REASON_API_UNAVAILABLE, "the cluster's own objects: %w", err)
	}
	r.report(initv1.Phase_PHASE_CLUSTER_STATE, "the cluster's own objects are written")
	return s.node.Finish(ctx)
}

// makeCluster installs Kubernetes and runs kubeadm, unless that was done for the same request before. The API server runs then.
func (s *Server) makeCluster(ctx context.Context, r *initRun, changed bool) error {
	if err := s.node.Install(ctx, r.order.software, true, r.report); err != nil {
		return err
	}
	if s.node.Lock.Record().Step >= journal.StepKubeadmRan && !changed {
		if err := s.node.CheckEpoch(ctx); err != nil { // B7: before etcd and the API server start
			return err
		}
		return s.node.ServeAgain(ctx)
	}
	if err := s.node.Clean(ctx, r.report, provision.NoEtcd); err != nil {
		return err
	}
	return s.kubeadmInit(ctx, r.order, r.report)
}

func (s *Server) initConfig(o *initOrder) ([]byte, error) {
	return kubeadm.Init(s.node.Kubeadm, kubeadm.Cluster{
		Restored: o.restore != nil, Name: o.request.GetClusterName(), Version: o.request.GetKubernetesVersion(), Endpoint: o.request.GetControlPlaneEndpoint(),
		PodCIDRs: o.request.GetPodCidrs(), ServiceCIDRs: o.request.GetServiceCidrs(), APIServerSANs: o.request.GetApiServerSans(),
		ControlPlaneNode: provision.KubeadmNode(o.meta), Images: o.software.Images,
	})
}

func (s *Server) kubeadmInit(ctx context.Context, o *initOrder, report provision.Progress) error {
	config, err := s.initConfig(o)
	if err != nil {
		return err
	}
	if err := s.node.WriteAuthz(); err != nil {
		return err
	}
	if o.restore != nil {
		if err := s.restore(ctx, o, report); err != nil {
			return err
		}
	} else {
		key := etcdencryption.Config(o.root.EtcdEncryption())
		if err := machine.WriteFile(s.node.On(etcdencryption.File), key, 0o600, 0o755); err != nil {
			return err
		}
	}
	err = s.node.Lock.Update(func(r *journal.Record) {
		r.Step, r.RequestDigest = max(r.Step, journal.StepConfigured), o.digest[:]
	})
	if err != nil {
		return err
	}
	report(initv1.Phase_PHASE_CONFIGURED, "kubeadm's configuration is written")
	if err := s.firstKubelet(ctx, o, config); err != nil {
		return err
	}
	return s.node.RunKubeadm(ctx, "init", config, o.software.Images, report, provision.NoEtcd)
}

// firstKubelet makes the first machine's authority and its kubelet's certificates before the rest of kubeadm runs: kubeadm keeps existing ones, and
// would write a client certificate that is valid for a year (J7).
func (s *Server) firstKubelet(ctx context.Context, o *initOrder, config []byte) error {
	if err := machine.WriteFile(s.node.On(machine.KubeadmConfig), config, 0o600, 0o755); err != nil {
		return err
	}
	run, cancel := context.WithTimeout(ctx, s.node.Timing.Kubeadm)
	defer cancel()
	var tail kubeadm.Tail
	if err := s.node.Machine.Kubeadm(run, s.node.Output(ctx, "kubeadm init phase certs ca", &tail), "init", "phase", "certs", "ca", "--config", s.node.On(machine.KubeadmConfig)); err != nil {
		return attest.Refuse(attestv1.Reason_REASON_KUBEADM_FAILED, "kubeadm init phase certs ca: %w\n%s", err, tail.String())
	}
	authority, err := clusterca.Load(s.node.On(machine.PKIFolder))
	if err != nil {
		return err
	}
	if err := clusterca.WriteSigner(s.node.On(machine.PKIFolder)); err != nil {
		return err
	}
	conf, err := kubelet.Kubeconfig(kubeadm.LocalEndpoint(kubeadm.Node{Name: o.meta.Name, Addresses: o.meta.Addresses}), authority.PEM()) // as kubeadm writes it
	if err != nil {
		return err
	}
	if err := machine.WriteFile(s.node.On(kubeadm.KubeletConf), conf, 0o600, 0o755); err != nil {
		return err
	}
	client, serving, err := s.node.SignKubelet(authority, o.meta.Name, o.meta.Addresses)
	if err != nil {
		return err
	}
	return kubelet.Place(s.node.Root, client, serving)
}

// proxy makes kubeadm print the objects of kube-proxy.
func (s *Server) proxy(ctx context.Context, o *initOrder) ([]runtime.Object, error) {
	if !s.node.Kubeadm.WantsProxy() {
		return nil, nil
	}
	config, err := s.initConfig(o)
	if err != nil {
		return nil, err
	}
	if err := machine.WriteFile(s.node.On(machine.KubeadmConfig), config, 0o600, 0o755); err != nil {
		return nil, err
	}
	defer func() { _ = os.Remove(s.node.On(machine.KubeadmConfig)) }() // it has no secret
	ctx, cancel := context.WithTimeout(ctx, s.node.Timing.Kubeadm)
	defer cancel()
	var lines []string
	if err := s.node.Machine.Kubeadm(ctx, func(l string) { lines = append(lines, l) }, kubeadm.ProxyManifest(s.node.On(machine.KubeadmConfig))...); err != nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_KUBEADM_FAILED, "kubeadm's manifest of kube-proxy: %w", err)
	}
	return kubeadm.Proxy(lines, o.software.Images[versions.Proxy])
}
