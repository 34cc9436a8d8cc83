// Package install initializes a cluster on its first machine, adopts one, or restores one from a backup, and installs and upgrades Muster's services in it.
//
// It sends no secret before the owner's folder is stored on the disk.
package install

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"net"
	"net/netip"
	"strconv"
	"time"

	"connectrpc.com/connect"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/peerdial"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/cmd/muster/owner/progress"
	"github.com/muster-k8s/muster/cmd/muster/owner/recovery"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/gen/muster/init/v1/initv1connect"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// InitConfig configures [Init]. The configuration of the cluster itself is in Dir.
type InitConfig struct {
	// Dir is the owner's folder.
	Dir *ownerdir.Dir
	// Manifests are applied first: usually a network plugin.
	Manifests []*unstructured.Unstructured
	// Values of the chart; the owner's key is added.
	Values clusterapi.Values
	// Report receives each step.
	Report progress.Reporter
	// Log receives the output of helm and client-go.
	Log *slog.Logger
	// DialContext opens TCP connections to machines; nil for a [net.Dialer].
	DialContext func(ctx context.Context, network, addr string) (net.Conn, error)
}

// Steps is the number of steps that [Init] reports, for a progress bar.
const Steps = 11

// InstallSteps is the number for an existing cluster: [Init] of a folder for one.
const InstallSteps = 10

// Init initializes a cluster, or resumes an interrupted call.
func Init(ctx context.Context, cfg InitConfig) error {
	if cfg.Dir == nil || cfg.Report == nil || cfg.Log == nil {
		return errors.New("install.Init: Dir, Report and Log are required")
	}
	i := &initializer{InitConfig: cfg}
	if err := i.load(); err != nil {
		return err
	}
	if i.dir().Restore != nil {
		return problem.WithRemedy(recovery.ErrRestoring, recovery.RestoreRemedy)
	}
	if s := i.dir().Stage; s == ownerdir.StagePrepared || s == ownerdir.StageRequested {
		if err := i.machine(ctx); err != nil {
			return err
		}
	}
	return i.install(ctx)
}

type initializer struct {
	InitConfig

	policy    *attest.Policy
	json      []byte
	secrets   ownerdir.Secrets
	clusterID keys.ClusterID
	backup    *initv1.Backup    // nil unless the cluster is restored
	restored  *clusterinfo.Info // of the backup; nil unless the cluster is restored
	checked   *checked          // the only machine that a restore may ask; nil unless the cluster is restored
}

func (i *initializer) dir() ownerdir.Cluster { return i.Dir.Cluster() }

// order returns cluster.json with the values for the machine. A restored cluster has the backup's values, because it may have been upgraded since init.
func (i *initializer) order() ownerdir.Cluster {
	c := i.dir()
	if r := i.restored; r != nil {
		c.KubernetesVersion, c.ControlPlaneEndpoint, c.Components, c.Images = r.KubernetesVersion, r.ControlPlaneEndpoint, r.Components, r.Images
	}
	return c
}

func (i *initializer) load() error {
	text, err := i.Dir.Read(ownerdir.PolicyFile)
	if err != nil {
		return err
	}
	if i.policy, i.json, err = policyfile.Parse(text); err != nil {
		return fmt.Errorf("%s: %w", i.Dir.File(ownerdir.PolicyFile), err)
	}
	if i.secrets, err = i.Dir.Secrets(); err != nil {
		return err
	}
	// The owner chose all inputs of the cluster ID, so the possible values of PCR 15 are known.
	i.clusterID = keys.NewRoot(i.secrets.Root, i.secrets.Salt).ClusterID(i.secrets.MeasurementSalt)
	return nil
}

// step runs f and reports it as one step.
func (i *initializer) step(name string, f func() (detail string, err error)) error {
	return progress.Step(i.Report, name, f)
}

// machine appraises the first machine and requests the init from it.
func (i *initializer) machine(ctx context.Context) error {
	c := i.dir()
	// A6: the machine must be unlocked; after an earlier request it may be locked to this cluster, and must be the
	// same machine.
	target := peerdial.Target{
		Addr: c.Endpoint, Purpose: attest.PurposeMachine, Policy: i.policy, Locks: []attest.Lock{attest.Unlocked()}, DialContext: i.DialContext,
	}
	if i.checked != nil {
		target.Only = &i.checked.id
	}
	if c.Stage == ownerdir.StageRequested {
		target.Only = &c.FirstMachine.ID
		target.Locks = append(target.Locks, attest.LockedTo(i.clusterID))
	}
	if err := i.step("verify the machine", func() (string, error) { return i.appraise(ctx, &target) }); err != nil {
		return err
	}
	name := "initialize the first machine"
	switch {
	case c.Adopted:
		name = "adopt the first machine"
	case i.backup != nil:
		name = "restore the cluster on the machine"
	}
	return i.step(name, func() (string, error) { return i.request(ctx, target) })
}

