package install

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/backups"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/backup"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// A machine that was asked may be lost, too: the owner begins with another one.
func TestARestoreCanBeStartedOver(t *testing.T) {
	o := ownertest.NewLost(t)
	c := o.Cluster()
	lost := &ownerdir.Machine{ID: attest.MachineID{1}}
	c.Stage, c.Endpoint, c.Restore, c.FirstMachine = ownerdir.StageRequested, "127.0.0.1:2", &ownerdir.Restore{SHA256: "0", Former: &ownerdir.Machine{ID: attest.MachineID{9}}}, lost
	if err := o.Save(c); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var shown backups.BackupInfo
	cfg := config(o.Owned)
	err := Restore(ctx, RestoreConfig{
		Dir: o.Dir, File: o.BackupFile(t, o.Manifest(t)), URL: "http://x", Endpoint: "127.0.0.1:1", Report: cfg.Report, Log: cfg.Log, StartOver: true,
		Ask: func(i backups.BackupInfo) (bool, error) {
			shown = i
			cancel() // before the machine is asked
			return true, nil
		},
	})
	if err == nil {
		t.Fatal("it went on without the machine")
	}
	if text := strings.Join(shown.Lines(), "\n"); !strings.Contains(text, "An earlier run used machine "+lost.ID.String()) {
		t.Errorf("the owner is shown %s", text)
	}
	c = o.Cluster()
	if c.Stage != ownerdir.StagePrepared || c.Endpoint != "127.0.0.1:1" || c.FirstMachine != nil || c.Restore == nil || c.Restore.SHA256 != shown.SHA256 || c.Restore.Former.ID != (attest.MachineID{9}) {
		t.Errorf("the folder has %+v, %+v: %v", c, c.Restore, err)
	}
}

// A restore that is refused changes nothing in the folder (K5).
func TestARestoreIsRefusedBeforeAnythingIsSent(t *testing.T) {
	epoch := func(n uint64) *uint64 { return &n }
	for name, tt := range map[string]struct {
		change func(*ownerdir.Cluster)
		accept *uint64
		ask    func(backups.BackupInfo) (bool, error)
		says   string
	}{
		"nobody accepts the epoch": {says: "CLUSTER_ROLLED_BACK"},
		"another epoch":            {accept: epoch(3), says: "CLUSTER_ROLLED_BACK"},
		"the owner says no":        {ask: func(backups.BackupInfo) (bool, error) { return false, nil }, says: "CLUSTER_ROLLED_BACK"},
		"a cluster that is not whole": {
			change: func(c *ownerdir.Cluster) { c.Stage = ownerdir.StageInitialized }, accept: epoch(4), says: "does not have a complete cluster yet",
		},
		"an adopted cluster":  {change: func(c *ownerdir.Cluster) { c.Adopted = true }, accept: epoch(4), says: "existed before Muster"},
		"another one is open": {change: func(c *ownerdir.Cluster) { c.Restore = &ownerdir.Restore{SHA256: "0"} }, accept: epoch(4), says: "is unfinished"},
	} {
		t.Run(name, func(t *testing.T) {
			o := ownertest.NewLost(t)
			c := o.Cluster()
			if tt.change != nil {
				tt.change(&c)
				if err := o.Save(c); err != nil {
					t.Fatal(err)
				}
			}
			cfg := config(o.Owned)
			err := Restore(t.Context(), RestoreConfig{Dir: o.Dir, File: o.BackupFile(t, o.Manifest(t)), URL: "http://x", Endpoint: c.Endpoint, AcceptEpoch: tt.accept, Ask: tt.ask, Report: cfg.Report, Log: cfg.Log})
			if err == nil || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("%v", err)
			}
			had, _ := json.Marshal(c)
			if have, _ := json.Marshal(o.Cluster()); !bytes.Equal(had, have) {
				t.Errorf("the folder was changed: %s", have)
			}
		})
	}
	t.Run("muster init does not go on with it", func(t *testing.T) {
		o := ownertest.NewLost(t)
		c := o.Cluster()
		c.Restore = &ownerdir.Restore{SHA256: "0"}
		if err := o.Save(c); err != nil {
			t.Fatal(err)
		}
		if err := Init(t.Context(), config(o.Owned)); err == nil || !strings.Contains(err.Error(), "a restore is unfinished") {
			t.Errorf("%v", err)
		}
	})
}

