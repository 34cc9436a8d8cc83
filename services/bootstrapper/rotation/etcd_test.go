package rotation

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	certutil "k8s.io/client-go/util/cert"

	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
)

// member is a real member of etcd with the files of one control plane, which restarts after each change, and the connection of its API server, which
// reads its files when it starts.
type member struct {
	*plane
	name         string
	data         string
	client, peer int
	initial      *string
	run          *program
	api          *tls.Config
}

func (m *member) Change(ctx context.Context, resume bool, do func() error, components ...string) error {
	if err := m.plane.Change(ctx, resume, do, components...); err != nil {
		return err
	}
	m.start(m.t)
	m.readFiles(m.t)
	return nil
}

// start starts or restarts etcd as kubeadm's manifest has it.
func (m *member) start(t *testing.T) {
	t.Helper()
	if m.run != nil {
		m.run.stop()
	}
	at := func(name string) string { return filepath.Join(m.pki(), "etcd", name) }
	url := func(port int) string { return fmt.Sprintf("https://127.0.0.1:%d", port) }
	m.run = start(t, "etcd", "--name="+m.name, "--data-dir="+m.data, "--unsafe-no-fsync", "--log-level=error",
		"--initial-cluster="+*m.initial, "--initial-advertise-peer-urls="+url(m.peer), "--listen-peer-urls="+url(m.peer),
		"--listen-client-urls="+url(m.client), "--advertise-client-urls="+url(m.client),
		"--client-cert-auth", "--trusted-ca-file="+at("ca.crt"), "--cert-file="+at("server.crt"), "--key-file="+at("server.key"),
		"--peer-client-cert-auth", "--peer-trusted-ca-file="+at("ca.crt"), "--peer-cert-file="+at("peer.crt"), "--peer-key-file="+at("peer.key"))
}

// readFiles reads what an API server reads of etcd's authority.
func (m *member) readFiles(t *testing.T) {
	t.Helper()
	pair, err := tls.LoadX509KeyPair(filepath.Join(m.pki(), "apiserver-etcd-client.crt"), filepath.Join(m.pki(), "apiserver-etcd-client.key"))
	if err != nil {
		t.Fatal(err)
	}
	list, err := certutil.CertsFromFile(filepath.Join(m.pki(), "etcd", "ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	for _, ca := range list {
		roots.AddCert(ca)
	}
	m.api = &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots, Certificates: []tls.Certificate{pair}}
}

// write writes to this member, which needs the quorum, with the connection of an API server.
func (m *member) write(ctx context.Context, with *tls.Config) error {
	c, err := clientv3.New(clientv3.Config{Context: ctx, Endpoints: []string{fmt.Sprintf("https://127.0.0.1:%d", m.client)}, TLS: with.Clone(), DialTimeout: 5 * time.Second, Logger: zap.NewNop()})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	_, err = c.Put(ctx, "key", m.name)
	return errors.Join(err, c.Close())
}

func newMembers(t *testing.T, n int) (out []*member) {
	t.Helper()
	var initial []string
	all := new(string)
	for i, p := range newPlanes(t, n) {
		m := &member{plane: p, name: fmt.Sprintf("node%d", i+1), data: t.TempDir(), client: reservePort(t), peer: reservePort(t), initial: all}
		p.ControlPlane = m
		initial = append(initial, fmt.Sprintf("%s=https://127.0.0.1:%d", m.name, m.peer))
		out = append(out, m)
	}
	*all = strings.Join(initial, ",")
	for _, m := range out {
		m.start(t)
		m.readFiles(t)
	}
	return out
}

func eventually(t *testing.T, try func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		err := try(ctx)
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatal(err)
		case <-tick.C:
		}
	}
}

// While one member after another changes, each takes writes with the files of each API server as it has read them.
func TestEtcdKeepsItsQuorumWhileItsAuthorityIsRotated(t *testing.T) {
	t.Parallel()
	members := newMembers(t, 3)
	before := members[0].api
	all := func(when string) {
		t.Helper()
		for i, m := range members {
			for j, from := range members {
				eventually(t, func(ctx context.Context) error {
					if err := m.write(ctx, from.api); err != nil {
						return fmt.Errorf("%s: member %d with the files of API server %d: %w", when, i, j, err)
					}
					return nil
				})
			}
		}
	}
	all("before")
	id := ""
	for _, phase := range []clusterinfo.RotationPhase{clusterinfo.RotationAccept, clusterinfo.RotationUse, clusterinfo.RotationFinish} {
		for i, m := range members {
			id = m.must(clusterinfo.EtcdCA, phase, id).ID
			all(fmt.Sprintf("%s of %d", phase, i))
		}
	}
	// The old authority's certificates lead nowhere.
	for i, m := range members {
		trusting := before.Clone()
		trusting.RootCAs = m.api.RootCAs
		if err := m.write(t.Context(), trusting); err == nil {
			t.Errorf("member %d takes a client certificate of the old authority", i)
		}
		trusting.Certificates = m.api.Certificates
		if err := m.write(t.Context(), trusting); err != nil {
			t.Errorf("member %d, with the new one: %v", i, err)
		}
	}
}
