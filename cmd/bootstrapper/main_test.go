package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/gen/muster/init/v1/initv1connect"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/internal/service/attester"
	"github.com/muster-k8s/muster/services/bootstrapper/machine/machinetest"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
	"github.com/muster-k8s/muster/trust/tpm/tpmtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// process is a run of the program; a test can wait for lines of its log.
type process struct {
	t    *testing.T
	mu   sync.Mutex
	log  bytes.Buffer
	stop context.CancelFunc
	done chan error
}

func (p *process) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log.Write(b)
}

func start(t *testing.T, args ...string) *process {
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	p := &process{t: t, stop: cancel, done: make(chan error, 1)}
	go func() { p.done <- run(ctx, args, io.Discard, p) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-p.done:
			if err != nil && !errors.Is(err, context.Canceled) {
				t.Errorf("%v: %v", args, err)
			}
		case <-time.After(5 * time.Minute):
			t.Errorf("%v does not end", args)
		}
	})
	return p
}

// line waits for a line of the log with that message, and returns its attributes.
func (p *process) line(msg string) map[string]any {
	p.t.Helper()
	deadline := time.After(5 * time.Minute)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	var ended error
	for over := false; ; {
		p.mu.Lock()
		text := p.log.String()
		p.mu.Unlock()
		for l := range strings.Lines(text) {
			var attrs map[string]any
			if json.Unmarshal([]byte(l), &attrs) == nil && attrs["msg"] == msg {
				return attrs
			}
		}
		if over {
			p.t.Fatalf("it ended with %v\n%s", ended, text)
		}
		select {
		case <-tick.C:
		case ended = <-p.done: // what it wrote last is read once more
			p.done <- ended
			over = true
		case <-deadline:
			p.t.Fatalf("no line %q in\n%s", msg, text)
		}
	}
}

func write(t *testing.T, path, content string) string {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// imageFile writes a machine's configuration with a real TPM, in an emulator.
func imageFile(t *testing.T, dir string, e *tpmtest.Emulator) string {
	t.Helper()
	return write(t, filepath.Join(dir, "image.yaml"), fmt.Sprintf(`apiVersion: muster.dev/v1alpha1
kind: ImageConfiguration
stateDisk: {mode: plain, path: %s/state}
tpm: {device: %s, eventLog: %s/none}
insecure: {noOwnerKey: true}
listen: {init: "127.0.0.1:0", metrics: "127.0.0.1:0", attesterMetrics: "127.0.0.1:0"}
`, dir, e.Socket, dir))
}

// shows waits until a machine's console has the text.
func shows(t *testing.T, screen, want string) {
	t.Helper()
	deadline := time.After(5 * time.Minute)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		b, err := os.ReadFile(screen)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(b), want) {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("the console shows %q, want %q", b, want)
		}
	}
}

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

