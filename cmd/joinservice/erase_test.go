package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// K4: no machine gets the key of a disk whose salt was deleted, enrolled or not, and the machine continues with another
// disk.
func TestTheKeyOfAnErasedDiskGoesToNobody(t *testing.T) {
	s := setUp(t)
	m, other := s.rebooted(t), s.machine(t)
	first, err := s.rejoined(t, m, again())
	if err != nil {
		t.Fatal(err)
	}
	s.EraseDisk(t, disk1)
	_ = s.notAgain(t, m, again(), attestv1.Reason_REASON_DISK_ERASED)
	s.unenroll(t, "w1")
	before := s.CSRs(t)
	s.refused(t, s.dial(t, m.Attester(attest.PurposeMachine)), m, worker(t, encrypted), attestv1.Reason_REASON_DISK_ERASED)
	s.refused(t, s.dial(t, other.Attester(attest.PurposeMachine)), other, worker(t, encrypted, named("w2", disk1, "192.168.77.13")), attestv1.Reason_REASON_DISK_ERASED)
	s.nothingOf(t, m)
	s.filedNothing(t, before)
	if next := s.ticketFor(t, m, worker(t, encrypted, named("w1", disk2, "192.168.77.12"))); bytes.Equal(next.GetDiskKey(), first.GetDiskKey()) {
		t.Error("its new disk has the key of the old one")
	}
}

// K4: a disk that is erased after joinservice has read its salt gets no key either: by then the owner has the answer that
// it is erased.
func TestNoKeyLeavesForADiskThatIsErasedMeanwhile(t *testing.T) {
	for name, ask := range map[string]func(t *testing.T, s *fixture) func() error{
		"a rejoin": func(t *testing.T, s *fixture) func() error {
			m := s.rebooted(t)
			return func() error {
				_, err := s.rejoin(t, m, again())
				return err
			}
		},
		"a ticket": func(t *testing.T, s *fixture) func() error {
			m := s.machine(t)
			s.ticketFor(t, m, worker(t, encrypted))
			asks, w := s.dial(t, m.Attester(attest.PurposeMachine)), worker(t, encrypted)
			return func() error {
				_, err := asks.IssueJoinTicket(t.Context(), w.IssueJoinTicketRequest)
				return err
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			again, began := true, time.Now()
			for again && time.Since(began) < patience {
				t.Run("one request", func(t *testing.T) {
					s := setUp(t)
					err := s.meanwhile(t, ask(t, s), func() { s.EraseDisk(t, disk1) })
					if again = tooSlow(err); !again && rpc.ReasonFrom(err) != attestv1.Reason_REASON_DISK_ERASED {
						t.Errorf("%v, want DISK_ERASED", err)
					}
				})
			}
			if again {
				t.Error("each request came to its end too late")
			}
		})
	}
}

// meanwhile calls change while a request for a disk's key is at the key service, and returns the request's answer. The key
// service reads its root secret from a pipe, which shows when it does and lets it wait.
func (s *fixture) meanwhile(t *testing.T, call func() error, change func()) error {
	t.Helper()
	path := filepath.Join(s.rootDir, "root")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	answer := make(chan error, 1)
	go func() { answer <- call() }()
	var pipe *os.File
	membertest.Eventually(t, func() (err error) {
		if len(answer) > 0 {
			return nil // before the key service has read
		}
		pipe, err = os.OpenFile(path, os.O_WRONLY|syscall.O_NONBLOCK, 0) // fails until the other end is open
		return err
	})
	if pipe == nil {
		if late, err := os.OpenFile(path, os.O_WRONLY|syscall.O_NONBLOCK, 0); err == nil {
			_ = late.Close()
		}
		return <-answer
	}
	change()
	if _, err := pipe.Write(s.Root[:]); err != nil {
		t.Fatal(err)
	}
	if err := pipe.Close(); err != nil {
		t.Fatal(err)
	}
	return <-answer
}

