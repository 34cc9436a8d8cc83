package bootstrapper_test

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	dto "github.com/prometheus/client_model/go"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	recoverv1 "github.com/muster-k8s/muster/gen/muster/recover/v1"
	"github.com/muster-k8s/muster/gen/muster/recover/v1/recoverv1connect"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/services/bootstrapper/epoch"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/keys"
	"github.com/muster-k8s/muster/trust/tpm/tpmtest"
)

// plane is a control plane with the owner's key and a real TPM's counter.
type plane struct {
	*fixture
	priv ed25519.PrivateKey
}

func newPlane(t *testing.T, name string) plane {
	t.Helper()
	w := first(t)
	w.meta.Name, w.counter = name, tpmtest.SWTPM(t).Open()
	w.image.Listen.Recover = "127.0.0.1:0"
	priv := w.signer
	r := w.boot()
	if out := w.init(t.Context(), r, w.request()); out.err != nil {
		t.Fatal(out.err, w.logged)
	}
	if err := r.end(t); err != nil {
		t.Fatal(err)
	}
	return plane{w, priv}
}

func (p plane) keeper() epoch.Keeper {
	return epoch.Keeper{Dir: filepath.Join(p.root, epoch.Folder), TPM: p.counter}
}

// restore replaces the disk with an earlier copy.
func (p plane) restore(from string) {
	p.t.Helper()
	if err := machine.EmptyDir(p.root); err != nil {
		p.t.Fatal(err)
	}
	if err := os.CopyFS(p.root, os.DirFS(from)); err != nil {
		p.t.Fatal(err)
	}
}

// on returns the address where the machine waits for its owner; empty: it does not wait.
func (p plane) on() string {
	for line := range strings.SplitSeq(p.logged.String(), "\n") {
		var said struct {
			Msg     string `json:"msg"`
			Recover string `json:"recover"`
		}
		if json.Unmarshal([]byte(line), &said) == nil && said.Msg == "waiting for the owner to look at this state disk" {
			return said.Recover
		}
	}
	return ""
}

// rolledBack boots the machine, and returns once it has refused with the reason and waits for its owner.
func (p plane) rolledBack(t *testing.T, want attestv1.Reason) *running {
	t.Helper()
	p.reboot()
	p.logged = &logBuffer{}
	p.dieAfter(-1)
	r := p.boot()
	// The observation covers everything from the machine's start, since it starts the comparison by itself.
	s, begun := p.observations(r), false
	families, log := s.Families, s.Log
	s.Families = func(t testing.TB) []*dto.MetricFamily {
		if !begun {
			return nil
		}
		return families(t)
	}
	s.Log = func() []byte {
		if !begun {
			return nil
		}
		return log()
	}
	places := refusaltest.Places{Metric: []string{"muster_join_attempts_total"}, Log: []string{"msg", "this control plane does not start: its state disk is not the newest"}}
	refusaltest.Reported(t, s, want, places, func() { begun = true })
	eventually(t, "it waits for its owner", func() bool { return p.on() != "" })
	if p.exists(mayStart) || p.did("start "+machine.UnitKubelet) || p.did("start "+machine.UnitAttester) || p.did("start "+machine.UnitRenewal) || !strings.Contains(p.logged.String(), "CLUSTER_ROLLED_BACK") {
		t.Errorf("something was started: %v", p.steps)
	}
	return r
}

func (p plane) client() recoverv1connect.EpochServiceClient {
	p.t.Helper()
	transport, err := atls.NewTransport(atls.ClientConfig{
		Attester: atls.NoAttester, Verifier: attesttest.Verifier(p.t, p.ca), PeerPurpose: attest.PurposeMachine,
		Appraiser: attesttest.ParsedPolicy(p.t, p.ca, []*attesttest.Machine{p.tpm}).For(attest.LockedTo(p.cluster())),
	})
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { _ = transport.Close() })
	return recoverv1connect.NewEpochServiceClient(rpc.HTTPClient(transport), "https://"+p.on(), rpc.ClientOptions()...)
}

func (p plane) cluster() keys.ClusterID { return keys.ClusterID(p.record().ClusterID) }

func (p plane) order(d *recoverv1.DescribeEpochResponse) ownerorder.Epoch {
	return ownerorder.Epoch{Cluster: p.cluster(), Machine: p.tpm.ID(), Epoch: d.GetEpoch(), DiskCounter: d.GetDiskCounter(), TPMCounter: d.GetTpmCounter(), Nonce: ownerorder.Nonce(d.GetNonce())}
}

