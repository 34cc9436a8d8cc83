package main

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	ownerrecovery "github.com/muster-k8s/muster/cmd/muster/owner/recovery"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/machine/machinetest"
	"github.com/muster-k8s/muster/services/bootstrapper/recovery"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/keys"
)

// waitingMachine is a control plane in its initramfs: the recovery server of the bootstrapper, a TPM, and a disk that
// one key opens.
type waitingMachine struct {
	tpm   *attesttest.Machine
	owner ed25519.PrivateKey // the key that the image has
	addr  string
	disk  keys.DiskID

	mu   sync.Mutex
	key  []byte
	open bool
	log  bytes.Buffer
}

func (w *waitingMachine) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.log.Write(p)
}

func (w *waitingMachine) logged() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.log.String()
}

func (w *waitingMachine) try(_ context.Context, key keys.Disk, _ keys.ClusterID, desired component.Desired) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case !desired.Recovered || desired.Uncompared != "": // B8
		return errors.New("there is nothing to compare the disk with")
	case w.open:
		return recovery.ErrOpen
	case !bytes.Equal(key.Expose(), w.key):
		return recovery.ErrWrongKey
	}
	w.open = true
	return nil
}

func newWaitingMachine(t *testing.T, ca *attesttest.CA) *waitingMachine {
	t.Helper()
	return serveWaiting(t, attesttest.NewMachine(t, ca, attesttest.Options{}))
}

func serveWaiting(t *testing.T, m *attesttest.Machine) *waitingMachine {
	t.Helper()
	_, owner, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	w := &waitingMachine{tpm: m, owner: owner}
	if w.disk, err = keys.ParseDiskID("3f1c9d2a-5b7e-4c1d-8a6f-0123456789ab"); err != nil {
		t.Fatal(err)
	}
	registry := prometheus.NewRegistry()
	calls, err := rpc.NewMetrics(registry)
	if err != nil {
		t.Fatal(err)
	}
	s, err := recovery.New(recovery.Config{
		DiskID: w.disk, OwnerKeys: attest.OwnerKeys{w.owner.Public().(ed25519.PublicKey)}, Try: w.try, Attester: w.tpm.Attester(attest.PurposeMachine), Challenges: atls.NewChallengeQueue(), Calls: calls, Metrics: registry, Log: slog.New(slog.NewJSONHandler(w, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w.addr = l.Addr().String()
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx, l) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return w
}

// folder creates the owner's folder of the cluster that was initialized on machine first.
func (w *waitingMachine) folder(t *testing.T, ca *attesttest.CA, first *attesttest.Machine) (string, ownerdir.Secrets) {
	t.Helper()
	path, secrets := filepath.Join(t.TempDir(), "muster-prod"), ownerdir.NewSecrets([32]byte{7})
	planes := []string{w.tpm.ID().String(), first.ID().String(), strings.Repeat("ab", 32)}
	d, err := ownerdir.Create(path, ownerdir.New{
		Cluster: ownerdir.Cluster{
			Name: "prod", Endpoint: "192.0.2.1:9000", KubernetesVersion: "1.36.1", ControlPlaneEndpoint: "192.0.2.1:6443", PodCIDRs: []string{"10.244.0.0/16"}, ServiceCIDRs: []string{"10.96.0.0/16"},
			Images: machinetest.Images().References(), Stage: ownerdir.StageInstalled, FirstMachine: &ownerdir.Machine{ID: first.ID(), DiskID: w.disk.String(), DiskSalt: keys.DiskSalt{3}.String()},
		},
		Secrets: secrets, OwnerKey: w.owner, Policy: attesttest.Policy(t, ca, []*attesttest.Machine{w.tpm}, func(p *attestv1.Policy) { p.ControlPlanes = slices.Compact(planes) }),
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	return path, secrets
}

// lock sets the key of the machine's disk: the one that follows from the secrets.
func (w *waitingMachine) lock(t *testing.T, s ownerdir.Secrets) {
	t.Helper()
	k, err := keys.NewRoot(s.Root, s.Salt).Disk(w.disk, keys.DiskSalt{3})
	if err != nil {
		t.Fatal(err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.key = k.Expose()
}

// muster runs the program.
func muster(t *testing.T, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	var out, complaints bytes.Buffer
	a := &app{stdout: &out, stderr: &complaints}
	if err = a.run(ctx, args); err != nil {
		a.complain(err)
	}
	return out.String(), complaints.String(), err
}

// The program, the transport and the machine's server are the real ones; the disk and its TPM are fakes.
func TestAControlPlaneIsRecovered(t *testing.T) {
	ca := attesttest.NewCA(t)
	w := newWaitingMachine(t, ca)
	folder, secrets := w.folder(t, ca, w.tpm)
	w.lock(t, secrets)
	other, _ := w.folder(t, ca, w.tpm)

	// Another cluster's folder, whose policy accepts the machine nevertheless.
	_, stderr, err := muster(t, "recover", w.addr, "--directory", other)
	if err == nil || !strings.Contains(stderr, "Reason: RECOVERY_SECRET_INVALID") || !strings.Contains(stderr, "What to do: Use the owner's folder") {
		t.Errorf("another cluster's folder: %v\n%s", err, stderr)
	}
	// Another machine than the folder knows, or than the flag names.
	stranger, _ := w.folder(t, ca, attesttest.NewMachine(t, ca, attesttest.Options{}))
	if _, stderr, err = muster(t, "recover", w.addr, "--directory", stranger); err == nil || !strings.Contains(stderr, "Reason: POLICY_REFUSED") || !strings.Contains(stderr, "name it by --machine-id") {
		t.Errorf("another machine: %v\n%s", err, stderr)
	}
	if _, stderr, err = muster(t, "recover", w.addr, "--directory", folder, "--machine-id", strings.Repeat("ab", 32)); err == nil || !strings.Contains(stderr, "is expected at this address") {
		t.Errorf("another machine was named: %v\n%s", err, stderr)
	}
	w.mu.Lock()
	open := w.open
	w.mu.Unlock()
	if open {
		t.Fatal("the disk is open")
	}

	stdout, stderr, err := muster(t, "recover", w.addr, "--directory", folder)
	if err != nil {
		t.Fatalf("%v\n%s", err, stderr)
	}
	if want := "The state disk of machine " + w.tpm.ID().String() + " is open, and the machine continues to boot.\n"; stdout != want {
		t.Errorf("%q, want %q", stdout, want)
	}
	for _, state := range []string{"connected: ", "appraised: ", "trying: ", "opened: "} {
		if !strings.Contains(stderr, state) {
			t.Errorf("%q is not told:\n%s", state, stderr)
		}
	}
	t.Logf("muster recover says:\n%s%s", stderr, stdout)

	// Once more, with output for a program.
	stdout, _, err = muster(t, "recover", w.addr, "--directory", folder, "--machine-id", w.tpm.ID().String(), "--output", "json")
	var last struct {
		Event string
		ownerrecovery.Recovery
	}
	lines := strings.Split(strings.TrimSpace(stdout), "\n")
	if jerr := json.Unmarshal([]byte(lines[len(lines)-1]), &last); err != nil || jerr != nil || last.Event != "result" || !last.Already || last.Machine != w.tpm.ID().String() {
		t.Errorf("%v %v %+v\n%s", err, jerr, last, stdout)
	}

	// K3.
	for _, file := range []string{"root-secret", "salt"} {
		digits, err := os.ReadFile(filepath.Join(folder, file))
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(stdout+stderr+w.logged(), strings.TrimSpace(string(digits))) {
			t.Errorf("%s is in what was told", file)
		}
	}
}
