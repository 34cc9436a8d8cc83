package bootstrapper_test

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/services/bootstrapper/bootsecret"
	"github.com/muster-k8s/muster/services/bootstrapper/discovery"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/rotation"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

var newKey = []byte("the new key, a secret")

// GetRotatedKey answers as the test says.
func (j *joinservice) GetRotatedKey(_ context.Context, req *joinv1.GetRotatedKeyRequest) (*joinv1.GetRotatedKeyResponse, error) {
	j.mu.Lock()
	answer := j.rotated
	j.mu.Unlock()
	if answer == nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "this control plane has no such key")
	}
	content, err := answer(req)
	return &joinv1.GetRotatedKeyResponse{Content: content}, err
}

// has gives a joinservice the new key, and returns the requests for it.
func (j *joinservice) has(key []byte) (requests func() []*joinv1.GetRotatedKeyRequest) {
	var (
		mu   sync.Mutex
		seen []*joinv1.GetRotatedKeyRequest
	)
	j.mu.Lock()
	defer j.mu.Unlock()
	j.rotated = func(req *joinv1.GetRotatedKeyRequest) ([]byte, error) {
		mu.Lock()
		defer mu.Unlock()
		seen = append(seen, req)
		return key, nil
	}
	return func() []*joinv1.GetRotatedKeyRequest {
		mu.Lock()
		defer mu.Unlock()
		return seen
	}
}

// rotatingNode returns a fixture whose machine is a control plane, and the private key of its owner.
func rotatingNode(t *testing.T) (*fixture, ed25519.PrivateKey) {
	t.Helper()
	w := newFixture(t, "node2")
	public, private := ownerKey(t)
	w.image.OwnerKeys = attest.OwnerKeys{public}
	w.tpm.LockTo(clusterID)
	return w, private
}

// joinserviceOn starts a joinservice on a machine of its own.
func (w *fixture) joinserviceOn(owner ed25519.PrivateKey, changes ...func(*attestv1.Policy)) *joinservice {
	w.t.Helper()
	return newJoinservice(w.t, w, attesttest.NewMachine(w.t, w.ca, attesttest.Options{}), owner, changes...)
}

// fetch fetches a key from the control planes of the metadata, and from those at addresses.
func (w *fixture) fetch(known *journal.Policy, addresses ...netip.Addr) ([]byte, error) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), time.Minute)
	defer cancel()
	peers := rotation.Peers{
		Root: w.root, Image: w.image, Metadata: func() (*metadata.Machine, error) { m := w.meta; return &m, nil },
		Journal: func() (journal.Record, error) {
			return journal.Record{Step: journal.StepDone, Kind: journal.KindJoin, NodeName: "node2", ClusterID: clusterID[:], Policy: known}, nil
		},
		TPM: w.tpm, Attester: w.tpm.Attester(attest.PurposeMachine), NewVerifier: verifier, Log: slog.New(slog.DiscardHandler),
		Addresses: func(context.Context) ([]netip.Addr, error) { return addresses, nil }, Unit: w.machine.Unit,
	}
	return peers.Fetch(ctx, clusterinfo.ServiceAccountKey, strings.Repeat("ab", 32))
}

func TestANewKeyIsFetchedFromAControlPlaneThatHasIt(t *testing.T) {
	w, owner := rotatingNode(t)
	without, with := w.joinserviceOn(owner), w.joinserviceOn(owner)
	requests := with.has(newKey)
	answer := with.rotated
	with.rotated = func(req *joinv1.GetRotatedKeyRequest) ([]byte, error) {
		if w.machine.Running(machine.UnitKubelet) { // it would renew the node's Lease
			t.Error("the kubelet runs while a joinservice may watch whether another machine's does (J11)")
		}
		return answer(req)
	}
	if err := w.machine.Runs(machine.UnitKubelet); err != nil {
		t.Fatal(err)
	}
	w.meta.JoinEndpoints = []string{without.addr, with.addr}
	got, err := w.fetch(nil)
	if err != nil || !bytes.Equal(got, newKey) {
		t.Fatalf("%q, %v", got, err)
	}
	// J11: the kubelet is off while a control plane is asked, and no longer, also if that refuses.
	if calls, want := w.machine.Calls(), []string{"stop kubelet.service", "start kubelet.service", "stop kubelet.service", "start kubelet.service"}; !slices.Equal(calls, want) {
		t.Errorf("%q, want %q", calls, want)
	}
	secret, err := bootsecret.Load(w.root)
	if err != nil {
		t.Fatal(err)
	}
	seen := requests()
	if len(seen) != 1 || seen[0].GetNodeName() != "node2" || seen[0].GetKey() != "service-account-key" || seen[0].GetId() != strings.Repeat("ab", 32) || !bytes.Equal(seen[0].GetBootSecret(), secret.Expose()) {
		t.Errorf("%v", seen)
	}
}