// The provider restores the disks of all control planes to a time before node4 belonged to an attacker: no control plane serves that cluster by itself
// (B7).
func TestControlPlanesThatAreRestoredAreNotServed(t *testing.T) {
	var planes []plane
	var copies []string
	for i := range 3 {
		p := newPlane(t, fmt.Sprintf("node%d", i+1))
		if err := p.keeper().Advance(t.Context(), epoch.Record{Epoch: 1, PolicySerial: 4}); err != nil { // as muster-renewal does
			t.Fatal(err)
		}
		dir := t.TempDir()
		if err := os.CopyFS(dir, os.DirFS(p.root)); err != nil {
			t.Fatal(err)
		}
		planes, copies = append(planes, p), append(copies, dir)
	}
	for _, p := range planes {
		if err := p.keeper().Advance(t.Context(), epoch.Record{Epoch: 2, PolicySerial: 5, Bans: []string{"node4"}}); err != nil {
			t.Fatal(err)
		}
		p.reboot()
		p.dieAfter(-1)
		if err := p.boot().end(t); err != nil || !p.did("start "+machine.UnitKubelet) {
			t.Fatalf("the newest disk: %v", err)
		}
	}
	for i, p := range planes {
		p.restore(copies[i])
		p.rolledBack(t, attestv1.Reason_REASON_CLUSTER_ROLLED_BACK).kill(t)
	}
	for _, p := range planes { // nor after another boot
		r := p.rolledBack(t, attestv1.Reason_REASON_CLUSTER_ROLLED_BACK)
		c := p.client()
		d, err := c.DescribeEpoch(t.Context(), &recoverv1.DescribeEpochRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if d.GetEpoch() != 1 || d.GetPolicySerial() != 4 || len(d.GetBans()) > 0 || d.GetDiskCounter() >= d.GetTpmCounter() {
			t.Errorf("described as %v", d)
		}
		if _, err := c.AcceptEpoch(t.Context(), p.order(d).Wire(p.priv)); err != nil {
			t.Fatal(err)
		}
		if err := r.end(t); err != nil || !p.did("start "+machine.UnitKubelet) {
			t.Errorf("accepted: %v", err)
		}
		p.reboot()
		p.dieAfter(-1)
		if err := p.boot().end(t); err != nil || !p.did("start "+machine.UnitKubelet) {
			t.Errorf("at the next boot: %v", err)
		}
	}
}

func TestOnlyTheOwnersOrderForThisEpochOfThisMachineIsTaken(t *testing.T) {
	p := newPlane(t, "node1")
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(p.root)); err != nil {
		t.Fatal(err)
	}
	if err := p.keeper().Advance(t.Context(), epoch.Record{Epoch: 2, PolicySerial: 5}); err != nil {
		t.Fatal(err)
	}
	p.restore(dir)
	r := p.rolledBack(t, attestv1.Reason_REASON_CLUSTER_ROLLED_BACK)
	c := p.client()
	d, err := c.DescribeEpoch(t.Context(), &recoverv1.DescribeEpochRequest{})
	if err != nil {
		t.Fatal(err)
	}
	good := p.order(d)
	_, other := ownerKey(t)
	with := func(change func(o *ownerorder.Epoch)) *recoverv1.AcceptEpochRequest {
		o := good
		change(&o)
		return o.Wire(p.priv)
	}
	places := refusaltest.Places{Metric: []string{"muster_rpc_requests_total"}, Log: []string{"msg", "call refused", "procedure", recoverv1connect.EpochServiceAcceptEpochProcedure}}
	for name, tt := range map[string]struct {
		req  *recoverv1.AcceptEpochRequest
		want attestv1.Reason
	}{
		"signed by another owner":      {good.Wire(other), attestv1.Reason_REASON_OWNER_SIGNATURE},
		"for another epoch":            {with(func(o *ownerorder.Epoch) { o.Epoch++ }), attestv1.Reason_REASON_OWNER_SIGNATURE},
		"for another machine":          {with(func(o *ownerorder.Epoch) { o.Machine[0]++ }), attestv1.Reason_REASON_OWNER_SIGNATURE},
		"for another cluster":          {with(func(o *ownerorder.Epoch) { o.Cluster[0]++ }), attestv1.Reason_REASON_OWNER_SIGNATURE},
		"for another disk":             {with(func(o *ownerorder.Epoch) { o.DiskCounter-- }), attestv1.Reason_REASON_OWNER_SIGNATURE},
		"of another boot":              {with(func(o *ownerorder.Epoch) { o.Nonce[0]++ }), attestv1.Reason_REASON_OWNER_SIGNATURE},
		"of before the counter's last": {with(func(o *ownerorder.Epoch) { o.TPMCounter-- }), attestv1.Reason_REASON_OWNER_SIGNATURE},
		"with a policy's signature":    {&recoverv1.AcceptEpochRequest{Epoch: d.GetEpoch(), Signature: attest.SignPolicy(p.priv, []byte("{}")).GetSignature()}, attestv1.Reason_REASON_OWNER_SIGNATURE},
		"with half a signature":        {&recoverv1.AcceptEpochRequest{Epoch: d.GetEpoch(), Signature: bytes.Repeat([]byte{1}, 32)}, attestv1.Reason_REASON_REQUEST_INVALID},
	} {
		t.Log(name)
		refusaltest.Refused(t, p.observations(r), tt.want, places, func() error {
			_, err := c.AcceptEpoch(t.Context(), tt.req)
			return err
		})
	}
	if p.did("start " + machine.UnitKubelet) {
		t.Error("the kubelet was started")
	}
	refusaltest.EveryProcedure(t, p.observations(r), refusaltest.Plain(t), "https://"+p.on(), attestv1.Reason_REASON_SESSION_REQUIRED, recoverv1connect.EpochServiceName)
	if _, err := c.AcceptEpoch(t.Context(), good.Wire(p.priv)); err != nil {
		t.Fatal(err)
	}
	if err := r.end(t); err != nil || !p.did("start "+machine.UnitKubelet) {
		t.Errorf("accepted: %v", err)
	}
	// The owner's order is not valid for a second restore.
	p.restore(dir)
	r = p.rolledBack(t, attestv1.Reason_REASON_CLUSTER_ROLLED_BACK)
	defer r.kill(t)
	if _, err := p.client().AcceptEpoch(t.Context(), good.Wire(p.priv)); rpc.ReasonFrom(err) != attestv1.Reason_REASON_OWNER_SIGNATURE {
		t.Errorf("the same order again: %v", err)
	}
}

