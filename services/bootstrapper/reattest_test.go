package bootstrapper_test

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/types/known/durationpb"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/services/bootstrapper/discovery"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/orders"
	"github.com/muster-k8s/muster/services/bootstrapper/reattestation"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/tpm"
)

const reattestations = "muster_reattestations_total"

// node returns a fixture whose machine is a node of the joinservice's cluster.
func node(t *testing.T) (*fixture, *joinservice) {
	t.Helper()
	w := newFixture(t, "node2")
	owner, key := ownerKey(t)
	w.image.OwnerKeys = attest.OwnerKeys{owner}
	j := newJoinservice(t, w, attesttest.NewMachine(t, w.ca, attesttest.Options{}), key)
	w.meta.JoinEndpoints = []string{j.addr}
	w.meta.Role = metadata.RoleWorker
	w.tpm.LockTo(clusterID)
	return w, j
}

// reattest runs the loop until the test ends.
func (w *fixture) reattest(change ...func(*reattestation.Config)) *prometheus.Registry {
	w.t.Helper()
	registry := prometheus.NewRegistry()
	cfg := reattestation.Config{
		Image: w.image, Metadata: func() (*metadata.Machine, error) { m := w.meta; return &m, nil },
		Journal: func() (journal.Record, error) {
			return journal.Record{Step: journal.StepDone, Kind: journal.KindJoin, ClusterID: clusterID[:]}, nil
		},
		Policy: journal.Open(filepath.Join(w.root, journal.AttesterPolicy)),
		Root:   w.root, TPM: w.tpm, Attester: w.tpm.Attester(attest.PurposeMachine), NewVerifier: verifier, Metrics: registry, Log: slog.New(slog.NewJSONHandler(w.logged, nil)),
		Timing: reattestation.Timing{
			Interval: 5 * time.Millisecond, RetryMin: 5 * time.Millisecond, RetryMax: 20 * time.Millisecond,
			Stagger: 20 * time.Millisecond, Dial: 5 * time.Second, Call: 20 * time.Second,
		},
	}
	for _, c := range change {
		c(&cfg)
	}
	r, err := reattestation.New(cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(w.t.Context()))
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	end := sync.OnceFunc(func() {
		stop()
		if err := <-done; err != nil {
			w.t.Error(err)
		}
	})
	w.t.Cleanup(end)
	w.stopReattesting = end
	return registry
}

func (j *joinservice) reattested() []attest.Peer {
	j.mu.Lock()
	defer j.mu.Unlock()
	return append([]attest.Peer(nil), j.attested...)
}

func TestANodeAttestsAgainAndAgainEachTimeAnew(t *testing.T) {
	for name, interval := range map[string]*durationpb.Duration{
		"when the joinservice says":       durationpb.New(time.Millisecond),
		"when it says nothing":            nil,
		"when it says never":              durationpb.New(100 * time.Hour),
		"when it says what is no time":    {Nanos: -1, Seconds: 1},
		"when it says that it's too late": durationpb.New(-time.Hour),
	} {
		t.Run(name, func(t *testing.T) {
			w, j := node(t)
			j.again = func(int) (*joinv1.ReattestResponse, error) {
				return &joinv1.ReattestResponse{PolicySerial: 1, Interval: interval}, nil
			}
			metrics := w.reattest()
			eventually(t, "three verdicts", func() bool { return len(j.reattested()) >= 3 })
			seen := map[[32]byte]bool{}
			for _, p := range j.reattested() {
				seen[p.Claims().EvidenceDigest()] = true
				if p.Machine() != w.tpm.ID() || p.Purpose() != attest.PurposeMachine {
					t.Errorf("%s attested", p)
				}
			}
			if len(seen) < 3 {
				t.Errorf("%d pieces of evidence for three verdicts", len(seen))
			}
			eventually(t, "metrics", func() bool {
				return counter(t, metrics, reattestations, "ACCEPTED") >= 3 && counter(t, metrics, "muster_reattestation_last_success_timestamp_seconds") > float64(time.Now().Add(-time.Minute).Unix())
			})
		})
	}
}

