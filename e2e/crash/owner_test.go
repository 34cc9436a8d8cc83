package crash

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	mathrand "math/rand/v2"
	"net"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/machine/machinetest"
)

// wire forwards connections, and cuts some as configured: after a number of bytes or after a time, at any point of
// the transmission.
type wire struct {
	listener net.Listener
	target   atomic.Pointer[string] // nil: there is no server
	cuts     atomic.Int64           // connections that it has cut

	mu   sync.Mutex
	plan []cut
	work sync.WaitGroup
}

type cut struct {
	bytes int64         // 0: not by bytes
	after time.Duration // 0: not by time
}

func newWire(t *testing.T) *wire {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{listener: l}
	w.work.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			w.work.Go(func() { w.forward(c) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		w.work.Wait()
	})
	return w
}

func (w *wire) addr() string { return w.listener.Addr().String() }

// next returns what happens to the next connection.
func (w *wire) next() (cut, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.plan) == 0 {
		return cut{}, false
	}
	c := w.plan[0]
	w.plan = w.plan[1:]
	return c, true
}

func (w *wire) forward(from net.Conn) {
	defer from.Close()
	target := w.target.Load()
	if target == nil {
		return
	}
	to, err := net.Dial("tcp", *target)
	if err != nil {
		return
	}
	defer to.Close()
	both := func() { _ = from.Close(); _ = to.Close() }
	limit, cutting := w.next()
	var left atomic.Int64
	left.Store(1 << 40)
	if cutting && limit.bytes > 0 {
		left.Store(limit.bytes)
	}
	if cutting && limit.after > 0 {
		timer := time.AfterFunc(limit.after, func() { w.cuts.Add(1); both() })
		defer timer.Stop()
	}
	var done sync.WaitGroup
	for _, way := range [][2]net.Conn{{from, to}, {to, from}} {
		done.Go(func() {
			defer both()
			buf := make([]byte, 512)
			for {
				n, err := way[0].Read(buf)
				if over := left.Add(-int64(n)); over < 0 {
					w.cuts.Add(1)
					return
				}
				if _, werr := way[1].Write(buf[:n]); err != nil || werr != nil {
					return
				}
			}
		})
	}
	done.Wait()
}

// seat is an owner's workstation: a folder with policy, init secret and lists, and the program muster.
type seat struct {
	t      *testing.T
	dir    string
	muster string
	apiURL string // HOST:PORT
}

