package install

import (
	"context"
	"crypto/x509/pkix"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/cmd/muster/owner/backups"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/cmd/muster/owner/recovery"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/internal/apiserver"
	"github.com/muster-k8s/muster/internal/backup"
	"github.com/muster-k8s/muster/internal/kubetest"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

func text(t *testing.T, c ownerdir.Cluster) string {
	t.Helper()
	b, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// The network was down, and the cluster was not lost: the folder is as before, and known.json is written again.
func TestARestoreThatWasNotNeededCanBeAbandoned(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*ownertest.Patience)
	defer cancel()
	ownertest.Fresh(t)
	kube := ownertest.Defined(t)
	o := ownertest.NewLost(t)
	c := o.Cluster()
	c.KubernetesVersion, c.FirstMachine = "1.36.2", &ownerdir.Machine{ID: attest.MachineID{9}, NodeName: "node1"}
	c.ControlPlanes = map[string]attest.MachineID{"node1": {9}}
	if err := o.Save(c); err != nil {
		t.Fatal(err)
	}
	before := text(t, o.Cluster())
	begun, stop := context.WithCancel(ctx)
	cfg := config(o.Owned)
	restore := RestoreConfig{
		Dir: o.Dir, File: o.BackupFile(t, o.Manifest(t)), URL: "http://x", Endpoint: "127.0.0.1:1", Report: cfg.Report, Log: cfg.Log,
		Ask: func(backups.BackupInfo) (bool, error) {
			stop() // before the machine is asked
			return true, nil
		},
	}
	if err := Restore(begun, restore); err == nil {
		t.Fatal("it went on without the machine")
	}
	if c := o.Cluster(); c.Stage != ownerdir.StagePrepared || c.Restore == nil || c.KubernetesVersion != "1.36.2" {
		t.Fatalf("the folder has %+v", c)
	}
	if err := o.Write(ownerdir.AdminConf, ownertest.Kubeconfig(t)); err != nil {
		t.Fatal(err)
	}
	policy, err := o.Read(ownerdir.PolicyFile)
	if err != nil {
		t.Fatal(err)
	}
	_, document, err := policyfile.Parse(policy)
	if err != nil {
		t.Fatal(err)
	}
	key, err := o.OwnerKey()
	if err != nil {
		t.Fatal(err)
	}
	if err := ownertest.PutPolicy(ctx, kube, attest.SignPolicy(key, document)); err != nil {
		t.Fatal(err)
	}
	if err := recovery.RecordState(ctx, o.Dir, kube); !errors.Is(err, recovery.ErrRestoring) {
		t.Errorf("a restore is open, and %v", err)
	}
	if err := (&initializer{InitConfig: config(o.Owned)}).lost(ctx); err == nil || !strings.Contains(problem.Remedy(err), "muster restore --abandon") {
		t.Errorf("%v: %s", err, problem.Remedy(err))
	}
	if asked, err := Abandon(ctx, o.Dir); err != nil || len(asked) != 0 {
		t.Fatalf("%+v, %v", asked, err)
	}
	if after := text(t, o.Cluster()); after != before {
		t.Errorf("the folder has\n%s, and had\n%s", after, before)
	}
	if err := recovery.RecordState(ctx, o.Dir, kube); err != nil {
		t.Error(err)
	}
	if known, err := o.Known(); err != nil || known.Version == 0 {
		t.Errorf("%+v, %v", known, err)
	}
	if _, err := Abandon(ctx, o.Dir); err == nil || text(t, o.Cluster()) != before {
		t.Errorf("without a restore: %v", err)
	}
}

// A machine that was asked may run the restored cluster, and one that has answered does.
func TestARestoreWithAMachineIsAbandonedOnlyWithoutItsCluster(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	l := ownertest.NewLifecycle(t)
	machine := &ownerdir.Machine{ID: attest.MachineID{7}, NodeName: "restored1"}
	open := func(stage ownerdir.Stage, ended bool) {
		t.Helper()
		c := l.Cluster()
		c.Stage, c.FirstMachine, c.Restore = stage, machine, &ownerdir.Restore{SHA256: "0", Former: &ownerdir.Machine{ID: attest.MachineID{9}}, Ended: ended}
		if err := l.Save(c); err != nil {
			t.Fatal(err)
		}
	}
	open(ownerdir.StageInitialized, true)
	if _, err := Abandon(ctx, l.Dir); err == nil || !strings.Contains(err.Error(), "the restore can't be canceled") {
		t.Errorf("%v", err)
	}
	open(ownerdir.StagePrepared, true) // begun again with --start-over
	if _, err := Abandon(ctx, l.Dir); err == nil || !strings.Contains(err.Error(), "the restore can't be canceled") {
		t.Errorf("%v", err)
	}
	open(ownerdir.StageRequested, false)
	i := &initializer{InitConfig: config(l.Owned)}
	if err := i.lost(ctx); err == nil || !strings.Contains(err.Error(), "does not have the node restored1") {
		t.Errorf("an old control plane answers: %v", err)
	}
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig") // whose API server's connections are forwarded to a kubelet
	err := kubetest.WriteKubeconfig(kubeconfig, kubetest.Forwarded(t, pkix.Name{CommonName: "system:node:cp1", Organization: []string{"system:nodes"}}))
	forwarded, read := os.ReadFile(kubeconfig)
	present, had := l.Read(ownerdir.AdminConf)
	if err := errors.Join(err, read, had, l.Write(ownerdir.AdminConf, forwarded)); err != nil {
		t.Fatal(err)
	}
	if err := i.lost(ctx); !errors.As(err, new(*apiserver.NodeError)) {
		t.Errorf("a node answers: %v", err)
	}
	if _, err := Abandon(ctx, l.Dir); !errors.As(err, new(*apiserver.NodeError)) || l.Cluster().Restore == nil {
		t.Errorf("a node answers: %v", err)
	}
	if err := l.Write(ownerdir.AdminConf, present); err != nil {
		t.Fatal(err)
	}
	if err := ownertest.Shared.Client.Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "restored1"}}); err != nil {
		t.Fatal(err)
	}
	if err := i.lost(ctx); err != nil {
		t.Errorf("the restored cluster's API server answers: %v", err)
	}
	if _, err := Abandon(ctx, l.Dir); err == nil || !strings.Contains(err.Error(), "the cluster is restored there") || l.Cluster().Restore == nil {
		t.Errorf("%v", err)
	}
	ownertest.Fresh(t)
	if asked, err := Abandon(ctx, l.Dir); err != nil || !slices.Equal(asked, []ownerdir.Asked{{ID: machine.ID, NodeName: "restored1"}}) {
		t.Errorf("%+v, %v", asked, err)
	}
	if c := l.Cluster(); c.Stage != ownerdir.StageInstalled || c.Restore != nil || c.FirstMachine.ID != (attest.MachineID{9}) {
		t.Errorf("%+v", c)
	}
}