// B7: each boot raises the counter by two. The metadata, which are not measured, can't turn a control plane into a worker.
func TestEachBootCountsAndMetadataHideNoOlderDisk(t *testing.T) {
	p := newPlane(t, "node1")
	counter := func() uint64 {
		t.Helper()
		s, err := p.keeper().Check(context.WithoutCancel(t.Context()))
		if err != nil || s.Err != nil {
			t.Fatal(s.Err, err)
		}
		return s.Counter
	}
	before := counter()
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(p.root)); err != nil {
		t.Fatal(err)
	}
	p.reboot()
	if err := p.boot().end(t); err != nil {
		t.Fatal(err)
	}
	if got := counter(); got != before+2 {
		t.Errorf("the counter went from %d to %d", before, got)
	}
	p.restore(dir)
	p.meta.Role = "worker"
	p.rolledBack(t, attestv1.Reason_REASON_CLUSTER_ROLLED_BACK).kill(t)
}

// A machine of an earlier version of Muster has no record, and creates one at its first boot; a worker has no record.
func TestARecordBeginsWithControlPlanesAlone(t *testing.T) {
	p := newPlane(t, "node1")
	if err := os.RemoveAll(filepath.Join(p.root, epoch.Folder)); err != nil {
		t.Fatal(err)
	}
	p.rolledBack(t, attestv1.Reason_REASON_CLUSTER_ROLLED_BACK).kill(t) // the counter exists
	p.counter = tpmtest.SWTPM(t).Open()
	p.reboot()
	p.dieAfter(-1)
	if err := p.boot().end(t); err != nil || !p.did("start "+machine.UnitKubelet) {
		t.Fatalf("neither record nor counter: %v", err)
	}
	if s, err := p.keeper().Check(context.WithoutCancel(t.Context())); err != nil || s.Err != nil || s.Record == nil {
		t.Errorf("%+v, %v", s, err)
	}
	w, j := worker(t)
	r := w.boot()
	eventually(t, "joined", func() bool { return j.asked() > 0 && w.exists("/var/lib/kubelet/config.yaml") })
	r.kill(t)
	if w.exists(epoch.Folder) || slices.Contains(w.steps, "after the counter is defined") {
		t.Error("a worker has one")
	}
}