func realVerifier(t *testing.T, e *tpmtest.Emulator) *tpm2.Verifier {
	t.Helper()
	v, err := tpm2.NewVerifier(tpm2.VerifierConfig{Roots: func() []*x509.Certificate { return []*x509.Certificate{e.Root} }, Now: time.Now})
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// unlocked accepts a genuine machine that belongs to no cluster yet.
type unlocked struct{}

func (unlocked) Appraise(_ context.Context, c attest.Claims) (attest.Appraisal, error) {
	return attest.Appraisal{}, attest.CheckLock(c, attest.Unlocked())
}

func TestRunServesInitProbesAndMetricsWithARealTPM(t *testing.T) {
	dir, e := t.TempDir(), tpmtest.SWTPM(t)
	meta := write(t, filepath.Join(dir, "metadata.yaml"), fmt.Sprintf("apiVersion: muster.dev/v1alpha1\nkind: MachineMetadata\nname: node1\nrole: control-plane\naddresses: [192.168.77.11]\ninitSecretHash: %x\n", sha256.Sum256(bytes.Repeat([]byte{1}, 32))))
	screen := write(t, filepath.Join(dir, "console"), "")
	p := start(t, "run", "--image", imageFile(t, dir, e), "--metadata", meta, "--journal", filepath.Join(dir, "journal"), "--tpm-lock", e.Lock, "--console", screen)
	at := p.line("listening")

	shows(t, screen, "muster: waiting to join a cluster: the metadata name no joinservice (joinEndpoints); `muster init` can make it the first of a new one; next try in 1 s\r\n")
	transport, err := atls.NewTransport(atls.ClientConfig{Attester: atls.NoAttester, Verifier: realVerifier(t, e), Appraiser: unlocked{}, PeerPurpose: attest.PurposeMachine})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = transport.Close() }()
	client := initv1connect.NewInitServiceClient(rpc.HTTPClient(transport), fmt.Sprint("https://", at["init"]), rpc.ClientOptions()...)
	b32 := bytes.Repeat([]byte{9}, 32)
	stream, err := client.Init(t.Context(), &initv1.InitRequest{
		IdempotencyKey: b32[:16], InitSecret: b32, RootSecret: b32, Salt: b32, MeasurementSalt: b32, DiskSalt: b32, ClusterName: "demo", KubernetesVersion: "1.36.1",
		ControlPlaneEndpoint: "192.168.77.1:6443", PodCidrs: []string{"10.244.0.0/16"}, ServiceCidrs: []string{"10.96.0.0/16"}, Images: machinetest.Images().References(),
	})
	if err != nil {
		t.Fatal(err)
	}
	for stream.Receive() {
		t.Errorf("got %v", stream.Msg())
	}
	if err := stream.Err(); rpc.ReasonFrom(err) != attestv1.Reason_REASON_INIT_SECRET_INVALID {
		t.Errorf("a wrong secret: %v", err)
	}
	_ = stream.Close()
	base := fmt.Sprint("http://", at["metrics"])
	if code, body := get(t, base+"/readyz"); code != http.StatusOK {
		t.Errorf("readyz: %d %s", code, body)
	}
	_, body := get(t, base+"/metrics")
	for _, want := range []string{`muster_init_attempts_total{reason="INIT_SECRET_INVALID"} 1`, "muster_node_locked 0", `muster_bootstrap_phase{phase="waiting"} 1`, `muster_quote_seconds_count{purpose="machine"} 1`, "muster_rpc_requests_total", `muster_insecure_config{reason="owner_key_unknown"} 1`} {
		if !strings.Contains(body, want) {
			t.Errorf("no %s in the metrics", want)
		}
	}
}

func TestAttesterServesEvidenceOfARealTPM(t *testing.T) {
	dir, e := t.TempDir(), tpmtest.SWTPM(t)
	sockets := filepath.Join(filepath.Dir(e.Socket), "attest") // a unix socket's path is short
	p := start(t, "attester", "--image", imageFile(t, dir, e), "--dir", sockets, "--tpm-lock", e.Lock)
	at := p.line("attester is running")
	p.line("own evidence can be made")
	c, err := attester.New(attester.Socket(sockets, attest.PurposeKMS))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := attesttest.Claims(t.Context(), c, realVerifier(t, e), attest.PurposeKMS, attest.Binding{1}); err != nil {
		t.Error(err)
	}
	if code, body := get(t, fmt.Sprint("http://", at["metrics"], "/readyz")); code != http.StatusOK {
		t.Errorf("readyz: %d %s", code, body)
	}
}

func TestTheCommandLineIsRefused(t *testing.T) {
	for name, tt := range map[string]struct {
		args []string
		want string
	}{
		"an unknown command":      {[]string{"start"}, "no command"},
		"a stray argument":        {[]string{"run", "now"}, "unexpected argument"},
		"an image that is absent": {[]string{"run", "--image", "/nonexistent/image.yaml"}, "/nonexistent/image.yaml"},
	} {
		if err := run(t.Context(), tt.args, io.Discard, io.Discard); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := run(t.Context(), nil, io.Discard, io.Discard); !errors.Is(err, flag.ErrHelp) {
		t.Error(err)
	}
	var out bytes.Buffer
	if err := run(t.Context(), []string{"version"}, &out, io.Discard); err != nil || !strings.HasPrefix(out.String(), "bootstrapper ") {
		t.Errorf("%q, %v", out.String(), err)
	}
}