// J2, J6: nor does one leave for a machine that the owner removes from the policy meanwhile, revoked, with a role that is not listed any more, or not listed as a control plane.
func TestNoKeyLeavesForAMachineThatThePolicyRefusesMeanwhile(t *testing.T) {
	control := func(w *requestOptions) { w.role = joinv1.Role_ROLE_CONTROL_PLANE }
	for name, tt := range map[string]struct {
		role    v1alpha1.Role
		rejoins bool
		want    attestv1.Reason
	}{
		"a revoked machine rejoins":                   {v1alpha1.RoleWorker, true, attestv1.Reason_REASON_EK_UNTRUSTED},
		"a revoked machine joins":                     {v1alpha1.RoleWorker, false, attestv1.Reason_REASON_EK_UNTRUSTED},
		"a machine whose role is not listed rejoins":  {v1alpha1.RoleWorker, true, attestv1.Reason_REASON_ROLE_REFUSED},
		"a machine whose role is not listed joins":    {v1alpha1.RoleWorker, false, attestv1.Reason_REASON_ROLE_REFUSED},
		"a machine whose network is not listed joins": {v1alpha1.RoleWorker, false, attestv1.Reason_REASON_ADDRESS_REFUSED},
		"a control plane that is not listed rejoins":  {v1alpha1.RoleControlPlane, true, attestv1.Reason_REASON_SERVER_NOT_LISTED},
		"a control plane that is not listed joins":    {v1alpha1.RoleControlPlane, false, attestv1.Reason_REASON_SERVER_NOT_LISTED},
	} {
		t.Run(name, func(t *testing.T) {
			slow, began := true, time.Now()
			for slow && time.Since(began) < patience {
				t.Run("one request", func(t *testing.T) {
					s := setUp(t)
					m, w := s.machine(t), worker(t, encrypted)
					refuse := func(p *attestv1.Policy) { p.Tpm2.Revoked = &attestv1.Revoked{Keys: []string{m.ID().String()}} }
					if tt.want == attestv1.Reason_REASON_ROLE_REFUSED {
						refuse = func(p *attestv1.Policy) { p.Roles = []string{string(v1alpha1.RoleControlPlane)} }
					}
					if tt.want == attestv1.Reason_REASON_ADDRESS_REFUSED {
						refuse = func(p *attestv1.Policy) { p.NodeCidrs = []string{"192.0.2.0/24"} }
					}
					if tt.role == v1alpha1.RoleControlPlane {
						m, w = s.controlMachine(t), worker(t, encrypted, control)
						refuse = attesttest.ControlPlanes(s.cp1)
					}
					s.Enroll(t, "w1", v1alpha1.AttestedNodeSpec{MachineID: m.ID().String(), Role: tt.role, DiskID: disk1, DiskMode: v1alpha1.DiskModeLUKS})
					s.GiveDisk(t, disk1, m.ID())
					client := s.dial(t, m.Attester(attest.PurposeMachine))
					s.seen(t, client, m)
					s.ticketFor(t, s.machine(t), worker(t, named("w2", disk2, "192.168.77.13"))) // asks the key service for the cluster's ID
					ask := func() error { _, err := client.IssueJoinTicket(t.Context(), w.IssueJoinTicketRequest); return err }
					if tt.rejoins {
						ask = func() error {
							_, err := s.rejoin(t, m, again(func(r *joinv1.IssueRejoinTicketRequest) { r.Role = w.GetRole() }))
							return err
						}
					}
					err := s.meanwhile(t, ask, func() {
						s.inForce(t, s.policy(t, func(p *attestv1.Policy) { p.Serial = 2 }, refuse))
					})
					if slow = tooSlow(err); !slow && rpc.ReasonFrom(err) != tt.want {
						t.Errorf("%v, want %s", err, tt.want)
					}
				})
			}
			if slow {
				t.Error("each request came to its end too late")
			}
		})
	}
}

