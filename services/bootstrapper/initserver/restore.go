package initserver

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/internal/backup"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/objects/etcdencryption"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/etcd"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/provision"
	"github.com/muster-k8s/muster/trust/attest"
)

const (
	// restoreFolder has the backup and etcd's snapshot while a restore runs.
	restoreFolder = "/var/lib/muster/restore"
	backupFile    = "backup.age"
	// maxAuthority bounds a certificate, in bytes.
	maxAuthority = 16 << 10
	// fetchTime bounds one attempt to fetch a backup.
	fetchTime = 6 * time.Hour
)

// restoreOrder is the checked part of a request that names a backup.
type restoreOrder struct {
	file      component.Component
	sha256    [sha256.Size]byte
	fileKey   []byte
	authority *x509.Certificate
}

func parseBackup(b *initv1.Backup) (*restoreOrder, error) {
	if len(b.GetFileKey()) != backup.FileKeySize {
		return nil, invalid("backup.file_key: want %d bytes, not %d", backup.FileKeySize, len(b.GetFileKey()))
	}
	if len(b.GetAuthority()) > maxAuthority {
		return nil, invalid("backup.authority: at most %d bytes, not %d", maxAuthority, len(b.GetAuthority()))
	}
	authority, err := x509.ParseCertificate(b.GetAuthority())
	if err != nil {
		return nil, invalid("backup.authority: %w", err)
	}
	file, err := component.File(b.GetUrl(), b.GetSha256(), restoreFolder, backupFile)
	if err != nil {
		return nil, invalid("backup: %w", err)
	}
	sum := [sha256.Size]byte(b.GetSha256())
	if sum == ([sha256.Size]byte{}) { // that means in a signature that there is no backup
		return nil, invalid("backup.sha256: no file has this one")
	}
	return &restoreOrder{file: file, sha256: sum, fileKey: b.GetFileKey(), authority: authority}, nil
}

// restore puts the certificate authorities and the data of etcd in place, which kubeadm then uses. It is safe to repeat (B3): etcd has not started.
func (s *Server) restore(ctx context.Context, o *initOrder, report provision.Progress) error {
	folder := s.node.On(restoreFolder)
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return err
	}
	limits := s.node.Components
	limits.Download, limits.Try = backup.MaxFile, fetchTime
	in := component.New(s.node.Root, limits, s.node.Log)
	defer in.Close()
	if err := in.Install(ctx, []component.Component{o.restore.file}, func(text string) { report(initv1.Phase_PHASE_COMPONENTS, text) }); err != nil {
		return err
	}
	report(initv1.Phase_PHASE_COMPONENTS, "reading the backup")
	snapshot := filepath.Join(folder, backup.Snapshot)
	small, err := s.unpack(o, filepath.Join(folder, backupFile), snapshot)
	if err != nil {
		return err
	}
	defer func() {
		for _, content := range small {
			clear(content) // K3
		}
	}()
	for _, name := range clusterinfo.ControlPlaneFiles() {
		path := s.node.On(filepath.Join(machine.PKIFolder, name))
		content, ok := small["pki/"+name]
		if ok {
			err = machine.WriteFile(path, content, 0o600, 0o755)
		} else if err = os.Remove(path); errors.Is(err, fs.ErrNotExist) { // of an earlier try, with another backup
			err = nil
		}
		if err != nil {
			return err
		}
	}
	if _, err := os.Stat(s.node.On(etcdencryption.File)); err != nil {
		return invalid("backup: it has no %s: a cluster of Muster has one, and one that was adopted can't be restored", etcdencryption.File)
	}
	report(initv1.Phase_PHASE_COMPONENTS, "restoring etcd")
	data := s.node.On(machine.EtcdFolder)
	if err := machine.EmptyDir(data); err != nil {
		return err
	}
	host := o.meta.Addresses[0].String()
	if err := etcd.Restore(snapshot, data, o.meta.Name, net.JoinHostPort(host, "2380")); err != nil {
		return fmt.Errorf("restore etcd: %w", err)
	}
	return errors.Join(machine.Sync(data), os.RemoveAll(folder))
}

// unpack verifies the backup, writes etcd's snapshot to a file, and returns the other files by name.
func (s *Server) unpack(o *initOrder, from, snapshot string) (map[string][]byte, error) {
	f, err := os.Open(from)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	out, err := os.OpenFile(snapshot, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	// K5
	m, small, err := backup.Read(f, backup.WithFileKey(o.restore.fileKey), o.restore.authority, out)
	if cerr := out.Close(); err == nil && cerr != nil {
		return nil, cerr
	}
	if err != nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "backup: %w", err)
	}
	if id := o.root.ClusterID([secretSize]byte(o.request.GetMeasurementSalt())); m.ClusterID != id.String() {
		return nil, invalid("backup: it is of the cluster %s, and the request of %s", m.ClusterID, id)
	}
	// Certificates of a node of the lost cluster may still be valid for its name.
	for _, n := range m.Nodes {
		if n.Name == o.meta.Name {
			return nil, attest.Refuse(attestv1.Reason_REASON_NAME_TAKEN, "the backup has a node %s: give this machine another name in its metadata", n.Name)
		}
	}
	return small, nil
}
