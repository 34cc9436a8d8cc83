package etcd

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/muster-k8s/muster/internal/kubetest"
)

// These are addresses that no other etcd of this computer uses.
const (
	host       = "127.0.20.79"
	secondHost = "127.0.20.80"
	thirdHost  = "127.0.20.81"
)

// process is a real etcd as kubeadm configures it, with an authority of its own.
type process struct {
	t         *testing.T
	folder    string
	cert, key []byte
}

func newProcess(t *testing.T) *process {
	t.Helper()
	r := &process{t: t, folder: t.TempDir()}
	r.cert, r.key, _ = authority(t)
	ca, err := tls.X509KeyPair(r.cert, r.key)
	if err != nil {
		t.Fatal(err)
	}
	server, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(2), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1), net.ParseIP(host), net.ParseIP(secondHost), net.ParseIP(thirdHost)},
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}, ca.Leaf, server.Public(), ca.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{"ca.crt": r.cert, "server.crt": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: leaf}), "server.key": encode(t, server)} {
		if err := os.WriteFile(filepath.Join(r.folder, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

func encode(t *testing.T, key *ecdsa.PrivateKey) []byte {
	t.Helper()
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})
}

// run runs etcd on a folder while do does, with the process's name.
func (r *process) run(data, name string, do func(*clientv3.Client)) {
	r.t.Helper()
	defer r.start(data, name, host, name+"=https://"+net.JoinHostPort(host, peerPort))()
	c, err := connect(r.t.Context(), []netip.Addr{netip.MustParseAddr(host)}, r.cert, r.key)
	if err != nil {
		r.t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	do(c)
}

// start starts a member of a new cluster. stop kills it.
func (r *process) start(data, name, host, cluster string) (stop func()) {
	r.t.Helper()
	bin, err := kubetest.Binaries()
	if err != nil {
		r.t.Fatal(err)
	}
	var log bytes.Buffer
	client, peer := "https://"+net.JoinHostPort(host, clientPort), "https://"+net.JoinHostPort(host, peerPort)
	at := func(name string) string { return filepath.Join(r.folder, name) }
	cmd := exec.Command(filepath.Join(bin, "etcd"), "--name="+name, "--data-dir="+data, "--unsafe-no-fsync", "--log-level=warn",
		"--listen-client-urls="+client, "--advertise-client-urls="+client, "--listen-peer-urls="+peer, "--initial-advertise-peer-urls="+peer, "--initial-cluster="+cluster,
		"--client-cert-auth", "--trusted-ca-file="+at("ca.crt"), "--cert-file="+at("server.crt"), "--key-file="+at("server.key"),
		"--peer-client-cert-auth", "--peer-trusted-ca-file="+at("ca.crt"), "--peer-cert-file="+at("server.crt"), "--peer-key-file="+at("server.key"))
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	return sync.OnceFunc(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if r.t.Failed() {
			r.t.Logf("etcd %s: %s", name, &log)
		}
	})
}

// must repeats a call until etcd serves it.
func (r *process) must(call func(context.Context) error) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), 5*time.Minute)
	defer cancel()
	for {
		try, end := context.WithTimeout(ctx, 10*time.Second)
		err := call(try)
		end()
		if err == nil {
			return
		}
		if ctx.Err() != nil {
			r.t.Fatal(err)
		}
	}
}

func TestASnapshotIsRestoredAsAClusterOfOneMember(t *testing.T) {
	r := newProcess(t)
	const key = "/registry/x"
	file := filepath.Join(r.folder, "snapshot")
	var before int64
	r.run(filepath.Join(r.folder, "first"), "node1", func(c *clientv3.Client) {
		r.must(func(ctx context.Context) error { _, err := c.Put(ctx, key, "before"); return err })
		full := errors.New("full")
		var asked int64
		err := Snapshot(t.Context(), netip.MustParseAddr(host), r.cert, r.key, func(size int64) error { asked = size; return full }, nil)
		if !errors.Is(err, full) || asked == 0 {
			t.Errorf("without room, of %d bytes: %v", asked, err)
		}
		f, err := os.Create(file)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(Snapshot(t.Context(), netip.MustParseAddr(host), r.cert, r.key, func(int64) error { return nil }, f), f.Close()); err != nil {
			t.Fatal(err)
		}
		r.must(func(ctx context.Context) error {
			put, err := c.Put(ctx, key, "after")
			if err == nil {
				before = put.Header.Revision
			}
			return err
		})
	})
	data := filepath.Join(r.folder, "restored")
	if err := os.Mkdir(data, 0o700); err != nil { // as the mount point of a machine
		t.Fatal(err)
	}
	if err := Restore(file, data, "node9", net.JoinHostPort(host, peerPort)); err != nil {
		t.Fatal(err)
	}
	if err := Restore(file, data, "node9", net.JoinHostPort(host, peerPort)); err == nil {
		t.Error("data are overwritten")
	}
	r.run(data, "node9", func(c *clientv3.Client) {
		r.must(func(ctx context.Context) error {
			got, err := c.Get(ctx, key)
			if err != nil {
				return err
			}
			if len(got.Kvs) != 1 || string(got.Kvs[0].Value) != "before" || got.Header.Revision <= before {
				t.Errorf("restored: %v, after revision %d", got, before)
			}
			return nil
		})
		list, err := c.MemberList(t.Context())
		if err != nil || len(list.Members) != 1 || list.Members[0].GetName() != "node9" {
			t.Errorf("members %v, %v", list, err)
		}
		// A client that watched the lost etcd begins anew, rather than to miss what happened in between.
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		if w := <-c.Watch(ctx, key, clientv3.WithRev(before)); w.CompactRevision == 0 {
			t.Errorf("a watch from revision %d goes on: %v", before, w)
		}
	})
}

func TestADamagedSnapshotIsNotRestored(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "snapshot")
	if err := os.WriteFile(file, []byte(strings.Repeat("x", 512+32)), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Restore(file, filepath.Join(dir, "data"), "node1", "127.0.0.1:2380"); err == nil {
		t.Error("it is restored")
	}
}