// newSeat prepares the owner of a machine, and gives the machine a kubeconfig that an owner accepts.
func newSeat(t *testing.T, h *host) *seat {
	t.Helper()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	api := httptest.NewTLSServer(h.api)
	t.Cleanup(api.Close)
	s := &seat{t: t, dir: t.TempDir(), muster: filepath.Join(root, "bin", "muster"), apiURL: api.Listener.Addr().String()}

	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	inPEM := func(kind string, b []byte) []byte {
		return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: b})
	}
	c := clientcmdapi.NewConfig()
	c.Clusters["c"] = &clientcmdapi.Cluster{Server: api.URL, CertificateAuthorityData: inPEM("CERTIFICATE", api.Certificate().Raw)}
	c.AuthInfos["u"] = &clientcmdapi.AuthInfo{ClientCertificateData: inPEM("CERTIFICATE", der), ClientKeyData: inPEM("EC PRIVATE KEY", keyDER)}
	c.Contexts["x"], c.CurrentContext = &clientcmdapi.Context{Cluster: "c", AuthInfo: "u"}, "x"
	conf, err := clientcmd.Write(*c)
	if err != nil {
		t.Fatal(err)
	}
	zero := strings.Repeat("0", 64)
	var pcrs []map[string]any
	for _, i := range []int{4, 8, 9, 11, 12, 13, 14} {
		pcrs = append(pcrs, map[string]any{"index": i, "value": zero})
	}
	req, _ := request(h.mirror)
	for path, content := range map[string]any{
		h.plan.beside("admin.conf"): string(conf),
		s.file("secret.hex"):        hex.EncodeToString(initSecret) + "\n",
		s.file("policy.yaml"): map[string]any{
			"version": 2, "serial": 1, "roles": []string{"worker", "control-plane"}, "nodeCidrs": []string{"192.168.77.0/24"},
			"insecure": map[string]bool{"allowPlainState": true, "anyFirmware": true},
			"tpm2": map[string]any{
				"bank": "sha256", "images": []map[string]any{{"name": "nothing", "pcrs": pcrs}},
				"ekRoots": []map[string]any{{"operator": true, "key": "ecc-p384", "pem": string(inPEM("CERTIFICATE", h.tpm.Root.Raw))}},
			},
		},
		s.file("components.yaml"): map[string]any{
			"apiVersion": "muster.dev/v1alpha1", "kind": "ComponentList",
			"components": []map[string]any{{"url": h.mirror + "/kubeadm", "sha256": hex.EncodeToString(req.GetComponents()[0].GetSha256()), "path": "/usr/local/bin/kubeadm", "mode": "0755"}},
			"images":     machinetest.Images().References(),
		},
	} {
		text, err := json.Marshal(content)
		if c, ok := content.(string); ok {
			text, err = []byte(c), nil
		}
		if err = errors.Join(err, os.WriteFile(path, text, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

func (s *seat) file(name string) string { return filepath.Join(s.dir, name) }

// program is a `muster init` that runs.
type program struct {
	cmd  *exec.Cmd
	out  *logBuffer
	over chan struct{}
	err  error
}

// init starts `muster init` with an owner's folder.
func (s *seat) init(folder, endpoint string) *program {
	s.t.Helper()
	digest := "@sha256:" + strings.Repeat("0", 64)
	p := &program{out: &logBuffer{}, over: make(chan struct{})}
	p.cmd = exec.Command(s.muster, "init", "--directory", s.file(folder), "--name", "demo", "--endpoint", endpoint, "--init-secret-file", "secret.hex", "--policy", "policy.yaml",
		"--control-plane-endpoint", s.apiURL, "--components", "components.yaml", "--joinservice-image", "example.com/joinservice"+digest, "--kms-image", "example.com/kms"+digest)
	p.cmd.Dir, p.cmd.Stdout, p.cmd.Stderr = s.dir, p.out, p.out
	if err := start(p.cmd, func(err error) {
		p.err = err
		close(p.over)
	}); err != nil {
		s.t.Fatalf("%v: make build makes it", err)
	}
	s.t.Cleanup(p.kill)
	return p
}

func (p *program) kill() {
	_ = p.cmd.Process.Kill()
	<-p.over
}

func (p *program) ended() bool {
	select {
	case <-p.over:
		return true
	default:
		return false
	}
}

// stage is the stage in the owner's folder.
func (s *seat) stage(folder string) string {
	var c struct{ Stage, ClusterID string }
	b, err := os.ReadFile(filepath.Join(s.file(folder), "cluster.json"))
	if err != nil || json.Unmarshal(b, &c) != nil {
		return ""
	}
	return c.Stage
}

// has waits until a folder has the first machine's result.
func (s *seat) has(folder string, p *program) {
	s.t.Helper()
	eventually(s.t, folder+" has the cluster's kubeconfig", func() bool {
		// Asked first: the program may reach the stage and end between two questions.
		over := p.ended()
		if s.stage(folder) == "initialized" {
			return true // the following steps need a whole cluster, and are not tested here
		}
		if over {
			s.t.Fatalf("muster init ended with %v\n%s", p.err, p.out)
		}
		return false
	})
}

func (s *seat) adminConf(folder string) []byte {
	s.t.Helper()
	b, err := os.ReadFile(filepath.Join(s.file(folder), "admin.conf"))
	if err != nil {
		s.t.Fatal(err)
	}
	return b
}

// B3: the connection of an owner who calls init is cut, at random bytes and times, and the machine's bootstrapper is
// killed in every third run. The owner's program continues by itself; kubeadm runs once, or again after a kill during
// its run, and the owner has the machine's result.
func TestAnInitWhoseConnectionIsCutIsResumed(t *testing.T) {
	t.Parallel()
	chance := seeded(t)
	b := newBench(t)
	cuts, kills := int64(0), 0
	for i := range runs(4, 40) {
		h := b.newHost(t, first(), nil)
		h.plan.Linger = patience // the owner's program comes back
		s, w := newSeat(t, h), newWire(t)
		w.plan = cutsOf(chance)
		cli := s.init("muster-demo", w.addr())
		l := h.start(-1)
		addr := l.addr(t)
		w.target.Store(&addr)
		if i%3 == 2 {
			timer := time.AfterFunc(within(chance, 500*time.Millisecond), l.kill)
			<-time.After(500 * time.Millisecond)
			timer.Stop()
			if dead(l) && l.killed() {
				kills++
				l = h.start(-1)
				addr := l.addr(t)
				w.target.Store(&addr)
			}
		}
		s.has("muster-demo", cli)
		conf, err := os.ReadFile(filepath.Join(h.plan.Root, "/etc/kubernetes/admin.conf"))
		if err != nil || !bytes.Equal(conf, s.adminConf("muster-demo")) {
			t.Errorf("run %d: the owner's kubeconfig is not the machine's: %v", i, err)
		}
		rec := h.record()
		if rec.Kind != journal.KindInit || rec.Step != journal.StepDone {
			t.Errorf("run %d: the journal says %s by %s", i, rec.Step, rec.Kind)
		}
		if n := h.count("kubeadm init begins"); n != 1 && (i%3 != 2 || n != 2) {
			t.Errorf("run %d: kubeadm init ran %d times", i, n)
		}
		cuts += w.cuts.Load()
		cli.kill()
		l.kill()
		if t.Failed() {
			t.Fatalf("run %d\n%s\n%s", i, cli.out, l.log)
		}
	}
	t.Logf("%d connections were cut, %d bootstrappers killed", cuts, kills)
	if cuts == 0 {
		t.Error("no connection was cut")
	}
}

// cutsOf returns what happens to the first connections: one to three are cut, the first for sure, since an exchange
// takes about 6 KiB however fast it is.
func cutsOf(chance *mathrand.Rand) []cut {
	var out []cut
	for i := range 1 + chance.IntN(3) {
		switch {
		case i == 0:
			out = append(out, cut{bytes: 1 + chance.Int64N(4<<10)})
		case chance.IntN(2) == 0:
			out = append(out, cut{bytes: 1 + chance.Int64N(16<<10)})
		default:
			out = append(out, cut{after: 1 + within(chance, 300*time.Millisecond)})
		}
	}
	return out
}

// Two owners' programs call at once: with copies of one folder both get the same cluster and kubeadm runs once; with
// another folder, so other secrets and another idempotency key, one of them gets it, and the other gets the error
// that the machine was taken. A folder in use is not used twice.
func TestInitCalledTwice(t *testing.T) {
	t.Parallel()
	chance := seeded(t)
	b := newBench(t)
	for _, same := range []bool{true, false} {
		t.Run(fmt.Sprintf("the same folder %v", same), func(t *testing.T) {
			h := b.newHost(t, first(), nil)
			h.plan.Linger = patience
			s, w := newSeat(t, h), newWire(t)
			var two *program
			one := s.init("one", w.addr()) // there is no server yet
			eventually(t, "the owner's folder is made", func() bool { return s.stage("one") == "prepared" })
			if same {
				again := s.init("one", w.addr())
				<-again.over
				if again.err == nil || !strings.Contains(again.out.String(), "in use by another muster") {
					t.Errorf("the folder in use was used: %v\n%s", again.err, again.out)
				}
			} else {
				two = s.init("two", w.addr())
				eventually(t, "the other owner's folder is made", func() bool { return s.stage("two") == "prepared" })
			}
			l := h.start(-1)
			addr := l.addr(t)
			<-time.After(within(chance, 300*time.Millisecond))
			w.target.Store(&addr)
			if same {
				eventually(t, "the machine was asked", func() bool { return s.stage("one") != "prepared" })
				one.kill()
				if out, err := exec.CommandContext(t.Context(), "cp", "-a", s.file("one"), s.file("two")).CombinedOutput(); err != nil {
					t.Fatalf("%v: %s", err, out)
				}
				t.Logf("copied at the stage %q", s.stage("two"))
				one, two = s.init("one", w.addr()), s.init("two", w.addr())
				s.has("one", one)
				s.has("two", two)
				if !bytes.Equal(s.adminConf("one"), s.adminConf("two")) {
					t.Error("two clusters")
				}
			} else {
				s.oneIsRefused(one, two)
			}
			if n := h.count("kubeadm init begins"); n != 1 {
				t.Errorf("kubeadm init ran %d times", n)
			}
			if t.Failed() {
				t.Logf("%s\n%s\n%s", one.out, two.out, l.log)
			}
			one.kill()
			two.kill()
			l.kill()
		})
	}
}

// oneIsRefused waits until one of two owners has the machine and the other was refused.
func (s *seat) oneIsRefused(one, two *program) {
	s.t.Helper()
	var refused *program
	eventually(s.t, "one is refused", func() bool {
		for _, p := range []*program{one, two} {
			// An owner who comes after the lock sees that in PCR 15, before anything is sent.
			if text := p.out.String(); strings.Contains(text, "Reason: NODE_LOCKED") || strings.Contains(text, "Reason: LOCK_FOREIGN") {
				refused = p
				return true
			}
		}
		return false
	})
	<-refused.over
	folder, winner := "one", one
	if refused == one {
		folder, winner = "two", two
	}
	text := refused.out.String()
	if refused.err == nil || !strings.Contains(text, "What to do") {
		s.t.Errorf("refused with %v\n%s", refused.err, text)
	}
	s.has(folder, winner)
}
