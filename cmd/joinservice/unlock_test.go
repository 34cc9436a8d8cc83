package main

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/services/bootstrapper/bootsecret"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/console"
	"github.com/muster-k8s/muster/services/bootstrapper/disk"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/unlock"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
	"github.com/muster-k8s/muster/trust/keys"
)

// volume is a state disk that one key opens.
type volume struct {
	id  string
	key []byte

	mu   sync.Mutex
	open bool
}

func (v *volume) ID() (keys.DiskID, error) { return keys.ParseDiskID(v.id) }

func (v *volume) State() (disk.State, error) { return disk.StateLocked, nil }

func (v *volume) Format(context.Context, func(done, total uint64)) error {
	return errors.New("a locked disk is not to be formatted")
}

func (v *volume) Unlock(_ context.Context, key keys.Disk) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if !bytes.Equal(key.Expose(), v.key) {
		return disk.ErrWrongKey
	}
	v.open = true
	return nil
}

func (v *volume) Close(context.Context) error { return nil }

func (v *volume) isOpen() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.open
}

// initramfs is a machine that has rebooted, until its disk is open.
type initramfs struct {
	t       *testing.T
	screen  string
	log     *membertest.Buffer
	disk    *volume
	metrics *prometheus.Registry
	done    chan error
}

// unlock boots a machine that knows its owner, with disk1.
func (s *fixture) unlock(t *testing.T, m *attesttest.Machine) *initramfs {
	t.Helper()
	i := &initramfs{t: t, screen: filepath.Join(t.TempDir(), "console"), log: &membertest.Buffer{}, disk: &volume{id: disk1, key: s.DiskKey(t, disk1)}, metrics: prometheus.NewRegistry(), done: make(chan error, 1)}
	if err := os.WriteFile(i.screen, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	terminal, err := console.Open(i.screen)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = terminal.Close() })
	root := t.TempDir()
	secret := filepath.Join(root, bootsecret.Path)
	if err := errors.Join(os.MkdirAll(filepath.Dir(secret), 0o755), os.WriteFile(secret, secretOf(m), 0o600)); err != nil { // so that the running system of this boot has the same
		t.Fatal(err)
	}
	u, err := unlock.New(unlock.Config{
		Image: &metadata.Image{OwnerKeys: attest.OwnerKeys{s.Public}, TPM: metadata.TPM{Bank: "sha256"}},
		Metadata: func() (*metadata.Machine, error) {
			return &metadata.Machine{Name: "w1", Role: metadata.RoleWorker, Addresses: []netip.Addr{netip.MustParseAddr("192.168.77.12")}, JoinEndpoints: []string{s.join.Addr}}, nil
		},
		Root: root, Desired: component.DesiredFile(filepath.Join(t.TempDir(), "desired")), Disk: i.disk, Policy: journal.Open(filepath.Join(t.TempDir(), "policy")), TPM: m, Attester: m.Attester(attest.PurposeMachine), Console: terminal, Metrics: i.metrics, Log: slog.New(slog.NewJSONHandler(i.log, nil)),
		NewVerifier: func(roots []*x509.Certificate) (attest.Verifier, error) {
			return tpm2.NewVerifier(tpm2.VerifierConfig{Roots: func() []*x509.Certificate { return roots }, Now: time.Now})
		},
		Timing: unlock.Timing{Stagger: 20 * time.Millisecond, RetryMin: 20 * time.Millisecond, RetryMax: 200 * time.Millisecond, Dial: 5 * time.Second, Ticket: 30 * time.Second},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	go func() { i.done <- u.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-i.done; err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	return i
}

// opens waits until the disk is open.
func (i *initramfs) opens() {
	i.t.Helper()
	select {
	case err := <-i.done:
		i.done <- err
		if err != nil || !i.disk.isOpen() {
			i.t.Fatalf("%v, open %t", err, i.disk.isOpen())
		}
	case <-time.After(patience):
		i.t.Fatalf("the disk is not opened:\n%s", i.log)
	}
}

// refused waits until console and metric report that it was refused for that reason.
func (i *initramfs) refused(want attestv1.Reason) {
	i.t.Helper()
	name := attest.ReasonName(want)
	membertest.Eventually(i.t, func() error {
		families, err := i.metrics.Gather()
		if err != nil {
			return err
		}
		b, err := os.ReadFile(i.screen)
		if err != nil {
			return err
		}
		reported := slices.ContainsFunc(strings.Split(string(b), "\r\n"), func(l string) bool {
			l, waits := strings.CutPrefix(l, "muster: waiting for the key of the state disk: ")
			return waits && strings.HasPrefix(l, name+" by 127.0.0.1:") && strings.Contains(l, "; next try in ")
		})
		return membertest.Want(reported && refusaltest.Sum(families, "muster_unlock_attempts_total", "reason", name) > 0, "%s is not reported: %q", name, b)
	})
}

func TestARebootedMachineOpensItsDisk(t *testing.T) {
	s := setUp(t)
	s.unlock(t, s.rebooted(t)).opens()
}

// Whichever side was upgraded first: a policy that lists both images admits both.
func TestAMachineRejoinsWithAnotherImageThanItsClusterRuns(t *testing.T) {
	for name, tt := range map[string]struct{ cluster, machine string }{
		"a newer machine in an older cluster":  {cluster: "v1", machine: "v2"},
		"an older machine in a newer cluster":  {cluster: "v2", machine: "v1"},
		"both have been upgraded, for control": {cluster: "v2", machine: "v2"},
	} {
		t.Run(name, func(t *testing.T) {
			s := setUp(t, booting(tt.cluster))
			v1, v2 := attesttest.NewMachine(t, s.ca, attesttest.Options{Image: "v1"}), attesttest.NewMachine(t, s.ca, attesttest.Options{Image: "v2"})
			serial := uint64(1)
			accept := func(machines ...*attesttest.Machine) {
				t.Helper()
				serial++
				s.inForce(t, s.SetPolicy(t, attesttest.Policy(t, s.ca, append(machines, s.cp1), attesttest.ControlPlanes(s.listed...), func(p *attestv1.Policy) {
					p.Serial, p.Insecure = serial, &attestv1.InsecureSwitches{AllowPlainState: true}
				})))
			}
			// It joined while cluster and machine had the first image.
			m := attesttest.NewMachine(t, s.ca, attesttest.Options{Image: tt.cluster})
			s.ticketFor(t, m, worker(t, encrypted))
			m.LockTo(s.ID)
			m.BootImage(tt.machine)
			i := s.unlock(t, m)
			if tt.machine != tt.cluster {
				i.refused(attestv1.Reason_REASON_POLICY_REFUSED)
			}
			accept(v1, v2)
			i.opens()
			if v := s.Node(t, "w1"); v.Spec.DiskID != disk1 {
				t.Errorf("its enrollment is %+v", v.Spec)
			}
		})
	}
}

// After a crash in the middle of the first join the machine is enrolled, its disk has the cluster's key, and its journal
// has it as no node yet. It opens its disk, which locks it again, and asks for a ticket again.
func TestAMachineThatCrashedInItsFirstJoinGoesOn(t *testing.T) {
	s := setUp(t)
	m := s.rebooted(t)
	s.unlock(t, m).opens()
	if ticket := s.ticketFor(t, m, worker(t, encrypted)); !bytes.Equal(ticket.GetDiskKey(), s.DiskKey(t, disk1)) {
		t.Error("another key")
	}
}

// A machine whose enrollment the owner has removed reports that. It needs an empty disk, or a new enrollment.
func TestAForgottenMachineIsToldAndTheWaysOutAreOpen(t *testing.T) {
	s := setUp(t)
	m := s.rebooted(t)
	s.unenroll(t, "w1")
	i := s.unlock(t, m)
	i.refused(attestv1.Reason_REASON_NOT_ENROLLED)
	text, err := os.ReadFile(i.screen)
	if err != nil || !strings.Contains(string(text), "(this machine is no longer enrolled, for example after muster forget: it joins as new with an empty state disk, or continues with this one if the owner enrolls it again with its disk)") {
		t.Errorf("console %q, %v", text, err)
	}
	s.Enroll(t, "w1", v1alpha1.AttestedNodeSpec{MachineID: m.ID().String(), Role: v1alpha1.RoleWorker, DiskID: disk1, DiskMode: v1alpha1.DiskModeLUKS})
	i.opens()
	if owner := s.DiskOf(t, disk1); owner != m.ID().String() {
		t.Errorf("the disk is %q's", owner)
	}
}

// A disk in another machine stays closed, whether or not that machine is accepted (J2).
func TestAStolenDiskStaysClosed(t *testing.T) {
	s := setUp(t)
	s.rebooted(t)
	thief := s.machine(t)
	i := s.unlock(t, thief) // an accepted machine that knows name and disk of w1, and is not w1
	i.refused(attestv1.Reason_REASON_NAME_TAKEN)
	if i.disk.isOpen() {
		t.Error("the disk is open")
	}
}
