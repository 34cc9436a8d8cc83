package lifecycle

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// A7: root on a control plane writes enrollments, and chooses by none of them which machine the owner signs as a control plane, or signs away. Each attack
// is refused, and the same command passes once the enrollment is the owner's again.
func TestTheAPIServerChoosesNoControlPlane(t *testing.T) {
	ownertest.Fresh(t)
	ownertest.Defined(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*ownertest.Patience)
	defer cancel()
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		for _, name := range []string{"cp1", "cp2", "w1"} {
			ownertest.Unenroll(ctx, name)
		}
		_ = ownertest.Shared.Client.Delete(ctx, &v1alpha1.AttestationPolicy{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.PolicyName}})
	})
	ownertest.Access(t, nil)
	ca := attesttest.NewCA(t)
	o := ownertest.Own(t, &ownertest.FirstMachine{Addr: "192.0.2.1:9000"}, ownertest.Endpoint(), attesttest.Policy(t, ca, []*attesttest.Machine{attesttest.NewMachine(t, ca, attesttest.Options{})}))
	if err := o.Write(ownerdir.AdminConf, ownertest.Kubeconfig(t)); err != nil {
		t.Fatal(err)
	}
	report := func(string) {}
	machine := func(n byte) attest.MachineID { return attest.MachineID{n} }
	enroll := func(name string, n byte, role v1alpha1.Role) error {
		_, err := policies.Enroll(ctx, o.Dir, name, v1alpha1.AttestedNodeSpec{MachineID: machine(n).String(), Role: role}, report)
		return err
	}
	api := func(t *testing.T, name, patch string) {
		t.Helper()
		n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if err := ownertest.Shared.Client.Patch(ctx, n, client.RawPatch(types.MergePatchType, []byte(patch))); err != nil {
			t.Fatal(err)
		}
	}
	// becomes deletes an enrollment and makes another one of its name.
	becomes := func(t *testing.T, name string, n byte, role v1alpha1.Role) {
		t.Helper()
		ownertest.Unenroll(ctx, name)
		e := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1alpha1.AttestedNodeSpec{MachineID: machine(n).String(), Role: role}}
		if err := ownertest.Shared.Client.Create(ctx, e); err != nil {
			t.Fatal(err)
		}
	}
	run := func(name string, to *clusterapi.Replacement) error {
		var d *Removal
		var err error
		if to == nil {
			d, err = PlanForget(ctx, o.Dir, name, true, false)
		} else {
			d, err = PlanReplace(ctx, o.Dir, name, *to)
		}
		if err == nil {
			_, err = d.Do(ctx, report)
		}
		return err
	}
	tpm := func(n byte) *clusterapi.Replacement {
		return &clusterapi.Replacement{MachineID: machine(n).String()}
	}
	// signed returns the machines that the owner's policy lists, and that the cluster got.
	signed := func(t *testing.T) []attest.MachineID {
		t.Helper()
		_, p, json, err := policies.FolderPolicy(o.Dir)
		var have v1alpha1.AttestationPolicy
		if err == nil {
			err = ownertest.Shared.Client.Get(ctx, client.ObjectKey{Name: v1alpha1.PolicyName}, &have)
		}
		if err != nil || have.Spec.Policy != string(json) {
			t.Fatalf("%v, %s", err, have.Spec.Policy)
		}
		return slices.SortedFunc(slices.Values(p.ControlPlanes()), func(a, b attest.MachineID) int { return strings.Compare(a.String(), b.String()) })
	}
	// begin makes cp1 and cp2 control planes, with the machines 1 and 2, and w1 a worker, with machine 3.
	begin := func(t *testing.T) {
		t.Helper()
		for _, name := range []string{"cp1", "cp2", "w1"} {
			ownertest.Unenroll(ctx, name)
		}
		kube, err := access.Connect(o.Dir)
		if err != nil {
			t.Fatal(err)
		}
		if err := (policies.Listing{Remove: []attest.MachineID{machine(9)}}).Apply(ctx, o.Dir, kube, report); err != nil {
			t.Fatal(err)
		}
		c := o.Cluster()
		c.ControlPlanes = nil
		if err := errors.Join(o.Save(c), enroll("cp1", 1, v1alpha1.RoleControlPlane), enroll("cp2", 2, v1alpha1.RoleControlPlane), enroll("w1", 3, v1alpha1.RoleWorker)); err != nil {
			t.Fatal(err)
		}
	}
	refused := func(t *testing.T, err error, reason, says string) {
		t.Helper()
		if p := problem.Explain(err); err == nil || p.Reason != reason || !strings.Contains(p.Message, says) || p.Remedy == "" {
			t.Errorf("%+v, want %s: … %s …", p, reason, says)
		}
	}

	for name, tt := range map[string]struct {
		attack func(t *testing.T)
		node   string
		to     *clusterapi.Replacement
		reason string
		says   string
		repair func(t *testing.T)
		want   []attest.MachineID // that the policy lists at the end; cp1 and cp2 are machines 1 and 2, w1 is machine 3
	}{
		"forget: another control plane's machine": {
			attack: func(t *testing.T) {
				api(t, "cp2", `{"spec":{"banned":true}}`)
				api(t, "cp2", `{"spec":{"machineID":"`+machine(1).String()+`"}}`)
			},
			node: "cp2", reason: "NAME_TAKEN", says: "your folder records machine " + machine(2).String(),
			repair: func(t *testing.T) { api(t, "cp2", `{"spec":{"machineID":"`+machine(2).String()+`"}}`) },
			want:   []attest.MachineID{machine(1)},
		},
		"forget: a control plane that is made a worker": {
			attack: func(t *testing.T) { becomes(t, "cp2", 2, v1alpha1.RoleWorker) },
			node:   "cp2", reason: "ROLE_REFUSED", says: "your folder records it as a control plane",
			repair: func(*testing.T) { ownertest.Unenroll(ctx, "cp2") },
			want:   []attest.MachineID{machine(1)},
		},
		"replace: a control plane that is made a worker": {
			attack: func(t *testing.T) { becomes(t, "cp2", 2, v1alpha1.RoleWorker) },
			node:   "cp2", to: tpm(9), reason: "ROLE_REFUSED", says: "your folder records it as a control plane",
			repair: func(t *testing.T) { becomes(t, "cp2", 2, v1alpha1.RoleControlPlane) },
			want:   []attest.MachineID{machine(1), machine(9)},
		},
		"replace: a worker that is made a control plane": {
			attack: func(t *testing.T) { becomes(t, "w1", 3, v1alpha1.RoleControlPlane) },
			node:   "w1", to: tpm(9), reason: "ROLE_REFUSED", says: "your folder records no control plane w1",
			repair: func(t *testing.T) { becomes(t, "w1", 3, v1alpha1.RoleWorker) },
			want:   []attest.MachineID{machine(1), machine(2)},
		},
		"replace: a worker with the machine that the cluster gave it as a control plane": {
			attack: func(t *testing.T) { becomes(t, "w1", 9, v1alpha1.RoleControlPlane) },
			node:   "w1", to: tpm(9), reason: "ROLE_REFUSED", says: "your folder records no control plane w1",
			repair: func(t *testing.T) { becomes(t, "w1", 3, v1alpha1.RoleWorker) },
			want:   []attest.MachineID{machine(1), machine(2)},
		},
		"replace: the machine that the cluster shows, of a TPM that was cleared": {
			attack: func(t *testing.T) {
				becomes(t, "cp2", 9, v1alpha1.RoleControlPlane)
				api(t, "cp2", `{"metadata":{"annotations":{"`+v1alpha1.KeepNode+`":"true"}},"spec":{"banned":true}}`)
			},
			node: "cp2", to: tpm(9), reason: "NAME_TAKEN", says: "in the cluster cp2 is machine " + machine(9).String(),
			repair: func(t *testing.T) { becomes(t, "cp2", 2, v1alpha1.RoleControlPlane) },
			want:   []attest.MachineID{machine(1), machine(9)},
		},
		"replace: a worker with a control plane's machine that the cluster does not show": {
			attack: func(*testing.T) { ownertest.Unenroll(ctx, "cp2") },
			node:   "w1", to: tpm(2), reason: "NAME_MISMATCH", says: "as the control plane cp2",
			repair: func(t *testing.T) {
				if err := run("cp2", nil); err != nil {
					t.Fatal(err)
				}
			},
			want: []attest.MachineID{machine(1)},
		},
	} {
		t.Run(name, func(t *testing.T) {
			begin(t)
			tt.attack(t)
			refused(t, run(tt.node, tt.to), tt.reason, tt.says)
			if have := signed(t); !slices.Equal(have, []attest.MachineID{machine(1), machine(2)}) {
				t.Errorf("after the refusal, the policy lists %v", have)
			}
			tt.repair(t)
			if err := run(tt.node, tt.to); err != nil {
				t.Error(err)
			}
			if have := signed(t); !slices.Equal(have, tt.want) {
				t.Errorf("the policy lists %v, want %v", have, tt.want)
			}
		})
	}

	t.Run("replace: only the disk, of a control plane whose disk is hidden", func(t *testing.T) {
		begin(t)
		disk := &clusterapi.Replacement{DiskID: "5f0c95b6-2a3d-4c7e-9f10-000000000042"}
		refused(t, run("cp2", disk), "", "its etcd member was on the disk")
		becomes(t, "cp2", 2, v1alpha1.RoleWorker)
		refused(t, run("cp2", disk), "", "its etcd member was on the disk")
		if err := run("w1", disk); err != nil {
			t.Error(err)
		}
	})
	t.Run("forget: one that the cluster hides leaves the policy", func(t *testing.T) {
		begin(t)
		ownertest.Unenroll(ctx, "cp2")
		for range 2 { // the second time there is nothing to do
			if err := run("cp2", nil); err != nil {
				t.Error(err)
			}
			if have := signed(t); !slices.Equal(have, []attest.MachineID{machine(1)}) || o.Cluster().ControlPlane(machine(2)) != "" {
				t.Errorf("the policy lists %v, the folder records %v", have, o.Cluster().ControlPlanes)
			}
			if err := o.Remember(&ownerdir.Known{Gone: []ownerdir.KnownGone{{Name: "cp2"}}}); err != nil {
				t.Fatal(err)
			}
		}
	})
	t.Run("replace: interrupted before the enrollment", func(t *testing.T) {
		begin(t)
		d, err := PlanReplace(ctx, o.Dir, "cp2", *tpm(9))
		if err == nil {
			err = d.listed.Apply(ctx, o.Dir, d.kube, report)
		}
		if err == nil {
			err = o.RecordControlPlane("cp2", &attest.MachineID{9})
		}
		if err != nil {
			t.Fatal(err)
		}
		refused(t, run("cp2", tpm(8)), "NAME_TAKEN", "your folder records machine "+machine(9).String())
		if err := run("cp2", tpm(9)); err != nil {
			t.Error(err)
		}
		if have := signed(t); !slices.Equal(have, []attest.MachineID{machine(1), machine(9)}) || ownertest.EnrollmentOf(t, "cp2").Spec.MachineID != machine(9).String() {
			t.Errorf("the policy lists %v", have)
		}
	})
	t.Run("a folder without a record: its owner makes one", func(t *testing.T) {
		begin(t)
		c := o.Cluster()
		c.ControlPlanes = nil
		if err := o.Save(c); err != nil {
			t.Fatal(err)
		}
		_, before, _, err := policies.FolderPolicy(o.Dir)
		if err != nil {
			t.Fatal(err)
		}
		refused(t, run("cp2", nil), "ROLE_REFUSED", "your folder records no control plane cp2")
		refused(t, run("cp2", tpm(9)), "ROLE_REFUSED", "your folder records no control plane cp2")
		becomes(t, "cp2", 2, v1alpha1.RoleWorker)
		refused(t, run("cp2", nil), "ROLE_REFUSED", "your folder records no control plane cp2")
		refused(t, enroll("cp2", 2, v1alpha1.RoleControlPlane), "ROLE_REFUSED", "enrolled as a worker")
		becomes(t, "cp2", 2, v1alpha1.RoleControlPlane)
		refused(t, enroll("cp2", 9, v1alpha1.RoleControlPlane), "NAME_TAKEN", "enrolled to machine "+machine(2).String())
		if err := enroll("cp2", 2, v1alpha1.RoleControlPlane); err != nil {
			t.Fatal(err)
		}
		if _, after, _, err := policies.FolderPolicy(o.Dir); err != nil || after.Serial() != before.Serial() {
			t.Errorf("%v: the record alone needs no signature", err)
		}
		if err := run("cp2", nil); err != nil {
			t.Error(err)
		}
		if have := signed(t); !slices.Equal(have, []attest.MachineID{machine(1)}) {
			t.Errorf("the policy lists %v", have)
		}
	})
	t.Run("a control plane that only the cluster has", func(t *testing.T) {
		begin(t)
		ownertest.Unenroll(ctx, "w1")
		becomes(t, "w1", 9, v1alpha1.RoleControlPlane)
		kube, err := access.Connect(o.Dir)
		if err != nil {
			t.Fatal(err)
		}
		_, p, _, err := policies.FolderPolicy(o.Dir)
		if err != nil {
			t.Fatal(err)
		}
		err = policies.MustList(ctx, o.Dir, kube, p, nil)
		refused(t, err, "SERVER_NOT_LISTED", "w1")
		if r := problem.Explain(err).Remedy; strings.Contains(r, "- \""+machine(9).String()) || !strings.Contains(r, "not in the folder, only in the cluster: w1") {
			t.Errorf("its line is ready to paste: %s", r)
		}
		refused(t, policies.MustList(ctx, o.Dir, kube, p, []string{"w2"}), "SERVER_NOT_LISTED", "w1")
		refused(t, policies.MustList(ctx, o.Dir, kube, p, []string{"w1", "cp2"}), "", "your folder records it as a control plane")
		if err := policies.MustList(ctx, o.Dir, kube, p, []string{"w1"}); err != nil {
			t.Error(err)
		}
	})
	t.Run("a machine or name that the folder has is not enrolled again", func(t *testing.T) {
		begin(t)
		ownertest.Unenroll(ctx, "cp2")
		refused(t, enroll("w2", 2, v1alpha1.RoleWorker), "NAME_MISMATCH", "as the control plane cp2")
		refused(t, enroll("cp3", 2, v1alpha1.RoleControlPlane), "NAME_MISMATCH", "as the control plane cp2")
		refused(t, enroll("cp2", 9, v1alpha1.RoleControlPlane), "NAME_TAKEN", "your folder records cp2 as machine "+machine(2).String())
		refused(t, enroll("cp2", 9, v1alpha1.RoleWorker), "ROLE_REFUSED", "your folder records cp2 as a control plane")
		if have := signed(t); !slices.Equal(have, []attest.MachineID{machine(1), machine(2)}) {
			t.Errorf("the policy lists %v", have)
		}
		// The same machine again, or another one after the owner has let the first one go.
		if err := enroll("cp2", 2, v1alpha1.RoleControlPlane); err != nil {
			t.Error(err)
		}
		if err := errors.Join(run("cp2", nil), enroll("cp2", 9, v1alpha1.RoleControlPlane)); err != nil {
			t.Error(err)
		}
		if have := signed(t); !slices.Equal(have, []attest.MachineID{machine(1), machine(9)}) {
			t.Errorf("the policy lists %v", have)
		}
	})
}
