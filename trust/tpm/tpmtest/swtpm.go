// Package tpmtest has the contract test that every TPM of Muster's tests and machines passes, and
// starts swtpm, a TPM 2.0 in a process.
package tpmtest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/muster-k8s/muster/trust/tpm"
)

// Emulator is a running swtpm whose endorsement keys have certificates.
type Emulator struct {
	// Socket is the path for [tpm.Open].
	Socket string
	// Lock is a lock file beside it.
	Lock string
	// Root issued the endorsement key certificates.
	Root *x509.Certificate

	t     testing.TB
	dir   string
	banks string
	bare  bool
	proc  *os.Process
	over  chan struct{} // closed when proc has ended
}

// An Option changes how an [Emulator] is made.
type Option func(*Emulator)

// Banks sets the active banks, such as "sha256,sha384". Without it: sha256.
func Banks(names string) Option { return func(e *Emulator) { e.banks = names } }

// Bare leaves the endorsement keys without certificates, for [Provision].
func Bare() Option { return func(e *Emulator) { e.bare = true } }

// SWTPM makes a TPM with swtpm_setup and a certificate authority of its own, starts it, and stops
// it when the test ends. It fails the test if swtpm is not installed.
func SWTPM(t testing.TB, opts ...Option) *Emulator {
	t.Helper()
	for _, tool := range []string{"swtpm", "swtpm_setup", "swtpm_localca"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Fatalf("%v: install the packages swtpm and swtpm-tools", err)
		}
	}
	// Not t.TempDir: its path includes the test's name, and a unix socket's path is limited to 107
	// bytes.
	dir, err := os.MkdirTemp("", "swtpm")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	e := &Emulator{t: t, dir: dir, banks: "sha256", Socket: filepath.Join(dir, "tpm.sock"), Lock: filepath.Join(dir, "tpm.lock")}
	for _, o := range opts {
		o(e)
	}
	e.setup()
	e.start()
	t.Cleanup(e.stop)
	return e
}

// Open returns the TPM.
func (e *Emulator) Open() *tpm.TPM { return tpm.Open(e.Socket, tpm.WithLock(e.Lock)) }

// Restart switches the TPM off without a TPM2_Shutdown and on again: PCRs start at zero and
// resetCount increases.
func (e *Emulator) Restart() {
	e.t.Helper()
	e.stop()
	e.start()
}

// Copy returns a TPM with a copy of this one's current state, switched on: what an attacker gets by
// copying a virtual machine. It stops when the test ends.
func (e *Emulator) Copy() *Emulator {
	e.t.Helper()
	dir, err := os.MkdirTemp("", "swtpm")
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.CopyFS(filepath.Join(dir, "state"), os.DirFS(filepath.Join(e.dir, "state"))); err != nil {
		e.t.Fatal(err)
	}
	c := &Emulator{t: e.t, dir: dir, banks: e.banks, Root: e.Root, Socket: filepath.Join(dir, "tpm.sock"), Lock: filepath.Join(dir, "tpm.lock")}
	c.start()
	e.t.Cleanup(c.stop)
	return c
}

func (e *Emulator) setup() {
	e.t.Helper()
	ca, state := filepath.Join(e.dir, "ca"), filepath.Join(e.dir, "state")
	for _, d := range []string{ca, state} {
		if err := os.Mkdir(d, 0o700); err != nil {
			e.t.Fatal(err)
		}
	}
	root, keyPEM := newRoot(e.t)
	e.Root = root
	write := func(name, content string) string {
		path := filepath.Join(ca, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			e.t.Fatal(err)
		}
		return path
	}
	signKey := write("signkey.pem", keyPEM)
	issuer := write("issuercert.pem", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: root.Raw})))
	localca := write("localca.conf", fmt.Sprintf("statedir = %s\nsigningkey = %s\nissuercert = %s\ncertserial = %s\n",
		ca, signKey, issuer, filepath.Join(ca, "serial")))
	options := write("localca.options", "--platform-manufacturer Muster\n--platform-version 1\n--platform-model test\n")
	tool, err := exec.LookPath("swtpm_localca")
	if err != nil {
		e.t.Fatal(err)
	}
	config := write("setup.conf", fmt.Sprintf("create_certs_tool = %s\ncreate_certs_tool_config = %s\ncreate_certs_tool_options = %s\n",
		tool, localca, options))
	args := []string{"--tpm2", "--tpmstate", state, "--pcr-banks", e.banks, "--config", config, "--overwrite"}
	if !e.bare {
		args = append(args, "--create-ek-cert")
	}
	cmd := exec.CommandContext(e.t.Context(), "swtpm_setup", args...)
	if out, err := cmd.CombinedOutput(); err != nil {
		e.t.Fatalf("swtpm_setup: %v\n%s", err, out)
	}
}

func (e *Emulator) start() {
	e.t.Helper()
	logPath := filepath.Join(e.dir, "swtpm.log")
	log, err := os.OpenFile(logPath, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		e.t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command("swtpm", "socket", "--tpm2", "--tpmstate", "dir="+filepath.Join(e.dir, "state"),
		"--server", "type=unixio,path="+e.Socket, "--ctrl", "type=unixio,path="+e.Socket+".ctrl",
		"--flags", "not-need-init,startup-clear")
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // a crashed test leaves nothing behind
	started, over := make(chan error), make(chan struct{})
	go func() {
		defer close(over)
		// The signal comes when the thread that started the process ends, so that thread stays.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // it was killed, so this is an error
		}
	}()
	if err := <-started; err != nil {
		e.t.Fatalf("swtpm: %v", err)
	}
	e.proc, e.over = cmd.Process, over
	deadline := time.NewTimer(5 * time.Minute)
	defer deadline.Stop()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		c, err := net.Dial("unix", e.Socket)
		if err == nil {
			c.Close()
			return
		}
		select {
		case <-tick.C:
		case <-deadline.C:
			out, _ := os.ReadFile(logPath)
			e.t.Fatalf("swtpm does not listen: %v\n%s", err, strings.TrimSpace(string(out)))
		}
	}
}

// stop ends the process, by its id.
func (e *Emulator) stop() {
	if e.proc == nil {
		return
	}
	// A process that ended by itself did not serve its test to the end.
	if err := e.proc.Kill(); err != nil {
		e.t.Errorf("end swtpm: %v", err)
	}
	<-e.over
	e.proc = nil
	for _, path := range []string{e.Socket, e.Socket + ".ctrl"} {
		os.Remove(path)
	}
}

// newRoot makes a certificate authority; the string is its key in PEM.
func newRoot(t testing.TB) (*x509.Certificate, string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: "Muster test TPM CA"},
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().Add(24 * time.Hour),
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign,
		SubjectKeyId:          []byte{1, 2, 3, 4},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return cert, string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8}))
}
