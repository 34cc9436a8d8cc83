// Package lab_test brings up the lab's machines and makes a cluster of them by hand, with kubeadm and without Muster:
// a failure here is a fault of the lab.
//
// It needs root on a Debian machine, and installs the other requirements.
package lab_test

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/asn1"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-attestation/attest"
	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/lab/byhand"
	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/trust/tpm"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const source = "../.."

// bench is a lab under test and the tests' tools.
type bench struct {
	*driver.Lab
	kubectl string // path
}

// newBench builds the lab's program and brings a lab up; it is taken down with the test. The image boots the pod
// sandbox's program instead of the bootstrapper: any program that runs is sufficient where Muster is not tested.
func newBench(t *testing.T, up driver.Up) bench {
	t.Helper()
	dir, err := os.MkdirTemp("", "lab") // t.TempDir's names are too long for the sockets below
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	l, err := driver.Open(filepath.Join(dir, "lab"), t.Output())
	if err != nil {
		t.Fatal(err)
	}
	for name, pkg := range map[string]string{"program": "./lab", "boots": "./lab/pause"} {
		cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-buildvcs=false", "-o", filepath.Join(dir, name), pkg)
		cmd.Dir, cmd.Env = source, append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("build %s: %v\n%s", pkg, err, out)
		}
	}
	up.Source, up.Lab, up.Bootstrapper = source, filepath.Join(dir, "program"), filepath.Join(dir, "boots")
	up.Preinstalled = []string{"kubelet", "kubeadm", "kubectl"}
	t.Cleanup(func() {
		if err := l.Down(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	if err := l.Up(t.Context(), up); err != nil {
		t.Fatal(err)
	}
	kube, err := driver.KubeBinaries(t.Context(), source, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	return bench{l, filepath.Join(kube, "kubectl")}
}

// run runs a command in a machine or on the owner's workstation.
func (b bench) run(ctx context.Context, where string, stdin []byte, argv ...string) (string, error) {
	cmd, err := b.Command(ctx, where, argv...)
	if err != nil {
		return "", err
	}
	var out, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(stdin), &out, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s: %v: %w\n%s%s", where, argv, err, out.Bytes(), stderr.Bytes())
	}
	return out.String(), nil
}

func (b bench) must(t *testing.T, where string, stdin []byte, argv ...string) string {
	t.Helper()
	out, err := b.run(t.Context(), where, stdin, argv...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// kube runs kubectl on the owner's workstation.
func (b bench) kube(ctx context.Context, args ...string) (string, error) {
	return b.run(ctx, driver.Owner, nil, append([]string{b.kubectl, "--kubeconfig", "admin.conf"}, args...)...)
}

// eventually repeats check until it succeeds.
func eventually(t *testing.T, limit time.Duration, check func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		err := check(ctx)
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("not after %s: %v", limit, err)
		case <-tick.C:
		}
	}
}

func TestTwoMachinesBecomeAClusterByHandAndNothingIsLeft(t *testing.T) {
	before := mounts(t)
	start := time.Now()
	b := newBench(t, driver.Up{NoPreload: true}) // images come from the mirror
	want, err := b.Measurements()
	if err != nil {
		t.Fatal(err)
	}
	lap(t, &start, "lab up")

	var wg sync.WaitGroup
	var machines [2]driver.Machine
	var errs [2]error
	for i, n := range []driver.Node{{Name: "node1", Role: "control-plane", PullImages: true}, {Name: "node2", PullImages: true}} {
		wg.Go(func() { machines[i], errs[i] = b.AddNode(t.Context(), n) })
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
	lap(t, &start, "two machines")

	for _, m := range machines {
		checkMeasured(t, b, m, want)
	}
	checkRoots(t, b, machines[0], true)
	lap(t, &start, "measurements and EK certificates")

	config, err := byhand.Init([]byte(b.must(t, "node1", nil, "cat", "/etc/muster/image.yaml")), byhand.Node{Name: "node1", Address: "192.168.77.11"})
	if err != nil {
		t.Fatal(err)
	}
	b.must(t, "node1", config, "kubeadm", "init", "--config", "/dev/stdin")
	admin := b.must(t, "node1", nil, "cat", "/etc/kubernetes/admin.conf")
	if err := os.WriteFile(filepath.Join(b.OwnerDir(), "admin.conf"), []byte(admin), 0o600); err != nil {
		t.Fatal(err)
	}
	lap(t, &start, "kubeadm init, images pulled")

	if _, err := b.kube(t.Context(), "apply", "-f", "manifests"); err != nil {
		t.Fatal(err)
	}
	if config, err = byhand.Join([]byte(b.must(t, "node1", nil, "cat", "/etc/kubernetes/pki/ca.crt")), byhand.Node{Name: "node2", Address: "192.168.77.12"}); err != nil {
		t.Fatal(err)
	}
	b.must(t, "node2", config, "kubeadm", "join", "--config", "/dev/stdin")
	for _, until := range []string{"create", "condition=Ready"} { // kubeadm ends before the kubelet has made its Node
		eventually(t, 10*time.Minute, func(ctx context.Context) error { // an API server that is busy cuts a watch short
			_, err := b.kube(ctx, "wait", "--for="+until, "node/node1", "node/node2", "--timeout=300s")
			return err
		})
	}
	lap(t, &start, "kubeadm join, both nodes Ready")

	checkEcho(t, b)
	lap(t, &start, "echo from pod to pod")

	traces := tracesOf(t, b)
	if err := b.Down(t.Context()); err != nil {
		t.Fatal(err)
	}
	lap(t, &start, "lab down")
	traces.checkGone(t)
	if after := mounts(t); after != before {
		t.Errorf("mounts differ. before:\n%s\nafter:\n%s", before, after)
	}
	if left, err := os.ReadDir(b.Dir); err == nil {
		t.Errorf("the lab's folder is still there: %v", left)
	}
}

func TestMachinesThatDifferMeasureDifferently(t *testing.T) {
	b := newBench(t, driver.Up{NoPreload: true})
	want, err := b.Measurements()
	if err != nil {
		t.Fatal(err)
	}
	add := func(n driver.Node) driver.Machine {
		t.Helper()
		m, err := b.AddNode(t.Context(), n)
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	differs := func(m driver.Machine, pcrs ...int) {
		t.Helper()
		for pcr, value := range readPCRs(t, m, want) {
			if got := value != want.PCRs[strconv.Itoa(pcr)]; got != slices.Contains(pcrs, pcr) {
				t.Errorf("%s: PCR %d differs: %t", m.Name, pcr, got)
			}
		}
	}

	tampered := add(driver.Node{Name: "node1", TamperBootstrapper: true})
	differs(tampered, 4)
	if state := b.must(t, "node1", nil, "systemctl", "is-active", "muster-bootstrapper"); strings.TrimSpace(state) != "active" {
		t.Errorf("the tampered bootstrapper is %q; a test with it must be about its measurement alone", state)
	}
	checkRoots(t, b, tampered, true)

	foreign := add(driver.Node{Name: "node2", ForeignEK: true})
	differs(foreign) // its measurements are right; only its TPM's root is not trusted
	checkRoots(t, b, foreign, false)

	differs(add(driver.Node{Name: "intruder", Number: 99, NoBootstrapper: true}), 4)
}

func TestARebootedMachineMeasuresAgainAndKeepsItsDisk(t *testing.T) {
	b := newBench(t, driver.Up{})
	want, err := b.Measurements()
	if err != nil {
		t.Fatal(err)
	}
	m, err := b.AddNode(t.Context(), driver.Node{Name: "node1"})
	if err != nil {
		t.Fatal(err)
	}
	b.must(t, "node1", nil, "sh", "-c", "echo kept > /var/lib/muster/note; systemctl enable muster-attester; cp /bin/true /usr/local/bin/component")
	dev := tpm.Open(m.TPMSocket, tpm.WithLock(filepath.Join(t.TempDir(), "lock")))
	if err := dev.Measure(t.Context(), 15, []byte("something")); err != nil {
		t.Fatal(err)
	}
	again, err := b.RebootNode(t.Context(), "node1")
	if err != nil {
		t.Fatal(err)
	}
	if again.Init == m.Init || m.Init.Alive() {
		t.Error("PID 1 survived the reboot")
	}
	checkMeasured(t, b, again, want)
	lock, err := dev.ReadPCR(t.Context(), bank(t), 15)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(lock, make([]byte, 32)) {
		t.Errorf("PCR 15 is %x after a reboot", lock)
	}
	if note := b.must(t, "node1", nil, "cat", "/var/lib/muster/note"); note != "kept\n" {
		t.Errorf("the disk holds %q", note)
	}
	b.must(t, "node1", nil, "/usr/local/bin/component") // as on a real machine's disk
	if images := b.must(t, "node1", nil, "ctr", "-n", "k8s.io", "images", "ls", "-q"); !strings.Contains(images, "registry.k8s.io/kube-apiserver:") {
		t.Errorf("images that it began with: %s", images)
	}
	if state := b.must(t, "node1", nil, "systemctl", "is-active", "muster-attester"); strings.TrimSpace(state) != "active" {
		t.Errorf("an enabled unit is %q after a reboot", state)
	}
}

func TestTwoLabsDoNotMeetAndAKilledOneIsCleanedUp(t *testing.T) {
	one := newBench(t, driver.Up{NoPreload: true})
	two := newBench(t, driver.Up{NoPreload: true})
	for _, b := range []bench{one, two} {
		if _, err := b.AddNode(t.Context(), driver.Node{Name: "node1"}); err != nil {
			t.Fatal(err)
		}
	}
	traces := tracesOf(t, two)
	s, err := two.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	p, err := os.FindProcess(s.Daemon.PID)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Kill(); err != nil { // the pid is the daemon's: it has just answered, and this process is its parent
		t.Fatal(err)
	}
	eventually(t, 5*time.Minute, func(context.Context) error { return traces.processesGone() }) // the kernel does it
	if err := two.Down(t.Context()); err != nil {
		t.Fatal(err)
	}
	traces.checkGone(t)
	if out := one.must(t, "node1", nil, "systemctl", "is-active", "containerd"); strings.TrimSpace(out) != "active" {
		t.Errorf("the other lab's containerd is %q", out)
	}
}

// checkMeasured compares a machine's PCRs and event log with the image's manifest.
func checkMeasured(t *testing.T, b bench, m driver.Machine, want driver.Measurements) {
	t.Helper()
	for pcr, value := range readPCRs(t, m, want) {
		if value != want.PCRs[strconv.Itoa(pcr)] {
			t.Errorf("%s: PCR %d is %s, the image promised %s", m.Name, pcr, value, want.PCRs[strconv.Itoa(pcr)])
		}
	}
	raw := b.must(t, m.Name, nil, "cat", "/run/muster/binary_bios_measurements")
	log, err := attest.ParseEventLog([]byte(raw))
	if err != nil {
		t.Fatalf("%s: event log: %v", m.Name, err)
	}
	dev := tpm.Open(m.TPMSocket, tpm.WithLock(filepath.Join(t.TempDir(), "lock")))
	var pcrs []attest.PCR
	for i := range 16 {
		v, err := dev.ReadPCR(t.Context(), bank(t), i)
		if err != nil {
			t.Fatal(err)
		}
		pcrs = append(pcrs, attest.PCR{Index: i, Digest: v, DigestAlg: bankHash(t)})
	}
	if _, err := log.Verify(pcrs); err != nil {
		t.Errorf("%s: the event log doesn't replay to the PCRs: %v", m.Name, err)
	}
}

// readPCRs reads the PCRs that a policy is made of, a connection to the TPM for each.
func readPCRs(t *testing.T, m driver.Machine, want driver.Measurements) map[int]string {
	t.Helper()
	dev := tpm.Open(m.TPMSocket, tpm.WithLock(filepath.Join(t.TempDir(), "lock")))
	values := map[int]string{}
	for s := range want.PCRs {
		i, err := strconv.Atoi(s)
		if err != nil {
			t.Fatal(err)
		}
		v, err := dev.ReadPCR(t.Context(), bank(t), i)
		if err != nil {
			t.Fatal(err)
		}
		values[i] = hex.EncodeToString(v)
	}
	return values
}

// checkRoots verifies the machine's EK certificate against the owner's roots.
func checkRoots(t *testing.T, b bench, m driver.Machine, genuine bool) {
	t.Helper()
	dev := tpm.Open(m.TPMSocket, tpm.WithLock(filepath.Join(t.TempDir(), "lock")))
	ek, err := dev.EndorsementKey(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(ek.Certificates[0])
	if err != nil {
		t.Fatal(err)
	}
	san := asn1.ObjectIdentifier{2, 5, 29, 17} // critical, and of TCG attributes that crypto/x509 doesn't read
	cert.UnhandledCriticalExtensions = slices.DeleteFunc(cert.UnhandledCriticalExtensions, san.Equal)
	rootPEM, err := os.ReadFile(filepath.Join(b.OwnerDir(), "ek-roots.pem"))
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(rootPEM)
	root, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(root)
	_, err = cert.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
	if (err == nil) != genuine {
		t.Errorf("%s: the EK certificate verifies against the lab's CA: %v, want %t", m.Name, err, genuine)
	}
}

func lap(t *testing.T, start *time.Time, what string) {
	t.Helper()
	t.Logf("%-40s %6.2f s", what, time.Since(*start).Seconds())
	*start = time.Now()
}