// Each machine that was asked may have the cluster's keys, and may run the cluster under each name that it had.
func TestEveryMachineThatWasAskedIsNamed(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	l := ownertest.NewLifecycle(t)
	i := &initializer{InitConfig: config(l.Owned)}
	c := l.Cluster()
	c.FirstMachine = &ownerdir.Machine{ID: attest.MachineID{9}, NodeName: "node1"}
	if err := l.Save(c); err != nil {
		t.Fatal(err)
	}
	ask := func(id byte, names ...string) {
		t.Helper()
		if err := i.beginRestore(RestoreConfig{Endpoint: "127.0.0.1:1"}, &backups.BackupInfo{SHA256: "0"}); err != nil {
			t.Fatal(err)
		}
		c := l.Cluster()
		c.Stage, c.FirstMachine = ownerdir.StageRequested, &ownerdir.Machine{ID: attest.MachineID{id}, NodeName: names[0]}
		if err := l.Save(c); err != nil {
			t.Fatal(err)
		}
		for _, name := range names {
			if err := i.renamed(name); err != nil {
				t.Fatal(err)
			}
		}
	}
	ask(7, "restored1")
	ask(8, "restored2", "restored3")
	for _, name := range []string{"restored1", "restored2", "restored3"} {
		if err := ownertest.Shared.Client.Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}); err != nil {
			t.Fatal(err)
		}
		if _, err := Abandon(ctx, l.Dir); err == nil || !strings.Contains(err.Error(), "the node "+name+" of the restore's machine") {
			t.Errorf("%v", err)
		}
		ownertest.Fresh(t)
	}
	want := []ownerdir.Asked{{ID: attest.MachineID{7}, NodeName: "restored1"}, {ID: attest.MachineID{8}, NodeName: "restored2"}, {ID: attest.MachineID{8}, NodeName: "restored3"}}
	if asked, err := Abandon(ctx, l.Dir); err != nil || !slices.Equal(asked, want) {
		t.Errorf("%+v, %v", asked, err)
	}
	if c := l.Cluster(); c.Restore != nil || c.FirstMachine.ID != (attest.MachineID{9}) {
		t.Errorf("%+v", c)
	}
}

