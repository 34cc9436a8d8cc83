// Package backups orders backups from control planes, fetches them, and verifies them against the owner's folder.
package backups

import (
	"cmp"
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"filippo.io/age"

	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/orders"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/internal/backup"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/printable"
)

// BackupInfo describes a backup that was read and verified.
type BackupInfo struct {
	// File is its path.
	File string `json:"file"`
	// Size is in bytes, SHA256 in 64 hexadecimal digits.
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"`
	// Node is the control plane that made it, TakenAt the time by that machine's clock.
	Node              string    `json:"node"`
	TakenAt           time.Time `json:"takenAt"`
	KubernetesVersion string    `json:"kubernetesVersion"`
	// OwnerKey is the owner's public key to which it is encrypted, 32 bytes.
	OwnerKey []byte `json:"ownerKey"`
	// Epoch and PolicySerial are the cluster's; 0 if there is none.
	Epoch        uint64 `json:"epoch"`
	PolicySerial uint64 `json:"policySerial"`
	// Nodes is the number of enrollments, ControlPlanes that of control planes among them.
	Nodes         int `json:"nodes"`
	ControlPlanes int `json:"controlPlanes"`
	// KnownEpoch is the newest epoch in the owner's folder; 0 if there is none.
	KnownEpoch uint64 `json:"knownEpoch"`
	// Differs lists the values that differ between folder and backup. Since lists the changes since the backup that the
	// folder records. Each entry is a sentence.
	Differs []string `json:"differs"`
	Since   []string `json:"since"`
}

// MakeBackup orders a control plane to make a backup; with node "", the first one that is Ready. It also returns the control plane's name.
func MakeBackup(ctx context.Context, d *ownerdir.Dir, node string, report func(string)) (string, backup.Stored, error) {
	kube, err := access.Connect(d)
	if err != nil {
		return "", backup.Stored{}, err
	}
	if node == "" {
		node, err = readyControlPlane(ctx, kube)
	} else {
		err = isControlPlane(ctx, kube, node)
	}
	if err != nil {
		return node, backup.Stored{}, err
	}
	signed, r, err := orders.Send(ctx, d, node, orders.Request{Action: ownerorder.ActionBackup, Args: orders.Fixed(nil)}, func(s string) { report(node + ": " + s) })
	if err != nil {
		return node, backup.Stored{}, err
	}
	stored, err := parseStored([]byte(r.Output))
	if err == nil {
		err = madeFor(signed, node, stored)
	}
	return node, stored, err
}

// madeFor returns an error if a backup was made before its order was signed. The order may be that of an earlier run of the same command.
func madeFor(signed ownerorder.SignedMachineOrder, node string, s backup.Stored) error {
	o, err := ownerorder.ParseMachineOrder(signed.Text)
	if err == nil && s.TakenAt.Before(o.SignedAt.Add(-ownerorder.MaxAge)) {
		err = fmt.Errorf("%s reports that it made the backup at %s, before the order: its clock is wrong, or the report was forged", node, s.TakenAt.UTC().Format(time.RFC3339))
	}
	return err
}

func parseStored(text []byte) (s backup.Stored, err error) {
	if err := json.Unmarshal(text, &s); err != nil || !s.Valid() {
		return backup.Stored{}, fmt.Errorf("the machine's report about its backup can't be read: %s", printable.ASCII(string(text), orders.MaxReport))
	}
	return s, nil
}

// isControlPlane refuses a node with another role at once. Its machine would also refuse the order, but only minutes later.
func isControlPlane(ctx context.Context, kube *clusterapi.Client, name string) error {
	p, err := kube.Presence(ctx, name)
	if err != nil {
		return err
	}
	if p.Enrollment != nil && !p.ControlPlane {
		return problem.WithRemedy(fmt.Errorf("%s is a worker, but only control planes make backups", name), "Name a control plane by --from, or leave it out: muster status shows the roles.")
	}
	return nil
}

func readyControlPlane(ctx context.Context, kube *clusterapi.Client) (string, error) {
	list, err := kube.ControlPlanes(ctx)
	if err != nil {
		return "", err
	}
	for _, c := range list {
		p, err := kube.Presence(ctx, c.Name)
		if err != nil {
			return "", err
		}
		if p.Ready() && p.Enrollment != nil && !p.Enrollment.ShutOut() {
			return c.Name, nil
		}
	}
	return "", problem.WithRemedy(errors.New("no control plane is Ready"), "muster status shows why. To order the backup from one that is not Ready: --from NODE.")
}

// readable returns an error if the folder does not have the owner's key to which a backup is encrypted.
func readable(d *ownerdir.Dir, owner string) error {
	have, err := d.ReadingKeys()
	if err != nil || slices.ContainsFunc(have, func(k ed25519.PrivateKey) bool { return base64.StdEncoding.EncodeToString(access.PublicOf(k)) == owner }) {
		return err
	}
	return problem.WithRemedy(fmt.Errorf("it is encrypted to the owner's key %s, which %s does not have", owner, d.Path()), "Use the newest copy of the owner's folder: it also has the keys from before a rotation.")
}

