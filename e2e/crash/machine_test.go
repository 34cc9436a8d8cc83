package crash

import (
	"bytes"
	"context"
	"crypto"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/gen/muster/init/v1/initv1connect"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/machine/machinetest"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
	"github.com/muster-k8s/muster/trust/tpm"
	"github.com/muster-k8s/muster/trust/tpm/tpmtest"
)

// patience limits the wait for something that should happen soon, on a busy machine.
const patience = 5 * time.Minute

var kubeadmBinary = []byte("#!kubeadm")

// bench is a TPM, a mirror and an API server that the machines use one after the other.
type bench struct {
	t      *testing.T
	tpm    *tpmtest.Emulator
	api    *machinetest.APIServer
	mirror string
}

func newBench(t *testing.T) *bench {
	t.Helper()
	mirror := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(kubeadmBinary) }))
	t.Cleanup(mirror.Close)
	return &bench{t: t, tpm: tpmtest.SWTPM(t), api: machinetest.NewAPIServer(t), mirror: mirror.URL}
}

// host is a machine: its disk and TPM, which outlive its bootstrapper processes.
type host struct {
	*bench
	plan  plan
	meta  meta
	lives int
	// heldBefore is how often processes before this one were held, by name.
	heldBefore map[string]int
}

// meta is the content of /etc/muster/metadata.yaml.
type meta struct {
	APIVersion     string   `json:"apiVersion"`
	Kind           string   `json:"kind"`
	Name           string   `json:"name"`
	Role           string   `json:"role"`
	Addresses      []string `json:"addresses"`
	InitSecretHash string   `json:"initSecretHash,omitempty"`
	JoinEndpoints  []string `json:"joinEndpoints,omitempty"`
}

var initSecret = bytes.Repeat([]byte{0xEE}, 32)

// newHost returns a machine that was just installed and booted: PCR 15 is zero. ownerKey is
// the owner's public key in its image, nil for none; change may be nil.
func (b *bench) newHost(t *testing.T, m meta, ownerKey []byte) *host {
	t.Helper()
	return b.newHostIn(t, t.TempDir(), m, ownerKey, map[string]string{"mode": "plain", "path": "/var/lib/muster/state"})
}

// newHostIn is newHost for a machine whose files are in dir, with that state disk.
func (b *bench) newHostIn(t *testing.T, dir string, m meta, ownerKey []byte, stateDisk map[string]string) *host {
	t.Helper()
	b.tpm.Restart()
	b.api.Forget(secretPath)
	b.api.Forget(configPath)
	h := &host{bench: b, plan: plan{Root: filepath.Join(dir, "root"), TPMLock: b.tpm.Lock, Linger: 50 * time.Millisecond}}
	h.t = t
	m.APIVersion, m.Kind, m.Addresses = "muster.dev/v1alpha1", "MachineMetadata", []string{"192.168.77.11"}
	write := func(name string, content any) {
		text, err := json.Marshal(content) // JSON is YAML
		if s, ok := content.(string); ok {
			text, err = []byte(s), nil
		}
		if err = errors.Join(err, os.WriteFile(filepath.Join(dir, name), text, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	image := map[string]any{
		"apiVersion": "muster.dev/v1alpha1", "kind": "ImageConfiguration",
		"stateDisk": stateDisk,
		"tpm":       map[string]string{"device": b.tpm.Socket, "eventLog": "/nonexistent", "bank": "sha256"},
		"listen":    map[string]string{"init": "127.0.0.1:0", "metrics": "127.0.0.1:0", "recover": "127.0.0.1:0"},
		"ekRoots":   string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: b.tpm.Root.Raw})),
		"kubeadm":   map[string]string{"criSocket": "unix:///run/containerd/containerd.sock"},
	}
	if ownerKey != nil {
		image["ownerKeys"] = []string{base64.StdEncoding.EncodeToString(ownerKey)}
	} else {
		image["insecure"] = map[string]bool{"noOwnerKey": true}
	}
	write("image.yaml", image)
	h.meta = m
	write("metadata.yaml", m)
	write("admin.conf", string(b.api.Kubeconfig()))
	if err := os.Mkdir(h.plan.Root, 0o700); err != nil {
		t.Fatal(err)
	}
	return h
}

// setEndpoints changes the joinEndpoints in the machine's metadata, which it reads for each attempt.
func (h *host) setEndpoints(joinEndpoints ...string) {
	h.t.Helper()
	h.meta.JoinEndpoints = joinEndpoints
	text, err := json.Marshal(h.meta)
	if err == nil {
		err = machine.WriteFile(h.plan.beside("metadata.yaml"), text, 0o600, 0o700)
	}
	if err != nil {
		h.t.Fatal(err)
	}
}

func first(joinEndpoints ...string) meta {
	hash := sha256.Sum256(initSecret)
	return meta{Name: "node1", Role: "control-plane", InitSecretHash: hex.EncodeToString(hash[:]), JoinEndpoints: joinEndpoints}
}

const (
	secretPath = "/api/v1/namespaces/muster-system/secrets/muster-kms-root"
	configPath = "/api/v1/namespaces/muster-system/configmaps/muster-cluster"
)

