package recovery

import (
	"crypto/ed25519"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/keys"
)

// serial sets the serial of a policy.
func serial(n uint64) func(*attestv1.Policy) { return func(p *attestv1.Policy) { p.Serial = n } }

// policyOf returns a policy that accepts the machines, and lists them as control planes.
func policyOf(t testing.TB, ca *attesttest.CA, machines []*attesttest.Machine, changes ...func(*attestv1.Policy)) []byte {
	t.Helper()
	return attesttest.Policy(t, ca, machines, append([]func(*attestv1.Policy){attesttest.ControlPlanes(machines...)}, changes...)...)
}

// J2: before a key is derived, the disk that the machine claims is compared with the cluster's last known state.
func TestADiskThatIsNotTheMachinesGetsNoKey(t *testing.T) {
	ca := attesttest.NewCA(t)
	first, second := attesttest.NewMachine(t, ca, attesttest.Options{}), attesttest.NewMachine(t, ca, attesttest.Options{})
	policy := policyOf(t, ca, []*attesttest.Machine{first, second})
	node := func(m *attesttest.Machine, disk string) ownerdir.KnownNode {
		return ownerdir.KnownNode{MachineID: m.ID().String(), Role: "control-plane", Disk: ownerdir.KnownDisk{ID: disk, Salt: keys.DiskSalt{3}.String(), RootVersion: 1}}
	}
	banned := node(second, waitingDisk)
	banned.Banned = true
	unsalted, rotated := node(second, waitingDisk), node(second, waitingDisk)
	unsalted.Disk.Salt, rotated.Disk.RootVersion = "", 2
	for name, tt := range map[string]struct {
		nodes map[string]ownerdir.KnownNode
		named string // by --disk
		want  attestv1.Reason
		says  string
	}{
		"the disk that the cluster said last": {nodes: map[string]ownerdir.KnownNode{"node2": node(second, waitingDisk)}},
		"another disk than that":              {nodes: map[string]ownerdir.KnownNode{"node2": node(second, otherDisk)}, want: attestv1.Reason_REASON_DISK_MISMATCH, says: "the folder records disk " + otherDisk},
		"another machine's disk":              {nodes: map[string]ownerdir.KnownNode{"node1": node(first, waitingDisk), "node2": node(second, otherDisk)}, want: attestv1.Reason_REASON_DISK_MISMATCH, says: "(node1)"},
		"a machine that nobody knows":         {nodes: map[string]ownerdir.KnownNode{"node1": node(first, otherDisk)}, want: attestv1.Reason_REASON_DISK_MISMATCH, says: "records no disk"},
		"a machine without a disk":            {nodes: map[string]ownerdir.KnownNode{"node2": node(second, "")}, want: attestv1.Reason_REASON_DISK_MISMATCH, says: "records no disk"},
		"a banned machine":                    {nodes: map[string]ownerdir.KnownNode{"node2": banned}, want: attestv1.Reason_REASON_BANNED, says: "node2"},
		"a named disk that it does not have":  {nodes: map[string]ownerdir.KnownNode{"node2": node(second, waitingDisk)}, named: otherDisk, want: attestv1.Reason_REASON_DISK_MISMATCH, says: "--disk names"},
		"a named disk that nobody knows":      {nodes: map[string]ownerdir.KnownNode{"node1": node(first, otherDisk)}, named: waitingDisk, want: attestv1.Reason_REASON_DISK_ERASED, says: "no salt of disk"},
		"a disk without a salt":               {nodes: map[string]ownerdir.KnownNode{"node2": unsalted}, want: attestv1.Reason_REASON_DISK_ERASED, says: "no salt of disk"},
		"a key of another root secret":        {nodes: map[string]ownerdir.KnownNode{"node2": rotated}, want: attestv1.Reason_REASON_DISK_ERASED, says: "version 2"},
	} {
		t.Run(name, func(t *testing.T) {
			w := serveWaiting(t, second, opens)
			o := knows(t, w, first, otherDisk, policy)
			key, err := o.OwnerKey()
			if err != nil {
				t.Fatal(err)
			}
			o.Remembers(t, policy, key, tt.nodes)
			id := second.ID()
			_, err = recoverDisk(t, o, w, &id, tt.named)
			if tt.want == attestv1.Reason_REASON_UNSPECIFIED {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			if rpc.ReasonFrom(err) != tt.want || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("%v, want %s that says %q", err, attest.ReasonName(tt.want), tt.says)
			}
			if tt.want == attestv1.Reason_REASON_DISK_ERASED { // the owner cannot override this with a salt
				if w.calls() != 0 {
					t.Error("a key was sent")
				}
				return
			}
			if tt.named == "" && !strings.Contains(problem.Explain(err).Remedy, "--disk "+waitingDisk) {
				t.Errorf("no way out in %q", problem.Explain(err).Remedy)
			}
			if w.calls() != 0 {
				t.Error("a key was sent")
			}
			_, err = recoverDisk(t, o, w, &id, waitingDisk)
			if known := slices.ContainsFunc(slices.Collect(maps.Values(tt.nodes)), func(n ownerdir.KnownNode) bool { return n.Disk.ID == waitingDisk }); (err == nil) != known { // K4: it has a salt, or none
				t.Errorf("named by the owner: %v, and its salt is known: %v", err, known)
			}
		})
	}
}

