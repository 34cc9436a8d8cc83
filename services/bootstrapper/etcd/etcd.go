// Package etcd makes snapshots of a cluster's etcd, checks its members, and removes members from it: one that its owner names, and those that an unfinished join of a control plane has left: kubeadm's own
// reset does so only if it got far enough to read the cluster's configuration, and never for a machine that did not come back.
//
// Before `kubeadm join` adds a member, etcd must have no member of this machine, and no learner of any machine. etcd takes one learner at a time, so an
// old one would block every later join. Voting members of other machines are never removed: only the owner knows whether one is gone for good.
package etcd

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/etcdutl/v3/snapshot"
	"go.uber.org/zap"
	"k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"

	"github.com/muster-k8s/muster/internal/required"
)

// These are the ports that kubeadm gives etcd: for clients, and for other members.
const (
	clientPort = "2379"
	peerPort   = "2380"
)

const (
	// certificateLife bounds the client certificate, which is only in memory: clocks may differ by hours.
	certificateLife = 24 * time.Hour
	// dialTimeout bounds the wait for one connection, callTimeout one call.
	dialTimeout, callTimeout = 5 * time.Second, 15 * time.Second
)

// Target describes an etcd and the machine for which it is cleaned. All fields are required.
type Target struct {
	// ControlPlanes are addresses of machines that run etcd, one of which must answer.
	ControlPlanes []netip.Addr
	// CACert and CAKey are etcd's certificate authority, PEM. The key signs a certificate for this one connection.
	CACert, CAKey []byte
	// Own are this machine's addresses.
	Own []netip.Addr
	// Learners also removes learners of other machines: they are left over while this machine has the join lease.
	Learners bool
}

// Member is a member that was removed.
type Member struct {
	// ID is etcd's ID, Name the node's name; it is empty for a member that never started.
	ID   uint64
	Name string
	// PeerURLs are its addresses for other members.
	PeerURLs []string
	// Learner means that it had no vote yet.
	Learner bool
}

// String returns the member as text for a log.
func (m Member) String() string {
	kind := "member"
	if m.Learner {
		kind = "learner"
	}
	return fmt.Sprintf("%s %x %q of %v", kind, m.ID, m.Name, m.PeerURLs)
}

// Clean removes members of this machine and learners of all machines, and returns those that it removed. It changes nothing if no control plane is
// given.
func Clean(ctx context.Context, t Target) ([]Member, error) {
	if err := required.Fields("etcd.Clean", t, "Learners"); err != nil {
		return nil, err
	}
	return remove(ctx, t.ControlPlanes, t.CACert, t.CAKey, leftOver(t.Own, t.Learners))
}

// RemoveNode removes the member that has a node's name, and returns it; none, if there is none. It asks the etcd at one of the
// addresses, with a certificate that it signs with etcd's authority, both PEM. etcd refuses if too few of the remaining members run.
func RemoveNode(ctx context.Context, at []netip.Addr, caCert, caKey []byte, node string) ([]Member, error) {
	if node == "" { // a member that never started has no name
		return nil, errors.New("etcd: the node to remove has no name")
	}
	return remove(ctx, at, caCert, caKey, named(node))
}

func remove(ctx context.Context, at []netip.Addr, caCert, caKey []byte, which func(*etcdserverpb.Member) bool) ([]Member, error) {
	c, err := connect(ctx, at, caCert, caKey)
	if err != nil {
		return nil, err
	}
	defer c.Close() //nolint:errcheck // an error has no consequence
	return clean(ctx, c, which)
}

func connect(ctx context.Context, at []netip.Addr, caCert, caKey []byte) (*clientv3.Client, error) {
	return dial(ctx, urls(at, clientPort), caCert, caKey)
}

func dial(ctx context.Context, endpoints []string, caCert, caKey []byte) (*clientv3.Client, error) {
	conf, err := clientTLS(caCert, caKey)
	if err != nil {
		return nil, err
	}
	c, err := clientv3.New(clientv3.Config{Context: ctx, Endpoints: endpoints, TLS: conf, DialTimeout: dialTimeout, Logger: zap.NewNop()})
	if err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	return c, nil
}

// Snapshot writes a snapshot of the etcd at an address: its database, and the SHA-256 of that in the last 32 bytes. It first calls room with the
// size, to check that there is room. The certificate authority is etcd's, PEM.
func Snapshot(ctx context.Context, at netip.Addr, caCert, caKey []byte, room func(size int64) error, w io.Writer) error {
	c, err := connect(ctx, []netip.Addr{at}, caCert, caKey)
	if err != nil {
		return err
	}
	defer c.Close() //nolint:errcheck // an error has no consequence
	call, cancel := context.WithTimeout(ctx, callTimeout)
	st, err := c.Status(call, c.Endpoints()[0])
	cancel()
	if err != nil {
		return fmt.Errorf("etcd: status: %w", err)
	}
	if err := room(st.DbSize); err != nil {
		return err
	}
	// A snapshot is the member's own, which may have lost the others. This read is answered by a member alone that is up to date with them.
	call, cancel = context.WithTimeout(ctx, callTimeout)
	_, err = c.Get(call, "/", clientv3.WithCountOnly())
	cancel()
	if err != nil {
		return fmt.Errorf("etcd: this member is not up to date: %w", err)
	}
	r, err := c.Snapshot(ctx)
	if err != nil {
		return fmt.Errorf("etcd: snapshot: %w", err)
	}
	_, err = io.Copy(w, r)
	if err := errors.Join(err, r.Close()); err != nil {
		return fmt.Errorf("etcd: snapshot: %w", err)
	}
	return nil
}

