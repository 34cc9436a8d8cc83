package owner

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
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
	return writeBackup(t, publicOf(key), o.key, m)
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
	if info.Epoch != 4 || info.Nodes != 3 || info.ControlPlanes != 1 || info.KubernetesVersion != "1.36.1" || len(info.Since) != 0 || len(info.SHA256) != 64 {
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
		"of another owner":               {other.file(t, other.manifest(t)), "not encrypted for this owner's key"},
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
	m := &backup.Manifest{State: backup.State{Epoch: 4, Nodes: []backup.Node{{Name: "node1", UID: "a"}, {Name: "w1", UID: "b"}, {Name: "w2", UID: "c", Banned: true}, {Name: "w3", UID: "d"}}}}
	known := &ownerdir.Known{
		Epoch: 9, Bans: map[string]int64{"b": 2, "c": 1, "x": 1}, Gone: []ownerdir.KnownGone{{UID: "d", Name: "w3"}, {UID: "y", Name: "w9"}},
		Nodes: map[string]ownerdir.KnownNode{"node1": {UID: "a"}, "w1": {UID: "b", Banned: true}, "w2": {UID: "c", Banned: true}, "w4": {UID: "e"}},
	}
	want := []string{"The folder knows epoch 9.", "Banned since, and not banned in it: w1.", "Forgotten since, and enrolled in it: w3.", "Joined since, and not in it: w4."}
	if got := since(m, known); !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
	// What a restore bans before any machine gets something.
	if got := revoked(m, known); !slices.Equal(got, []string{"w1", "w3"}) {
		t.Errorf("it would ban %q", got)
	}
	if got := since(m, &ownerdir.Known{Epoch: 4, Nodes: map[string]ownerdir.KnownNode{"node1": {UID: "a"}}}); len(got) != 0 {
		t.Errorf("got %q", got)
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
