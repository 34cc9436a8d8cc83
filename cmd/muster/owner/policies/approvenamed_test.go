package policies

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	waitlist "github.com/muster-k8s/muster/internal/objects/waiting"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// A root of a TPM vendor certifies everybody's TPMs.
func TestAMachineWhoseTPMAnybodyCanBuyIsNamed(t *testing.T) {
	own := attesttest.NewCA(t)
	a := newApproval(t, func(p *attestv1.Policy) {
		p.Tpm2.EkRoots[0].Operator = false
		p.Tpm2.EkRoots = append(p.Tpm2.EkRoots, &attestv1.EkRoot{Pem: own.PEM(), Operator: true, Key: p.GetTpm2().GetEkRoots()[0].GetKey()})
	})
	m := a.boot(t, "192.0.2.1", attesttest.Options{})
	vendor := a.ca
	a.ca = own
	mine := a.boot(t, "192.0.2.3", attesttest.Options{})
	a.ca = vendor
	rented := a.boot(t, "192.0.2.2", attesttest.Options{Platform: &attesttest.Platform{CA: a.cloud, Project: "ours", Zone: "a"}})
	a.lists(t, waits(m, "192.0.2.1", machineIDs), waits(rented, "192.0.2.2", platformIDs), waits(mine, "192.0.2.3", machineIDs))
	refused := func(c Candidate, want bool) {
		t.Helper()
		if (c.Problem != nil) != want || want && !strings.Contains(c.Problem.Message, "any buyer of such a TPM") {
			t.Errorf("machine %s: problem %+v", c.Machine, c.Problem)
		}
	}
	for _, allow := range []bool{false, true} {
		ap := a.approver(t, ApproveConfig{AnyTPM: allow, AnyAccount: true, BareEK: true, TrustCluster: true})
		all, err := ap.Candidates(t.Context())
		if err != nil || len(all) != 3 {
			t.Fatalf("%d candidates, %v", len(all), err)
		}
		for _, c := range all {
			refused(c, !allow && c.Machine == m.ID().String())
		}
		c, err := ap.Host(t.Context(), "192.0.2.1:9000")
		if err != nil {
			t.Fatal(err)
		}
		refused(c, !allow)
		if c, err = ap.Machine(t.Context(), m.ID()); err != nil {
			t.Fatal(err)
		}
		refused(c, false)
	}
}

// Otherwise a machine that its owner has put out would come back with the next approval of a whole network.
func TestAMachineThatWasPutOutIsNamed(t *testing.T) {
	for name, record := range map[string]func(t *testing.T, id string, k *ownerdir.Known){
		"banned": func(_ *testing.T, id string, k *ownerdir.Known) { k.BannedMachines = map[string]string{"uid": id} },
		"forgotten": func(_ *testing.T, id string, k *ownerdir.Known) {
			k.Disks = []ownerdir.KnownFormer{{KnownDisk: ownerdir.KnownDisk{ID: "6d6b5c1e-0000-4000-8000-000000000001"}, MachineID: id}}
		},
		"a node": func(_ *testing.T, id string, k *ownerdir.Known) {
			k.Nodes = map[string]ownerdir.KnownNode{"w9": {MachineID: id, Role: "worker"}}
		},
		"replaced": func(_ *testing.T, id string, k *ownerdir.Known) {
			k.Nodes = map[string]ownerdir.KnownNode{"w9": {UID: "uid", MachineID: id, Role: "worker"}}
			*k = *k.Keep(&ownerdir.Known{Nodes: map[string]ownerdir.KnownNode{"w9": {UID: "uid", MachineID: someone.String(), Role: "worker"}}})
		},
		"forgotten with its disk erased": func(_ *testing.T, id string, k *ownerdir.Known) {
			k.Nodes = map[string]ownerdir.KnownNode{"w9": {UID: "uid", MachineID: id, Role: "worker"}}
			*k = *k.Keep(&ownerdir.Known{})
		},
		"a node that the folder does not know": func(t *testing.T, id string, _ *ownerdir.Known) {
			n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "w9"}, Spec: v1alpha1.AttestedNodeSpec{MachineID: id, Role: v1alpha1.RoleWorker}}
			if err := ownertest.Shared.Client.Create(t.Context(), n); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { ownertest.Unenroll(context.WithoutCancel(t.Context()), "w9") })
		},
	} {
		t.Run(name, func(t *testing.T) {
			a := newApproval(t)
			m, other := a.boot(t, "192.0.2.1", attesttest.Options{}), a.boot(t, "192.0.2.2", attesttest.Options{})
			a.lists(t, waits(m, "192.0.2.1", machineIDs), waits(other, "192.0.2.2", machineIDs))
			had, err := a.Known()
			if err != nil {
				t.Fatal(err)
			}
			k := *had
			record(t, m.ID().String(), &k)
			if err := a.RememberAfter(had, &k); err != nil {
				t.Fatal(err)
			}
			ap := a.approver(t, ApproveConfig{AnyTPM: true})
			all, err := ap.Candidates(t.Context())
			if err != nil || len(all) != 2 {
				t.Fatalf("%d candidates, %v", len(all), err)
			}
			for _, c := range all {
				if (c.Problem != nil) != (c.Machine == m.ID().String()) {
					t.Errorf("machine %s: problem %+v", c.Machine, c.Problem)
				}
			}
			if c, err := ap.Host(t.Context(), "192.0.2.1:9000"); err != nil || c.Problem == nil || !strings.Contains(c.Problem.Remedy, "muster approve "+m.ID().String()) {
				t.Errorf("by its address: problem %+v, %v", c.Problem, err)
			}
			if c, err := ap.Machine(t.Context(), m.ID()); err != nil || c.Problem != nil {
				t.Errorf("by its ID: problem %+v, %v", c.Problem, err)
			}
		})
	}
}