// The machine is appraised by the current policy: not by one that is older than the cluster's last, or another one of
// its serial.
func TestAPolicyThatIsNotCurrentRecoversNothing(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	policy := func(n uint64, changes ...func(*attestv1.Policy)) []byte {
		return policyOf(t, ca, []*attesttest.Machine{m}, append(changes, serial(n))...)
	}
	other := func(p *attestv1.Policy) { p.Insecure = &attestv1.InsecureSwitches{AllowPlainState: true} }
	twice := func(p *attestv1.Policy) {
		p.Tpm2.MachineIds = []string{m.ID().String(), m.ID().String()}
	}
	for name, tt := range map[string]struct {
		folder, last []byte
		otherKey     bool // another key signed the last one
		want         attestv1.Reason
	}{
		"the current one":                    {folder: policy(4), last: policy(4)},
		"a newer one, not applied yet":       {folder: policy(5), last: policy(4)},
		"an older one":                       {folder: policy(3), last: policy(4), want: attestv1.Reason_REASON_POLICY_INVALID},
		"another one with the same serial":   {folder: policy(4), last: policy(4, other), want: attestv1.Reason_REASON_POLICY_INVALID},
		"a note that the owner did not sign": {folder: policy(4), last: policy(4), otherKey: true, want: attestv1.Reason_REASON_POLICY_SIGNATURE},
		// Of the version before: this one refuses an ID that stands twice in a list.
		"one after another version's":            {folder: policy(5), last: policy(4, twice)},
		"one with another version's serial":      {folder: policy(4), last: policy(4, twice), want: attestv1.Reason_REASON_POLICY_INVALID},
		"one that is older than such a one":      {folder: policy(3), last: policy(4, twice), want: attestv1.Reason_REASON_POLICY_INVALID},
		"such a one that another key has signed": {folder: policy(5), last: policy(4, twice), otherKey: true, want: attestv1.Reason_REASON_POLICY_SIGNATURE},
	} {
		t.Run(name, func(t *testing.T) {
			w := serveWaiting(t, m, opens)
			o := knows(t, w, m, waitingDisk, tt.folder)
			key, err := o.OwnerKey()
			if err != nil {
				t.Fatal(err)
			}
			if tt.otherKey {
				key = ed25519.NewKeyFromSeed(make([]byte, ed25519.SeedSize))
			}
			o.Remembers(t, tt.last, key, map[string]ownerdir.KnownNode{"node1": {MachineID: m.ID().String(), Role: "control-plane", Disk: ownerdir.KnownDisk{ID: waitingDisk, Salt: keys.DiskSalt{3}.String(), RootVersion: 1}}})
			_, err = recoverFrom(t, o, w, nil)
			if got := rpc.ReasonFrom(err); err == nil != (tt.want == attestv1.Reason_REASON_UNSPECIFIED) || err != nil && got != tt.want {
				t.Errorf("%v, want %s", err, attest.ReasonName(tt.want))
			}
			if err != nil && (w.calls() != 0 || w.described != 0) {
				t.Error("the machine was asked")
			}
		})
	}
}