// appraise repeats the exchange until there is a verdict, and records the accepted machine before anything is sent.
func (i *initializer) appraise(ctx context.Context, target *peerdial.Target) (string, error) {
	var peer attest.Peer
	err := i.retry(ctx, func() error {
		s, err := peerdial.Open(*target)
		if err != nil {
			return err
		}
		defer func() { _ = s.Close() }()
		peer, err = s.Exchange(ctx)
		return err
	})
	if err != nil {
		return "", i.explainVerdict(err)
	}
	id := peer.Machine()
	c := i.dir()
	if c.Stage == ownerdir.StagePrepared {
		c.Stage = ownerdir.StageRequested
		c.FirstMachine = &ownerdir.Machine{ID: id, DiskSalt: keys.NewDiskSalt().String(), Verdict: verdictOf(peer)}
		if i.checked != nil {
			c.FirstMachine.NodeName = i.checked.name
		}
		if err := i.Dir.Save(c); err != nil {
			return "", err
		}
	}
	target.Only = &id
	// From the first request on, the machine may lock itself to this cluster at any time.
	target.Locks = []attest.Lock{attest.Unlocked(), attest.LockedTo(i.clusterID)}
	return "machine " + id.String(), nil
}

// explainVerdict adds remedies that need to name the owner's files.
func (i *initializer) explainVerdict(err error) error {
	c := i.dir()
	if attest.ReasonOf(err) == attestv1.Reason_REASON_LOCK_FOREIGN {
		return problem.WithRemedy(err, "The machine is locked to another cluster, perhaps by an earlier attempt with another folder. Reboot it. To use it again, wipe its state first.")
	}
	if c.Adopted && rpc.ReasonFrom(err) == attestv1.Reason_REASON_INIT_NOT_ALLOWED {
		return problem.WithRemedy(err, "The machine must be a control plane, as kubeadm makes one, of the cluster at --control-plane-endpoint, and its metadata must have the role control-plane, its node's name and the init secret's hash. The log of its bootstrapper shows what is missing.")
	}
	if attest.ReasonOf(err) != attestv1.Reason_REASON_POLICY_REFUSED || len(attest.MismatchesOf(err)) > 0 {
		return err
	}
	switch {
	case c.Stage == ownerdir.StageRequested && c.Restore != nil:
		return problem.WithRemedy(err, fmt.Sprintf("The restore was started on machine %s, which may hold the cluster's secrets. Continue with that machine. If it can't be used: power it off, erase its state disk, and run the command with --start-over.", c.FirstMachine.ID))
	case c.Stage == ownerdir.StageRequested:
		return problem.WithRemedy(err, fmt.Sprintf("The init of this cluster was started on machine %s, which may hold its secrets. Continue with that machine. Or wipe it, and initialize a new cluster in another --directory.", c.FirstMachine.ID))
	case i.checked != nil:
		return problem.WithRemedy(err, "Another machine answers at "+c.Endpoint+" than before. Find out which machines have that address, power the wrong one off, and run the same command again.")
	}
	return err
}

func verdictOf(p attest.Peer) ownerdir.Verdict {
	c := p.Claims()
	digest := c.EvidenceDigest()
	v := ownerdir.Verdict{
		Time: p.VerifiedAt().UTC().Format(time.RFC3339), PolicySerial: p.Appraisal().PolicySerial, EvidenceDigest: hex.EncodeToString(digest[:]),
		PCRs: map[string]string{}, AKName: hex.EncodeToString(c.AKName()), ResetCount: c.Clock().ResetCount,
	}
	for pcr := range 16 {
		v.PCRs[strconv.Itoa(pcr)] = hex.EncodeToString(c.PCR(pcr))
	}
	return v
}

// request calls Init until there is a result, resuming after lost connections.
func (i *initializer) request(ctx context.Context, target peerdial.Target) (string, error) {
	var result *initv1.InitResult
	err := i.retry(ctx, func() error {
		s, err := peerdial.Open(target)
		if err != nil {
			return err
		}
		defer func() { _ = s.Close() }()
		if err := i.opened(ctx, s); err != nil {
			return err
		}
		result, err = i.call(ctx, s)
		return err
	})
	if err != nil {
		return "", i.explainVerdict(err)
	}
	return "node " + result.GetNodeName(), i.keep(result)
}

// opened returns an error until the machine accepts an init: its state disk must be open, and a first boot writes the whole
// disk. If the machine does not report the disk's state, the caller requests the init at once.
func (i *initializer) opened(ctx context.Context, s *peerdial.Session) error {
	status, err := initv1connect.NewMachineServiceClient(s.Client(), s.URL(), rpc.ClientOptions()...).GetStatus(ctx, &initv1.GetStatusRequest{})
	if err != nil {
		return nil //nolint:nilerr // the init meets the same error
	}
	return i.diskOpen(status)
}

