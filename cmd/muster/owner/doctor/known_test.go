package doctor

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
)

// rolledBack are faults of a cluster that is older than the folder's record (B7).
func (p *patient) rolledBack(t *testing.T) []harm {
	knew := func(change func(k *ownerdir.Known)) func(*testing.T) func(*testing.T) {
		var changed []byte
		harm := p.file(ownerdir.KnownFile, func(path string, content []byte) error {
			var k ownerdir.Known
			if err := json.Unmarshal(content, &k); err != nil {
				return err
			}
			change(&k)
			var err error
			if changed, err = json.Marshal(k); err != nil {
				return err
			}
			return os.WriteFile(path, changed, 0o600)
		})
		return func(t *testing.T) func(*testing.T) {
			t.Helper()
			repair := harm(t)
			return func(t *testing.T) {
				t.Helper()
				if now, err := p.dir.Read(ownerdir.KnownFile); err != nil || !bytes.Equal(now, changed) {
					t.Errorf("an older cluster was noted: %s, %v\nit was %s", now, err, changed)
				}
				repair(t)
			}
		}
	}
	enrolled := func(t *testing.T) *v1alpha1.AttestedNode {
		t.Helper()
		node := &v1alpha1.AttestedNode{}
		try(t, shared.Client.Get(t.Context(), client.ObjectKey{Name: "node1"}, node))
		return node
	}
	key, err := p.dir.OwnerKey()
	try(t, err)
	text, err := p.dir.Read(ownerdir.PolicyFile)
	try(t, err)
	newer, err := policyfile.ListControlPlanes(text, 9, nil, nil)
	try(t, err)
	_, document, err := policyfile.Parse(newer)
	try(t, err)
	signed := attest.SignPolicy(key, document)
	// beside is a warning of another check, which does not hide that the cluster is older.
	beside := func(other func(*testing.T) func(*testing.T)) func(*testing.T) func(*testing.T) {
		return func(t *testing.T) func(*testing.T) {
			t.Helper()
			undo := other(t)
			repair := knew(func(k *ownerdir.Known) { k.Epoch = 41 })(t)
			return func(t *testing.T) { t.Helper(); repair(t); undo(t) }
		}
	}
	return []harm{
		{CheckKnown, checkup.Fail, "it is at epoch 0, but was at 41 before", CheckOwnerKey, beside(func(t *testing.T) func(*testing.T) {
			t.Helper()
			path := filepath.Join(p.folder, "owner-next.key")
			_, err := ownerdir.NewKeyFile(path)
			try(t, err)
			return func(t *testing.T) { t.Helper(); try(t, os.Remove(path)) }
		})},
		{CheckKnown, checkup.Fail, "it is at epoch 0, but was at 41 before", CheckFolder, beside(p.file("cluster.json", func(path string, b []byte) error {
			return os.WriteFile(path, []byte(strings.Replace(string(b), `"installed"`, `"requested"`, 1)), 0o600)
		}))},
		{CheckKnown, checkup.Fail, "its policy has the serial 1, but had 9", "", knew(func(k *ownerdir.Known) {
			k.Policy = ownerdir.KnownPolicy{JSON: string(signed.GetPolicy()), Signature: signed.GetSignature()}
		})},
		{CheckKnown, checkup.Fail, "it is at epoch 0, but was at 41 before", "", knew(func(k *ownerdir.Known) { k.Epoch = 41 })},
		{CheckKnown, checkup.Fail, "was banned with generation", "", func(t *testing.T) func(*testing.T) {
			t.Helper()
			node := enrolled(t)
			return knew(func(k *ownerdir.Known) { k.Bans = map[string]int64{string(node.UID): node.Generation + 1} })(t)
		}},
		{CheckKnown, checkup.Fail, "the enrollment of node1 (", "", knew(func(k *ownerdir.Known) {
			n := k.Nodes["node1"]
			n.Generation++ // 0 if none was recorded
			k.Nodes["node1"] = n
		})},
		{CheckKnown, checkup.Fail, " exists again, with the generation", "", func(t *testing.T) func(*testing.T) {
			t.Helper()
			node := enrolled(t)
			return knew(func(k *ownerdir.Known) { k.Gone = []ownerdir.KnownGone{{UID: string(node.UID), Name: "node1"}} })(t)
		}},
		{CheckKnown, checkup.Fail, "the cluster is at epoch 0, and node1 knows 7", "", func(t *testing.T) func(*testing.T) {
			t.Helper()
			write := func(t *testing.T, value, label any) {
				t.Helper()
				patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
					"annotations": map[string]any{clusterinfo.EpochAnnotation: value}, "labels": map[string]any{"node-role.kubernetes.io/control-plane": label},
				}})
				try(t, err)
				try(t, shared.Client.Patch(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1"}}, client.RawPatch(types.MergePatchType, patch)))
			}
			write(t, "7", "")
			repair := knew(func(k *ownerdir.Known) { k.Nodes = nil })(t) // else there is nothing to record
			return func(t *testing.T) { repair(t); write(t, nil, nil) }
		}},
		{CheckFolder, checkup.Warn, "a restore is unfinished", CheckKnown, p.restoring()},
		{CheckKnown, checkup.Fail, "a restore is unfinished", CheckFolder, p.restoring()},
		{CheckFolder, checkup.Fail, "known.json: version 9 was written by another version", "", p.file(ownerdir.KnownFile, func(path string, _ []byte) error { return os.WriteFile(path, []byte(`{"version": 9}`), 0o600) })},
	}
}

