package etcd

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// members is a cluster's list of members.
type members struct {
	list  []*etcdserverpb.Member
	stuck uint64 // the member that can't be removed
}

func (m *members) MemberList(context.Context, ...clientv3.OpOption) (*clientv3.MemberListResponse, error) {
	if m.list == nil {
		return nil, errors.New("no leader")
	}
	return (*clientv3.MemberListResponse)(&etcdserverpb.MemberListResponse{Members: slices.Clone(m.list)}), nil
}

func (m *members) MemberRemove(_ context.Context, id uint64) (*clientv3.MemberRemoveResponse, error) {
	if id == m.stuck {
		return nil, errors.New("re-configuration failed")
	}
	m.list = slices.DeleteFunc(m.list, func(o *etcdserverpb.Member) bool { return o.GetID() == id })
	return &clientv3.MemberRemoveResponse{}, nil
}

func (m *members) ids() (out []uint64) {
	for _, o := range m.list {
		out = append(out, o.GetID())
	}
	return out
}

func member(id uint64, name, host string, learner bool) *etcdserverpb.Member {
	return &etcdserverpb.Member{ID: id, Name: name, PeerURLs: []string{"https://" + host + ":2380"}, IsLearner: learner}
}

func TestOwnMembersAndLearnersGoAndNobodyElse(t *testing.T) {
	own := []netip.Addr{netip.MustParseAddr("192.168.77.13"), netip.MustParseAddr("fd00::13")}
	first, second := member(1, "node1", "192.168.77.11", false), member(2, "node2", "192.168.77.12", false)
	for name, tt := range map[string]struct {
		list []*etcdserverpb.Member
		want []uint64
	}{
		"nothing was left":                     {[]*etcdserverpb.Member{first, second}, []uint64{1, 2}},
		"a learner of its own, never started":  {[]*etcdserverpb.Member{first, member(3, "", "192.168.77.13", true)}, []uint64{1}},
		"a member of its own, with a vote":     {[]*etcdserverpb.Member{first, member(3, "node3", "192.168.77.13", false), second}, []uint64{1, 2}},
		"at its other address":                 {[]*etcdserverpb.Member{first, member(3, "node3", "[fd00::13]", false)}, []uint64{1}},
		"a learner of a machine that is gone":  {[]*etcdserverpb.Member{first, member(4, "node4", "192.168.77.14", true)}, []uint64{1}},
		"an address that begins like its own":  {[]*etcdserverpb.Member{first, member(5, "node5", "192.168.77.130", false)}, []uint64{1, 5}},
		"its address at another port":          {[]*etcdserverpb.Member{first, {ID: 6, PeerURLs: []string{"https://192.168.77.13:2390"}}}, []uint64{1, 6}},
		"a peer URL that does not parse":       {[]*etcdserverpb.Member{first, {ID: 7, PeerURLs: []string{"https://%zz"}}}, []uint64{1, 7}},
		"its own by the second of two URLs":    {[]*etcdserverpb.Member{first, {ID: 8, PeerURLs: []string{"https://10.0.0.1:2380", "https://192.168.77.13:2380"}}}, []uint64{1}},
		"a dead member with a vote, of others": {[]*etcdserverpb.Member{first, second, member(9, "node9", "192.168.77.19", false)}, []uint64{1, 2, 9}},
	} {
		t.Run(name, func(t *testing.T) {
			m := &members{list: tt.list}
			removed, err := clean(t.Context(), m, leftOver(own, true))
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(m.ids(), tt.want) || len(removed) != len(tt.list)-len(tt.want) {
				t.Errorf("left %v, want %v; removed %v", m.ids(), tt.want, removed)
			}
		})
	}
}

// A machine that may have lost its join lease must not remove the learner of the machine that joins (J8).
func TestOutsideItsTurnAMachineRemovesOnlyItself(t *testing.T) {
	own := []netip.Addr{netip.MustParseAddr("192.168.77.13")}
	m := &members{list: []*etcdserverpb.Member{
		member(1, "node1", "192.168.77.11", false), member(3, "", "192.168.77.13", true), member(4, "node4", "192.168.77.14", true),
	}}
	if _, err := clean(t.Context(), m, leftOver(own, false)); err != nil {
		t.Fatal(err)
	}
	if want := []uint64{1, 4}; !slices.Equal(m.ids(), want) {
		t.Errorf("left %v, want %v", m.ids(), want)
	}
}

