package install

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/backups"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/peerdial"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/cmd/muster/owner/progress"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/gen/muster/init/v1/initv1connect"
	"github.com/muster-k8s/muster/internal/backup"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
)

// RestoreConfig configures [Restore].
type RestoreConfig struct {
	// Dir is the owner's folder, opened for writing.
	Dir *ownerdir.Dir
	// File is the backup, URL the address at which the machine gets the same file.
	File, URL string
	// Endpoint is HOST:PORT of the new machine's bootstrapper.
	Endpoint string
	// StartOver allows another backup or another machine after an earlier run has used one.
	StartOver bool
	// AcceptEpoch is the epoch that the owner accepts without a question; nil to call Ask.
	AcceptEpoch *uint64
	// Ask shows what would be restored, and asks the user; nil without an interactive user.
	Ask func(backups.BackupInfo) (bool, error)
	// Values has the port of the joinservice; see [InitConfig].
	Values clusterapi.Values
	Report progress.Reporter
	Log    *slog.Logger
}

// RestoreSteps is the number of steps that [Restore] reports.
const RestoreSteps = 15

// Restore makes a new machine the first control plane of the folder's cluster, from a backup, after all control planes were lost. After an
// interruption, the same call completes the restore.
func Restore(ctx context.Context, cfg RestoreConfig) error {
	i := &initializer{InitConfig: InitConfig{Dir: cfg.Dir, Values: cfg.Values, Report: cfg.Report, Log: cfg.Log}}
	if err := i.load(); err != nil {
		return err
	}
	known, err := i.Dir.Known()
	if err != nil {
		return err
	}
	if err := policies.Current(i.Dir, known, i.policy, i.json); err != nil {
		return err
	}
	if err := policies.NotOpened(i.Dir, &v1alpha1.AttestationPolicy{}, i.json); err != nil {
		return err
	}
	c := i.dir()
	switch {
	case c.Adopted:
		return problem.WithRemedy(errors.New("the cluster existed before Muster, which does not have all of its keys"), "Restore it with the tools that created it.")
	case c.Restore == nil && c.Stage != ownerdir.StageInstalled:
		return problem.WithRemedy(fmt.Errorf("%s does not have a complete cluster yet", i.Dir.Path()), "Complete muster init first.")
	}
	var info *backups.BackupInfo
	var m *backup.Manifest
	if err := i.step("read the backup", func() (detail string, err error) {
		info, m, err = i.openBackup(cfg)
		return cfg.File, err
	}); err != nil {
		return err
	}
	switch {
	case c.Restore == nil || c.Stage == ownerdir.StagePrepared || cfg.StartOver: // nothing was sent, or StartOver replaces it
		if err := i.step("accept the epoch", func() (string, error) { return i.acceptBackup(ctx, cfg, info) }); err != nil {
			return err
		}
		if err := i.beginRestore(cfg, info); err != nil {
			return err
		}
	case c.Restore.SHA256 != info.SHA256 || c.Endpoint != cfg.Endpoint:
		return problem.WithRemedy(fmt.Errorf("the restore of the backup with the SHA-256 %s on %s is unfinished", c.Restore.SHA256, c.Endpoint), "Continue with that backup and that machine. If the machine can't be used: power it off, erase its state disk, and run the command with --start-over.")
	case c.Stage == ownerdir.StageRequested: // the last check may be days old
		if err := i.step("check that the cluster is still lost", func() (string, error) { return "", i.lost(ctx) }); err != nil {
			return err
		}
	}
	if s := i.dir().Stage; s == ownerdir.StagePrepared || s == ownerdir.StageRequested {
		if err := i.restoreOn(ctx, m, known); err != nil {
			return err
		}
	}
	return i.reinstall(ctx, m, known)
}