// life is one bootstrapper process of a machine.
type life struct {
	h    *host
	cmd  *exec.Cmd
	log  *logBuffer
	over chan struct{} // closed when the process is gone
	err  error         // of Wait; valid once over is closed
}

// logBuffer keeps the output of a process.
type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// start starts the machine's bootstrapper, which dies at the killAt-th effect of this life; negative: it is not
// killed.
func (h *host) start(killAt int) *life {
	h.t.Helper()
	p := h.plan
	p.KillAt = killAt
	text, err := json.Marshal(p)
	if err != nil {
		h.t.Fatal(err)
	}
	l := &life{h: h, log: &logBuffer{}, over: make(chan struct{})}
	l.cmd = exec.Command(os.Args[0]) // it ends with the test: see below
	if p.Programs != "" {
		l.cmd = withPrograms(p.Programs)
	}
	l.cmd.Env = append(os.Environ(), planVariable+"="+string(text))
	l.cmd.Stderr = l.log
	if err := start(l.cmd, func(err error) {
		l.err = err
		close(l.over)
	}); err != nil {
		h.t.Fatal(err)
	}
	h.lives++
	h.t.Cleanup(l.kill)
	return l
}

// start starts a process that ends with the test's, also if that is killed. over receives the result of its Wait.
func start(cmd *exec.Cmd, over func(error)) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	go func() {
		// The signal is sent when the thread ends that started the process, so that thread stays.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			over(cmd.Wait())
		}
	}()
	return <-started
}

// kill ends the process at once, if it still runs, and waits for its end.
func (l *life) kill() {
	_ = l.cmd.Process.Kill()
	<-l.over
}

// killed reports whether the process was ended by SIGKILL. One that still runs was not.
func (l *life) killed() bool {
	select {
	case <-l.over:
	default:
		return false
	}
	s, ok := l.cmd.ProcessState.Sys().(syscall.WaitStatus)
	return ok && s.Signaled() && s.Signal() == syscall.SIGKILL
}

// end waits for the process to end by itself.
func (l *life) end() error {
	select {
	case <-l.over:
		return l.err
	case <-time.After(patience):
		return errors.New("the bootstrapper does not end")
	}
}

// attributes returns those of the first line of the log with that message; nil: there is none.
func (l *life) attributes(msg string) map[string]any {
	for line := range strings.Lines(l.log.String()) {
		var a map[string]any
		if json.Unmarshal([]byte(line), &a) == nil && a["msg"] == msg {
			return a
		}
	}
	return nil
}

// addr waits for the address of the init server; empty: the process ended before.
func (l *life) addr(t *testing.T) string {
	t.Helper()
	var found string
	eventually(t, "the bootstrapper listens", func() bool {
		if a := l.attributes("listening"); a != nil {
			found, _ = a["init"].(string)
			return true
		}
		select {
		case <-l.over:
			return true
		default:
			return false
		}
	})
	return found
}

// eventually waits for a condition.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.After(patience)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("not within %s: %s", patience, what)
		}
	}
}

func (h *host) record() journal.Record {
	h.t.Helper()
	r, err := journal.Open(filepath.Join(h.plan.Root, journalPath)).Load()
	if err != nil {
		h.t.Fatal(err)
	}
	return r
}

// effects returns the names of all effects so far, over all lives.
func (h *host) effects() []string {
	b, err := os.ReadFile(h.plan.beside("effects"))
	if err != nil {
		return nil
	}
	return strings.Split(strings.TrimSpace(string(b)), "\n")
}

func (h *host) count(effect string) int {
	return len(slices.DeleteFunc(h.effects(), func(e string) bool { return e != effect }))
}

// reboot clears PCRs and what is in memory, and so ends all units.
func (h *host) reboot() {
	h.t.Helper()
	h.tpm.Restart()
	if err := os.RemoveAll(filepath.Join(h.plan.Root, "run")); err != nil {
		h.t.Fatal(err)
	}
}

// hold makes the machine's next process wait at each of the names the first time.
func (h *host) hold(names ...string) {
	h.t.Helper()
	h.plan.Hold, h.heldBefore = names, map[string]int{}
	for _, name := range names {
		h.heldBefore[name] = h.count(heldAt + name)
		if err := syscall.Mkfifo(h.plan.gate(name), 0o600); err != nil && !errors.Is(err, fs.ErrExist) {
			h.t.Fatal(err)
		}
	}
}

// held waits until the machine's process waits at name.
func (h *host) held(name string) {
	h.t.Helper()
	eventually(h.t, "the bootstrapper is held: "+name, func() bool { return h.count(heldAt+name) > h.heldBefore[name] })
}

// release lets the process that is held at name continue.
func (h *host) release(name string) {
	h.t.Helper()
	gate, err := os.OpenFile(h.plan.gate(name), os.O_WRONLY, 0)
	if err == nil {
		err = gate.Close()
	}
	if err != nil {
		h.t.Fatal(err)
	}
}

