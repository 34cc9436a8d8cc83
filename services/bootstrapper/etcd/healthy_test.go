package etcd

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
)

// Between two control planes of an upgrade: with one member that does not vote or run, the next one that stops takes the quorum.
func TestAnEtcdIsHealthyOnlyIfAllItsMembersAre(t *testing.T) {
	r := newProcess(t)
	var cluster []string
	hosts := []string{host, secondHost, thirdHost}
	for i, h := range hosts {
		cluster = append(cluster, fmt.Sprintf("node%d=https://%s", i+1, net.JoinHostPort(h, peerPort)))
	}
	start := func(i int) func() {
		name := fmt.Sprintf("node%d", i+1)
		return r.start(filepath.Join(r.folder, name), name, hosts[i], strings.Join(cluster, ","))
	}
	var stops []func()
	for i := range hosts {
		stops = append(stops, start(i))
	}
	defer func() {
		for _, stop := range stops {
			stop()
		}
	}()
	at := netip.MustParseAddr(host)
	c, err := connect(t.Context(), []netip.Addr{at}, r.cert, r.key)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	healthy := func(ctx context.Context) error { return Healthy(ctx, at, r.cert, r.key) }
	refused := func(want string) {
		t.Helper()
		if err := healthy(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	r.must(healthy)

	var learner uint64
	r.must(func(ctx context.Context) error {
		a, err := c.MemberAddAsLearner(ctx, []string{"https://127.0.20.82:2380"})
		if err == nil {
			learner = a.Member.GetID()
		}
		return err
	})
	refused("127.0.20.82:2380: it is a learner")
	r.must(func(ctx context.Context) error { _, err := c.MemberRemove(ctx, learner); return err })
	r.must(healthy)

	var voter uint64
	r.must(func(ctx context.Context) error {
		a, err := c.MemberAdd(ctx, []string{"https://127.0.20.82:2380"})
		if err == nil {
			voter = a.Member.GetID()
		}
		return err
	})
	refused("127.0.20.82:2380: it has never started")
	r.must(func(ctx context.Context) error { _, err := c.MemberRemove(ctx, voter); return err })
	r.must(healthy)

	r.must(func(ctx context.Context) error {
		_, err := etcdserverpb.NewMaintenanceClient(c.ActiveConnection()).Alarm(ctx, &etcdserverpb.AlarmRequest{Action: etcdserverpb.AlarmRequest_ACTIVATE, Alarm: etcdserverpb.AlarmType_NOSPACE})
		return err
	})
	refused("NOSPACE")
	r.must(func(ctx context.Context) error { _, err := c.AlarmDisarm(ctx, &clientv3.AlarmMember{}); return err })
	r.must(healthy)

	stops[2]()
	refused("member node3: it does not answer")
	stops[2] = start(2)
	r.must(healthy)

	stops[1]()
	stops[2]()
	refused("list members")
}

// memberSeven is a member that answers its clients, and has lost the others until it is upToDate.
type memberSeven struct {
	etcdserverpb.UnimplementedMaintenanceServer
	etcdserverpb.UnimplementedKVServer

	upToDate atomic.Bool
}

func (m *memberSeven) Status(context.Context, *etcdserverpb.StatusRequest) (*etcdserverpb.StatusResponse, error) {
	return &etcdserverpb.StatusResponse{Header: &etcdserverpb.ResponseHeader{MemberId: 7}}, nil
}

func (m *memberSeven) Range(_ context.Context, r *etcdserverpb.RangeRequest) (*etcdserverpb.RangeResponse, error) {
	if !m.upToDate.Load() && !r.GetSerializable() { // what is serializable, a member answers from what it has
		return nil, status.Error(codes.FailedPrecondition, "no answer of the others")
	}
	return &etcdserverpb.RangeResponse{Header: &etcdserverpb.ResponseHeader{MemberId: 7}}, nil
}

// If such a member counted as healthy, the next one that stops would take the quorum.
func TestAMemberThatLagsBehindOrIsAnotherIsNotHealthy(t *testing.T) {
	r := newProcess(t)
	own, err := tls.LoadX509KeyPair(filepath.Join(r.folder, "server.crt"), filepath.Join(r.folder, "server.key"))
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(r.cert)
	l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		t.Fatal(err)
	}
	m := new(memberSeven)
	server := grpc.NewServer(grpc.Creds(credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{own}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: roots})))
	etcdserverpb.RegisterMaintenanceServer(server, m)
	etcdserverpb.RegisterKVServer(server, m)
	done := make(chan error, 1)
	go func() { done <- server.Serve(l) }()
	defer func() {
		server.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	ask := func(id uint64) error {
		return healthy(t.Context(), &etcdserverpb.Member{ID: id, Name: "node1", ClientURLs: []string{"https://" + l.Addr().String()}}, r.cert, r.key)
	}
	if err := ask(7); err == nil || !strings.Contains(err.Error(), "not up to date") {
		t.Errorf("a member that lags behind: %v", err)
	}
	m.upToDate.Store(true)
	if err := ask(8); err == nil || !strings.Contains(err.Error(), "member 7 answers at") {
		t.Errorf("another member: %v", err)
	}
	if err := ask(7); err != nil {
		t.Errorf("repaired: %v", err)
	}
}