// An empty list accepts every machine: no command puts it in force without the owner's consent.
func TestARestoreEmptiesNoListOfMachines(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	ownertest.Fresh(t)
	kube := ownertest.Defined(t)
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	listed := attesttest.Policy(t, ca, []*attesttest.Machine{m}, func(p *attestv1.Policy) { p.Tpm2.MachineIds = []string{m.ID().String()} })
	o := ownertest.Rules(ctx, t, kube, listed)
	text, err := policyfile.ListControlPlanes(attesttest.Policy(t, ca, []*attesttest.Machine{m}), 2, []policyfile.ControlPlane{{Machine: m.ID(), Name: "node9"}}, nil)
	if err == nil {
		err = o.Write(ownerdir.PolicyFile, text)
	}
	c := o.Cluster()
	c.Stage, c.FirstMachine, c.Restore = ownerdir.StageInitialized, &ownerdir.Machine{ID: m.ID(), NodeName: "node9"}, &ownerdir.Restore{SHA256: "0"}
	if err = errors.Join(err, o.Save(c)); err != nil {
		t.Fatal(err)
	}
	refused := func(when string, err error) {
		t.Helper()
		if err == nil {
			t.Fatalf("%s: it was not refused", when)
		}
		if p := problem.Explain(err); p.Reason != "POLICY_INVALID" || !strings.Contains(p.Message, "tpm2.machineIds of the policy is empty") || !strings.Contains(p.Remedy, "complete the restore first") {
			t.Errorf("%s: %v: %+v", when, err, p)
		}
	}
	i := &initializer{InitConfig: config(o)}
	if err := i.load(); err != nil {
		t.Fatal(err)
	}
	_, err = i.listRestored(ctx, kube)
	refused("by the backup's policy", err)
	if have, err := kube.Policy(ctx); err != nil || have.Generation != 1 {
		t.Errorf("the cluster's policy: %+v, %v", have, err)
	}
	key, err := o.OwnerKey()
	if err != nil {
		t.Fatal(err)
	}
	o.Remembers(t, listed, key, nil)
	refused("before anything is sent", Restore(ctx, RestoreConfig{Dir: o.Dir, File: "none", URL: "http://x", Endpoint: "127.0.0.1:1", Report: i.Report, Log: i.Log}))
}

// A backup brings back what was banned, erased and lost since.
func TestWhatABackupBringsBackIsShutOutAgain(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	l := ownertest.NewLifecycle(t)
	m := &backup.Manifest{State: backup.State{Epoch: 4}}
	for i, name := range []string{"lost1", "lost2", "stolen", "fine", "other-disk"} {
		role := v1alpha1.RoleWorker
		if strings.HasPrefix(name, "lost") {
			role = v1alpha1.RoleControlPlane
		}
		l.Node(t, name, byte(91+i), role)
		e := ownertest.EnrollmentOf(t, name)
		m.Nodes = append(m.Nodes, backup.Node{Name: name, UID: string(e.UID), Role: string(role), MachineID: e.Spec.MachineID, DiskID: e.Spec.DiskID})
	}
	of := func(name string) backup.Node {
		return m.Nodes[slices.IndexFunc(m.Nodes, func(n backup.Node) bool { return n.Name == name })]
	}
	node := func(name string, banned bool) ownerdir.KnownNode {
		return ownerdir.KnownNode{UID: of(name).UID, MachineID: of(name).MachineID, Banned: banned, Disk: ownerdir.KnownDisk{ID: of(name).DiskID}}
	}
	id := func(digits string) string { return strings.Repeat(digits, 32) }
	known := &ownerdir.Known{
		Version: ownerdir.KnownVersion,
		Nodes: map[string]ownerdir.KnownNode{
			"stolen": node("stolen", true), "fine": node("fine", false), "lost2": node("lost2", true),
			"restored":     {UID: "l0", MachineID: attest.MachineID{0xf1}.String()}, // noted by an earlier run
			"later-banned": {UID: "l1", MachineID: id("a1"), Banned: true}, "later": {UID: "l2", MachineID: id("a2")},
			"other-disk": {UID: "l3", MachineID: id("a3"), Banned: true}, // the name went to another machine, which was banned
		},
		Gone:   []ownerdir.KnownGone{{UID: "g1", Name: "gone-since", Epoch: 5}, {UID: "g2", Name: "gone-before", Epoch: 4}},
		Erased: []string{of("other-disk").DiskID, "00000000-0000-4000-8000-000000000000"},
	}
	c := l.Cluster()
	c.FirstMachine = &ownerdir.Machine{ID: attest.MachineID{0xf1}, NodeName: "restored"}
	if err := l.Save(c); err != nil {
		t.Fatal(err)
	}
	i := &initializer{InitConfig: config(l.Owned)}
	kube, err := access.Connect(l.Dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, name := range []string{"later-banned", "banned-" + id("a3")[:16], "restored", "lost2"} {
			ownertest.Unenroll(context.WithoutCancel(t.Context()), name)
		}
	})
	for range 2 { // an interrupted restore does it again
		for _, do := range []func() (string, error){
			func() (string, error) { return i.banAgain(ctx, kube, m, known) },
			func() (string, error) { return i.eraseAgain(ctx, kube, known) },
			func() (string, error) { return i.forgetLost(ctx, kube, m, known) },
		} {
			if _, err := do(); err != nil {
				t.Fatal(err)
			}
		}
	}
	for name, want := range map[string]bool{"stolen": true, "fine": false, "other-disk": true, "later-banned": true, "banned-" + id("a3")[:16]: true} {
		if e := ownertest.EnrollmentOf(t, name); e.Spec.Banned != want {
			t.Errorf("%s is banned: %t", name, !want)
		}
	}
	if e := ownertest.EnrollmentOf(t, "later-banned"); e.Spec.MachineID != id("a1") || !ownertest.Listed(t).Entry("later-banned").Suspended {
		t.Errorf("%+v, %+v", e.Spec, ownertest.Listed(t).Entry("later-banned"))
	}
	for name, want := range map[string]bool{"later": true, "gone-since": true, "gone-before": false, "fine": false, "lost1": true} {
		if got := ownertest.Listed(t).Entry(name).Revoked != nil; got != want {
			t.Errorf("certificates of %s are revoked: %t", name, got)
		}
	}
	d, err := kube.Disk(ctx, of("other-disk").DiskID)
	if err != nil || d.Spec.Salt != "" || !d.Spec.Erased {
		t.Errorf("%+v, %v", d, err)
	}
	if d, err = kube.Disk(ctx, of("fine").DiskID); err != nil || d.Spec.Salt == "" {
		t.Errorf("%+v, %v", d, err)
	}
	if p, err := kube.Presence(ctx, "lost1"); err != nil || p.Enrollment != nil || p.Node != nil {
		t.Errorf("lost1 is there: %+v, %v", p, err)
	}
	// The ban of a machine does not go with its enrollment.
	if e := ownertest.EnrollmentOf(t, "lost2"); !e.Spec.Banned || string(e.UID) == of("lost2").UID || e.Spec.MachineID != of("lost2").MachineID || e.Spec.Role != v1alpha1.RoleWorker {
		t.Errorf("lost2: %+v", e.Spec)
	}
	isShut(ctx, t, l, i, kube, m, known)
}