// A9: firmware of another class gets no key, also not by recovery.
func TestAMachineOfAnotherClassOrImageGetsNoKey(t *testing.T) {
	for name, opts := range map[string]attesttest.Options{"of another class": {Drivers: []string{"Driver0000"}}, "of a former image": {Image: "former"}} {
		t.Run(name, func(t *testing.T) {
			ca := attesttest.NewCA(t)
			m := attesttest.NewMachine(t, ca, opts)
			w := serveWaiting(t, m, opens)
			now := attesttest.NewMachine(t, ca, attesttest.Options{})
			o := knows(t, w, m, waitingDisk, policyOf(t, ca, []*attesttest.Machine{now}, attesttest.ControlPlanes(now, m)))
			if _, err := recoverFrom(t, o, w, nil); rpc.ReasonFrom(err) != attestv1.Reason_REASON_POLICY_REFUSED || w.calls() != 0 || w.described != 0 {
				t.Errorf("%v, asked %d times", err, w.calls())
			}
			o = knows(t, w, m, waitingDisk, policyOf(t, ca, []*attesttest.Machine{now, m}))
			if _, err := recoverFrom(t, o, w, nil); err != nil {
				t.Errorf("the policy has both: %v", err)
			}
		})
	}
}

// The recorded state is not overwritten by a cluster that is older.
func TestAnOlderClusterIsNoticed(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	key := ed25519.NewKeyFromSeed(make([]byte, ed25519.SeedSize))
	public := key.Public().(ed25519.PublicKey)
	of := func(n uint64) ownerdir.KnownPolicy {
		_, json, err := policyfile.Parse(policyOf(t, ca, []*attesttest.Machine{m}, serial(n)))
		if err != nil {
			t.Fatal(err)
		}
		s := attest.SignPolicy(key, json)
		return ownerdir.KnownPolicy{JSON: string(s.GetPolicy()), Signature: s.GetSignature()}
	}
	nodes := func(list ...string) map[string]ownerdir.KnownNode { // each "name UID generation"
		out := map[string]ownerdir.KnownNode{}
		for _, text := range list {
			var name string
			var n ownerdir.KnownNode
			_, _ = fmt.Sscan(text, &name, &n.UID, &n.Generation)
			out[name] = n
		}
		return out
	}
	same := nodes("w1 u1 5", "w2 u2 4")
	known := &ownerdir.Known{
		Version: ownerdir.KnownVersion, Policy: of(4), Epoch: 41, Nodes: same, Gone: []ownerdir.KnownGone{{UID: "gone", Name: "w3", Epoch: 40}, {Name: "of version 1"}},
		Bans: map[string]int64{"u1": 3, "banned": 2}, Names: map[string]string{"u1": "w1", "banned": "w4"},
	}
	first := &ownerdir.Known{Version: 1, Policy: of(4), Nodes: nodes("w1", "w2"), Bans: map[string]int64{"u1": 3, "banned": 2}}
	for name, tt := range map[string]struct {
		known  *ownerdir.Known
		policy ownerdir.KnownPolicy
		epoch  uint64
		nodes  map[string]ownerdir.KnownNode
		older  []string
	}{
		"nothing known":                       {&ownerdir.Known{}, of(1), 0, same, nil},
		"the same":                            {known, of(4), 41, same, nil},
		"newer":                               {known, of(5), 42, nodes("w1 u1 6", "w2 u2 4"), nil},
		"one that joined":                     {known, of(4), 42, nodes("w1 u1 5", "w2 u2 4", "w5 u5 1"), nil},
		"one that was forgotten":              {known, of(4), 41, nodes("w1 u1 5"), nil},
		"one that was forgotten, and joined":  {known, of(4), 41, nodes("w1 u1 5", "w2 new 1"), nil},
		"an older policy":                     {known, of(3), 41, same, []string{"its policy has the serial 3, but had 4 before"}},
		"no policy":                           {known, ownerdir.KnownPolicy{}, 41, same, []string{"its policy has the serial 0, but had 4 before"}},
		"a policy of another key":             {known, ownerdir.KnownPolicy{JSON: of(3).JSON, Signature: make([]byte, 64)}, 41, same, nil},
		"an older epoch, as of before a join": {known, of(4), 40, same, []string{"it is at epoch 40, but was at 41 before"}},
		"an epoch that nobody has counted":    {known, of(4), 0, same, []string{"it is at epoch 0, but was at 41 before"}},
		"from before an exchanged TPM":        {known, of(4), 41, nodes("w1 u1 5", "w2 u2 3"), []string{"the enrollment of w2 (u2) has the generation 3, but had 4 before"}},
		"from before a forget":                {known, of(4), 41, nodes("w1 u1 5", "w2 u2 4", "w3 gone 7"), []string{"the removed enrollment of w3 (gone) exists again, with the generation 7"}},
		"from before a ban":                   {known, of(4), 41, nodes("w1 u1 2", "w2 u2 4"), []string{"the enrollment of w1 (u1) has the generation 2, but was banned with generation 3"}},
		"from after a ban that has ended":     {known, of(4), 41, nodes("w1 u1 4", "w2 u2 4"), []string{"the enrollment of w1 (u1) has the generation 4, but had 5 before"}},
		"from before a ban and a forget":      {known, of(4), 41, nodes("w1 u1 5", "w2 u2 4", "w4 banned 1"), []string{"the enrollment of w4 (banned) has the generation 1, but was banned with generation 2"}},
		"all of it": {known, of(1), 7, nodes("w1 u1 5", "w2 u2 1", "w3 gone 1"), []string{
			"its policy has the serial 1, but had 4 before", "it is at epoch 7, but was at 41 before",
			"the enrollment of w2 (u2) has the generation 1, but had 4 before", "the removed enrollment of w3 (gone) exists again, with the generation 1",
		}},
		"of version 1, the same":                 {first, of(4), 0, same, nil},
		"of version 1, a ban that was undone":    {first, of(4), 9, nodes("w1 u1 2", "w2 u2 4"), []string{"the enrollment of w1 (u1) has the generation 2, but was banned with generation 3"}},
		"of version 1, an older policy":          {first, of(3), 9, same, []string{"its policy has the serial 3, but had 4 before"}},
		"an enrollment without a UID is unknown": {known, of(4), 41, nodes("w1 u1 5", "w2"), nil},
	} {
		older, err := tt.known.Older(&ownerdir.Known{Policy: tt.policy, Epoch: tt.epoch, Nodes: tt.nodes}, attest.OwnerKeys{public})
		if err != nil || !slices.Equal(older, tt.older) {
			t.Errorf("%s: %q %v, want %q", name, older, err, tt.older)
		}
	}
	if _, err := known.Older(known, attest.OwnerKeys{make([]byte, 32)}); err == nil || errors.Is(err, ErrRolledBack) {
		t.Errorf("a note that another owner signed: %v", err)
	}
}