// diskOpen returns an error while a machine's state disk is not open.
func (i *initializer) diskOpen(status *initv1.GetStatusResponse) error {
	switch waits := status.GetLastReason() != attestv1.Reason_REASON_UNSPECIFIED; {
	case status.GetPhase() == initv1.Phase_PHASE_UNLOCKING && waits && i.dir().Restore != nil:
		return problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_STATE_DISK, "the machine's state disk belongs to an earlier cluster, and the machine waits for its key"),
			"The backup has everything that this restore wrote to it. If nothing else on the disk is needed, erase its first MiB (docs/state-disk.md#erase-the-first-mib), start the machine again, and run the same command.")
	case status.GetPhase() == initv1.Phase_PHASE_UNLOCKING && waits:
		host, _, err := net.SplitHostPort(i.dir().Endpoint)
		if err != nil {
			return fmt.Errorf("cluster.json: %w", err)
		}
		return problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_STATE_DISK, "the machine's state disk belongs to an earlier cluster, and the machine waits for its key"),
			fmt.Sprintf("If that was this cluster, and the power failed: muster recover %s --directory %s, and run the same command again. Otherwise erase the disk's first MiB if nothing on it is needed (docs/state-disk.md#erase-the-first-mib).", host, i.Dir.Path()))
	case status.GetPhase() == initv1.Phase_PHASE_UNLOCKING, status.GetPhase() == initv1.Phase_PHASE_FORMATTING:
		return attest.Refuse(attestv1.Reason_REASON_NOT_READY, "the machine prepares its state disk")
	}
	return nil
}

// call makes one call and follows its stream. The client sends nothing before it has accepted the server: the transport
// dials, appraises, and only then sends the request (A6).
func (i *initializer) call(ctx context.Context, s *peerdial.Session) (*initv1.InitResult, error) {
	ctx, peer := atls.CapturePeer(ctx)
	c := i.order()
	list := versions.NewList(c.Components...)
	salt, err := keys.ParseDiskSalt(c.FirstMachine.DiskSalt)
	if err != nil {
		return nil, fmt.Errorf("cluster.json: diskSalt: %w: an older version of muster started this init, so initialize a new cluster in another --directory", err)
	}
	owner, err := i.Dir.OwnerKey()
	if err != nil {
		return nil, err
	}
	events := i.events(ctx, s, &initv1.InitRequest{
		IdempotencyKey: i.secrets.IdempotencyKey[:], InitSecret: i.secrets.Init[:], RootSecret: i.secrets.Root[:], Salt: i.secrets.Salt[:],
		MeasurementSalt: i.secrets.MeasurementSalt[:], ClusterName: c.Name, KubernetesVersion: c.KubernetesVersion,
		ControlPlaneEndpoint: c.ControlPlaneEndpoint, PodCidrs: c.PodCIDRs, ServiceCidrs: c.ServiceCIDRs, ApiServerSans: c.APIServerSANs,
		Components: list.Wire(), DiskSalt: salt[:], Images: c.Images,
		OwnerSignature: i.signed().Sign(owner),
	})
	for event, err := range events {
		if err != nil {
			return nil, err
		}
		switch m := event.GetMessage().(type) {
		case *initv1.InitResponse_Progress:
			i.Report.Update(phaseName(m.Progress.GetPhase()) + " " + m.Progress.GetText())
		case *initv1.InitResponse_Result:
			p, ok := peer()
			if !ok {
				return nil, errors.New("the result came over a connection that was not appraised") // A1: cannot be
			}
			return m.Result, i.check(m.Result, p)
		}
	}
	return nil, errors.New("the machine ended the stream without a result")
}

// signed is what the owner signs for the machine.
func (i *initializer) signed() ownerorder.Init {
	s := ownerorder.Init{Cluster: i.clusterID, Machine: i.dir().FirstMachine.ID, Adopt: i.dir().Adopted}
	copy(s.Backup[:], i.backup.GetSha256())
	return s
}

// events calls Init, Adopt or Restore, and returns the machine's stream. An error is the last element.
func (i *initializer) events(ctx context.Context, s *peerdial.Session, req *initv1.InitRequest) iter.Seq2[*initv1.InitResponse, error] {
	client := initv1connect.NewInitServiceClient(s.Client(), s.URL(), rpc.ClientOptions()...)
	if i.dir().Adopted {
		stream, err := client.Adopt(ctx, &initv1.AdoptRequest{Order: req})
		return received(stream, err, (*initv1.AdoptResponse).GetEvent)
	}
	if i.backup != nil {
		stream, err := client.Restore(ctx, &initv1.RestoreRequest{Order: req, Backup: i.backup})
		return received(stream, err, (*initv1.RestoreResponse).GetEvent)
	}
	stream, err := client.Init(ctx, req)
	return received(stream, err, func(m *initv1.InitResponse) *initv1.InitResponse { return m })
}

