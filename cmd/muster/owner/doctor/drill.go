package doctor

import (
	"context"
	"crypto/subtle"
	"fmt"
	"log/slog"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/recovery"
	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// Names of the checks that only a drill makes.
const (
	CheckClusterID     = "cluster ID"
	CheckDiskKeys      = "keys of disks"
	CheckControlPlanes = "control planes"
)

const otherFolder = "Use the folder of this cluster, or your copy of it: with this one, no control plane could be recovered. Change nothing in the cluster: it is healthy, and the keys of its disks are derived from its own secrets."

// unlessDrilled returns a remedy that assumes a correct folder, and none in a drill: with another cluster's folder, the
// remedy would cause the damage that the drill should prevent.
func (d *doctor) unlessDrilled(remedy string) string {
	if d.drill {
		return otherFolder
	}
	return remedy
}

// Drill proves on a healthy cluster that its owner's folder would recover it: that the secrets in it are those from
// which the disks' keys are derived, and that its policy accepts each control plane as it is now. It only reads.
//
// A drill cannot prove that a disk opens: only the machine can test that. But each disk has the key that is derived from the
// Secret muster-kms-root, and the drill derives the same keys.
func Drill(ctx context.Context, cfg Config) *checkup.Report {
	d := newDoctor(cfg)
	d.drill = true
	if !d.folder() {
		return &d.Report
	}
	defer func() { _ = d.dir.Close() }()
	d.ownPolicy()
	d.derived()
	if !d.kubeconfig() || !d.apiServer(ctx) {
		return &d.Report
	}
	d.each(ctx, d.installed, d.ownerKey, d.root, d.description, d.diskKeys, d.recoverable)
	return &d.Report
}

// derived compares the folder's data about the cluster with the values derived from its secrets.
func (d *doctor) derived() {
	s, err := d.dir.Secrets()
	if err != nil {
		return // the check of the folder reports it
	}
	c := d.dir.Cluster()
	root, err := keys.ParseRoot(keys.FirstVersion, s.Root[:], s.Salt[:])
	if err != nil {
		d.Err(CheckClusterID, restoreFolder, err)
		return
	}
	if id := root.ClusterID(s.MeasurementSalt); id.String() != c.ClusterID {
		d.Add(CheckClusterID, checkup.Fail, otherFolder, "the cluster ID derived from root-secret, salt and measurement-salt is %s, but cluster.json has %s", id, c.ClusterID)
	}
	if r, err := d.dir.KeyRotation(); err == nil {
		if ownerdir.OwnerID(r.Signs) != c.OwnerID {
			d.Add(CheckClusterID, checkup.Fail, otherFolder, "owner.key is not the owner's key in cluster.json")
		}
	}
	if d.Clean(CheckClusterID) {
		d.OK(CheckClusterID, "is derived from root-secret, salt and measurement-salt; owner.key is its owner's")
	}
}

// installed checks the chart's release: its values contain the owner's key for the services.
func (d *doctor) installed(context.Context) (err error) {
	d.release, err = d.kube.Release(slog.New(slog.DiscardHandler))
	if err == nil && d.release == nil {
		d.Add(CheckChart, checkup.Fail, again, "Muster's release is not installed")
	}
	return err
}

// diskKeys derives the key of each enrolled disk from the folder and from the cluster's Secret.
func (d *doctor) diskKeys(ctx context.Context) error {
	var s corev1.Secret
	err := d.kube.Reader().Get(ctx, client.ObjectKey{Namespace: clusterapi.Namespace, Name: "muster-kms-root"}, &s)
	if clusterapi.Absent(err) {
		return nil // its check has reported it
	}
	if err != nil {
		return err
	}
	own, err := d.dir.Secrets()
	if err != nil {
		return nil //nolint:nilerr // the check of the folder reports it
	}
	theirs, err := keys.ParseRoot(keys.FirstVersion, s.Data["root"], s.Data["salt"])
	if err != nil {
		d.Err(CheckDiskKeys, "If this is the cluster's folder, put its root-secret and salt back into the Secret muster-kms-root: kms does not start with the present content.", err)
		return nil
	}
	var nodes v1alpha1.AttestedNodeList
	if err := d.kube.Reader().List(ctx, &nodes); err != nil {
		return err
	}
	compared := 0
	for _, n := range nodes.Items {
		if n.Spec.DiskID == "" {
			continue // its machine has not joined yet
		}
		id, err := keys.ParseDiskID(n.Spec.DiskID)
		if err != nil {
			d.Add(CheckDiskKeys, checkup.Fail, "Correct it: muster replace "+n.Name+" --disk UUID.", "%s: %v", n.Name, err)
			continue
		}
		compared++
		disk, err := d.kube.Disk(ctx, n.Spec.DiskID)
		if err != nil {
			return err
		}
		if disk == nil || disk.Spec.Erased {
			d.Add(CheckDiskKeys, checkup.Fail, "Its machine can't open it after the next reboot. Restore the salt of known.json (docs/leaving.md), or drain the node and let it join as new with a new disk.",
				"%s: the cluster has no salt of disk %s", n.Name, id)
			continue
		}
		known, err := d.dir.Known()
		if err != nil {
			return nil //nolint:nilerr // the check of the folder reports it
		}
		salt, err := recovery.RecordedSalt(d.dir, known, id)
		if err != nil {
			d.Add(CheckDiskKeys, checkup.Warn, noSalt, "%s: %v", n.Name, err)
			continue
		}
		given, err := keys.ParseDiskSalt(disk.Spec.Salt)
		if err != nil {
			return fmt.Errorf("AttestedDisk %s: %w", id, err)
		}
		ours, err := keys.NewRoot(own.Root, own.Salt).Disk(id, salt)
		if err != nil {
			return err
		}
		has, err := theirs.Disk(id, given)
		if err != nil {
			return err
		}
		if subtle.ConstantTimeCompare(ours.Expose(), has.Expose()) != 1 {
			d.Add(CheckDiskKeys, checkup.Fail, otherFolder, "%s: the key for disk %s derived from the folder differs from the cluster's", n.Name, id)
		}
	}
	if d.Clean(CheckDiskKeys) {
		d.OK(CheckDiskKeys, "%d, derived with the same result from folder and cluster", compared)
	}
	return nil
}

// recoverable appraises each control plane by the folder's policy, and reports how it would be recovered.
func (d *doctor) recoverable(ctx context.Context) error {
	if _, err := d.dir.Known(); err != nil {
		return nil //nolint:nilerr // the check of the folder reports it
	}
	found := 0
	err := d.controlPlanes(ctx, CheckControlPlanes, func(n v1alpha1.AttestedNode, at string) {
		switch salt := d.salt(n); {
		case at == "":
			d.Add(CheckControlPlanes, checkup.Warn, "Let it join, or forget it: muster forget "+n.Name+".", "%s is enrolled, but has never joined", n.Name)
		case n.Spec.DiskID == "":
			found++
			d.Add(CheckControlPlanes, checkup.Fail, "Name its disk: muster replace "+n.Name+" --disk UUID.", "%s: the policy accepts it, but its enrollment names no disk", n.Name)
		case salt != nil:
			found++
			d.Add(CheckControlPlanes, checkup.Fail, noSalt, "%s: accepted by the policy, but this folder can't recover it: %v", n.Name, salt)
		case !d.knows(n):
			found++
			d.Add(CheckControlPlanes, checkup.Warn, "Run muster status with the owner's folder, and copy the folder again.", "%s: accepted by the policy, but the folder does not record its disk. To recover it: muster recover %s --machine-id %s --disk %s", n.Name, at, n.Spec.MachineID, n.Spec.DiskID)
		default:
			found++
			d.OK(CheckControlPlanes, "%s: accepted by the policy, disk %s. To recover it: muster recover %s --machine-id %s", n.Name, n.Spec.DiskID, at, n.Spec.MachineID)
		}
	})
	if err == nil && found == 0 && d.policy != nil && d.Clean(CheckControlPlanes) {
		d.Add(CheckControlPlanes, checkup.Fail, "Run muster doctor: every cluster has control planes.", "no enrolled control plane could be checked")
	}
	return err
}

// noSalt is the remedy for a disk whose salt the folder does not have: muster status records it from the cluster's
// AttestedDisk.
const noSalt = "Use a newer copy of the folder, or run muster status with this one, which records the salts of all disks in known.json. Then copy the folder again, and repeat the drill."

// salt returns why the folder has no salt of an enrollment's disk (K4), or nil. Without the salt, the disk's key can't be
// derived, and a recovery is refused.
func (d *doctor) salt(n v1alpha1.AttestedNode) error {
	disk, err := keys.ParseDiskID(n.Spec.DiskID)
	if err != nil {
		return err
	}
	known, err := d.dir.Known()
	if err != nil {
		return err
	}
	_, err = recovery.RecordedSalt(d.dir, known, disk)
	return err
}

// knows reports whether the folder records the disk of an enrollment for its machine: otherwise a recovery requires --disk.
func (d *doctor) knows(n v1alpha1.AttestedNode) bool {
	known, err := d.dir.Known()
	if err != nil {
		return false
	}
	id, err := attest.ParseMachineID(n.Spec.MachineID)
	return err == nil && recovery.RecordedDisk(d.dir, known, id) == n.Spec.DiskID
}