// The bootstrapper ends when its machine is a node; the attester's metrics remain.
func TestTheAttesterTellsThatTheDiskHasNoIntegrity(t *testing.T) {
	for integrity, want := range map[string]float64{metadata.IntegrityNone: 1, metadata.IntegrityHMAC: 0} {
		w, _ := node(t)
		w.image.StateDisk = metadata.StateDisk{Mode: metadata.DiskLUKS, Path: "/dev/state", Integrity: integrity}
		metrics := w.reattest()
		if got := counter(t, metrics, "muster_insecure_config", metadata.InsecureIntegrity); got != want {
			t.Errorf("%s: %v", integrity, got)
		}
		if said := strings.Contains(w.logged.String(), `"insecure":"state_integrity_none"`); said != (want == 1) {
			t.Errorf("%s: the log: %t", integrity, said)
		}
	}
}

func TestANodeWaitsAsLongAsItIsTold(t *testing.T) {
	w, j := node(t)
	j.again = func(int) (*joinv1.ReattestResponse, error) {
		return &joinv1.ReattestResponse{Interval: durationpb.New(time.Hour)}, nil
	}
	metrics := w.reattest()
	eventually(t, "one verdict", func() bool { return counter(t, metrics, reattestations, "ACCEPTED") == 1 })
	// Ten times the default pause.
	<-time.After(50 * time.Millisecond)
	if n := len(j.reattested()); n != 1 {
		t.Errorf("it attested %d times within an hour", n)
	}
}

// The attester stores an order as it is, and reports what the other process has made of it.
func TestAnOrderIsStoredAndWhatBecameOfItReported(t *testing.T) {
	w, j := node(t)
	want := &joinv1.OwnerOrder{Text: `{"action":"doctor"}`, Signature: bytes.Repeat([]byte{7}, ed25519.SignatureSize)}
	j.again = func(int) (*joinv1.ReattestResponse, error) { return &joinv1.ReattestResponse{Order: want}, nil }
	w.reattest()
	eventually(t, "it is stored", func() bool { return w.exists(orders.Inbox) })
	if got := w.get(orders.Inbox); !strings.Contains(got, `{\"action\":\"doctor\"}`) {
		t.Errorf("it stores %s", got)
	}
	if j.reported() != nil {
		t.Error("it reports an order that nobody has executed")
	}
	w.put(t, orders.Journal, `{"begun":"2026-11-26T12:00:00Z","last":{"order":{"text":"x","signature":"AAAA"},"action":"doctor","state":"done","output":"well"}}`)
	digest := ownerorder.SignedMachineOrder{Text: "x", Signature: make([]byte, 3)}.Digest()
	said := func() bool {
		r := j.reported()
		return r.GetState() == joinv1.OrderState_ORDER_STATE_DONE && r.GetOutput() == "well" && hex.EncodeToString(r.GetDigest()) == digest
	}
	eventually(t, "it reports the end", said)
	// Once that is recorded, it is not repeated; a joinservice that sends an order again may have lost it.
	j.setAgain(func(int) (*joinv1.ReattestResponse, error) { return &joinv1.ReattestResponse{}, nil })
	eventually(t, "it reports nothing more", func() bool { return j.reported() == nil })
	j.setAgain(func(int) (*joinv1.ReattestResponse, error) { return &joinv1.ReattestResponse{Order: want}, nil })
	eventually(t, "it reports the end again", said)
	if j.mu.Lock(); !reflect.DeepEqual(j.keys, [][]byte{w.image.OwnerKeys[0]}) {
		t.Errorf("it reports the owner's keys %x", j.keys)
	}
	j.mu.Unlock()
}

// A machine that erases its disk first waits until the cluster knows. An order that its owner has withdrawn is not in the answer any more.
func TestAnOrderThatIsWithdrawnIsNotNotedAsRecorded(t *testing.T) {
	w, j := node(t)
	order := &joinv1.OwnerOrder{Text: "x", Signature: bytes.Repeat([]byte{0}, ed25519.SignatureSize)}
	w.put(t, orders.Journal, `{"begun":"2026-11-26T12:00:00Z","last":{"order":{"text":"x","signature":"`+base64.StdEncoding.EncodeToString(order.GetSignature())+`"},"action":"reset","state":"running"}}`)
	j.again = func(int) (*joinv1.ReattestResponse, error) { return &joinv1.ReattestResponse{}, nil }
	w.reattest()
	eventually(t, "two reports", func() bool { return len(j.reattested()) > 2 })
	if w.exists(orders.Recorded) {
		t.Error("the machine takes it that its owner waits")
	}
	j.setAgain(func(int) (*joinv1.ReattestResponse, error) { return &joinv1.ReattestResponse{Order: order}, nil })
	eventually(t, "it is noted", func() bool { return w.exists(orders.Recorded) })
}