// Days after the machine was accepted, the old cluster may run again: the request would make a second one.
func TestAnOldRequestIsNotSentBesideALivingCluster(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	ca := attesttest.NewCA(t)
	policy := attesttest.Policy(t, ca, []*attesttest.Machine{attesttest.NewMachine(t, ca, attesttest.Options{})})
	authority := ownertest.NewAuthority(t)
	o := &ownertest.Lost{Owned: ownertest.Administered(t, &ownertest.APIServer{CA: authority}, ownertest.Administrator, time.Now().Add(time.Hour), policy), Key: authority.Key}
	c := o.Cluster()
	c.ClusterID = o.ClusterID().String()
	if err := o.Save(c); err != nil {
		t.Fatal(err)
	}
	m := o.Manifest(t)
	file := o.BackupFile(t, m)
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	info, _, _, err := backups.ReadBackup(o.Dir, f, file)
	if err != nil {
		t.Fatal(err)
	}
	c.Stage, c.Endpoint, c.Restore = ownerdir.StageRequested, "127.0.0.1:1", &ownerdir.Restore{SHA256: info.SHA256}
	c.FirstMachine = &ownerdir.Machine{ID: attest.MachineID{7}, NodeName: "restored1"}
	if err := o.Save(c); err != nil {
		t.Fatal(err)
	}
	cfg := config(o.Owned)
	err = Restore(ctx, RestoreConfig{Dir: o.Dir, File: file, URL: "http://x", Endpoint: "127.0.0.1:1", Report: cfg.Report, Log: cfg.Log})
	if err == nil || !strings.Contains(err.Error(), "the cluster may not be lost") {
		t.Errorf("%v", err)
	}
}

// The machine gets the backup's values; the folder has its own until there is a result.
func TestTheValuesOfABackupCountWithTheResult(t *testing.T) {
	ca := attesttest.NewCA(t)
	machine := attesttest.NewMachine(t, ca, attesttest.Options{})
	var path string
	var requested ownerdir.Cluster
	f := newMachine(t, machine, func(*initv1.InitResult) {
		b, err := os.ReadFile(path)
		if err == nil {
			err = json.Unmarshal(b, &requested)
		}
		if err != nil {
			t.Error(err)
		}
	}, waitsAs("node1"))
	o := ownertest.Own(t, f, "192.0.2.9:6443", attesttest.Policy(t, ca, []*attesttest.Machine{machine}))
	path = o.File("cluster.json")
	c := o.Cluster()
	c.Restore = &ownerdir.Restore{SHA256: "0"}
	if err := o.Save(c); err != nil {
		t.Fatal(err)
	}
	i := &initializer{InitConfig: config(o), backup: &initv1.Backup{}, restored: &clusterinfo.Info{KubernetesVersion: "1.36.7", ControlPlaneEndpoint: unused, Images: c.Images}}
	if err := i.load(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	if err := i.restoreOn(ctx, &backup.Manifest{}, &ownerdir.Known{}); err != nil {
		t.Fatal(err)
	}
	if c := requested; c.Stage != ownerdir.StageRequested || c.KubernetesVersion != "1.36.1" || c.ControlPlaneEndpoint != "192.0.2.9:6443" || c.FirstMachine == nil || c.FirstMachine.NodeName != "node1" {
		t.Errorf("before the result: %+v", c)
	}
	calls := f.Calls()
	if len(calls) != 1 || calls[0].GetKubernetesVersion() != "1.36.7" || calls[0].GetControlPlaneEndpoint() != unused {
		t.Errorf("%+v", calls)
	}
	if c := o.Cluster(); c.Stage != ownerdir.StageInitialized || c.KubernetesVersion != "1.36.7" || c.ControlPlaneEndpoint != unused || !c.Restore.Ended {
		t.Errorf("with the result: %+v", c)
	}
}
