package docs_test

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/muster-k8s/muster/gen/muster/kms/v1/kmsv1connect"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/services/bootstrapper"
	"github.com/muster-k8s/muster/services/bootstrapper/clusterobjects"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/etcd"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/provision"
	"github.com/muster-k8s/muster/services/kms"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
)

// block is a fenced block of operate.md or debug.md that is executed, and its expected output; empty: it only has to succeed.
type block struct{ title, script, kind, output string }

func blocks(t *testing.T) []block {
	t.Helper()
	fence := regexp.MustCompile("(?ms)^```sh title=([a-z-]+)\n(.*?)^```\n(?:\n```(json|text) output=([a-z-]+)\n(.*?)^```\n)?")
	var out []block
	seen := map[string]bool{}
	text := read(t, "docs/operate.md") + read(t, "docs/debug.md")
	for _, m := range fence.FindAllStringSubmatch(text, -1) {
		if seen[m[1]] || m[4] != "" && m[4] != m[1] {
			t.Errorf("block %s: its title is not its own, or the output below it is %s's", m[1], m[4])
		}
		seen[m[1]] = true
		out = append(out, block{title: m[1], script: m[2], kind: m[3], output: m[5]})
	}
	if got, want := len(out), strings.Count(text, "```sh title="); got != want || got == 0 {
		t.Fatalf("%d of %d blocks were read", got, want)
	}
	return out
}

// programs builds the programs of the manual, and grpcurl at the version that tools/grpcurl pins, and returns the
// folder.
func programs(t *testing.T) string {
	t.Helper()
	bin := t.TempDir()
	for _, p := range []struct {
		dir, what string
		env       []string
	}{
		{dir: root, what: "./cmd/muster"},
		{dir: filepath.Join(root, "tools", "grpcurl"), what: "tool", env: []string{"GOWORK=off", "GOFLAGS="}},
	} {
		cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-buildvcs=false", "-o", bin+"/", p.what)
		cmd.Dir = p.dir
		cmd.Env = append(append(os.Environ(), "CGO_ENABLED=0"), p.env...)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("build %s: %v\n%s", p.what, err, out)
		}
	}
	return bin
}

// fixture is the environment of the manual's commands.
type fixture struct {
	env []string
	dir string
}