// A backup that was made after the folder knew an epoch of its number is of the same history.
func TestABackupOfAnotherHistoryIsNamed(t *testing.T) {
	m := &backup.Manifest{State: backup.State{Epoch: 7, History: "5:0000000000000005\n6:0000000000000006\n7:0000000000000007"}}
	for name, tt := range map[string]struct {
		epoch uint64
		id    string
		want  bool
	}{
		"the same history": {6, "0000000000000006", false}, "the same epoch of another one": {6, "0000000000000066", true}, "of before the history": {4, "0000000000000004", false}, "no ID known": {6, "", false},
	} {
		got := slices.ContainsFunc(backups.Since(m, &ownerdir.Known{Version: 2, Epoch: tt.epoch, EpochID: tt.id}), func(s string) bool { return strings.Contains(s, "another history") })
		if got != tt.want {
			t.Errorf("%s: named: %t", name, got)
		}
	}
}

// With a copy of the folder from before a rotation of the cluster's authority, a living cluster would be taken for lost: there would be two of it.
func TestAClusterThatAnswersIsNotRestored(t *testing.T) {
	old, next := ownertest.NewAuthority(t), ownertest.NewAuthority(t)
	for name, tt := range map[string]struct {
		api  *ownertest.APIServer
		off  bool
		says string
	}{
		"it refuses the administrator":       {&ownertest.APIServer{CA: old}, false, "the cluster is not lost"},
		"its authority is a later one":       {&ownertest.APIServer{CA: next, Before: &old}, false, "may not be lost"},
		"nothing answers, and no is the end": {&ownertest.APIServer{CA: old}, true, "was not accepted"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := ownertest.Administered(t, tt.api, ownertest.Administrator, time.Now().Add(time.Hour), []byte("policy\n"))
			if tt.off {
				text, err := dir.Read(ownerdir.AdminConf)
				if err != nil {
					t.Fatal(err)
				}
				server := regexp.MustCompile(`server: https://\S+`)
				if err := dir.Write(ownerdir.AdminConf, server.ReplaceAll(text, []byte("server: https://127.0.0.1:1"))); err != nil {
					t.Fatal(err)
				}
			}
			i := &initializer{InitConfig: InitConfig{Dir: dir.Dir, Report: dir.Report(access.RenewSteps)}}
			ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
			defer cancel()
			if _, err := i.acceptBackup(ctx, RestoreConfig{Dir: dir.Dir}, &backups.BackupInfo{}); err == nil || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("got %v, want %q", err, tt.says)
			}
		})
	}
}