// cluster is the part of etcd's API that is used.
type cluster interface {
	MemberList(ctx context.Context, opts ...clientv3.OpOption) (*clientv3.MemberListResponse, error)
	MemberRemove(ctx context.Context, id uint64) (*clientv3.MemberRemoveResponse, error)
}

// Restore makes the data of an etcd with one member from a snapshot. dir is missing or empty, name and peer (HOST:PORT) are the member's.
//
// The IDs of the cluster and of its member are random, from the token. So members of the lost etcd, which trust the same authority, do not accept it
// as one of them, even at the address of one. The revision is raised by the time in milliseconds: it is higher than all revisions that a client can
// have seen since the snapshot, or of an earlier restore. All earlier revisions count as compacted, so that each watch restarts, and none continues
// on another history.
func Restore(snapshotFile, dir, name, peer string) error {
	at := "https://" + peer
	return snapshot.NewV3(zap.NewNop()).Restore(snapshot.RestoreConfig{
		SnapshotPath: snapshotFile, OutputDataDir: dir, Name: name, PeerURLs: []string{at}, InitialCluster: name + "=" + at, InitialClusterToken: rand.Text(),
		RevisionBump: max(leastBump, uint64(time.Now().UnixMilli())), MarkCompacted: true,
	})
}

// leastBump is for a machine whose clock is in 1970.
const leastBump = 1_000_000_000

func clean(ctx context.Context, c cluster, which func(*etcdserverpb.Member) bool) (removed []Member, err error) {
	call := func(f func(context.Context) error) error {
		ctx, cancel := context.WithTimeout(ctx, callTimeout)
		defer cancel()
		return f(ctx)
	}
	var list *clientv3.MemberListResponse
	if err := call(func(ctx context.Context) (err error) { list, err = c.MemberList(ctx); return err }); err != nil {
		return nil, fmt.Errorf("etcd: list members: %w", err)
	}
	for _, m := range list.Members {
		if !which(m) {
			continue
		}
		if err := call(func(ctx context.Context) error { _, err := c.MemberRemove(ctx, m.GetID()); return err }); err != nil {
			return removed, fmt.Errorf("etcd: remove member %x (%s): %w", m.GetID(), m.GetName(), err)
		}
		removed = append(removed, Member{ID: m.GetID(), Name: m.GetName(), PeerURLs: m.GetPeerURLs(), Learner: m.GetIsLearner()})
	}
	return removed, nil
}

// leftOver returns what an unfinished join has left: members of this machine, and learners.
func leftOver(own []netip.Addr, learners bool) func(*etcdserverpb.Member) bool {
	return func(m *etcdserverpb.Member) bool { return of(m, own) || learners && m.GetIsLearner() }
}

// named returns the member of a node.
func named(node string) func(*etcdserverpb.Member) bool {
	return func(m *etcdserverpb.Member) bool { return m.GetName() == node }
}

// of reports whether one of the member's peer URLs has one of the addresses.
func of(m *etcdserverpb.Member, own []netip.Addr) bool {
	return slices.ContainsFunc(m.GetPeerURLs(), func(s string) bool {
		u, err := url.Parse(s)
		if err != nil {
			return false
		}
		a, err := netip.ParseAddr(u.Hostname())
		return err == nil && u.Port() == peerPort && slices.Contains(own, a.Unmap())
	})
}

func urls(addresses []netip.Addr, port string) []string {
	out := make([]string, 0, len(addresses))
	for _, a := range addresses {
		out = append(out, "https://"+net.JoinHostPort(a.String(), port))
	}
	return out
}

// clientTLS returns a client certificate of etcd's authority, as kubeadm writes into files for its own client. Here its key never leaves the process
// (K3).
func clientTLS(caCert, caKey []byte) (*tls.Config, error) {
	issuers, err := cert.ParseCertsPEM(caCert)
	if err != nil {
		return nil, fmt.Errorf("etcd: the authority's certificate: %w", err)
	}
	roots := x509.NewCertPool()
	for _, c := range issuers { // the first belongs to the key; while the authority is rotated, members have certificates of the other one
		roots.AddCert(c)
	}
	parsed, err := keyutil.ParsePrivateKeyPEM(caKey)
	if err != nil {
		return nil, errors.New("etcd: the authority's key is not PEM of a private key") // K3: the error has no part of it
	}
	signer, ok := parsed.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("etcd: the authority's key is a %T, which cannot sign", parsed)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, err
	}
	now := time.Now()
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: "muster-bootstrapper"},
		NotBefore: now.Add(-certificateLife), NotAfter: now.Add(certificateLife),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, issuers[0], key.Public(), signer)
	if err != nil {
		return nil, fmt.Errorf("etcd: sign a client certificate: %w", err)
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS12, RootCAs: roots, Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}},
	}, nil
}