// openBackup verifies the backup, and prepares what the machine needs to read it.
func (i *initializer) openBackup(cfg RestoreConfig) (*backups.BackupInfo, *backup.Manifest, error) {
	f, err := os.Open(cfg.File)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	info, m, authority, err := backups.ReadBackup(i.Dir, f, cfg.File)
	if err != nil {
		return nil, nil, problem.WithRemedy(fmt.Errorf("%s is refused: %w", cfg.File, err), "Use another backup of this cluster. muster backup verify FILE checks one.")
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, nil, err
	}
	owner, err := i.Dir.ReadingKeys()
	if err != nil {
		return nil, nil, err
	}
	key, err := backup.FileKey(f, owner)
	if err != nil {
		return nil, nil, err
	}
	sum, err := hex.DecodeString(info.SHA256)
	if err != nil {
		return nil, nil, err
	}
	if i.restored, err = clusterinfo.Parse(m.Cluster); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", cfg.File, err)
	}
	i.backup = &initv1.Backup{Url: cfg.URL, Sha256: sum, FileKey: key, Authority: authority.Raw}
	return info, m, nil
}

// acceptBackup lets the owner accept the backup's epoch.
func (i *initializer) acceptBackup(ctx context.Context, cfg RestoreConfig, info *backups.BackupInfo) (string, error) {
	if err := i.lost(ctx); err != nil {
		return "", err
	}
	for _, m := range i.dir().Asked() {
		info.Since = append(info.Since, fmt.Sprintf("An earlier run used machine %s (%s), which may have the cluster's keys: power it off, and erase its state disk.", m.ID, m.NodeName))
	}
	for _, l := range info.Lines() {
		i.Report.Update(l)
	}
	accepted := cfg.AcceptEpoch != nil && *cfg.AcceptEpoch == info.Epoch
	if cfg.AcceptEpoch == nil && cfg.Ask != nil {
		var err error
		if accepted, err = cfg.Ask(*info); err != nil {
			return "", err
		}
	}
	if !accepted {
		return "", problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_CLUSTER_ROLLED_BACK, "the backup has epoch %d of the cluster, which was not accepted", info.Epoch),
			strings.Join(append(info.Lines(), fmt.Sprintf("To restore it, run the command again with --accept-epoch %d.", info.Epoch)), "\n"))
	}
	return fmt.Sprintf("epoch %d is accepted", info.Epoch), nil
}

// beginRestore records the restore in the folder.
func (i *initializer) beginRestore(cfg RestoreConfig, info *backups.BackupInfo) error {
	c := i.dir()
	r := &ownerdir.Restore{Former: c.FirstMachine, FormerEndpoint: c.Endpoint}
	if c.Restore != nil {
		r = &ownerdir.Restore{Former: c.Restore.Former, FormerEndpoint: c.Restore.FormerEndpoint, Ended: c.Restore.Ended, Asked: c.Asked()}
	}
	r.SHA256, r.Epoch = info.SHA256, info.Epoch
	c.Restore = r
	c.Stage, c.Endpoint, c.FirstMachine = ownerdir.StagePrepared, cfg.Endpoint, nil
	return i.Dir.Save(c)
}

// checked is a machine that may become the first control plane of a restored cluster.
type checked struct {
	id   attest.MachineID
	name string // of its node
}

// restoreOn checks a machine, and restores the cluster on it.
func (i *initializer) restoreOn(ctx context.Context, m *backup.Manifest, known *ownerdir.Known) error {
	if err := i.freeMachine(ctx, m, known); err != nil {
		return err
	}
	return i.machine(ctx)
}