// VerifyBackup reads a backup to its end, and checks that a control plane of the folder's cluster made it.
func VerifyBackup(d *ownerdir.Dir, path string) (*BackupInfo, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, _, _, err := ReadBackup(d, f, path)
	if err != nil {
		return nil, problem.WithRemedy(fmt.Errorf("%s is refused: %w", path, err), "Take another file. It has to be a backup of the cluster of "+d.Path()+".")
	}
	return info, nil
}

// ReadBackup verifies the whole file, and compares it with the folder. It also returns the authority that has signed the file.
func ReadBackup(d *ownerdir.Dir, f *os.File, path string) (*BackupInfo, *backup.Manifest, *x509.Certificate, error) {
	owner, err := d.ReadingKeys()
	if err != nil {
		return nil, nil, nil, err
	}
	identity, err := backup.Identity(owner)
	if err != nil {
		return nil, nil, nil, err
	}
	m, sum, authority, err := signedBackup(d, f, identity)
	if err != nil {
		return nil, nil, nil, err
	}
	if m.ClusterID != d.Cluster().ClusterID {
		return nil, nil, nil, fmt.Errorf("it is a backup of cluster %s, but the folder belongs to cluster %s", problem.Printable(m.ClusterID), d.Cluster().ClusterID)
	}
	if ahead := time.Until(m.TakenAt); ahead > ownerorder.MaxAge {
		return nil, nil, nil, fmt.Errorf("it was taken at %s by the clock of %s, but this computer's clock is at %s: one of the clocks is wrong, and the file would be treated as the newest one", m.TakenAt.UTC().Format(time.RFC3339), problem.Printable(m.Node), time.Now().UTC().Format(time.RFC3339))
	}
	cluster, err := clusterinfo.Parse(m.Cluster)
	if err != nil {
		return nil, nil, nil, err
	}
	size, err := f.Seek(0, io.SeekCurrent)
	if err != nil {
		return nil, nil, nil, err
	}
	info := &BackupInfo{
		File: path, Size: size, SHA256: sum, Node: m.Node, TakenAt: m.TakenAt, KubernetesVersion: cluster.KubernetesVersion,
		OwnerKey: m.OwnerKey, Epoch: m.Epoch, PolicySerial: m.PolicySerial, Nodes: len(m.Nodes), Differs: Differences(d.Cluster(), cluster),
	}
	for _, n := range m.Nodes {
		if n.Role == "control-plane" {
			info.ControlPlanes++
		}
	}
	known, err := d.Known()
	if err != nil {
		return nil, nil, nil, err
	}
	info.KnownEpoch, info.Since = known.Epoch, Since(m, known)
	dropped, err := droppedSince(d, authority)
	if err != nil {
		return nil, nil, nil, err
	}
	info.Since = append(info.Since, dropped...)
	newer, err := newerBackup(d, m.TakenAt)
	if err == nil && newer != "" {
		info.Since = append(info.Since, newer+" is a newer backup.")
	}
	return info, m, authority, err
}

// signedBackup reads a backup to its end, and returns its SHA-256 and the one of the folder's authorities that has signed it (K5).
func signedBackup(d *ownerdir.Dir, f *os.File, identity age.Identity) (m *backup.Manifest, sum string, by *x509.Certificate, err error) {
	list, err := access.Authorities(d)
	if err != nil {
		return nil, "", nil, err
	}
	for _, by = range list {
		if _, err := f.Seek(0, io.SeekStart); err != nil {
			return nil, "", nil, err
		}
		h := sha256.New()
		var small map[string][]byte
		m, small, err = backup.Read(io.TeeReader(f, h), identity, by, io.Discard)
		for _, content := range small {
			clear(content) // K3
		}
		if !errors.Is(err, backup.ErrForeign) {
			return m, hex.EncodeToString(h.Sum(nil)), by, err
		}
	}
	return nil, "", nil, err
}

// droppedSince returns the consequences of a restore if the cluster has dropped the authority that signed the backup.
func droppedSince(d *ownerdir.Dir, signer *x509.Certificate) ([]string, error) {
	admin, err := d.Read(ownerdir.AdminConf)
	if err != nil || slices.ContainsFunc(access.TrustedBy(admin), signer.Equal) {
		return nil, err
	}
	return []string{fmt.Sprintf("The cluster has dropped the certificate authority (SHA-256 %x) that signed it: an attacker with a stolen key of that authority could have made it at any time. A restore brings that authority back, and nodes that trust only the present one stay NotReady until their machines are rebooted.", sha256.Sum256(signer.Raw))}, nil
}

// newerBackup returns the newest file in the folder's backups whose name has a later time; empty if there is none.
func newerBackup(d *ownerdir.Dir, than time.Time) (string, error) {
	files, err := filepath.Glob(filepath.Join(d.File(ownerdir.BackupsFolder), "*"+backup.Suffix))
	if err != nil || len(files) == 0 {
		return "", err
	}
	newest := slices.Max(files) // names sort by time
	if at, ok := backup.TimeOf(filepath.Base(newest)); !ok || !at.After(than) {
		return "", nil
	}
	return newest, nil
}