// Whoever writes the list can't make the command ask more machines than joinservice lists.
func TestNoMoreMachinesAreAskedThanJoinserviceLists(t *testing.T) {
	a := newApproval(t)
	var entries []waitlist.Entry
	for i := range 200 {
		entries = append(entries, waitlist.Entry{Machine: attest.MachineID{1, byte(i)}.String(), Reason: "POLICY_REFUSED", Address: "192.0.2.1"})
	}
	a.lists(t, entries...)
	all, err := a.approver(t, ApproveConfig{}).Candidates(t.Context())
	if want := waitlist.Max + waitlist.MaxUnlisted; err != nil || len(all) != want || all[0].Machine != entries[0].Machine || all[want-1].Machine != entries[want-1].Machine {
		t.Errorf("%d candidates, %v, want the oldest %d", len(all), err, want)
	}
}

// joinservice removes the entry of a machine that it has accepted some seconds later.
func TestAMachineThatWasAcceptedSinceWaitsNoLonger(t *testing.T) {
	a := newApproval(t)
	joined, other := attest.MachineID{1}.String(), attest.MachineID{2}.String()
	a.lists(t, waitlist.Entry{Machine: joined, Reason: "POLICY_REFUSED"}, waitlist.Entry{Machine: other, Reason: "POLICY_REFUSED"})
	waiting := func() (out []string) {
		all, err := a.kube.Waiting(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, w := range all {
			out = append(out, w.Machine)
		}
		return out
	}
	if got := waiting(); !slices.Equal(got, []string{joined, other}) {
		t.Fatalf("before: %q", got)
	}
	n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "w1"}, Spec: v1alpha1.AttestedNodeSpec{MachineID: joined, Role: v1alpha1.RoleWorker}}
	ownertest.Create(t, n)
	n.Status.LastVerdict = &v1alpha1.Verdict{Accepted: true, Reason: "ACCEPTED", Time: metav1.NewTime(time.Now().Add(time.Minute))}
	if err := ownertest.Shared.Client.Status().Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	if got := waiting(); !slices.Equal(got, []string{other}) {
		t.Errorf("it is accepted, and there wait: %q", got)
	}
}

// An empty list accepts every machine, so none waits for a place in it. The cluster's record alone could otherwise close the
// list, which would shut out all others.
func TestNoApprovalClosesAnOpenList(t *testing.T) {
	open := func(p *attestv1.Policy) {
		p.Tpm2.MachineIds, p.Tpm2.PlatformRoots[0].MachineIds = nil, nil
	}
	a := newApproval(t, open)
	away := attesttest.NewMachine(t, a.ca, attesttest.Options{})
	for _, list := range []string{machineIDs, platformIDs} {
		a.lists(t, waits(away, "192.0.2.99", list))
		ap := a.approver(t, ApproveConfig{TrustCluster: true, BareEK: true, AnyAccount: true, AnyTPM: true})
		all, err := ap.Candidates(t.Context())
		if err != nil || len(all) != 1 {
			t.Fatalf("%d candidates, %v", len(all), err)
		}
		named, err := ap.Machine(t.Context(), away.ID())
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range []Candidate{all[0], named} {
			if c.Problem == nil || !strings.Contains(c.Problem.Message, list+" is empty") {
				t.Errorf("%s: problem %+v", list, c.Problem)
			}
			c.Problem = nil
			if err := ap.Approve(t.Context(), []Candidate{c}, quiet); err == nil || !strings.Contains(err.Error(), list+" is empty") {
				t.Errorf("%s is approved: %v", list, err)
			}
		}
		a.has(t, 1)
	}
	text, err := a.Read(ownerdir.PolicyFile)
	if err != nil {
		t.Fatal(err)
	}
	edited, err := policyfile.ListMachines(text, 2, []policyfile.Listing{{Field: machineIDs, Machine: someone}})
	if err == nil {
		err = a.Write(ownerdir.PolicyFile, edited)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := a.approver(t, ApproveConfig{}).Approve(t.Context(), nil, quiet); err == nil || !strings.Contains(err.Error(), machineIDs+" is empty") {
		t.Errorf("an edit of the owner's is sent as an approval: %v", err)
	}
	have, err := a.kube.Policy(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if p, err := attest.ParsePolicy([]byte(have.Spec.Policy)); err != nil || p.Serial() != 1 {
		t.Errorf("%v: %s", err, have.Spec.Policy)
	}
	if err := a.Write(ownerdir.PolicyFile, text); err != nil {
		t.Fatal(err)
	}
	bare := a.boot(t, "192.0.2.4", attesttest.Options{Bare: true})
	a.lists(t, waits(bare, "192.0.2.4", bareList))
	ap := a.approver(t, ApproveConfig{BareEK: true})
	if all, err := ap.Candidates(t.Context()); err != nil || len(all) != 1 || all[0].Problem != nil || ap.Approve(t.Context(), all, quiet) != nil {
		t.Errorf("the first machine without a certificate: %+v, %v", all, err)
	}
	a.has(t, 2, policyfile.Listing{Field: bareList, Machine: bare.ID()})
}