// B7: a cluster that was restored to a state before a ban, and has counted on from there, has all numbers of the one
// that the folder knows.
func TestAClusterThatCaughtUpWithItsNumbersIsNoticed(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	key := ed25519.NewKeyFromSeed(make([]byte, ed25519.SeedSize))
	_, json, err := policyfile.Parse(policyOf(t, ca, []*attesttest.Machine{m}, serial(4)))
	if err != nil {
		t.Fatal(err)
	}
	signed := attest.SignPolicy(key, json)
	policy := ownerdir.KnownPolicy{JSON: string(signed.GetPolicy()), Signature: signed.GetSignature()}
	var history clusterinfo.History
	for n := range uint64(5) {
		history = history.Next(n + 1)
	}
	node := func(banned bool, generation int64) map[string]ownerdir.KnownNode {
		return map[string]ownerdir.KnownNode{"w1": {UID: "u1", Generation: generation, MachineID: "m1", Banned: banned}}
	}
	known := &ownerdir.Known{Version: ownerdir.KnownVersion, Policy: policy, Epoch: 5, EpochID: history.ID(5), Nodes: node(true, 2), Bans: map[string]int64{"u1": 2}}
	for name, tt := range map[string]struct {
		history clusterinfo.History
		older   bool
	}{
		"it has gone on":                      {history.Next(6).Next(7), false},
		"it was put back, and has counted on": {history[:4:4].Next(5).Next(6), true},
		"as far as before":                    {history[:4:4].Next(5), true},
		"the owner has begun a new history":   {clusterinfo.History(nil).Next(101), false},
	} {
		last := tt.history[len(tt.history)-1]
		seen := &ownerdir.Known{Policy: policy, Epoch: last.Number, EpochID: last.ID, History: tt.history, Nodes: node(false, 3)}
		older, err := known.Older(seen, attest.OwnerKeys{key.Public().(ed25519.PublicKey)})
		if err != nil || (len(older) > 0) != tt.older {
			t.Errorf("%s: %q, %v", name, older, err)
		}
		if next := known.Keep(seen); next.EpochID != last.ID || next.History != nil {
			t.Errorf("%s: noted is %+v", name, next)
		}
	}
}

