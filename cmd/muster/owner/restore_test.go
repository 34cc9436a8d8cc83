package owner

import (
	"context"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/internal/backup"
	"github.com/muster-k8s/muster/trust/attest"
)

// A backup brings back what was banned, erased and lost since.
func TestWhatABackupBringsBackIsShutOutAgain(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	l := newLifecycle(t)
	m := &backup.Manifest{State: backup.State{Epoch: 4}}
	for i, name := range []string{"lost1", "lost2", "stolen", "fine", "other-disk"} {
		role := v1alpha1.RoleWorker
		if strings.HasPrefix(name, "lost") {
			role = v1alpha1.RoleControlPlane
		}
		l.node(t, name, byte(91+i), role)
		e := enrollmentOf(t, name)
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
	i := &initializer{InitConfig: l.config()}
	kube, err := Connect(l.Dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, name := range []string{"later-banned", "banned-" + id("a3")[:16], "restored", "lost2"} {
			unenroll(context.WithoutCancel(t.Context()), name)
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
		if e := enrollmentOf(t, name); e.Spec.Banned != want {
			t.Errorf("%s is banned: %t", name, !want)
		}
	}
	if e := enrollmentOf(t, "later-banned"); e.Spec.MachineID != id("a1") || !listed(t).Entry("later-banned").Suspended {
		t.Errorf("%+v, %+v", e.Spec, listed(t).Entry("later-banned"))
	}
	for name, want := range map[string]bool{"later": true, "gone-since": true, "gone-before": false, "fine": false, "lost1": true} {
		if got := listed(t).Entry(name).Revoked != nil; got != want {
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
	if e := enrollmentOf(t, "lost2"); !e.Spec.Banned || string(e.UID) == of("lost2").UID || e.Spec.MachineID != of("lost2").MachineID || e.Spec.Role != v1alpha1.RoleWorker {
		t.Errorf("lost2: %+v", e.Spec)
	}
	l.isShut(ctx, t, i, kube, m, known)
}

// isShut checks that a restore ends only if one API server shows all of that.
func (l *lifecycle) isShut(ctx context.Context, t *testing.T, i *initializer, kube *clusterapi.Client, m *backup.Manifest, known *ownerdir.Known) {
	t.Helper()
	want := func(names ...string) {
		t.Helper()
		seen, err := see(ctx, kube)
		if err != nil {
			t.Fatal(err)
		}
		if got := i.notShut(seen, m, known); !slices.Equal(got, names) {
			t.Errorf("not shut out: %q, want %q", got, names)
		}
	}
	want("restored") // another API server answers
	n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "restored"}, Spec: v1alpha1.AttestedNodeSpec{MachineID: attest.MachineID{0xf1}.String(), Role: v1alpha1.RoleControlPlane}}
	if err := shared.Client.Create(ctx, n); err != nil {
		t.Fatal(err)
	}
	want()
	// A later run leaves alone what has joined since.
	if _, err := i.banAgain(ctx, kube, m, known); err != nil || listed(t).Entry("restored").Revoked != nil {
		t.Errorf("%+v, %v", listed(t).Entry("restored"), err)
	}
	e := &v1alpha1.AttestedNode{}
	if err := shared.Client.Get(ctx, types.NamespacedName{Name: "stolen"}, e); err != nil {
		t.Fatal(err)
	}
	e.Spec.Banned = false
	if err := shared.Client.Update(ctx, e); err != nil {
		t.Fatal(err)
	}
	want("stolen")
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
		got := slices.ContainsFunc(since(m, &ownerdir.Known{Version: 2, Epoch: tt.epoch, EpochID: tt.id}), func(s string) bool { return strings.Contains(s, "another history") })
		if got != tt.want {
			t.Errorf("%s: named: %t", name, got)
		}
	}
}

// With a copy of the folder from before a rotation of the cluster's authority, a living cluster would be taken for lost: there would be two of it.
func TestAClusterThatAnswersIsNotRestored(t *testing.T) {
	old, next := newAuthority(t), newAuthority(t)
	for name, tt := range map[string]struct {
		api  *apiServer
		off  bool
		says string
	}{
		"it refuses the administrator":       {&apiServer{ca: old}, false, "the cluster is not lost"},
		"its authority is a later one":       {&apiServer{ca: next, before: &old}, false, "may not be lost"},
		"nothing answers, and no is the end": {&apiServer{ca: old}, true, "was not accepted"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := administered(t, tt.api, administrator, time.Now().Add(time.Hour), []byte("policy\n"))
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
			i := &initializer{InitConfig: InitConfig{Dir: dir.Dir, Report: dir.report(RenewSteps)}}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			if _, err := i.acceptBackup(ctx, RestoreConfig{Dir: dir.Dir}, &BackupInfo{}); err == nil || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("got %v, want %q", err, tt.says)
			}
		})
	}
}