func (j *joinservice) setAgain(again func(int) (*joinv1.ReattestResponse, error)) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.again = again
}

// reported returns the report of the latest call.
func (j *joinservice) reported() *joinv1.OrderReport {
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.reports) == 0 {
		return nil
	}
	return j.reports[len(j.reports)-1]
}

func TestANodeGoesOnAfterFailures(t *testing.T) {
	w, j := node(t)
	j.again = func(n int) (*joinv1.ReattestResponse, error) {
		switch n {
		case 1:
			return nil, attest.Refuse(attestv1.Reason_REASON_NOT_ENROLLED, "x")
		case 2:
			return nil, attest.RefuseFor(time.Millisecond, attestv1.Reason_REASON_API_UNAVAILABLE, "x")
		}
		return &joinv1.ReattestResponse{Interval: durationpb.New(time.Hour)}, nil
	}
	journals := 0
	metrics := w.reattest(func(c *reattestation.Config) {
		read := c.Journal
		c.Journal = func() (journal.Record, error) {
			journals++ // only by this loop
			switch journals {
			case 1:
				return journal.Record{}, journal.ErrCorrupt
			case 2: // the bootstrapper is still at work
				return journal.Record{Step: journal.StepKubeadmRan, Kind: journal.KindJoin, ClusterID: clusterID[:]}, nil
			}
			return read()
		}
	})
	eventually(t, "a verdict", func() bool { return counter(t, metrics, reattestations, "ACCEPTED") == 1 })
	for _, reason := range []string{"NODE_LOCKED", "NOT_ENROLLED", "API_UNAVAILABLE"} {
		if got := counter(t, metrics, reattestations, reason); got != 1 {
			t.Errorf("%s was counted %v times", reason, got)
		}
	}
	if got := counter(t, metrics, reattestations); got != 4 {
		t.Errorf("%v attempts were counted: a machine that is no node yet has not failed\n%s", got, w.logged)
	}
}

// notYet is a machine whose bootstrapper extends PCR 15 a little later in this boot.
type notYet struct {
	discovery.PCRReader
	left int
}

func (n *notYet) ReadPCR(ctx context.Context, bank tpm.Bank, pcr int) ([]byte, error) {
	if pcr == attest.LockPCR && n.left > 0 {
		n.left--
		return make([]byte, bank.Size()), nil
	}
	return n.PCRReader.ReadPCR(ctx, bank, pcr)
}

func TestANodeThatIsNotLockedYetInThisBootAsksNobody(t *testing.T) {
	w, j := node(t)
	asked := 0
	j.again = func(n int) (*joinv1.ReattestResponse, error) {
		asked = n
		return &joinv1.ReattestResponse{Interval: durationpb.New(time.Hour)}, nil
	}
	later := &notYet{left: 3}
	metrics := w.reattest(func(c *reattestation.Config) {
		later.PCRReader = c.TPM
		c.TPM = later
	})
	eventually(t, "a verdict", func() bool { return counter(t, metrics, reattestations, "ACCEPTED") == 1 })
	if got := counter(t, metrics, reattestations); got != 1 || asked != 1 || later.left != 0 {
		t.Errorf("%v attempts, %d asked, %d looks left", got, asked, later.left)
	}
}

func TestANodeStepsOverJoinservicesThatAreGone(t *testing.T) {
	w, j := node(t)
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	gone := l.Addr().String()
	_ = l.Close()
	w.meta.JoinEndpoints = []string{gone, j.addr}
	metrics := w.reattest()
	eventually(t, "a verdict", func() bool { return counter(t, metrics, reattestations, "ACCEPTED") >= 1 })
}

