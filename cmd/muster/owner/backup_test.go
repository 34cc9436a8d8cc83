package owner

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/internal/backup"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// lost is an owner whose cluster does not answer.
type lost struct {
	*owned
	key crypto.Signer // of the cluster's authority
}

func newLost(t *testing.T) *lost {
	t.Helper()
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	o := own(t, serveFirst(t, m), "127.0.0.1:1", attesttest.Policy(t, ca, []*attesttest.Machine{m}))
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	conf := clientcmdapi.NewConfig()
	conf.Clusters["c"] = &clientcmdapi.Cluster{Server: "https://127.0.0.1:1", CertificateAuthorityData: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}
	conf.Contexts["c"] = &clientcmdapi.Context{Cluster: "c"}
	conf.CurrentContext = "c"
	text, err := clientcmd.Write(*conf)
	if err != nil {
		t.Fatal(err)
	}
	if err := o.Write(ownerdir.AdminConf, text); err != nil {
		t.Fatal(err)
	}
	c := o.Cluster()
	c.ClusterID, c.Stage = o.clusterID().String(), ownerdir.StageInstalled
	if err := o.Save(c); err != nil {
		t.Fatal(err)
	}
	return &lost{o, key}
}

func (o *lost) manifest(t *testing.T) backup.Manifest {
	t.Helper()
	info := clusterinfo.Info{ClusterID: o.clusterID(), KubernetesVersion: "1.36.1", ControlPlaneEndpoint: "127.0.0.1:1"}
	cluster, err := info.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	return backup.Manifest{
		ClusterID: o.clusterID().String(), Node: "node1", TakenAt: time.Now(),
		State: backup.State{Epoch: 4, PolicySerial: 1, Cluster: cluster, Nodes: []backup.Node{{Name: "node1", UID: "a", Role: "control-plane"}, {Name: "w1", UID: "b", Role: "worker"}, {Name: "w2", UID: "c", Role: "worker", Banned: true}}},
	}
}

func (o *lost) file(t *testing.T, m backup.Manifest) string {
	t.Helper()
	key, err := o.OwnerKey()
	if err != nil {
		t.Fatal(err)
	}
	return writeBackup(t, key.Public().(ed25519.PublicKey), o.key, m)
}