// Differences returns a sentence for each value that differs between the folder and a backup. A restore uses the backup's values.
func Differences(c ownerdir.Cluster, in *clusterinfo.Info) []string {
	out := []string{}
	differ := func(what, folder, backup string) {
		if folder != backup {
			out = append(out, fmt.Sprintf("%s: %s in the folder, %s in the backup. A restore uses the backup's.", what, folder, problem.Printable(backup)))
		}
	}
	differ("Kubernetes", c.KubernetesVersion, in.KubernetesVersion)
	if o := in.Other(); o != nil {
		out = append(out, fmt.Sprintf("The cluster was being upgraded: nodes ran Kubernetes %s and %s. After a restore, muster upgrade kubernetes continues.", problem.Printable(in.KubernetesVersion), problem.Printable(o.KubernetesVersion)))
	}
	differ("Control-plane endpoint", c.ControlPlaneEndpoint, in.ControlPlaneEndpoint)
	var had, has []string
	for _, p := range c.Components {
		had = append(had, p.Path+" (SHA-256 "+p.SHA256[:min(12, len(p.SHA256))]+")")
	}
	for _, p := range in.Components {
		has = append(has, p.Path+" (SHA-256 "+p.SHA256[:min(12, len(p.SHA256))]+")")
	}
	for _, l := range []struct {
		what     string
		had, has []string
	}{{"components", had, has}, {"images", c.Images, in.Images}} {
		for _, one := range []struct {
			text      string
			in, notIn []string
		}{{"In the backup, which a restore uses, but not among the folder's ", l.has, l.had}, {"In the folder, but not among the backup's ", l.had, l.has}} {
			only := slices.DeleteFunc(slices.Clone(one.in), func(s string) bool { return slices.Contains(one.notIn, s) })
			if len(only) > 0 {
				out = append(out, one.text+l.what+": "+problem.Named(only)+".")
			}
		}
	}
	return out
}

// Since returns the changes since a backup that a folder records, and what a restore would undo.
func Since(m *backup.Manifest, known *ownerdir.Known) []string {
	out := []string{}
	if known.Version == 0 {
		return []string{"The folder has no known.json, so later changes are not known."}
	}
	if known.Epoch > m.Epoch {
		out = append(out, fmt.Sprintf("The folder records epoch %d.", known.Epoch))
	} else if h, err := clusterinfo.ParseHistory(m.History); err != nil {
		out = append(out, "The history of its epochs can't be read: "+problem.Printable(err.Error())+".")
	} else if lacks := h.Lacks(clusterinfo.HistoryEpoch{Number: known.Epoch, ID: known.EpochID}); lacks != "" && m.History != "" {
		out = append(out, "It is of another history of the cluster than the folder's: "+lacks+". A control plane that was restored, or that was thought lost, has made it.")
	}
	had := map[string]backup.Node{}
	for _, n := range m.Nodes {
		had[n.UID] = n
	}
	var banned, unbanned, replaced, joined, bannedLater, gone []string
	for name, n := range known.Nodes {
		was, there := had[n.UID]
		if !there {
			if joined = append(joined, name); n.Banned {
				bannedLater = append(bannedLater, name)
			}
			continue
		}
		if n.Banned && !was.Banned {
			banned = append(banned, name)
		}
		if was.Banned && !n.Banned {
			unbanned = append(unbanned, name)
		}
		if n.MachineID != was.MachineID || n.Disk.ID != was.DiskID {
			replaced = append(replaced, name)
		}
	}
	for _, g := range known.Gone {
		if n, there := had[g.UID]; there {
			gone = append(gone, n.Name)
		}
	}
	for _, l := range []struct {
		text  string
		names []string
	}{
		{"Banned since, and not banned in it: ", banned},
		{"Banned in it, but no longer banned: ", unbanned},
		{"Given another machine or disk since: ", replaced},
		{"Forgotten since, and enrolled in it: ", gone},
		{"Joined since, and not in it: ", joined},
		{"Joined since and banned, and banned again by a restore: ", bannedLater},
		{"Erased disks, whose salts a restore deletes again: ", slices.Clone(known.Erased)},
	} {
		if len(l.names) == 0 {
			continue
		}
		out = append(out, l.text+problem.Named(l.names)+".")
	}
	return out
}

// Lines returns the text about a backup that users see.
func (i BackupInfo) Lines() []string {
	return slices.Concat([]string{
		fmt.Sprintf("%s: %.1f MiB, SHA-256 %s", i.File, float64(i.Size)/(1<<20), i.SHA256),
		fmt.Sprintf("Taken on %s at %s: Kubernetes %s, epoch %d with %s, %d nodes, %d of them control planes.", problem.Printable(i.Node), i.TakenAt.Local().Format(time.DateTime), cmp.Or(i.KubernetesVersion, "unknown"), i.Epoch, policies.PolicyOf(i.PolicySerial), i.Nodes, i.ControlPlanes),
		"Encrypted for the owner's key " + base64.StdEncoding.EncodeToString(i.OwnerKey) + ".",
	}, i.Differs, i.Since)
}