// The metadata's endpoint may be a load balancer, which leads to this control plane itself.
func TestOtherControlPlanesAreAskedBeforeTheMetadatasEndpoints(t *testing.T) {
	w, owner := rotatingNode(t)
	j := w.joinserviceOn(owner)
	j.has(newKey)
	_, port, err := net.SplitHostPort(j.addr)
	if err != nil {
		t.Fatal(err)
	}
	balancer, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.2:"+port)
	if err != nil {
		t.Fatal(err)
	}
	defer balancer.Close()
	asked := make(chan struct{})
	go func() {
		if c, err := balancer.Accept(); err == nil {
			_ = c.Close()
			close(asked)
		}
	}()
	w.meta.JoinEndpoints = []string{"127.0.0.2:" + port}
	if got, err := w.fetch(nil, netip.MustParseAddr("127.0.0.1")); err != nil || !bytes.Equal(got, newKey) {
		t.Fatalf("%q, %v", got, err)
	}
	select {
	case <-asked:
		t.Error("the metadata's endpoint was asked")
	default:
	}
}

// A7: each refused joinservice would send a key. It is repeated with only the wrong thing corrected.
func TestAJoinserviceThatIsRefusedSendsNoKey(t *testing.T) {
	serial := func(n uint64) func(*attestv1.Policy) { return func(p *attestv1.Policy) { p.Serial = n } }
	for name, tt := range map[string]struct {
		wrong func(t *testing.T, w *fixture, owner ed25519.PrivateKey) *joinservice
		known uint64 // the serial of the newest policy that the machine has accepted; 0: none
		want  attestv1.Reason
	}{
		"one of another owner": {func(t *testing.T, w *fixture, _ ed25519.PrivateKey) *joinservice {
			_, other := ownerKey(t)
			return w.joinserviceOn(other)
		}, 0, attestv1.Reason_REASON_POLICY_SIGNATURE},
		"one on a machine that the policy does not list": {func(_ *testing.T, w *fixture, owner ed25519.PrivateKey) *joinservice {
			return w.joinserviceOn(owner, attesttest.ControlPlanes(w.tpm))
		}, 0, attestv1.Reason_REASON_SERVER_NOT_LISTED},
		"one of another cluster": {func(t *testing.T, w *fixture, owner ed25519.PrivateKey) *joinservice {
			host := attesttest.NewMachine(t, w.ca, attesttest.Options{})
			j := newJoinservice(t, w, host, owner)
			host.Reboot()
			host.LockTo([32]byte{0xC2})
			return j
		}, 0, attestv1.Reason_REASON_LOCK_FOREIGN},
		"one with an older policy": {func(_ *testing.T, w *fixture, owner ed25519.PrivateKey) *joinservice {
			return w.joinserviceOn(owner, serial(6))
		}, 7, attestv1.Reason_REASON_POLICY_INVALID},
	} {
		t.Run(name, func(t *testing.T) {
			w, owner := rotatingNode(t)
			var known *journal.Policy
			if tt.known > 0 {
				digest := sha256.Sum256(nil)
				known = &journal.Policy{OwnerKey: journal.Hex(w.image.OwnerKeys[0]), Serial: tt.known, Digest: digest[:]}
			}
			j := tt.wrong(t, w, owner)
			requests := j.has(newKey)
			w.meta.JoinEndpoints = []string{j.addr}
			got, err := w.fetch(known)
			if is := discovery.ReasonOf(err); is != tt.want || len(got) > 0 || len(requests()) > 0 {
				t.Errorf("%s, want %s: %v", is, tt.want, err)
			}
			right := w.joinserviceOn(owner, serial(8))
			right.has(newKey)
			w.meta.JoinEndpoints = []string{right.addr}
			if got, err := w.fetch(known); err != nil || !bytes.Equal(got, newKey) {
				t.Errorf("repaired: %q, %v", got, err)
			}
		})
	}
}

func TestAKeyThatNoControlPlaneHasIsReportedWithItsCauses(t *testing.T) {
	w, owner := rotatingNode(t)
	if _, err := w.fetch(nil); err == nil || !strings.Contains(err.Error(), "no other control plane") {
		t.Errorf("without an endpoint: %v", err)
	}
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	off := l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	j := w.joinserviceOn(owner)
	w.meta.JoinEndpoints = []string{off, j.addr}
	if _, err := w.fetch(nil); err == nil || !strings.Contains(err.Error(), off) || !strings.Contains(err.Error(), j.addr) || rpc.ReasonFrom(err) != attestv1.Reason_REASON_REQUEST_INVALID {
		t.Errorf("%v", err)
	}
	j.has(newKey)
	if got, err := w.fetch(nil); err != nil || !bytes.Equal(got, newKey) {
		t.Errorf("repaired: %q, %v", got, err)
	}
}
