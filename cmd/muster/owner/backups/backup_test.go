package backups

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/internal/backup"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/versions"
)

func TestABackupIsVerifiedAgainstTheFolder(t *testing.T) {
	o, other := ownertest.NewLost(t), ownertest.NewLost(t)
	info, err := VerifyBackup(o.Dir, o.BackupFile(t, o.Manifest(t)))
	if err != nil {
		t.Fatal(err)
	}
	if info.Epoch != 4 || info.Nodes != 3 || info.ControlPlanes != 1 || info.KubernetesVersion != "1.36.1" || len(info.Since) != 1 || len(info.SHA256) != 64 {
		t.Errorf("%+v", info)
	}
	text := strings.Join(info.Lines(), "\n")
	for _, want := range []string{"epoch 4", "serial 1", "3 nodes, 1 of them", info.SHA256} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in %s", want, text)
		}
	}
	owner, err := o.OwnerKey()
	if err != nil {
		t.Fatal(err)
	}
	foreign := o.Manifest(t)
	foreign.ClusterID = other.ClusterID().String()
	for name, tt := range map[string]struct{ path, says string }{
		"of another owner":               {other.BackupFile(t, other.Manifest(t)), "not encrypted for a key of this owner"},
		"of somebody else":               {ownertest.WriteBackup(t, access.PublicOf(owner), other.Key, o.Manifest(t)), "not signed by this cluster's certificate authority"},
		"of another cluster, same owner": {o.BackupFile(t, foreign), "it is a backup of cluster"},
		"no backup":                      {o.File(ownerdir.PolicyFile), "not a backup"},
	} {
		if _, err := VerifyBackup(o.Dir, tt.path); err == nil || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestABackupIsComparedWithTheFoldersValues(t *testing.T) {
	list := func(hashes ...string) (out []versions.Component) {
		for _, h := range hashes {
			out = append(out, versions.Component{Path: "/usr/local/bin/" + h, SHA256: strings.Repeat(h, 64)})
		}
		return out
	}
	c := ownerdir.Cluster{KubernetesVersion: "1.36.1", ControlPlaneEndpoint: "a:6443", Components: list("a", "b"), Images: []string{"x@1", "y@1"}}
	in := &clusterinfo.Info{KubernetesVersion: "1.36.1", ControlPlaneEndpoint: "a:6443", Components: list("b", "a"), Images: []string{"y@1", "x@1"}}
	if got := Differences(c, in); len(got) != 0 {
		t.Errorf("got %q", got)
	}
	in.Previous = &clusterinfo.Release{KubernetesVersion: "1.35.4"}
	if got := Differences(c, in); len(got) != 1 || !strings.Contains(got[0], "nodes ran Kubernetes 1.36.1 and 1.35.4") {
		t.Errorf("got %q", got)
	}
	in = &clusterinfo.Info{KubernetesVersion: "1.35.0", ControlPlaneEndpoint: "b:6443", Components: list("b", "c"), Images: []string{"y@2"}}
	want := []string{
		"Kubernetes: 1.36.1 in the folder, 1.35.0 in the backup. A restore uses the backup's.", "Control-plane endpoint: a:6443 in the folder, b:6443 in the backup. A restore uses the backup's.",
		"In the backup, which a restore uses, but not among the folder's components: /usr/local/bin/c (SHA-256 cccccccccccc).",
		"In the folder, but not among the backup's components: /usr/local/bin/a (SHA-256 aaaaaaaaaaaa).",
		"In the backup, which a restore uses, but not among the folder's images: y@2.", "In the folder, but not among the backup's images: x@1, y@1.",
	}
	if got := Differences(c, in); !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
}

func TestANewerBackupInTheFolderIsNamed(t *testing.T) {
	o := ownertest.NewLost(t)
	m := o.Manifest(t)
	for name, newer := range map[string]bool{backup.Name("node1", m.TakenAt.Add(-time.Hour)): false, backup.Name("node2", m.TakenAt.Add(time.Hour)): true} {
		path := o.File(filepath.Join(ownerdir.BackupsFolder, name))
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
		info, err := VerifyBackup(o.Dir, o.BackupFile(t, m))
		if err != nil {
			t.Fatal(err)
		}
		if got := slices.ContainsFunc(info.Since, func(s string) bool { return strings.HasPrefix(s, path+" is a newer backup") }); got != newer {
			t.Errorf("%s: %q", name, info.Since)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
}
