package recovery

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/cmd/muster/owner/progress"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	recoverv1 "github.com/muster-k8s/muster/gen/muster/recover/v1"
	"github.com/muster-k8s/muster/gen/muster/recover/v1/recoverv1connect"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// olderMachine waits with an older disk, over the real attested TLS. It accepts only orders of its owner.
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
	if err := m.owner().Verify(req, attest.OwnerKeys{m.key}); err != nil {
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
		has:     &recoverv1.DescribeEpochResponse{Epoch: 41, PolicySerial: 1, Bans: []string{"node3"}, DiskCounter: 12, TpmCounter: 15, Nonce: bytes.Repeat([]byte{7}, 32)},
	}
	l := ownertest.Listen(t)
	ownertest.Serve(t, l, m.Attester(attest.PurposeMachine), rpc.Serve(recoverv1connect.EpochServiceName, recoverv1connect.EpochServiceHandler(m), recoverv1connect.NewEpochServiceHandler))
	w := &waitingMachine{Machine: m.Machine, addr: l.Addr().String(), disk: waitingDisk}
	o := knows(t, w, m.Machine, waitingDisk, policyOf(t, ca, []*attesttest.Machine{m.Machine}))
	key, err := o.OwnerKey()
	if err != nil {
		t.Fatal(err)
	}
	m.key = key.Public().(ed25519.PublicKey)
	m.owner = func() ownerorder.Epoch {
		return ownerorder.Epoch{Cluster: o.ClusterID(), Machine: m.ID(), Epoch: 41, DiskCounter: 12, TPMCounter: 15, Nonce: ownerorder.Nonce(bytes.Repeat([]byte{7}, 32))}
	}
	_, policy, _, err := policies.FolderPolicy(o.Dir)
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
		ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
		defer cancel()
		return Recover(ctx, RecoverConfig{Dir: o.Dir, Addr: w.addr, AcceptEpoch: accept, Ask: ask, Report: progress.New(progress.Config{Out: io.Writer(o.Out), Format: progress.Plain, Steps: RecoverSteps})})
	}
	m.LockTo([32]byte{0xEE}) // another cluster's
	if _, err := revive(number(41), nil); rpc.ReasonFrom(err) != attestv1.Reason_REASON_LOCK_FOREIGN || m.taken > 0 {
		t.Errorf("a machine of another cluster: %v", err)
	}
	m.Reboot()
	m.LockTo(o.ClusterID())
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
		remedy := problem.Explain(err).Remedy
		for _, want := range []string{"--accept-epoch 41", "epoch 41", "node4", "counter was 12", "now it is 15"} {
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

// A name may have belonged to another machine when the copy was made: its ban is not a ban of the name's present
// machine.
func TestABanIsThatOfItsMachine(t *testing.T) {
	known := &ownerdir.Known{
		Version: ownerdir.KnownVersion, Nodes: map[string]ownerdir.KnownNode{"w1": {UID: "u1", MachineID: "y", Banned: true}, "w2": {UID: "u2", MachineID: "z", Banned: true}},
		Gone: []ownerdir.KnownGone{{UID: "u3", Name: "w3"}}, Bans: map[string]int64{"u1": 9, "u2": 2, "u3": 2, "u4": 2},
		Names: map[string]string{"u1": "w1", "u2": "w2", "u3": "w3", "u4": "w4"}, BannedMachines: map[string]string{"u3": "x3", "u4": "x4"},
	}
	names := []string{"w1", "other", "w3", "w4"}
	v := &Revival{Epoch: 5, Bans: names, BannedMachines: []string{"x", "z", "another", "x4"}}
	v.undone(known)
	if !slices.Equal(v.Unbanned, []string{"w1"}) || !slices.Equal(v.BannedAndForgotten, []string{"w3"}) {
		t.Errorf("unbanned %q, banned and forgotten %q", v.Unbanned, v.BannedAndForgotten)
	}
	v = &Revival{Epoch: 5, Bans: names} // a record of an earlier version
	v.undone(known)
	if !slices.Equal(v.Unbanned, []string{"w2"}) || len(v.BannedAndForgotten) > 0 {
		t.Errorf("by names: unbanned %q, banned and forgotten %q", v.Unbanned, v.BannedAndForgotten)
	}
}

// All that an older copy undoes is listed, and no line is reassuring while there is such an item (B7, K4).
func TestWhatAnOlderControlPlaneWouldUndoIsNamed(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	text := policyOf(t, ca, []*attesttest.Machine{m}, serial(9))
	o := ownertest.Own(t, &ownertest.FirstMachine{Addr: "192.0.2.11:9000"}, "192.0.2.1:6443", text)
	key, err := o.OwnerKey()
	if err != nil {
		t.Fatal(err)
	}
	_, document, err := policyfile.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	signed := attest.SignPolicy(key, document)
	policy := ownerdir.KnownPolicy{JSON: string(signed.GetPolicy()), Signature: signed.GetSignature()}
	const sound = "This disk has every ban that the folder knows"
	live := map[string]ownerdir.KnownNode{"w1": {UID: "u1"}, "w2": {UID: "u2", Banned: true}}
	for name, tt := range map[string]struct {
		known ownerdir.Known
		epoch uint64 // of the disk
		want  Revival
		says  []string
	}{
		"nothing": {
			ownerdir.Known{Version: 2, Epoch: 41, Nodes: live, Bans: map[string]int64{"u2": 3}}, 41,
			Revival{}, []string{sound + ", and the folder records no forgotten node or erased disk."},
		},
		"a ban": {
			ownerdir.Known{Version: 2, Epoch: 41, Nodes: map[string]ownerdir.KnownNode{"w3": {UID: "u3", Banned: true}}, Bans: map[string]int64{"u3": 3}}, 41,
			Revival{Unbanned: []string{"w3"}}, []string{"not on this disk: w3."},
		},
		"a node that was banned and forgotten": {
			ownerdir.Known{Version: 2, Epoch: 42, Nodes: live, Bans: map[string]int64{"u7": 2}, Names: map[string]string{"u7": "w7"}, Gone: []ownerdir.KnownGone{{UID: "u7", Name: "w7", Epoch: 42}}}, 41,
			Revival{BannedAndForgotten: []string{"w7"}}, []string{"The folder knows epoch 42", "Banned, then forgotten, and would be back without a ban: w7."},
		},
		"one whose ban the disk has": {
			ownerdir.Known{Version: 2, Nodes: live, Bans: map[string]int64{"old": 2}, Names: map[string]string{"old": "w2"}, Gone: []ownerdir.KnownGone{{UID: "old", Name: "w2"}}}, 41,
			Revival{Forgotten: []string{"w2"}}, []string{"Forgotten, and would be back: w2."},
		},
		"one that went so long ago that its ban alone is known": {
			ownerdir.Known{Version: 2, Nodes: live, Bans: map[string]int64{"u7": 2}, Names: map[string]string{"u7": "w7"}}, 41,
			Revival{BannedAndForgotten: []string{"w7"}}, []string{"would be back without a ban: w7."},
		},
		"a ban that version 1 noted, without a name": {
			ownerdir.Known{Version: 1, Bans: map[string]int64{"u7": 2}}, 41,
			Revival{BannedAndForgotten: []string{"enrollment u7"}}, []string{"would be back without a ban: enrollment u7.", "an earlier version of muster"},
		},
		"nodes that were forgotten": {
			ownerdir.Known{Version: 2, Epoch: 43, Nodes: live, Gone: []ownerdir.KnownGone{{UID: "u9", Name: "w9", Epoch: 43}, {UID: "u8", Name: "w8", Epoch: 41}, {Name: "w7"}, {UID: "u5", Name: "w7", Epoch: 42}}}, 41,
			Revival{Forgotten: []string{"w7", "w8", "w9"}}, []string{"Forgotten, and would be back: w7, w8, w9."},
		},
		"one that was forgotten before the copy": {
			ownerdir.Known{Version: 2, Epoch: 41, Nodes: live, Gone: []ownerdir.KnownGone{{UID: "u9", Name: "w9", Epoch: 40}}}, 41,
			Revival{Before: true}, []string{"before epoch 41. This copy already has those changes, unless you have accepted an older epoch since then."},
		},
		"a copy without a record, of before all that": {
			ownerdir.Known{Version: 2, Epoch: 41, Nodes: live, Gone: []ownerdir.KnownGone{{UID: "u9", Name: "w9", Epoch: 1}}, Erased: []string{"d7"}, ErasedAt: map[string]uint64{"d7": 1}}, 0,
			Revival{Forgotten: []string{"w9"}, Erased: []string{"d7"}}, []string{"w9.", "d7."},
		},
		"disks that were erased": {
			ownerdir.Known{Version: 2, Epoch: 43, Nodes: live, Erased: []string{"d6", "d7", "d8"}, ErasedAt: map[string]uint64{"d6": 40, "d7": 41}}, 41,
			Revival{Erased: []string{"d7", "d8"}, Before: true}, []string{"Erased, and the salts of these disks would be back: d7, d8."},
		},
		"version 1 does not know what was forgotten": {
			ownerdir.Known{Version: 1, Nodes: live}, 41, Revival{}, []string{"known.json is from an earlier version of muster"},
		},
		"no file": {ownerdir.Known{}, 41, Revival{}, []string{"The folder has no known.json"}},
	} {
		t.Run(name, func(t *testing.T) {
			tt.known.Policy = policy
			r := &recoverer{RecoverConfig: RecoverConfig{Dir: o.Dir, Machine: new(attest.MachineID)}, key: key, known: &tt.known}
			v, err := r.compare(&recoverv1.DescribeEpochResponse{Epoch: tt.epoch, PolicySerial: 9, Bans: []string{"w2"}, DiskCounter: 12, TpmCounter: 15, Nonce: bytes.Repeat([]byte{7}, 32)})
			if err != nil {
				t.Fatal(err)
			}
			same := slices.Equal(v.Unbanned, tt.want.Unbanned) && slices.Equal(v.BannedAndForgotten, tt.want.BannedAndForgotten) &&
				slices.Equal(v.Forgotten, tt.want.Forgotten) && slices.Equal(v.Erased, tt.want.Erased)
			if !same || v.Before != tt.want.Before || v.KnownEpoch != tt.known.Epoch || v.KnownVersion != tt.known.Version {
				t.Errorf("%+v", v)
			}
			text := strings.Join(v.Lines(), "\n")
			for _, want := range tt.says {
				if !strings.Contains(text, want) {
					t.Errorf("%s\ndoes not say %q", text, want)
				}
			}
			if strings.Contains(text, sound) != (name == "nothing") {
				t.Errorf("reassuring, or not: %s", text)
			}
			b, err := json.Marshal(v)
			if err != nil {
				t.Fatal(err)
			}
			for _, field := range []string{"unbanned", "bannedAndForgotten", "forgotten", "erased"} {
				if !strings.Contains(string(b), `"`+field+`":[`) {
					t.Errorf("%s has no list %s", b, field)
				}
			}
		})
	}
	many := make([]string, problem.MaxNamed+7)
	for i := range many {
		many[i] = fmt.Sprintf("w%d", i)
	}
	if text := strings.Join(Revival{Forgotten: many}.Lines(), " "); !strings.Contains(text, "w99, and 7 more.") || strings.Contains(text, "w100") {
		t.Error(text)
	}
}