// A disk whose node was removed can be restored to a cluster, but not used for a recovery: also not that of the first machine, which cluster.json has too.
func TestADiskOfANodeThatHasGoneIsNotRecovered(t *testing.T) {
	ca := attesttest.NewCA(t)
	first, second := attesttest.NewMachine(t, ca, attesttest.Options{}), attesttest.NewMachine(t, ca, attesttest.Options{})
	policy := policyOf(t, ca, []*attesttest.Machine{first, second})
	for name, tt := range map[string]struct {
		gone   *attesttest.Machine
		banned bool
		want   attestv1.Reason
	}{
		"another machine, forgotten":            {second, false, attestv1.Reason_REASON_DISK_MISMATCH},
		"another machine, banned and forgotten": {second, true, attestv1.Reason_REASON_BANNED},
		"the first one, forgotten":              {first, false, attestv1.Reason_REASON_DISK_MISMATCH},
		"the first one, banned and forgotten":   {first, true, attestv1.Reason_REASON_BANNED},
	} {
		t.Run(name, func(t *testing.T) {
			w := serveWaiting(t, tt.gone, opens, opens)
			disk := otherDisk
			if tt.gone == first {
				disk = waitingDisk
			}
			o := knows(t, w, first, disk, policy)
			key, err := o.OwnerKey()
			if err != nil {
				t.Fatal(err)
			}
			enrolled := map[string]ownerdir.KnownNode{"node2": {UID: "u2", MachineID: tt.gone.ID().String(), Role: "control-plane", Disk: ownerdir.KnownDisk{ID: waitingDisk, Salt: keys.DiskSalt{3}.String(), RootVersion: 1}}}
			o.Remembers(t, policy, key, enrolled)
			known, err := o.Known()
			if err != nil {
				t.Fatal(err)
			}
			if tt.banned {
				known.Bans, known.BannedMachines = map[string]int64{"u2": 2}, map[string]string{"u2": tt.gone.ID().String()}
			}
			gone := known.Keep(&ownerdir.Known{Policy: known.Policy})
			if err := o.Remember(gone); err != nil || len(gone.Disks) != 1 {
				t.Fatalf("%+v, %v", gone, err)
			}
			id := tt.gone.ID()
			for named, want := range map[string]attestv1.Reason{"": tt.want, waitingDisk: attestv1.Reason_REASON_DISK_ERASED} {
				if _, err := recoverDisk(t, o, w, &id, named); rpc.ReasonFrom(err) != want || w.calls() != 0 {
					t.Errorf("named %q: %v, %d keys sent", named, err, w.calls())
				}
			}
			o.Remembers(t, policy, key, enrolled)
			if _, err := recoverDisk(t, o, w, &id, ""); err != nil {
				t.Error(err)
			}
			if tt.gone != first {
				return
			}
			// While the cluster is restored on a machine, known.json is still that of the lost one.
			c := o.Cluster()
			c.Stage, c.Restore = ownerdir.StageRequested, &ownerdir.Restore{SHA256: strings.Repeat("0", 64)}
			if err := errors.Join(o.Save(c), o.Remember(known.Keep(&ownerdir.Known{Policy: known.Policy}))); err != nil {
				t.Fatal(err)
			}
			if _, err := recoverDisk(t, o, w, &id, ""); err != nil {
				t.Errorf("a machine of a restore: %v", err)
			}
		})
	}
}

