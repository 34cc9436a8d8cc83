// Package crash kills Muster's programs with SIGKILL, cuts their connections, fills their disks and moves their
// clocks, and checks the state after that (B3, B2, J3). The table of docs/crashes.md lists the points and their end
// states.
//
// Most tests use a bootstrapper process: this test's program, started again, runs the bootstrapper with a real TPM
// (swtpm) and real attested TLS; only kubeadm, systemctl and the API server are fakes, so that a run takes a fraction
// of a second. The code that kills it is only in this package: no shipped program has a hook for it. The other tests
// run in the lab, with real programs of a real cluster.
package crash

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/services/bootstrapper"
	"github.com/muster-k8s/muster/services/bootstrapper/clusterobjects"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/etcd"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/machine/machinetest"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/provision"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
	"github.com/muster-k8s/muster/trust/tpm"
)

// planVariable, if set, makes this program a bootstrapper process: it is its [plan] in JSON.
const planVariable = "MUSTER_CRASH_PLAN"

func TestMain(m *testing.M) {
	if text, ok := os.LookupEnv(planVariable); ok {
		if err := runProcess(text); err != nil {
			fmt.Fprintln(os.Stderr, "bootstrapper:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// plan is the configuration of a bootstrapper process, and where it dies.
type plan struct {
	// Root replaces the root of the machine's file system. Beside it are image.yaml, metadata.yaml, admin.conf and
	// effects, to which the name of each effect is appended.
	Root string
	// TPMLock is the lock of the TPM that image.yaml names.
	TPMLock string
	// Linger is how long a result that was sent can still be fetched.
	Linger time.Duration
	// KillAt is the number of the effect at which the process kills itself, from 0; negative: none.
	KillAt int
	// KillIn, if set, is the name of the effect at which it kills itself.
	KillIn string
	// Hold are names of effects, or texts of progress in the log, at which the process waits, each the first time,
	// until the test releases it: this makes the order of events deterministic.
	Hold []string
	// Programs is the folder of programs that replace those of a machine with a device-mapper; empty: none.
	Programs string
	// Unlock is the path of the state disk of a process that is `bootstrapper unlock`; empty: it is `bootstrapper run`.
	Unlock string
}

func (p plan) beside(name string) string { return filepath.Join(filepath.Dir(p.Root), name) }

// gate is the named pipe whose opening lets the process go on.
func (p plan) gate(name string) string {
	return p.beside("hold-" + strings.ReplaceAll(name, " ", "-"))
}

// now is the machine's clock. The file clock contains its offset, and may change at any time.
func (p plan) now() time.Time {
	text, err := os.ReadFile(p.beside("clock"))
	if err != nil {
		return time.Now()
	}
	off, err := time.ParseDuration(string(text))
	if err != nil {
		return time.Time{}
	}
	return time.Now().Add(off)
}

const (
	journalPath = "/var/lib/muster/journal"
	unitsDir    = "/run/units" // a file for each unit that runs
)

// runProcess is the program `bootstrapper run` on a machine with fake programs.
func runProcess(text string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	var p plan
	if err := json.Unmarshal([]byte(text), &p); err != nil {
		return err
	}
	img, err := metadata.LoadImage(p.beside("image.yaml"))
	if err != nil {
		return err
	}
	conf, err := os.ReadFile(p.beside("admin.conf"))
	if err != nil {
		return err
	}
	effects, err := os.OpenFile(p.beside("effects"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer effects.Close()
	f := &fate{left: p.KillAt, name: p.KillIn, log: effects, hold: slices.Clone(p.Hold), gate: p.gate}
	if p.Programs != "" {
		if err := f.ask(p.Programs); err != nil {
			return err
		}
	}
	device := tpm.Open(img.TPM.Device, tpm.WithLock(p.TPMLock))
	attester := func(purpose attest.Purpose) (*tpm2.Attester, error) {
		return tpm2.NewAttester(tpm2.Config{TPM: device, Purpose: purpose, Bank: tpm.SHA256})
	}
	own, err := attester(attest.PurposeMachine)
	if err != nil {
		return err
	}
	if p.Unlock != "" {
		return unlockProcess(ctx, p, img, f, mortalTPM{device, f}, own)
	}
	public, err := attester(attest.PurposePublic)
	if err != nil {
		return err
	}
	fake := &machinetest.Machine{Root: p.Root, AdminConf: conf, Step: f.step, Units: filepath.Join(p.Root, unitsDir)}
	return bootstrapper.Serve(ctx, bootstrapper.Options{
		Public: public,
		Config: bootstrapper.Config{Config: provision.Config{
			Image: img, Metadata: func() (*metadata.Machine, error) { return metadata.LoadMachine(p.beside("metadata.yaml")) },
			Journal: &mortalJournal{journal.Open(filepath.Join(p.Root, journalPath)), f}, Root: p.Root,
			Machine: fake,
			TPM:     mortalTPM{device, f}, Attester: own, NewVerifier: verifierOf,
			Now:        p.now,
			Components: component.DefaultLimits, Log: slog.New(heldLog{slog.NewJSONHandler(os.Stderr, nil), f}),
			Timing: provision.Timing{
				Stagger: 20 * time.Millisecond, RetryMin: 5 * time.Millisecond, RetryMax: 50 * time.Millisecond, Dial: patience, Ticket: patience,
				Linger: p.Linger, Unclaimed: patience, Kubeadm: patience, Reset: patience, ClusterState: patience,
			},
		},
			WriteClusterState: func(ctx context.Context, kubeconfig []byte, s clusterobjects.State) error {
				_ = f.step("the cluster's objects are about to be written")
				if !fake.Running(machine.UnitKubelet) {
					return errors.New("no kubelet runs, and so no API server")
				}
				err := clusterobjects.Write(ctx, kubeconfig, s)
				_ = f.step("the cluster's objects were written")
				return err
			},
			CleanEtcd: func(ctx context.Context, _ etcd.Target) ([]etcd.Member, error) {
				if !fake.Member() {
					return nil, nil
				}
				return []etcd.Member{{ID: 7}}, fake.LeaveEtcd(ctx)
			},
		},
	})
}

func verifierOf(roots []*x509.Certificate) (attest.Verifier, error) {
	return tpm2.NewVerifier(tpm2.VerifierConfig{Roots: func() []*x509.Certificate { return roots }, Now: time.Now})
}

// fate counts the effects of the process on its machine, and kills it at one of them.
type fate struct {
	mu   sync.Mutex
	left int
	name string
	log  *os.File
	hold []string
	gate func(name string) string
}

// step records an effect before it happens. If it is the last one, step does not return.
func (f *fate) step(name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, err := fmt.Fprintln(f.log, name); err != nil {
		return err
	}
	if f.left == 0 || name == f.name {
		kill()
	}
	f.left--
	return f.holdAt(name)
}

// holdAt waits, if the process is to be held at name, until the test releases it. It is called with the mutex held,
// and unlocks it meanwhile.
func (f *fate) holdAt(name string) error {
	at := slices.Index(f.hold, name)
	if at < 0 {
		return nil
	}
	f.hold = slices.Delete(f.hold, at, at+1)
	if _, err := fmt.Fprintln(f.log, heldAt+name); err != nil {
		return err
	}
	f.mu.Unlock()
	defer f.mu.Lock()
	gate, err := os.Open(f.gate(name)) // until the test opens it for writing
	if err != nil {
		return err
	}
	return gate.Close()
}

// heldAt is what comes before the name of an effect at which the process waits.
const heldAt = "held: "

// heldLog holds the process after it has logged its next step.
type heldLog struct {
	slog.Handler
	fate *fate
}

func (h heldLog) Handle(ctx context.Context, r slog.Record) error {
	if err := h.Handler.Handle(ctx, r); err != nil || r.Message != "progress" {
		return err
	}
	text := ""
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == "text" {
			text = a.Value.String()
		}
		return true
	})
	h.fate.mu.Lock()
	defer h.fate.mu.Unlock()
	return h.fate.holdAt(text)
}

func (h heldLog) WithAttrs(attrs []slog.Attr) slog.Handler {
	return heldLog{h.Handler.WithAttrs(attrs), h.fate}
}
func (h heldLog) WithGroup(name string) slog.Handler {
	return heldLog{h.Handler.WithGroup(name), h.fate}
}

// last is step, but if the effect is the last one, it begins before the process dies.
func (f *fate) last(name string, begin func()) error {
	f.mu.Lock()
	if f.left == 0 {
		begin()
	}
	f.mu.Unlock()
	return f.step(name)
}

// kill ends this process as a power cut does: nothing of it runs any more.
func kill() {
	_ = syscall.Kill(syscall.Getpid(), syscall.SIGKILL)
	select {}
}

// mortalJournal may be the last write of the process: not at all, in the middle, or whole.
type mortalJournal struct {
	*journal.File
	fate *fate
}

func (j *mortalJournal) Save(r journal.Record) error {
	if err := j.fate.step("the journal is about to say " + r.Step.String()); err != nil {
		return err
	}
	err := j.fate.last("the journal is half written", func() {
		if b, err := journal.Encode(r); err == nil {
			_ = os.WriteFile(j.Path()+".new", b[:len(b)/2], 0o600)
		}
	})
	if err != nil {
		return err
	}
	if err := j.File.Save(r); err != nil {
		return err
	}
	return j.fate.step("the journal says " + r.Step.String())
}

type mortalTPM struct {
	*tpm.TPM
	fate *fate
}

func (m mortalTPM) Measure(ctx context.Context, pcr int, data []byte) error {
	if err := m.fate.step("PCR 15 is about to be extended"); err != nil {
		return err
	}
	if err := m.TPM.Measure(ctx, pcr, data); err != nil {
		return err
	}
	return m.fate.step("PCR 15 is extended")
}