// start starts a machine that waits, as `bootstrapper run` does, and a key service whose root
// is not mounted. The machine's measurements and its authority are in the folder.
func start(t *testing.T) fixture {
	t.Helper()
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	w := fixture{dir: t.TempDir()}
	values := map[string]string{}
	for _, i := range []int{4, 8, 9, 11, 12, 13, 14} {
		values[strconv.Itoa(i)] = hex.EncodeToString(m.PCRs()[i])
	}
	measurements, err := json.Marshal(map[string]any{"version": 1, "bank": m.Bank().String(), "image": "example", "pcrs": values})
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{"measurements.json": measurements, "ca.pem": []byte(ca.PEM())} {
		if err := os.WriteFile(filepath.Join(w.dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	waiting, probes := startMachine(t, ca, m, log)
	w.env = append(os.Environ(), "ID="+m.ID().String(), "MACHINE="+waiting, "PROBES="+probes, "SERVICE="+startKMS(t, ca, m, log))
	return w
}

func startMachine(t *testing.T, ca *attesttest.CA, m *attesttest.Machine, log *slog.Logger) (rpcs, probes string) {
	t.Helper()
	public, err := tpm2.NewAttester(tpm2.Config{TPM: m, Purpose: attest.PurposePublic, Bank: m.Bank()})
	if err != nil {
		t.Fatal(err)
	}
	fs := t.TempDir()
	listening := make(chan [2]string, 1)
	background(t, func(ctx context.Context) error {
		return bootstrapper.Serve(ctx, bootstrapper.Options{
			Public: public,
			Config: bootstrapper.Config{WriteClusterState: clusterobjects.Write, CleanEtcd: etcd.Clean, Config: provision.Config{
				Image: &metadata.Image{
					StateDisk: metadata.StateDisk{Mode: metadata.DiskPlain, Path: "/state"},
					TPM:       metadata.TPM{Bank: m.Bank().String()},
					Kubeadm:   metadata.Kubeadm{CRISocket: "unix:///run/containerd/containerd.sock"},
					Listen:    metadata.Listen{Init: "127.0.0.1:0", Metrics: "127.0.0.1:0"},
					EKRoots:   ca.Roots(),
				},
				Metadata: func() (*metadata.Machine, error) {
					return &metadata.Machine{Name: "node1", Role: metadata.RoleControlPlane, Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.11")}}, nil
				},
				Journal: journal.Open(filepath.Join(fs, "journal")), Machine: machine.Real{}, Root: fs, TPM: m, Attester: m.Attester(attest.PurposeMachine),
				NewVerifier: func(roots []*x509.Certificate) (attest.Verifier, error) {
					return tpm2.NewVerifier(tpm2.VerifierConfig{Roots: func() []*x509.Certificate { return roots }, Now: time.Now})
				},
				Components: component.DefaultLimits, Timing: provision.DefaultTiming,
				Log: slog.New(&addresses{Handler: log.Handler(), found: listening}),
			}},
		})
	})
	select {
	case found := <-listening:
		return found[0], found[1]
	case <-time.After(30 * time.Second):
		t.Fatal("the machine does not listen")
	}
	return "", ""
}

// addresses reads the machine's listening addresses from the log.
type addresses struct {
	slog.Handler
	found chan [2]string
}

func (a *addresses) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &addresses{a.Handler.WithAttrs(attrs), a.found}
}

func (a *addresses) Handle(ctx context.Context, r slog.Record) error {
	if r.Message == "listening" {
		var found [2]string
		r.Attrs(func(attr slog.Attr) bool {
			switch attr.Key {
			case "init":
				found[0] = attr.Value.String()
			case "metrics":
				found[1] = attr.Value.String()
			}
			return true
		})
		a.found <- found
	}
	return a.Handler.Handle(ctx, r)
}

func startKMS(t *testing.T, ca *attesttest.CA, m *attesttest.Machine, log *slog.Logger) string {
	t.Helper()
	registry := prometheus.NewRegistry()
	metrics, err := rpc.NewMetrics(registry)
	if err != nil {
		t.Fatal(err)
	}
	policy := attesttest.ParsedPolicy(t, ca, []*attesttest.Machine{m}).For(attest.LockedTo(sha256.Sum256(nil)))
	records := audit.NewStream(t.Output())
	unattested, err := audit.NewUnattestedRefusals("kms", records, log, registry)
	if err != nil {
		t.Fatal(err)
	}
	limits, err := audit.NewRefusalLimits(unattested)
	if err != nil {
		t.Fatal(err)
	}
	svc, err := kms.New(kms.Config{
		Root:          kms.MountedRoot(t.TempDir()),
		Review:        func(context.Context, string) (kms.Workload, error) { return kms.Workload{}, nil },
		Node:          func(string) (kms.Enrolled, bool) { return kms.Enrolled{}, false },
		Appraiser:     policy,
		Audit:         records,
		RefusalLimits: limits,
		Log:           log,
		Metrics:       registry,
	})
	if err != nil {
		t.Fatal(err)
	}
	health := rpc.NewHealth()
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server, err := rpc.NewServer(rpc.Config{
		Listener: listener,
		ATLS: atls.ServerConfig{
			Attester:      m.Attester(attest.PurposeKMS),
			Verifier:      attesttest.Verifier(t, ca),
			Appraiser:     policy,
			ClientPurpose: attest.PurposeJoinservice,
			Generation:    func() int64 { return 0 },
		},
		Services: []rpc.Service{rpc.Serve[kmsv1connect.KeyServiceHandler](kmsv1connect.KeyServiceName, svc, kmsv1connect.NewKeyServiceHandler)},
		Health:   health, Metrics: metrics, Log: log,
	})
	if err != nil {
		t.Fatal(err)
	}
	health.SetAll(true)
	background(t, server.Run)
	return listener.Addr().String()
}

// background runs something until the test ends.
func background(t *testing.T, run func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

// TestCommandsOfTheManualWork executes what docs/operate.md and docs/debug.md show, against a running service.
func TestCommandsOfTheManualWork(t *testing.T) {
	w := start(t)
	w.env = append(w.env, "PATH="+programs(t)+string(os.PathListSeparator)+os.Getenv("PATH"))
	for _, b := range blocks(t) {
		t.Run(b.title, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			cmd := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", b.script)
			cmd.Env, cmd.Dir = w.env, w.dir
			var stderr strings.Builder
			cmd.Stderr = &stderr
			out, err := cmd.Output()
			if err != nil {
				t.Fatalf("%v\n%s%s", err, out, stderr.String())
			}
			switch b.kind {
			case "json":
				if got, want := decode(t, string(out)), decode(t, b.output); !reflect.DeepEqual(got, want) {
					t.Errorf("it printed\n%s\nthe manual says\n%s", out, b.output)
				}
			case "text":
				if got, want := strings.TrimSpace(string(out)), strings.TrimSpace(b.output); got != want {
					t.Errorf("it printed\n%s\nthe manual says\n%s", got, want)
				}
			}
		})
	}
}

func decode(t *testing.T, s string) any {
	t.Helper()
	var v any
	if err := json.Unmarshal([]byte(s), &v); err != nil {
		t.Fatalf("%v: %s", err, s)
	}
	return v
}