// K4: a salt is written once. It can be deleted, but not written again.
func TestADisksSaltIsWrittenOnce(t *testing.T) {
	s := setUp(t)
	m := s.machine(t)
	s.GiveDisk(t, disk1, m.ID())
	patch := func(text string) error {
		d := &v1alpha1.AttestedDisk{}
		d.Name = disk1
		return s.Client.Patch(t.Context(), d, client.RawPatch(types.MergePatchType, []byte(text)))
	}
	const other = "abababababababababababababababababababababababababababababababab"
	for name, text := range map[string]string{
		"another salt":                    `{"spec":{"salt":"` + other + `"}}`,
		"no salt, and not erased":         `{"spec":{"salt":null}}`,
		"erased, with a salt":             `{"spec":{"erased":true}}`,
		"another version of the root":     `{"spec":{"rootVersion":2}}`,
		"no version of the root":          `{"spec":{"rootVersion":0}}`,
		"a salt that is none":             `{"spec":{"salt":"00"}}`,
		"erased, with another root":       `{"spec":{"salt":null,"erased":true,"rootVersion":2}}`,
		"erased and a salt at one stroke": `{"spec":{"salt":"` + other + `","erased":true}}`,
	} {
		if err := patch(text); err == nil {
			t.Errorf("%s was accepted", name)
		}
	}
	const erased = `{"spec":{"salt":null,"erased":true}}`
	if err := patch(erased); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"a new salt": `{"spec":{"salt":"` + other + `","erased":null}}`, "no longer erased": `{"spec":{"erased":false}}`,
	} {
		if err := patch(text); err == nil {
			t.Errorf("after it was erased, %s was accepted", name)
		}
	}
}

// J2: which machine a disk belongs to, and its salt, change only by an administrator. No role of a service, a node, or a tenant has the right.
func TestNobodyButAnAdministratorChangesADisk(t *testing.T) {
	s := setUp(t)
	m := s.machine(t)
	s.GiveDisk(t, disk1, m.ID())
	editor := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "tenant"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "admin"},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: "tenant"}},
	}
	if err := s.asUser(t, "admin", "system:masters").Create(t.Context(), editor); err != nil {
		t.Fatal(err)
	}
	disk := func() *v1alpha1.AttestedDisk {
		d := &v1alpha1.AttestedDisk{}
		d.Name = disk1
		return d
	}
	const joinservice = "system:serviceaccount:" + clusterinfo.Namespace + ":joinservice"
	for _, who := range []struct {
		user   string
		groups []string
	}{
		{joinservice, []string{"system:serviceaccounts"}},
		{"system:serviceaccount:" + clusterinfo.Namespace + ":kms", []string{"system:serviceaccounts"}},
		{"system:serviceaccount:kube-system:driver", []string{"system:serviceaccounts"}},
		{clusterinfo.NodeUserPrefix + "node1", []string{clusterinfo.NodeGroup}},
		{"tenant", nil},
	} {
		cfg, err := s.AsUser(who.user, append(who.groups, "system:authenticated")...)
		if err != nil {
			t.Fatal(err)
		}
		cfg.UserAgent = membertest.Intruder
		c, err := client.New(cfg, client.Options{Scheme: clusterview.Scheme()})
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(disk()), disk()); err != nil && who.user == joinservice {
			t.Fatalf("it is not the account of joinservice: %v", err)
		}
		for what, do := range map[string]func() error{
			"patch": func() error {
				return c.Patch(t.Context(), disk(), client.RawPatch(types.MergePatchType, []byte(`{"spec":{"machineID":"`+strings.Repeat("ab", 32)+`"}}`)))
			},
			"delete":            func() error { return c.Delete(t.Context(), disk()) },
			"delete collection": func() error { return c.DeleteAllOf(t.Context(), disk()) },
		} {
			if err := do(); !apierrors.IsForbidden(err) {
				t.Errorf("%s by %s: %v", what, who.user, err)
			}
		}
	}
	have := disk()
	if err := s.Client.Get(t.Context(), client.ObjectKeyFromObject(have), have); err != nil || have.Spec.MachineID != m.ID().String() {
		t.Errorf("the disk has %+v: %v", have.Spec, err)
	}
}