// The owner names a node; a member that never started has no name, and is not removed by an order.
func TestTheMemberOfANodeIsRemovedByName(t *testing.T) {
	all := []*etcdserverpb.Member{member(1, "node1", "192.168.77.11", false), member(2, "node2", "192.168.77.12", false), member(3, "", "192.168.77.13", true)}
	for name, want := range map[string][]uint64{"node2": {1, 3}, "node": {1, 2, 3}, "node22": {1, 2, 3}} {
		m := &members{list: slices.Clone(all)}
		if removed, err := clean(t.Context(), m, named(name)); err != nil || len(removed) != len(all)-len(want) || !slices.Equal(m.ids(), want) {
			t.Errorf("%s: removed %v, %v; left %v", name, removed, err, m.ids())
		}
	}
	if _, err := RemoveNode(t.Context(), nil, nil, nil, ""); err == nil || !strings.Contains(err.Error(), "has no name") {
		t.Error(err)
	}
}

func TestWhatCannotBeRemovedIsAnError(t *testing.T) {
	own := []netip.Addr{netip.MustParseAddr("192.168.77.13")}
	if _, err := clean(t.Context(), &members{}, leftOver(own, true)); err == nil {
		t.Error("an etcd that does not answer has nothing left")
	}
	removed, err := clean(t.Context(), &members{list: []*etcdserverpb.Member{member(3, "a", "192.168.77.14", true), member(4, "b", "192.168.77.13", false)}, stuck: 4}, leftOver(own, true))
	if err == nil || len(removed) != 1 || removed[0].ID != 3 || !strings.Contains(removed[0].String(), "learner 3") {
		t.Errorf("removed %v, %v", removed, err)
	}
}

// authority returns an etcd CA as kubeadm writes it.
func authority(t *testing.T) (cert, key []byte, roots *x509.CertPool) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "etcd-ca"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, k.Public(), k)
	if err != nil {
		t.Fatal(err)
	}
	priv, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	c, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	roots = x509.NewCertPool()
	roots.AddCert(c)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: priv}), roots
}

func TestTheClientsCertificateIsOfEtcdsAuthority(t *testing.T) {
	cert, key, roots := authority(t)
	conf, err := clientTLS(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(conf.Certificates[0].Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	if _, err := leaf.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
		t.Error(err)
	}
	if leaf.IsCA || conf.MinVersion < tls.VersionTLS12 || conf.InsecureSkipVerify {
		t.Errorf("certificate %+v", leaf.Subject)
	}
	for name, bad := range map[string][2][]byte{
		"no certificate": {nil, key}, "no key": {cert, nil}, "a certificate as the key": {cert, cert}, "a key as the certificate": {key, key},
	} {
		if _, err := clientTLS(bad[0], bad[1]); err == nil {
			t.Errorf("%s is good enough", name)
		} else if strings.Contains(err.Error(), "PRIVATE") || strings.Contains(err.Error(), string(key[30:60])) {
			t.Errorf("%s: the key is in the error (K3): %v", name, err)
		}
	}
}

// While the authority is rotated, its file has two certificates, and each member may have one of either.
func TestMembersOfEachAuthorityOfTheFileAreTrusted(t *testing.T) {
	first, key, _ := authority(t)
	second, secondKey, _ := authority(t)
	foreign, _, _ := authority(t)
	conf, err := clientTLS(slices.Concat(first, second), key)
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		ca      []byte
		trusted bool
	}{"the first": {first, true}, "the second": {second, true}, "another one": {foreign, false}} {
		block, _ := pem.Decode(tt.ca)
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Verify(x509.VerifyOptions{Roots: conf.RootCAs, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}); (err == nil) != tt.trusted {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := clientTLS(slices.Concat(first, second), secondKey); err == nil {
		t.Error("the key of the second certificate signs as the first")
	}
	if _, err := clientTLS(slices.Concat(second, first), secondKey); err != nil {
		t.Errorf("in the other order: %v", err)
	}
}

func TestSomebodyMustBeAsked(t *testing.T) {
	cert, key, _ := authority(t)
	own := []netip.Addr{netip.MustParseAddr("192.168.77.13")}
	for name, target := range map[string]Target{
		"no control plane": {CACert: cert, CAKey: key, Own: own},
		"no self":          {CACert: cert, CAKey: key, ControlPlanes: own},
	} {
		if _, err := Clean(t.Context(), target); err == nil {
			t.Errorf("%s: cleaned", name)
		}
	}
	// Nothing listens there: an answer would have to come from somewhere else.
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if _, err := Clean(ctx, Target{ControlPlanes: []netip.Addr{netip.MustParseAddr("127.0.0.1")}, CACert: cert, CAKey: key, Own: own}); err == nil {
		t.Error("cleaned an etcd that does not answer")
	}
}
