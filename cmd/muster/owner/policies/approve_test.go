package policies

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/gen/muster/init/v1/initv1connect"
	waitlist "github.com/muster-k8s/muster/internal/objects/waiting"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// approval is a cluster whose policy lists its machines, with machines that wait to be listed.
type approval struct {
	*ownertest.Lifecycle
	ca, cloud *attesttest.CA
	azure     *attesttest.CA
	kube      *clusterapi.Client

	mu sync.Mutex
	at map[string]string // where the machine with that address listens
}

// someone is a machine ID that lists have, so that they are not empty.
var someone = attest.MachineID{0x5e}

func newApproval(t *testing.T, changes ...func(*attestv1.Policy)) *approval {
	t.Helper()
	a := &approval{Lifecycle: ownertest.NewLifecycle(t), ca: attesttest.NewCA(t), cloud: attesttest.NewCA(t), azure: attesttest.NewCA(t), at: map[string]string{}}
	lists := func(p *attestv1.Policy) {
		p.Tpm2.MachineIds = []string{someone.String()}
		p.Tpm2.PlatformRoots = []*attestv1.PlatformRoot{{Pem: a.cloud.PEM(), Provider: "gcp", Key: "ecc-p256", Projects: []string{"ours"}, MachineIds: []string{someone.String()}}, {Pem: a.azure.PEM(), Provider: "azure", Key: "rsa-2048", MachineIds: []string{someone.String()}}}
	}
	model := attesttest.NewMachine(t, a.ca, attesttest.Options{})
	if err := a.Write(ownerdir.PolicyFile, attesttest.Policy(t, a.ca, []*attesttest.Machine{model}, append([]func(*attestv1.Policy){lists}, changes...)...)); err != nil {
		t.Fatal(err)
	}
	var err error
	if a.kube, err = access.Connect(a.Dir); err != nil {
		t.Fatal(err)
	}
	a.send(t)
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		_ = ownertest.Shared.Client.Delete(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: clusterapi.Namespace, Name: waitlist.ConfigMap}})
		_ = ownertest.Shared.Client.Delete(ctx, &v1alpha1.AttestationPolicy{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.PolicyName}})
	})
	return a
}

// send puts the folder's policy into the cluster.
func (a *approval) send(t *testing.T) {
	t.Helper()
	_, signed, err := SignedPolicy(a.Dir)
	if err == nil {
		err = ownertest.PutPolicy(t.Context(), a.kube, signed)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// boot makes a machine that serves its port 9000 at an address.
func (a *approval) boot(t *testing.T, address string, o attesttest.Options) *attesttest.Machine {
	t.Helper()
	m := attesttest.NewMachine(t, a.ca, o)
	f := &ownertest.FirstMachine{Machine: m}
	l := ownertest.Listen(t)
	ownertest.Serve(t, l, m.Attester(attest.PurposeMachine), rpc.Serve(initv1connect.InitServiceName, initv1connect.InitServiceHandler(f), initv1connect.NewInitServiceHandler))
	a.mu.Lock()
	defer a.mu.Unlock()
	a.at[net.JoinHostPort(address, "9000")] = l.Addr().String()
	return m
}

// lists writes joinservice's list of machines that wait.
func (a *approval) lists(t *testing.T, entries ...waitlist.Entry) {
	t.Helper()
	m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: clusterapi.Namespace, Name: waitlist.ConfigMap}, Data: map[string]string{}}
	for i, e := range entries {
		e.Since, e.Last = time.Now().Add(time.Duration(i)*time.Second), time.Now()
		text, err := e.Encode()
		if err != nil {
			t.Fatal(err)
		}
		m.Data[e.Machine] = text
	}
	if err := client.IgnoreNotFound(ownertest.Shared.Client.Delete(t.Context(), m.DeepCopy())); err != nil {
		t.Fatal(err)
	}
	if err := ownertest.Shared.Client.Create(t.Context(), m); err != nil {
		t.Fatal(err)
	}
}

// waits is the entry of a machine that lacks only a list.
func waits(m *attesttest.Machine, address, list string) waitlist.Entry {
	return waitlist.Entry{Machine: m.ID().String(), Reason: "POLICY_REFUSED", Address: address, List: list}
}