// lockValue is PCR 15.
func (h *host) lockValue() []byte {
	h.t.Helper()
	v, err := h.tpm.Open().ReadPCR(h.t.Context(), tpm.SHA256, attest.LockPCR)
	if err != nil {
		h.t.Fatal(err)
	}
	return v
}

// isNode returns an error if the machine is not a node of the cluster.
func (h *host) isNode(kind journal.Kind, clusterID [32]byte) error {
	h.t.Helper()
	rec := h.record()
	if rec.Step != journal.StepDone || rec.Kind != kind || !bytes.Equal(rec.ClusterID, clusterID[:]) {
		return fmt.Errorf("the journal says %s by %s to cluster %x", rec.Step, rec.Kind, rec.ClusterID)
	}
	if !bytes.Equal(h.lockValue(), attest.LockValue(crypto.SHA256, clusterID)) {
		return errors.New("PCR 15 is not the cluster's")
	}
	for _, u := range []string{machine.UnitAttester, machine.UnitKubelet} {
		if _, err := os.Stat(filepath.Join(h.plan.Root, unitsDir, u)); err != nil {
			return fmt.Errorf("%s was not started", u)
		}
	}
	left, err := filepath.Glob(filepath.Join(h.plan.Root, journalPath+"?*"))
	if err != nil || len(left) > 0 {
		return fmt.Errorf("left beside the journal: %v, %w", left, err)
	}
	if kind == journal.KindInit && h.api.Object(secretPath) == nil {
		return errors.New("the cluster has no root secret")
	}
	return nil
}

// owners are the callers of init, and the cluster that follows from the request.
func request(mirror string) (*initv1.InitRequest, [32]byte) {
	sum := sha256.Sum256(kubeadmBinary)
	req := &initv1.InitRequest{
		IdempotencyKey: bytes.Repeat([]byte{1}, 16), InitSecret: initSecret, RootSecret: bytes.Repeat([]byte{0xAB}, 32), Salt: bytes.Repeat([]byte{0xCD}, 32), MeasurementSalt: bytes.Repeat([]byte{0xDE}, 32), DiskSalt: bytes.Repeat([]byte{0xDF}, 32),
		ClusterName: "demo", KubernetesVersion: "1.36.1", ControlPlaneEndpoint: "192.168.77.1:6443", PodCidrs: []string{"10.244.0.0/16"}, ServiceCidrs: []string{"10.96.0.0/16"},
		Components: []*initv1.Component{{Url: mirror + "/kubeadm", Sha256: sum[:], Path: "/usr/local/bin/kubeadm", Mode: 0o755}}, Images: machinetest.Images().References(),
	}
	root, err := keys.ParseRoot(keys.FirstVersion, req.GetRootSecret(), req.GetSalt())
	if err != nil {
		panic(err) // constants
	}
	return req, root.ClusterID([32]byte(req.GetMeasurementSalt()))
}

// inState accepts genuine machines whose node lock is in one of the states. It does not check their measurements.
type inState []attest.Lock

func (s inState) Appraise(_ context.Context, c attest.Claims) (attest.Appraisal, error) {
	return attest.Appraisal{}, attest.CheckLock(c, s...)
}

// callInit makes one call of Init with a connection of its own and follows it to its end.
func (h *host) callInit(ctx context.Context, addr string, req *initv1.InitRequest, clusterID [32]byte) (*initv1.InitResult, error) {
	verifier, err := verifierOf([]*x509.Certificate{h.tpm.Root})
	if err != nil {
		return nil, err
	}
	transport, err := atls.NewTransport(atls.ClientConfig{
		Attester: atls.NoAttester, Verifier: verifier, Appraiser: inState{attest.Unlocked(), attest.LockedTo(clusterID)}, PeerPurpose: attest.PurposeMachine,
	})
	if err != nil {
		return nil, err
	}
	defer func() { _ = transport.Close() }()
	stream, err := initv1connect.NewInitServiceClient(rpc.HTTPClient(transport), "https://"+addr, rpc.ClientOptions()...).Init(ctx, req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = stream.Close() }()
	for stream.Receive() {
		if r := stream.Msg().GetResult(); r != nil {
			return r, nil
		}
	}
	if err := stream.Err(); err != nil {
		return nil, err
	}
	return nil, errors.New("the stream ended without a result")
}

// insists repeats a call whose connection was broken or took too long, as on a busy computer, while the process lives.
func (l *life) insists(ctx context.Context, call func() error) error {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		err := call()
		if r := rpc.ReasonFrom(err); r != attestv1.Reason_REASON_UNSPECIFIED && r != attestv1.Reason_REASON_DEADLINE {
			return err
		}
		select {
		case <-tick.C:
		case <-l.over:
			return err
		case <-ctx.Done():
			return err
		}
	}
}

// callInit is the host's callInit to this process.
func (l *life) callInit(ctx context.Context, addr string, req *initv1.InitRequest, clusterID [32]byte) (result *initv1.InitResult, err error) {
	err = l.insists(ctx, func() error {
		result, err = l.h.callInit(ctx, addr, req, clusterID)
		return err
	})
	return result, err
}

func reasonOf(err error) string { return attest.ReasonName(rpc.ReasonFrom(err)) }
