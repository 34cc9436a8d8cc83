package owner

import (
	"context"
	"crypto/ed25519"
	"io"
	"strings"
	"sync"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	recoverv1 "github.com/muster-k8s/muster/gen/muster/recover/v1"
	"github.com/muster-k8s/muster/gen/muster/recover/v1/recoverv1connect"
	"github.com/muster-k8s/muster/internal/owner/ownerdir"
	"github.com/muster-k8s/muster/internal/owner/policyfile"
	"github.com/muster-k8s/muster/internal/owner/progress"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// olderMachine waits with an older disk, over the real attested TLS. It takes orders that are its owner's.
type olderMachine struct {
	*attesttest.Machine
	has   *recoverv1.DescribeEpochResponse
	owner func() ownerorder.Epoch
	key   ed25519.PublicKey

	mu    sync.Mutex
	taken int
}

func (m *olderMachine) DescribeEpoch(context.Context, *recoverv1.DescribeEpochRequest) (*recoverv1.DescribeEpochResponse, error) {
	return m.has, nil
}

func (m *olderMachine) AcceptEpoch(_ context.Context, req *recoverv1.AcceptEpochRequest) (*recoverv1.AcceptEpochResponse, error) {
	if err := m.owner().Verify(req, m.key); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.taken++
	return &recoverv1.AcceptEpochResponse{}, nil
}

func TestAnOlderControlPlaneIsRevivedByItsOwnerAlone(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := &olderMachine{
		Machine: attesttest.NewMachine(t, ca, attesttest.Options{}),
		has:     &recoverv1.DescribeEpochResponse{Epoch: 41, PolicySerial: 1, Bans: []string{"node3"}, DiskCounter: 12, TpmCounter: 15},
	}
	l := listen(t)
	serve(t, l, m.Attester(attest.PurposeMachine), rpc.Serve(recoverv1connect.EpochServiceName, recoverv1connect.EpochServiceHandler(m), recoverv1connect.NewEpochServiceHandler))
	w := &waitingMachine{Machine: m.Machine, addr: l.Addr().String(), disk: waitingDisk}
	o := knows(t, w, m.Machine, waitingDisk, attesttest.Policy(t, ca, []*attesttest.Machine{m.Machine}))
	key, err := o.OwnerKey()
	if err != nil {
		t.Fatal(err)
	}
	m.key = key.Public().(ed25519.PublicKey)
	m.owner = func() ownerorder.Epoch {
		return ownerorder.Epoch{Cluster: o.clusterID(), Machine: m.ID(), Epoch: 41, DiskCounter: 12, TPMCounter: 15}
	}
	_, policy, _, err := folderPolicy(o.Dir)
	if err != nil {
		t.Fatal(err)
	}
	text, err := o.Read(ownerdir.PolicyFile)
	if err != nil {
		t.Fatal(err)
	}
	_, document, err := policyfile.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	signed := attest.SignPolicy(key, document)
	err = o.Remember(&ownerdir.Known{
		Policy: ownerdir.KnownPolicy{JSON: string(signed.GetPolicy()), Signature: signed.GetSignature()},
		Nodes:  map[string]ownerdir.KnownNode{"node3": {Banned: true}, "node4": {Banned: true}, "node5": {}},
	})
	if err != nil {
		t.Fatal(err)
	}
	number := func(n uint64) *uint64 { return &n }
	asked := 0
	ask := func(answer bool) func(Revival) (bool, error) {
		return func(v Revival) (bool, error) {
			asked++
			if v.Epoch != 41 || v.KnownSerial != policy.Serial() || len(v.Unbanned) != 1 || v.Unbanned[0] != "node4" {
				t.Errorf("asked about %+v", v)
			}
			return answer, nil
		}
	}
	revive := func(accept *uint64, ask func(Revival) (bool, error)) (*Recovery, error) {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		return Recover(ctx, RecoverConfig{Dir: o.Dir, Addr: w.addr, AcceptEpoch: accept, Ask: ask, Report: progress.New(progress.Config{Out: io.Writer(o.out), Format: progress.Plain, Steps: RecoverSteps})})
	}
	m.LockTo([32]byte{0xEE}) // another cluster's
	if _, err := revive(number(41), nil); rpc.ReasonFrom(err) != attestv1.Reason_REASON_LOCK_FOREIGN || m.taken > 0 {
		t.Errorf("a machine of another cluster: %v", err)
	}
	m.Reboot()
	m.LockTo(o.clusterID())
	for name, refused := range map[string]func() (*Recovery, error){
		"nobody to ask":             func() (*Recovery, error) { return revive(nil, nil) },
		"no":                        func() (*Recovery, error) { return revive(nil, ask(false)) },
		"another epoch was named":   func() (*Recovery, error) { return revive(number(42), ask(true)) },
		"epoch 0 is none in itself": func() (*Recovery, error) { return revive(number(0), nil) },
	} {
		_, err := refused()
		if rpc.ReasonFrom(err) != attestv1.Reason_REASON_CLUSTER_ROLLED_BACK || m.taken > 0 {
			t.Errorf("%s: %v, %d orders", name, err, m.taken)
			continue
		}
		remedy := Explain(err).Remedy
		for _, want := range []string{"--accept-epoch 41", "epoch 41", "node4", "written at 12", "at 15"} {
			if !strings.Contains(remedy, want) {
				t.Errorf("%s: the remedy does not say %q: %s", name, want, remedy)
			}
		}
	}
	if asked != 1 {
		t.Errorf("asked %d times", asked)
	}
	for i, accepted := range []func() (*Recovery, error){func() (*Recovery, error) { return revive(number(41), nil) }, func() (*Recovery, error) { return revive(nil, ask(true)) }} {
		r, err := accepted()
		if err != nil || r.Revived == nil || r.Revived.Epoch != 41 || m.taken != i+1 {
			t.Errorf("%+v, %v, %d orders", r, err, m.taken)
		}
	}
	m.has.Bans = []string{"\x1b[2J"}
	if _, err := revive(number(41), nil); err == nil || strings.Contains(err.Error(), "\x1b") {
		t.Errorf("a name that a terminal obeys: %v", err)
	}
}