// A control plane without endpoints uses its own joinservice; a worker without endpoints reports that.
func TestAControlPlaneHasAJoinserviceOfItsOwn(t *testing.T) {
	for role, want := range map[string]string{metadata.RoleControlPlane: "NOT_READY", metadata.RoleWorker: "MACHINE_CONFIG"} {
		w, _ := node(t)
		w.meta.Role, w.meta.JoinEndpoints, w.meta.Addresses = role, nil, []netip.Addr{netip.MustParseAddr("127.0.0.1")}
		metrics := w.reattest() // nothing listens at 127.0.0.1:30090
		eventually(t, want, func() bool { return counter(t, metrics, reattestations, want) >= 1 })
	}
}

// The owner chooses the joinservice's port. The endpoints that the machine was given have it.
func TestAControlPlaneFindsItsJoinserviceAtTheClustersPort(t *testing.T) {
	w, j := node(t)
	_, port, err := net.SplitHostPort(j.addr)
	if err != nil {
		t.Fatal(err)
	}
	w.meta.Role, w.meta.Addresses = metadata.RoleControlPlane, []netip.Addr{netip.MustParseAddr("127.0.0.1")}
	w.meta.JoinEndpoints = []string{net.JoinHostPort("127.0.0.2", port)} // the other control plane is gone
	metrics := w.reattest()
	eventually(t, "a verdict", func() bool { return counter(t, metrics, reattestations, "ACCEPTED") >= 1 })
}

// The node verifies the joinservice first, as the join client does (A7).
func TestANodeJudgesItsJoinservice(t *testing.T) {
	for name, tt := range map[string]struct {
		spoil func(w *fixture, j *joinservice)
		want  string
	}{
		"one that booted something else": {func(_ *fixture, j *joinservice) { j.host.SetPCR(12, clusterID[:]) }, "JOINSERVICE_POLICY_REFUSED"},
		"one of another cluster":         {func(_ *fixture, j *joinservice) { j.host.Reboot(); j.host.LockTo([32]byte{1}) }, "JOINSERVICE_LOCK_FOREIGN"},
		"one of another owner": {func(w *fixture, _ *joinservice) {
			w.image.OwnerKeys = attest.OwnerKeys{make(ed25519.PublicKey, ed25519.PublicKeySize)}
		}, "POLICY_SIGNATURE"},
		"another boot, and no owner's key": {func(w *fixture, j *joinservice) {
			w.image.OwnerKeys, w.image.NoOwnerKey = nil, true
			j.host.SetPCR(12, clusterID[:])
		}, "JOINSERVICE_POLICY_REFUSED"},
		"no owner's key, and no switch": {func(w *fixture, _ *joinservice) { w.image.OwnerKeys = nil }, "MACHINE_CONFIG"},
		"one that is no control plane": {func(w *fixture, j *joinservice) {
			_, key := ownerKey(w.t)
			w.image.OwnerKeys = attest.OwnerKeys{key.Public().(ed25519.PublicKey)}
			j.signs(attest.SignPolicy(key, attesttest.Policy(w.t, w.ca, []*attesttest.Machine{w.tpm}, attesttest.ControlPlanes(w.tpm))))
		}, "SERVER_NOT_LISTED"},
	} {
		t.Run(name, func(t *testing.T) {
			w, j := node(t)
			tt.spoil(w, j)
			metrics := w.reattest()
			eventually(t, tt.want, func() bool { return counter(t, metrics, reattestations, tt.want) >= 2 })
			if n := len(j.reattested()); n > 0 {
				t.Errorf("it asked for %d verdicts", n)
			}
		})
	}
	t.Run("the same boot, and no owner's key", func(t *testing.T) {
		w, j := node(t)
		w.image.OwnerKeys, w.image.NoOwnerKey = nil, true
		metrics := w.reattest()
		eventually(t, "a verdict", func() bool { return counter(t, metrics, reattestations, "ACCEPTED") >= 1 && len(j.reattested()) > 0 })
	})
}

func TestAReattesterNeedsAllOfItsConfiguration(t *testing.T) {
	if _, err := reattestation.New(reattestation.Config{}); err == nil || errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}