func writeBackup(t *testing.T, to ed25519.PublicKey, authority crypto.Signer, m backup.Manifest) string {
	t.Helper()
	var out bytes.Buffer
	db := []byte("a database")
	if err := backup.Write(&out, to, authority, m, nil, bytes.NewReader(db), int64(len(db)), sha256.Sum256(db)); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "b.age")
	if err := os.WriteFile(path, out.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestABackupIsVerifiedAgainstTheFolder(t *testing.T) {
	o, other := newLost(t), newLost(t)
	info, err := VerifyBackup(o.Dir, o.file(t, o.manifest(t)))
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
	foreign := o.manifest(t)
	foreign.ClusterID = other.clusterID().String()
	for name, tt := range map[string]struct{ path, says string }{
		"of another owner":               {other.file(t, other.manifest(t)), "not encrypted for a key of this owner"},
		"of somebody else":               {writeBackup(t, publicOf(owner), other.key, o.manifest(t)), "not signed by this cluster's certificate authority"},
		"of another cluster, same owner": {o.file(t, foreign), "it is of the cluster"},
		"no backup":                      {o.File(ownerdir.PolicyFile), "not a backup"},
	} {
		if _, err := VerifyBackup(o.Dir, tt.path); err == nil || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestABackupIsComparedWithWhatTheFolderKnows(t *testing.T) {
	m := &backup.Manifest{State: backup.State{Epoch: 4, Nodes: []backup.Node{
		{Name: "node1", UID: "a", MachineID: "1"}, {Name: "w1", UID: "b", MachineID: "2"}, {Name: "w2", UID: "c", Banned: true}, {Name: "w3", UID: "d"},
		{Name: "w5", UID: "f", MachineID: "5", DiskID: "x"}, {Name: "w6", UID: "g", MachineID: "6", DiskID: "y"}, {Name: "w7", UID: "h", Banned: true},
	}}}
	known := &ownerdir.Known{
		Version: ownerdir.KnownVersion, Epoch: 9, Bans: map[string]int64{"b": 2, "c": 1, "h": 1, "x": 1}, Gone: []ownerdir.KnownGone{{UID: "d", Name: "w3"}, {UID: "y", Name: "w9"}},
		Nodes: map[string]ownerdir.KnownNode{
			"node1": {UID: "a", MachineID: "1"}, "w1": {UID: "b", MachineID: "2", Banned: true}, "w2": {UID: "c", Banned: true}, "w4": {UID: "e", MachineID: "4"},
			"w5": {UID: "f", MachineID: "50", Disk: ownerdir.KnownDisk{ID: "x"}}, "w6": {UID: "g", MachineID: "6", Disk: ownerdir.KnownDisk{ID: "z"}}, "w7": {UID: "h"},
		},
	}
	want := []string{
		"The folder knows epoch 9.", "Banned since, and not banned in it: w1.", "Banned in it, and not any more: w7.",
		"Given another machine or disk since: w5, w6.", "Forgotten since, and enrolled in it: w3.", "Joined since, and not in it: w4.",
	}
	if got := since(m, known); !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
	// What a restore bans before any machine gets something: also the machine that another one has replaced.
	if got := revoked(m, known); !slices.Equal(got, []string{"w1", "w3", "w5"}) {
		t.Errorf("it would ban %q", got)
	}
	for machine, want := range map[string]bool{"1": false, "2": true, "4": false, "5": true, "50": false, "none": false} {
		if got := bannedMachine(machine, m, known); got != want {
			t.Errorf("machine %s is banned: %v", machine, got)
		}
	}
	if got := since(m, &ownerdir.Known{Version: ownerdir.KnownVersion, Epoch: 4, Nodes: map[string]ownerdir.KnownNode{"node1": {UID: "a", MachineID: "1"}}}); len(got) != 0 {
		t.Errorf("got %q", got)
	}
	if got := since(m, &ownerdir.Known{}); len(got) != 1 || !strings.Contains(got[0], "no known.json") {
		t.Errorf("got %q", got)
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
	if got := differences(c, in); len(got) != 0 {
		t.Errorf("got %q", got)
	}
	in.Previous = &clusterinfo.Release{KubernetesVersion: "1.35.4"}
	if got := differences(c, in); len(got) != 1 || !strings.Contains(got[0], "nodes ran Kubernetes 1.36.1 and 1.35.4") {
		t.Errorf("got %q", got)
	}
	in = &clusterinfo.Info{KubernetesVersion: "1.35.0", ControlPlaneEndpoint: "b:6443", Components: list("b", "c"), Images: []string{"y@2"}}
	want := []string{
		"Kubernetes: 1.36.1 in the folder, 1.35.0 in the backup, which a restore takes.", "Control-plane endpoint: a:6443 in the folder, b:6443 in the backup, which a restore takes.",
		"In the backup, which a restore takes, and not among the folder's components: /usr/local/bin/c (SHA-256 cccccccccccc).",
		"In the folder, and not among the backup's components: /usr/local/bin/a (SHA-256 aaaaaaaaaaaa).",
		"In the backup, which a restore takes, and not among the folder's images: y@2.", "In the folder, and not among the backup's images: x@1, y@1.",
	}
	if got := differences(c, in); !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
}

func TestANewerBackupInTheFolderIsNamed(t *testing.T) {
	o := newLost(t)
	m := o.manifest(t)
	for name, newer := range map[string]bool{backup.Name("node1", m.TakenAt.Add(-time.Hour)): false, backup.Name("node2", m.TakenAt.Add(time.Hour)): true} {
		path := o.File(filepath.Join(ownerdir.BackupsFolder, name))
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
		info, err := VerifyBackup(o.Dir, o.file(t, m))
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

// A machine that was asked may be lost, too: the owner begins with another one.
func TestARestoreCanBeStartedOver(t *testing.T) {
	o := newLost(t)
	c := o.Cluster()
	lost := &ownerdir.Machine{ID: attest.MachineID{1}}
	c.Stage, c.Endpoint, c.Restore, c.FirstMachine = ownerdir.StageRequested, "127.0.0.1:2", &ownerdir.Restore{SHA256: "0", Former: &ownerdir.Machine{ID: attest.MachineID{9}}}, lost
	if err := o.Save(c); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var shown BackupInfo
	cfg := o.config()
	err := Restore(ctx, RestoreConfig{
		Dir: o.Dir, File: o.file(t, o.manifest(t)), URL: "http://x", Endpoint: "127.0.0.1:1", Report: cfg.Report, Log: cfg.Log, StartOver: true,
		Ask: func(i BackupInfo) (bool, error) {
			shown = i
			cancel() // before the machine is asked
			return true, nil
		},
	})
	if err == nil {
		t.Fatal("it went on without the machine")
	}
	if text := strings.Join(shown.Lines(), "\n"); !strings.Contains(text, "Machine "+lost.ID.String()+" was asked before") {
		t.Errorf("the owner is shown %s", text)
	}
	c = o.Cluster()
	if c.Stage != ownerdir.StagePrepared || c.Endpoint != "127.0.0.1:1" || c.FirstMachine != nil || c.Restore == nil || c.Restore.SHA256 != shown.SHA256 || c.Restore.Former.ID != (attest.MachineID{9}) {
		t.Errorf("the folder has %+v, %+v: %v", c, c.Restore, err)
	}
}

// A restore that is refused changes nothing in the folder.
func TestARestoreIsRefusedBeforeAnythingIsSent(t *testing.T) {
	epoch := func(n uint64) *uint64 { return &n }
	for name, tt := range map[string]struct {
		change func(*ownerdir.Cluster)
		accept *uint64
		ask    func(BackupInfo) (bool, error)
		says   string
	}{
		"nobody accepts the epoch": {says: "CLUSTER_ROLLED_BACK"},
		"another epoch":            {accept: epoch(3), says: "CLUSTER_ROLLED_BACK"},
		"the owner says no":        {ask: func(BackupInfo) (bool, error) { return false, nil }, says: "CLUSTER_ROLLED_BACK"},
		"a cluster that is not whole": {
			change: func(c *ownerdir.Cluster) { c.Stage = ownerdir.StageInitialized }, accept: epoch(4), says: "has no whole cluster yet",
		},
		"an adopted cluster":  {change: func(c *ownerdir.Cluster) { c.Adopted = true }, accept: epoch(4), says: "older than Muster"},
		"another one is open": {change: func(c *ownerdir.Cluster) { c.Restore = &ownerdir.Restore{SHA256: "0"} }, accept: epoch(4), says: "is not at its end"},
	} {
		t.Run(name, func(t *testing.T) {
			o := newLost(t)
			c := o.Cluster()
			if tt.change != nil {
				tt.change(&c)
				if err := o.Save(c); err != nil {
					t.Fatal(err)
				}
			}
			cfg := o.config()
			err := Restore(t.Context(), RestoreConfig{Dir: o.Dir, File: o.file(t, o.manifest(t)), URL: "http://x", Endpoint: c.Endpoint, AcceptEpoch: tt.accept, Ask: tt.ask, Report: cfg.Report, Log: cfg.Log})
			if err == nil || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("%v", err)
			}
			had, _ := json.Marshal(c)
			if have, _ := json.Marshal(o.Cluster()); !bytes.Equal(had, have) {
				t.Errorf("the folder was changed: %s", have)
			}
		})
	}
	t.Run("muster init does not go on with it", func(t *testing.T) {
		o := newLost(t)
		c := o.Cluster()
		c.Restore = &ownerdir.Restore{SHA256: "0"}
		if err := o.Save(c); err != nil {
			t.Fatal(err)
		}
		if err := Init(t.Context(), o.config()); err == nil || !strings.Contains(err.Error(), "a restore of this cluster is not at its end") {
			t.Errorf("%v", err)
		}
	})
}