// A7: a machine that the owner has removed from the policy's control planes gets no key, whatever known.json says.
func TestAMachineThatThePolicyDoesNotListGetsNoKey(t *testing.T) {
	ca := attesttest.NewCA(t)
	first, second := attesttest.NewMachine(t, ca, attesttest.Options{}), attesttest.NewMachine(t, ca, attesttest.Options{})
	both := []*attesttest.Machine{first, second}
	for name, tt := range map[string]struct {
		listed []*attesttest.Machine
		stage  ownerdir.Stage
		want   attestv1.Reason
	}{
		"listed":                             {both, ownerdir.StageInstalled, attestv1.Reason_REASON_UNSPECIFIED},
		"not listed":                         {both[1:], ownerdir.StageInstalled, attestv1.Reason_REASON_SERVER_NOT_LISTED},
		"of a policy without a list":         {nil, ownerdir.StageInstalled, attestv1.Reason_REASON_SERVER_NOT_LISTED},
		"not listed yet, during its init":    {both[1:], ownerdir.StageInitialized, attestv1.Reason_REASON_UNSPECIFIED},
		"not listed, during another's init ": {both[:1], ownerdir.StageInitialized, attestv1.Reason_REASON_SERVER_NOT_LISTED},
	} {
		t.Run(name, func(t *testing.T) {
			there := first
			if tt.stage == ownerdir.StageInitialized && tt.listed[0] == first {
				there = second
			}
			w := serveWaiting(t, there, opens)
			o := knows(t, w, first, waitingDisk, attesttest.Policy(t, ca, both, attesttest.ControlPlanes(tt.listed...)))
			c := o.Cluster()
			c.Stage = tt.stage
			if err := o.Save(c); err != nil {
				t.Fatal(err)
			}
			id := there.ID()
			for _, disk := range []string{waitingDisk, ""} {
				_, err := recoverDisk(t, o, w, &id, disk)
				if tt.want == attestv1.Reason_REASON_UNSPECIFIED {
					if err != nil {
						t.Error(err)
					}
					return
				}
				if rpc.ReasonFrom(err) != tt.want || w.calls() != 0 || w.described != 0 || !strings.Contains(problem.Remedy(err), "controlPlanes") {
					t.Errorf("%v, asked %d times: %s", err, w.calls(), problem.Remedy(err))
				}
			}
		})
	}
}

// K4: a recovery gives no key of an erased disk, and the folder keeps nothing from which it could be derived.
func TestAnErasedDiskIsNotRecovered(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	policy := policyOf(t, ca, []*attesttest.Machine{m})
	w := serveWaiting(t, m, opens)
	o := knows(t, w, m, waitingDisk, policy)
	key, err := o.OwnerKey()
	if err != nil {
		t.Fatal(err)
	}
	salt := keys.DiskSalt{3}.String()
	o.Remembers(t, policy, key, map[string]ownerdir.KnownNode{"node1": {MachineID: m.ID().String(), Role: "control-plane", Disk: ownerdir.KnownDisk{ID: waitingDisk, Salt: salt, RootVersion: 1}}})
	backup, err := o.Backup(time.Now(), map[string][]byte{"disks.yaml": []byte("metadata:\n  name: " + waitingDisk + "\n"), "objects.yaml": nil})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := recoverFrom(t, o, w, nil); err != nil {
		t.Fatal(err)
	}
	calls := w.calls()
	left, err := o.EraseDisk(waitingDisk)
	if err != nil || len(left) != 1 || left[0] != filepath.Join(backup, "disks.yaml") {
		t.Errorf("left %q, %v", left, err)
	}
	for _, file := range []string{ownerdir.KnownFile, "cluster.json"} {
		if text, err := o.Read(file); err != nil || strings.Contains(string(text), salt) {
			t.Errorf("%s has the salt, %v", file, err)
		}
	}
	if _, err := recoverFrom(t, o, w, nil); rpc.ReasonFrom(err) != attestv1.Reason_REASON_DISK_ERASED || w.calls() != calls {
		t.Errorf("%v, want DISK_ERASED", err)
	}
	known, err := o.Known()
	if err != nil || !slices.Equal(known.Erased, []string{waitingDisk}) {
		t.Fatalf("%+v, %v", known, err)
	}
	// A restored cluster has the salt again. It is not recorded.
	again := known.Keep(&ownerdir.Known{Nodes: map[string]ownerdir.KnownNode{"node1": {Disk: ownerdir.KnownDisk{ID: waitingDisk, Salt: salt, RootVersion: 1}}}})
	if again.Nodes["node1"].Disk.Salt != "" || !slices.Equal(again.Erased, known.Erased) {
		t.Errorf("%+v", again)
	}
}