// freeMachine refuses a machine with the name of a node in the backup or in the folder's record, because certificates of that node may still be
// valid. It also refuses a banned machine. The cluster is then restored only on the machine that was checked, also if another one answers at its
// address later.
func (i *initializer) freeMachine(ctx context.Context, m *backup.Manifest, known *ownerdir.Known) error {
	c := i.dir()
	target := peerdial.Target{Addr: c.Endpoint, Purpose: attest.PurposeMachine, Policy: i.policy, Locks: []attest.Lock{attest.Unlocked(), attest.LockedTo(i.clusterID)}, DialContext: i.DialContext}
	if c.Stage == ownerdir.StageRequested {
		target.Only = &c.FirstMachine.ID
	}
	return i.step("ask the machine for its name", func() (name string, err error) {
		var peer attest.Peer
		err = i.retry(ctx, func() error {
			s, err := peerdial.Open(target)
			if err != nil {
				return err
			}
			defer func() { _ = s.Close() }()
			if peer, err = s.Exchange(ctx); err != nil {
				return err
			}
			status, err := initv1connect.NewMachineServiceClient(s.Client(), s.URL(), rpc.ClientOptions()...).GetStatus(ctx, &initv1.GetStatusRequest{})
			if err != nil {
				return err
			}
			if err := i.diskOpen(status); err != nil { // before that, it does not know its name
				return err
			}
			if name = problem.Printable(status.GetNodeName()); name == "" {
				return attest.Refuse(attestv1.Reason_REASON_NOT_READY, "the machine does not know its name yet (%s)", attest.ReasonName(status.GetLastReason()))
			}
			return nil
		})
		if err != nil {
			return "", i.explainVerdict(err)
		}
		taken := slices.ContainsFunc(m.Nodes, func(n backup.Node) bool { return n.Name == name })
		if _, there := known.Nodes[name]; taken || there || slices.ContainsFunc(known.Gone, func(g ownerdir.KnownGone) bool { return g.Name == name }) {
			return "", problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_NAME_TAKEN, "the cluster has, or had, a node %s", name), "Give the machine another name in its metadata.")
		}
		id := peer.Machine()
		if bannedMachine(id.String(), m, known) {
			return "", problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_BANNED, "machine %s is banned, in the backup or in known.json", id), "Restore on another machine.")
		}
		for _, n := range m.Nodes {
			if n.MachineID == id.String() {
				i.Report.Update(fmt.Sprintf("the machine was %s: that enrollment is removed", problem.Printable(n.Name)))
			}
		}
		i.checked = &checked{id, name}
		return name, i.renamed(name)
	})
}

// renamed records, before anything is sent, a new name of the machine that got the request: the restored cluster is recognized by its node's name.
func (i *initializer) renamed(name string) error {
	c := i.dir()
	if c.Stage != ownerdir.StageRequested || c.FirstMachine.NodeName == name {
		return nil
	}
	c.Restore.Asked, c.FirstMachine.NodeName = c.Asked(), name
	return i.Dir.Save(c)
}

// reinstall enrolls the machine, lets the services start there, and completes the restore.
func (i *initializer) reinstall(ctx context.Context, m *backup.Manifest, known *ownerdir.Known) error {
	kube, err := access.Connect(i.Dir)
	if err != nil {
		return err
	}
	c := i.dir()
	for _, s := range []struct {
		name string
		do   func() (string, error)
	}{
		{"wait for the API server", func() (string, error) {
			ctx, cancel := deadline(ctx, apiTimeout, "the API server at "+c.ControlPlaneEndpoint+" did not become ready")
			defer cancel()
			return kube.Server(), kube.Reachable(ctx)
		}},
		{"find the machine's node", func() (string, error) { // another API server may answer at the endpoint
			p, err := kube.Presence(ctx, c.FirstMachine.NodeName)
			if err == nil && p.Node == nil {
				err = problem.WithRemedy(fmt.Errorf("the API server at %s does not have the node %s", kube.Server(), c.FirstMachine.NodeName), "An old control plane answers there: power it off, and direct "+c.ControlPlaneEndpoint+" to the new machine.")
			}
			return c.FirstMachine.NodeName, err
		}},
		{"ban again what was banned or forgotten", func() (string, error) { return i.banAgain(ctx, kube, m, known) }},
		{"erase again what was erased", func() (string, error) { return i.eraseAgain(ctx, kube, known) }},
		{"forget the lost control planes", func() (string, error) { return i.forgetLost(ctx, kube, m, known) }},
		{"set the policy", func() (string, error) { return i.listRestored(ctx, kube) }},
		{"enroll the machine", func() (string, error) { return c.FirstMachine.NodeName, i.enroll(ctx, kube) }},
		{"wait for Muster's services", func() (string, error) {
			ctx, cancel := deadline(ctx, servicesTimeout, "its pods did not become ready")
			defer cancel()
			return "", kube.ServicesReady(ctx, i.Report.Update)
		}},
		{"verify the joinservice", func() (string, error) { return i.joinservice(ctx) }},
	} {
		if err := i.step(s.name, s.do); err != nil {
			return err
		}
	}
	if err := i.step("record the cluster's state", func() (string, error) { return i.noteRestored(ctx, kube, m, known) }); err != nil {
		return err
	}
	c = i.dir()
	c.Stage, c.Restore = ownerdir.StageInstalled, nil
	return i.Dir.Save(c)
}