func (a *approval) approver(t *testing.T, cfg ApproveConfig) *Approver {
	t.Helper()
	out, err := a.tries(t, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func (a *approval) tries(t *testing.T, cfg ApproveConfig) (*Approver, error) {
	t.Helper()
	cfg.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		a.mu.Lock()
		to, there := a.at[addr]
		a.mu.Unlock()
		if !there {
			return nil, &net.OpError{Op: "dial", Net: network, Err: errors.New("connection refused")}
		}
		return (&net.Dialer{}).DialContext(ctx, network, to)
	}
	return NewApprover(t.Context(), a.Dir, cfg)
}

// has checks serial and lists of the policy, which are the same in folder and cluster.
func (a *approval) has(t *testing.T, serial uint64, want ...policyfile.Listing) {
	t.Helper()
	text, p, json, err := FolderPolicy(a.Dir)
	if err != nil {
		t.Fatal(err)
	}
	have, err := a.kube.Policy(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if have.Spec.Policy != string(json) || p.Serial() != serial {
		t.Errorf("the folder's policy has serial %d, want %d; the cluster has %s", p.Serial(), serial, have.Spec.Policy)
	}
	for _, l := range want {
		if is, err := policyfile.Lists(text, l); err != nil || !is {
			t.Errorf("%v is not listed: %v", l, err)
		}
	}
}

func quiet(string) {}

const machineIDs, platformIDs, azureIDs = "tpm2.machineIds", "tpm2.platformRoots[0].machineIds", "tpm2.platformRoots[1].machineIds"

// Each machine that can't be approved is beside one that differs only in the cause.
func TestOnlyMachinesThatLackAListCanBeApproved(t *testing.T) {
	a := newApproval(t)
	ca := attesttest.NewCA(t)
	certified := a.boot(t, "192.0.2.1", attesttest.Options{})
	tampered := a.boot(t, "192.0.2.2", attesttest.Options{Image: "tampered"})
	secure := a.boot(t, "192.0.2.3", attesttest.Options{SecureBoot: true})
	bare := a.boot(t, "192.0.2.4", attesttest.Options{Bare: true})
	bareTampered := a.boot(t, "192.0.2.5", attesttest.Options{Bare: true, Image: "tampered"})
	rented := a.boot(t, "192.0.2.6", attesttest.Options{Platform: &attesttest.Platform{CA: a.cloud, Project: "ours", Zone: "a"}})
	foreign := a.boot(t, "192.0.2.7", attesttest.Options{Platform: &attesttest.Platform{CA: a.cloud, Project: "theirs", Zone: "a"}})
	stranger := a.boot(t, "192.0.2.11", attesttest.Options{Platform: &attesttest.Platform{CA: a.azure, Azure: true}})
	locked := a.boot(t, "192.0.2.8", attesttest.Options{})
	locked.LockTo([32]byte{9})
	ours := a.boot(t, "192.0.2.9", attesttest.Options{})
	ours.LockTo(a.ID)
	unknown := func() *attesttest.Machine { // a TPM of another vendor
		own := a.ca
		a.ca = ca
		defer func() { a.ca = own }()
		return a.boot(t, "192.0.2.10", attesttest.Options{})
	}()
	away := attesttest.NewMachine(t, a.ca, attesttest.Options{})
	for name, tt := range map[string]struct {
		e     waitlist.Entry
		cfg   ApproveConfig
		named bool
		want  string // part of the problem; empty: it can be approved
		list  string
	}{
		"a certified machine":                             {e: waits(certified, "192.0.2.1", machineIDs), list: machineIDs},
		"a certified machine, whatever the record":        {e: waitlist.Entry{Machine: certified.ID().String(), Address: "192.0.2.1", Reason: "POLICY_REFUSED", List: bareList, Differs: "PCR 4", Image: "x"}, list: machineIDs},
		"a changed image":                                 {e: waits(tampered, "192.0.2.2", machineIDs), want: "PCR 4"},
		"a changed image that is named":                   {e: waits(tampered, "192.0.2.2", machineIDs), named: true, cfg: ApproveConfig{TrustCluster: true, BareEK: true}, want: "PCR 4"},
		"other firmware":                                  {e: waits(secure, "192.0.2.3", machineIDs), want: "PCR 7"},
		"a bare machine":                                  {e: waits(bare, "192.0.2.4", bareList), want: "no EK certificate"},
		"a bare machine that is named":                    {e: waits(bare, "192.0.2.4", bareList), named: true, list: bareList},
		"a bare machine by a flag":                        {e: waits(bare, "192.0.2.4", bareList), cfg: ApproveConfig{BareEK: true}, list: bareList},
		"a bare machine that the cluster calls certified": {e: waits(bare, "192.0.2.4", machineIDs), want: "no EK certificate"},
		"a changed bare machine":                          {e: waits(bareTampered, "192.0.2.5", bareList), named: true, want: "PCR 4"},
		"a rented machine":                                {e: waits(rented, "192.0.2.6", platformIDs), list: platformIDs},
		"a rented machine of others":                      {e: waits(foreign, "192.0.2.7", platformIDs), want: "no rule of tpm2.platformRoots"},
		"a machine of anybody's account":                  {e: waits(stranger, "192.0.2.11", azureIDs), want: "another account"},
		"one that the cluster calls certified":            {e: waits(stranger, "192.0.2.11", machineIDs), want: "another account"},
		"one that is named":                               {e: waits(stranger, "192.0.2.11", azureIDs), named: true, list: azureIDs},
		"one by a flag":                                   {e: waits(stranger, "192.0.2.11", azureIDs), cfg: ApproveConfig{AnyAccount: true}, list: azureIDs},
		"a machine of another cluster":                    {e: waits(locked, "192.0.2.8", machineIDs), want: "PCR 15"},
		"a machine with this cluster's lock":              {e: waits(ours, "192.0.2.9", machineIDs), list: machineIDs},
		"a TPM that no root certifies":                    {e: waits(unknown, "192.0.2.10", machineIDs), cfg: ApproveConfig{TrustCluster: true}, want: "EK_UNTRUSTED"},
		"a machine that no list lacks":                    {e: waits(certified, "192.0.2.1", ""), want: "no list of the policy is the cause"},
		"an address with another machine":                 {e: waits(certified, "192.0.2.9", machineIDs), cfg: ApproveConfig{TrustCluster: true}, want: "at 192.0.2.9:9000 is machine " + ours.ID().String()},
		"an unreachable machine":                          {e: waits(away, "192.0.2.99", machineIDs), want: "can't verify it"},
		"an unreachable machine, by the cluster":          {e: waits(away, "192.0.2.99", machineIDs), cfg: ApproveConfig{TrustCluster: true}, list: machineIDs},
		"no address":                                      {e: waits(away, "", machineIDs), want: "has no usable address"},
		"a name as address":                               {e: waits(away, "evil.example", machineIDs), want: "has no usable address"},
		"an unreachable changed machine":                  {e: waitlist.Entry{Machine: away.ID().String(), Address: "192.0.2.99", Reason: "POLICY_REFUSED", List: machineIDs, Differs: "PCR 4 differs"}, cfg: ApproveConfig{TrustCluster: true}, want: "PCR 4 differs"},
		"an unreachable bare machine":                     {e: waits(away, "192.0.2.99", bareList), cfg: ApproveConfig{TrustCluster: true}, want: "no EK certificate"},
		"no machine ID":                                   {e: waitlist.Entry{Machine: "zz", Address: "192.0.2.1", Reason: "X", List: machineIDs}, want: "malformed"},
	} {
		t.Run(name, func(t *testing.T) {
			a.lists(t, tt.e)
			ap := a.approver(t, tt.cfg)
			var c Candidate
			if tt.named {
				id, err := attest.ParseMachineID(tt.e.Machine)
				if err == nil {
					c, err = ap.Machine(t.Context(), id)
				}
				if err != nil {
					t.Fatal(err)
				}
			} else {
				all, err := ap.Candidates(t.Context())
				if err != nil || len(all) != 1 {
					t.Fatalf("%d candidates, %v", len(all), err)
				}
				c = all[0]
			}
			if tt.want == "" {
				if c.Problem != nil || c.List != tt.list || c.Machine != tt.e.Machine || c.Verified != (tt.e.Address != "192.0.2.99") {
					t.Errorf("%+v, problem %+v", c, c.Problem)
				}
				return
			}
			if c.Problem == nil || !strings.Contains(c.Problem.Message, tt.want) {
				t.Fatalf("problem %+v, want one about %q", c.Problem, tt.want)
			}
			if err := ap.Approve(t.Context(), []Candidate{c}, quiet); err == nil {
				t.Error("it is approved nevertheless")
			}
			a.has(t, 1)
		})
	}
	t.Run("a machine by its address alone", func(t *testing.T) {
		a.lists(t)
		ap := a.approver(t, ApproveConfig{})
		if c, err := ap.Host(t.Context(), "192.0.2.1:9000"); err != nil || c.Problem != nil || c.List != machineIDs || c.Machine != certified.ID().String() {
			t.Errorf("%+v, %v", c, err)
		}
		if c, err := ap.Host(t.Context(), "192.0.2.4:9000"); err != nil || c.Problem == nil || c.Machine != bare.ID().String() {
			t.Errorf("%+v, %v", c, err)
		}
		if _, err := ap.Host(t.Context(), "192.0.2.99:9000"); !problem.Unreachable(err) {
			t.Errorf("%v", err)
		}
		if _, err := ap.Machine(t.Context(), certified.ID()); attest.ReasonOf(err) != attestv1.Reason_REASON_NOT_ENROLLED {
			t.Errorf("%v", err)
		}
	})
}

func TestApprovedMachinesAreInTheSignedPolicy(t *testing.T) {
	a := newApproval(t)
	certified, bare := a.boot(t, "192.0.2.1", attesttest.Options{}), a.boot(t, "192.0.2.2", attesttest.Options{Bare: true})
	rented := a.boot(t, "192.0.2.3", attesttest.Options{Platform: &attesttest.Platform{CA: a.cloud, Project: "ours", Zone: "a"}})
	entries := []waitlist.Entry{waits(certified, "192.0.2.1", machineIDs), waits(bare, "192.0.2.2", bareList), waits(rented, "192.0.2.3", platformIDs)}
	a.lists(t, entries...)
	ap := a.approver(t, ApproveConfig{BareEK: true})
	all, err := ap.Candidates(t.Context())
	if err != nil || len(all) != 3 {
		t.Fatalf("%d, %v", len(all), err)
	}
	var steps []string
	if err := ap.Approve(t.Context(), all, func(s string) { steps = append(steps, s) }); err != nil {
		t.Fatal(err)
	}
	want := []policyfile.Listing{{Field: machineIDs, Machine: certified.ID()}, {Field: bareList, Machine: bare.ID()}, {Field: platformIDs, Machine: rented.ID()}}
	a.has(t, 2, want...) // one signature for all
	if !slices.Equal(steps, []string{"policy of serial 2 signed: it lists 3 more machines"}) || ap.Serial() != 2 {
		t.Errorf("%q, serial %d", steps, ap.Serial())
	}
	// The policy accepts them now, and they can't be approved again.
	if all, err = ap.Candidates(t.Context()); err != nil || slices.ContainsFunc(all, func(c Candidate) bool {
		return c.Problem == nil || !strings.Contains(c.Problem.Message, "accepts it already")
	}) {
		t.Errorf("%+v, %v", all, err)
	}
	t.Run("an approval that stopped after the folder goes on", func(t *testing.T) {
		late := attest.MachineID{0x1a}
		text, err := a.Read(ownerdir.PolicyFile)
		if err == nil {
			text, err = policyfile.ListMachines(text, 3, []policyfile.Listing{{Field: machineIDs, Machine: late}})
		}
		if err == nil {
			err = a.Write(ownerdir.PolicyFile, text)
		}
		if err != nil {
			t.Fatal(err)
		}
		ap := a.approver(t, ApproveConfig{})
		if got := ap.Unsent(); len(got) != 1 || got[0].Machine != late {
			t.Fatalf("%v", got)
		}
		if err := ap.Approve(t.Context(), nil, quiet); err != nil {
			t.Fatal(err)
		}
		a.has(t, 3, policyfile.Listing{Field: machineIDs, Machine: late})
		if len(ap.Unsent()) != 0 {
			t.Error("it is still not sent")
		}
	})
	t.Run("an edit of the owner is not signed along", func(t *testing.T) {
		text, err := a.Read(ownerdir.PolicyFile)
		if err != nil {
			t.Fatal(err)
		}
		edited := strings.Replace(strings.Replace(string(text), "192.168.77.0/24", "192.168.0.0/16", 1), "serial: 3", "serial: 4", 1)
		if err := a.Write(ownerdir.PolicyFile, []byte(edited)); err != nil {
			t.Fatal(err)
		}
		if _, err := a.tries(t, ApproveConfig{}); err == nil || !strings.Contains(problem.Explain(err).Remedy, "policy apply") {
			t.Errorf("%v", err)
		}
		if err := a.Write(ownerdir.PolicyFile, text); err != nil {
			t.Fatal(err)
		}
		a.approver(t, ApproveConfig{})
	})
	t.Run("a cluster's policy that the owner has not signed is not read", func(t *testing.T) {
		have, err := a.kube.Policy(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		changed := have.DeepCopy()
		changed.Spec.Policy = strings.Replace(have.Spec.Policy, someone.String(), attest.MachineID{1}.String(), 1)
		if err := ownertest.Shared.Client.Update(t.Context(), changed); err != nil {
			t.Fatal(err)
		}
		if _, err := a.tries(t, ApproveConfig{}); attest.ReasonOf(err) != attestv1.Reason_REASON_POLICY_SIGNATURE {
			t.Errorf("%v", err)
		}
		a.send(t)
		a.approver(t, ApproveConfig{})
	})
}

// A8: listing a machine without a certificate would refuse nodes with RSA attestation keys.
func TestAnApprovalDoesNotChangeWhichKeysAreAccepted(t *testing.T) {
	rsa := func(p *attestv1.Policy) {
		p.Tpm2.PlatformRoots = nil
		p.Tpm2.EkRoots[0].Key = string(attest.EKRSA2048)
	}
	a := newApproval(t, rsa)
	bare := a.boot(t, "192.0.2.2", attesttest.Options{Bare: true})
	a.lists(t, waits(bare, "192.0.2.2", bareList))
	ap := a.approver(t, ApproveConfig{BareEK: true})
	all, err := ap.Candidates(t.Context())
	if err != nil || len(all) != 1 || all[0].Problem != nil {
		t.Fatalf("%+v, %v", all, err)
	}
	if err := ap.Approve(t.Context(), all, quiet); err == nil || !strings.Contains(err.Error(), "ECC attestation keys") {
		t.Errorf("%v", err)
	}
	a.has(t, 1)
	ecc := newApproval(t, func(p *attestv1.Policy) { p.Tpm2.PlatformRoots = nil })
	bare = ecc.boot(t, "192.0.2.2", attesttest.Options{Bare: true})
	ecc.lists(t, waits(bare, "192.0.2.2", bareList))
	ap = ecc.approver(t, ApproveConfig{BareEK: true})
	if all, err = ap.Candidates(t.Context()); err != nil || ap.Approve(t.Context(), all, quiet) != nil {
		t.Fatalf("%+v, %v", all, err)
	}
	ecc.has(t, 2, policyfile.Listing{Field: bareList, Machine: bare.ID()})
}

// Of an autoscaling group, as many machines as asked for are approved as they come: none that booted something else, none from elsewhere.
func TestMachinesAreApprovedAsTheyCome(t *testing.T) {
	a := newApproval(t)
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	first := a.boot(t, "10.0.0.1", attesttest.Options{})
	tampered := a.boot(t, "10.0.0.2", attesttest.Options{Image: "tampered"})
	outside := a.boot(t, "192.0.2.3", attesttest.Options{})
	var later []waitlist.Entry
	for i := range 3 {
		address := fmt.Sprintf("10.0.0.%d", 10+i)
		later = append(later, waits(a.boot(t, address, attesttest.Options{}), address, machineIDs))
	}
	begin := []waitlist.Entry{waits(tampered, "10.0.0.2", machineIDs), waits(outside, "192.0.2.3", machineIDs), waits(first, "10.0.0.1", machineIDs)}
	a.lists(t, begin...)
	ap := a.approver(t, ApproveConfig{})
	var batches [][]string
	var left []string
	n, err := ap.Await(ctx, 3, netip.MustParsePrefix("10.0.0.0/8"), func(s string) { left = append(left, s) }, func(batch []Candidate) {
		var ids []string
		for _, c := range batch {
			ids = append(ids, c.Machine)
		}
		if batches = append(batches, ids); len(batches) == 1 {
			a.lists(t, append(begin[:2:2], later...)...)
		}
	})
	if err != nil || n != 3 || len(batches) != 2 || !slices.Equal(batches[0], []string{first.ID().String()}) || len(batches[1]) != 2 {
		t.Fatalf("%d approved in %v, %v", n, batches, err)
	}
	a.has(t, 3, policyfile.Listing{Field: machineIDs, Machine: first.ID()})
	text, err := a.Read(ownerdir.PolicyFile)
	if err != nil || strings.Contains(string(text), tampered.ID().String()) || strings.Contains(string(text), outside.ID().String()) {
		t.Errorf("a machine too many is listed: %v\n%s", err, text)
	}
	if got := slices.DeleteFunc(left, func(s string) bool { return !strings.Contains(s, "left out") }); len(got) == 0 || !strings.Contains(got[0], tampered.ID().String()) {
		t.Errorf("%q", left)
	}
	short, end := context.WithTimeout(ctx, 100*time.Millisecond)
	defer end()
	if n, err := ap.Await(short, 5, netip.MustParsePrefix("172.16.0.0/12"), quiet, func([]Candidate) {}); n != 0 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
}
