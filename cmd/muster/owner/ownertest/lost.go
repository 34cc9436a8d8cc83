package ownertest

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"testing"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/internal/backup"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// Lost is an owner whose cluster does not answer.
type Lost struct {
	*Owned
	Key crypto.Signer // of the cluster's authority
}

// NewLost returns a cluster whose API server does not answer.
func NewLost(t *testing.T) *Lost {
	t.Helper()
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	o := Own(t, ServeFirst(t, m), "127.0.0.1:1", attesttest.Policy(t, ca, []*attesttest.Machine{m}))
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
	c.ClusterID, c.Stage = o.ClusterID().String(), ownerdir.StageInstalled
	if err := o.Save(c); err != nil {
		t.Fatal(err)
	}
	return &Lost{o, key}
}

// Manifest returns the manifest of a backup of the cluster.
func (o *Lost) Manifest(t *testing.T) backup.Manifest {
	t.Helper()
	info := clusterinfo.Info{ClusterID: o.ClusterID(), KubernetesVersion: "1.36.1", ControlPlaneEndpoint: "127.0.0.1:1"}
	cluster, err := info.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	return backup.Manifest{
		ClusterID: o.ClusterID().String(), Node: "node1", TakenAt: time.Now(),
		State: backup.State{Epoch: 4, PolicySerial: 1, Cluster: cluster, Nodes: []backup.Node{{Name: "node1", UID: "a", Role: "control-plane"}, {Name: "w1", UID: "b", Role: "worker"}, {Name: "w2", UID: "c", Role: "worker", Banned: true}}},
	}
}

// BackupFile writes a backup that the owner of the folder can read, and returns its path.
func (o *Lost) BackupFile(t *testing.T, m backup.Manifest) string {
	t.Helper()
	key, err := o.OwnerKey()
	if err != nil {
		t.Fatal(err)
	}
	return WriteBackup(t, key.Public().(ed25519.PublicKey), o.Key, m)
}

// WriteBackup writes a backup, and returns its path.
func WriteBackup(t *testing.T, to ed25519.PublicKey, authority crypto.Signer, m backup.Manifest) string {
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