// noteRestored replaces known.json. The old one describes the lost history, so every change from now on would be reported as older.
func (i *initializer) noteRestored(ctx context.Context, kube *clusterapi.Client, m *backup.Manifest, known *ownerdir.Known) (string, error) {
	var seen *ownerdir.Known
	if err := i.retry(ctx, func() (err error) { // bans restart the API server
		seen, err = access.ReadState(ctx, kube)
		return err
	}); err != nil {
		return "", err
	}
	if wrong := i.notShut(seen, m, known); len(wrong) > 0 { // writes and reads went to different API servers
		return "", problem.WithRemedy(fmt.Errorf("the API server does not show the bans and removals of these nodes: %s", problem.Named(wrong)), "An old control plane answers at "+kube.Server()+" for some connections: power it off, and run the same command again.")
	}
	if known.Version == 0 {
		return "", nil
	}
	machines, err := kube.Knowledge(ctx)
	if err != nil {
		return "", err
	}
	seen.Epoch, seen.EpochID, seen.History = machines.Epoch, machines.History.ID(machines.Epoch), machines.History
	name, err := i.Dir.CopyKnown(time.Now())
	if err != nil {
		return "", err
	}
	return "the previous record is in " + name, i.Dir.Remember(known.Restored(seen))
}

// listRestored puts the folder's policy in force, with the machine as its only control plane (A7), because one of the lost ones may still run.
// Its serial is above those of the backup and of known.json: machines that were not lost accept no policy older than their last one.
func (i *initializer) listRestored(ctx context.Context, kube *clusterapi.Client) (string, error) {
	c := i.dir()
	m := c.FirstMachine
	text, p, json, err := policies.FolderPolicy(i.Dir)
	if err != nil {
		return "", err
	}
	have, err := kube.Policy(ctx)
	if err != nil {
		return "", err
	}
	if err := policies.NotOpened(i.Dir, have, json); err != nil { // without known.json, the backup's policy decides
		return "", err
	}
	lost := slices.DeleteFunc(p.ControlPlanes(), func(id attest.MachineID) bool { return id == m.ID })
	if p.MayServe(m.ID) != nil || !c.Restore.Listed && len(lost) > 0 { // only once: control planes that join after that are also listed
		signed, err := policies.SignedSerial(i.Dir, have)
		if err != nil {
			return "", err
		}
		serial := max(p.Serial(), signed) + 1
		if text, err = policyfile.ListControlPlanes(text, serial, []policyfile.ControlPlane{{Machine: m.ID, Name: m.NodeName}}, lost); err != nil {
			return "", err
		}
		if err := i.Dir.Write(ownerdir.PolicyFile, text); err != nil { // B3: before it is sent
			return "", err
		}
		c.Restore.Listed = true
		if err := i.Dir.Save(c); err != nil {
			return "", err
		}
		if err := i.load(); err != nil {
			return "", err
		}
		p, json = i.policy, i.json
	}
	if err := policies.Higher(i.Dir, have, p, string(json), i.Dir.File(ownerdir.PolicyFile)); err != nil {
		return "", err
	}
	key, err := i.Dir.OwnerKey()
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("serial %d", p.Serial()), policies.Put(ctx, i.Dir, kube, have, attest.SignPolicy(key, json))
}