func received[T any](stream *connect.ServerStreamForClient[T], err error, event func(*T) *initv1.InitResponse) iter.Seq2[*initv1.InitResponse, error] {
	return func(yield func(*initv1.InitResponse, error) bool) {
		if err != nil {
			yield(nil, err)
			return
		}
		defer func() { _ = stream.Close() }()
		for stream.Receive() {
			if !yield(event(stream.Msg()), nil) {
				return
			}
		}
		if err := stream.Err(); err != nil {
			yield(nil, err)
		}
	}
}

// check compares the result with the appraised machine, and with the owner's data.
func (i *initializer) check(r *initv1.InitResult, p attest.Peer) error {
	bad := func(format string, args ...any) error {
		err := attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "the machine's result: "+format, args...)
		return problem.WithRemedy(err, "Don't use this cluster. The machine's bootstrapper is faulty or of another version: wipe the machine, and initialize a new cluster in another --directory.")
	}
	id := p.Machine()
	if string(r.GetMachineId()) != string(id[:]) {
		return bad("it reports machine ID %x, but machine %s was appraised", r.GetMachineId(), id)
	}
	if string(r.GetClusterId()) != string(i.clusterID[:]) {
		return bad("its cluster ID %x is not the one that is derived from the owner's secrets, %s", r.GetClusterId(), i.clusterID)
	}
	if msgs := validation.IsDNS1123Label(r.GetNodeName()); len(msgs) > 0 {
		return bad("node name %q: %s", r.GetNodeName(), msgs[0])
	}
	if i.checked != nil && r.GetNodeName() != i.checked.name {
		return bad("node name %q: it reported the name %q, which was checked", r.GetNodeName(), i.checked.name)
	}
	if _, err := keys.ParseDiskID(r.GetDiskId()); err != nil {
		return bad("%w", err)
	}
	if len(r.GetAddresses()) == 0 {
		return bad("it names no address")
	}
	for _, a := range r.GetAddresses() {
		if ip, err := netip.ParseAddr(a); err != nil || ip.Unmap().String() != a || ip.Zone() != "" {
			return bad("%q is not an address", a)
		}
	}
	if err := access.CheckKubeconfig(r.GetKubeconfig(), i.order().ControlPlaneEndpoint); err != nil {
		return bad("%w", err)
	}
	return access.CheckClock(r.GetKubeconfig(), time.Now())
}

// keep stores the result. It stores the kubeconfig first, so that a folder whose stage shows a cluster always has the
// kubeconfig's key.
func (i *initializer) keep(r *initv1.InitResult) error {
	if err := access.WriteAdminConf(i.Dir, r.GetKubeconfig()); err != nil {
		return err
	}
	c := i.order()
	c.Stage = ownerdir.StageInitialized
	if c.Restore != nil {
		c.Restore.Ended = true
	}
	c.ClusterID = i.clusterID.String()
	c.FirstMachine.NodeName, c.FirstMachine.DiskID, c.FirstMachine.Addresses = r.GetNodeName(), r.GetDiskId(), r.GetAddresses()
	c.ControlPlanes = map[string]attest.MachineID{r.GetNodeName(): c.FirstMachine.ID} // A7: the only one, also after a restore
	return i.Dir.Save(c)
}

// retry repeats an action on the first machine.
func (i *initializer) retry(ctx context.Context, try func() error) error {
	return progress.Again(ctx, i.Report, try)
}

// phaseName returns the display name of a phase.
func phaseName(p initv1.Phase) string {
	if name, ok := phases[p]; ok {
		return name
	}
	return "phase " + strconv.Itoa(int(p)) + ":"
}

var phases = map[initv1.Phase]string{
	initv1.Phase_PHASE_WAITING:       "waiting:",
	initv1.Phase_PHASE_LOCKED:        "node lock:",
	initv1.Phase_PHASE_DISK:          "state disk:",
	initv1.Phase_PHASE_COMPONENTS:    "components:",
	initv1.Phase_PHASE_CONFIGURED:    "configuration:",
	initv1.Phase_PHASE_KUBEADM:       "kubeadm:",
	initv1.Phase_PHASE_CLUSTER_STATE: "cluster state:",
	initv1.Phase_PHASE_DONE:          "done:",
	initv1.Phase_PHASE_FORMATTING:    "state disk, formatting:",
	initv1.Phase_PHASE_UNLOCKING:     "state disk, unlocking:",
}