// restoring leaves a restore open.
func (p *patient) restoring() func(*testing.T) func(*testing.T) {
	return p.file("cluster.json", func(path string, b []byte) error {
		return os.WriteFile(path, []byte(strings.Replace(string(b), `"installed"`, `"prepared", "restore": {"sha256": "0", "epoch": 4}`, 1)), 0o600)
	})
}

// testKept deletes objects from a cluster as a restore of etcd does, and as an owner does: the folder keeps the
// disk's salt until the disk is erased (B7, K4).
func testKept(t *testing.T, p *patient) {
	const name, disk = "w7", "5f0c95b6-2a3d-4c7e-9f10-0000000000e1"
	salt := strings.Repeat("e1", 32)
	machine := strings.Repeat("e7", 32)
	noted := func(t *testing.T, level checkup.Level) *ownerdir.Known {
		t.Helper()
		if r := p.examine(t); !found(r, CheckKnown, level, "") {
			t.Errorf("%+v", r.Findings)
		}
		k, err := p.dir.Known()
		try(t, err)
		return k
	}
	epoch := &corev1.ConfigMap{ObjectMeta: in(clusterinfo.EpochMap), Data: map[string]string{"epoch": "41"}}
	defer created(epoch)(t)(t)
	noDisk := created(&v1alpha1.AttestedDisk{ObjectMeta: metav1.ObjectMeta{Name: disk}, Spec: v1alpha1.AttestedDiskSpec{MachineID: machine, Salt: salt, RootVersion: 1}})(t)
	w7 := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1alpha1.AttestedNodeSpec{MachineID: machine, Role: v1alpha1.RoleWorker, DiskID: disk, Banned: true}}
	noNode := created(w7)(t)
	want := ownerdir.KnownNode{
		UID: string(w7.UID), Generation: 1, MachineID: machine, Role: "worker", Banned: true, Disk: ownerdir.KnownDisk{ID: disk, Salt: salt, RootVersion: 1},
	}
	if k := noted(t, checkup.OK); k.Epoch != 41 || k.Nodes[name] != want || k.Names[want.UID] != name || len(k.Disks) != 0 {
		t.Fatalf("%+v", k)
	}
	noDisk(t)
	if k := noted(t, checkup.OK); k.Nodes[name] != want {
		t.Errorf("without its AttestedDisk: %+v", k.Nodes[name])
	}
	noNode(t)
	k := noted(t, checkup.OK)
	if _, there := k.Nodes[name]; there || !slices.Contains(k.Gone, ownerdir.KnownGone{UID: want.UID, Name: name, Epoch: 41}) || k.Bans[want.UID] != 1 {
		t.Errorf("a node that was forgotten: %+v", k)
	}
	if !slices.Equal(k.Disks, []ownerdir.KnownFormer{{KnownDisk: want.Disk, MachineID: machine, Node: name}}) {
		t.Errorf("its disk: %+v", k.Disks)
	}

	// Once the cluster is older, its disks may be older, too. The folder's record stays.
	change(t, epoch, false, func(m *corev1.ConfigMap) { m.Data["epoch"] = "40" })
	other := created(&v1alpha1.AttestedDisk{ObjectMeta: metav1.ObjectMeta{Name: "5f0c95b6-2a3d-4c7e-9f10-0000000000e2"}, Spec: v1alpha1.AttestedDiskSpec{MachineID: machine, Salt: salt, RootVersion: 1}})(t)
	if k := noted(t, checkup.Fail); k.Epoch != 41 || len(k.Disks) != 1 {
		t.Errorf("an older cluster was noted: %+v", k)
	}
	change(t, epoch, false, func(m *corev1.ConfigMap) { m.Data["epoch"] = "42" })
	if k := noted(t, checkup.OK); k.Epoch != 42 || len(k.Disks) != 2 {
		t.Errorf("one that is newer again was not noted: %+v", k)
	}
	other(t)

	_, err := p.dir.EraseDisk(disk)
	try(t, err)
	k = noted(t, checkup.OK)
	if text, err := p.dir.Read(ownerdir.KnownFile); err != nil || strings.Contains(string(text), `"id": "`+disk) || !slices.Contains(k.Erased, disk) || k.ErasedAt[disk] != 42 {
		t.Errorf("an erased disk: %s, %v", text, err)
	}
	try(t, os.Remove(p.dir.File(ownerdir.KnownFile)))
}
