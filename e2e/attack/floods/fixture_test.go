package floods

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-tpm/tpm2/transport/linuxudstpm"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/kubetest"
	"github.com/muster-k8s/muster/internal/service/attester"
	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2"
	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2/luks2test"
	"github.com/muster-k8s/muster/services/kms"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
	"github.com/muster-k8s/muster/trust/attest/tpm2/eventlog"
	"github.com/muster-k8s/muster/trust/attest/tpm2/eventlog/eventlogtest"
	"github.com/muster-k8s/muster/trust/tpm"
	"github.com/muster-k8s/muster/trust/tpm/tpmtest"
)

// fixture is a cluster with one control plane, cp1, that has a real TPM, and joiners with TPMs in software. Muster's
// programs are not running yet.
type fixture struct {
	ca     *attesttest.CA
	tpm    *tpmtest.Emulator
	slow   *slowTPM
	dir    string
	log    string // the file with the TPM's event log
	short  string // for sockets, whose path has at most 107 bytes
	ports  map[string]string
	made   int // honest machines so far
	member bool
}

func setUp(t *testing.T) *fixture {
	t.Helper()
	s := &fixture{ca: attesttest.NewCA(t), tpm: tpmtest.SWTPM(t), dir: t.TempDir(), ports: map[string]string{}}
	s.boot(t)
	s.slow = slow(t, s.tpm)
	s.short = filepath.Dir(s.tpm.Socket)
	for _, name := range []string{"joinservice", "joinservice-metrics", "kms", "kms-metrics", "attester-metrics", "init", "init-metrics", "unlock", "recover", "unlock-metrics"} {
		s.ports[name] = free(t)
	}
	return s
}

// inCluster makes cp1 the control plane of a cluster, once.
func (s *fixture) inCluster(t *testing.T) {
	t.Helper()
	if s.member {
		return
	}
	s.member = true
	cluster(t).Reset(t)
	device := s.tpm.Open()
	if err := device.Measure(t.Context(), attest.LockPCR, shared.ID[:]); err != nil {
		t.Fatal(err)
	}
	s.policy(t, device, s.enroll(t, device))
}

// given are the ports that free has returned.
var given = map[int]bool{}

// free returns an address without a listener. Programs listen on it anew for each row, so its port is outside of the
// range from which the kernel assigns ports to connections (net.ipv4.ip_local_port_range begins at 32768).
func free(t *testing.T) string {
	t.Helper()
	for range 100 {
		port := 12000 + rand.IntN(18000)
		l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			continue
		}
		addr := l.Addr().String()
		if err := l.Close(); err == nil && !given[port] {
			given[port] = true
			return addr
		}
	}
	t.Fatal("no free port of 100")
	return ""
}

// enroll enrolls the machine with the real TPM as control plane cp1, and returns its ID.
func (s *fixture) enroll(t *testing.T, device *tpm.TPM) attest.MachineID {
	t.Helper()
	a, err := tpm2.NewAttester(tpm2.Config{TPM: device, Purpose: attest.PurposeMachine, Bank: tpm.SHA256})
	if err != nil {
		t.Fatal(err)
	}
	claims, err := attesttest.Claims(t.Context(), a, s.verifier(t), attest.PurposeMachine, attest.Binding{1})
	if err != nil {
		t.Fatal(err)
	}
	shared.Enroll(t, "cp1", v1alpha1.AttestedNodeSpec{MachineID: claims.Machine().String(), Role: v1alpha1.RoleControlPlane, Addresses: []string{"192.168.77.11"}})
	return claims.Machine()
}

// verifier has never seen a machine before, like a joiner's.
func (s *fixture) verifier(t testing.TB) *tpm2.Verifier {
	t.Helper()
	roots := append(s.ca.Roots(), s.tpm.Root)
	v, err := tpm2.NewVerifier(tpm2.VerifierConfig{Roots: func() []*x509.Certificate { return roots }, Now: time.Now})
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// policy accepts the measurements of cp1 and the joiners, and lists cp1 as a control plane.
func (s *fixture) policy(t *testing.T, device *tpm.TPM, cp1 attest.MachineID) {
	t.Helper()
	joiner := attesttest.NewMachine(t, s.ca, attesttest.Options{})
	shared.SetPolicy(t, attesttest.Policy(t, s.ca, []*attesttest.Machine{joiner}, func(p *attestv1.Policy) {
		p.Insecure = &attestv1.InsecureSwitches{AllowPlainState: true, AnyFirmware: true}
		p.ControlPlanes = []string{cp1.String()}
		p.Tpm2.EkRoots = append(p.Tpm2.EkRoots, &attestv1.EkRoot{
			Pem: string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.tpm.Root.Raw})), Operator: true, Key: "ecc-p384",
		})
		image := &attestv1.Image{Name: "cp1"}
		for _, pcr := range []int{4, 8, 9, 11, 12, 13, 14} {
			value, err := device.ReadPCR(t.Context(), tpm.SHA256, pcr)
			if err != nil {
				t.Fatal(err)
			}
			image.Pcrs = append(image.Pcrs, &attestv1.PcrValue{Index: uint32(pcr), Value: hex.EncodeToString(value)})
		}
		p.Tpm2.Images = append(p.Tpm2.Images, image)
	}))
}

// boot extends the TPM by almost the maximum number of events of a log, and writes their log.
func (s *fixture) boot(t *testing.T) {
	t.Helper()
	device, err := linuxudstpm.Open(s.tpm.Socket)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = device.Close() }()
	w := eventlogtest.NewWriter(tpm.SHA256)
	for range 1000 {
		digests, err := w.Measure(4, eventlog.IPL, make([]byte, 200))
		if err != nil {
			t.Fatal(err)
		}
		tpmtest.Extend(t, device, tpm.SHA256, 4, digests[tpm.SHA256])
	}
	s.log = s.write(t, "event-log", w.Bytes())
}

// image is a machine's configuration.
func (s *fixture) image(t *testing.T, name, state string) string {
	t.Helper()
	return s.write(t, name+".yaml", fmt.Appendf(nil, `apiVersion: muster.dev/v1alpha1
kind: ImageConfiguration
stateDisk: %s
tpm: {device: %s, eventLog: %s}
insecure: {noOwnerKey: true}
listen: {init: %q, recover: %q, metrics: %q, attesterMetrics: %q}
`, state, s.slow.socket, s.log, s.ports[name], s.ports["recover"], s.ports[name+"-metrics"], s.ports["attester-metrics"]))
}

func (s *fixture) write(t *testing.T, name string, content []byte) string {
	t.Helper()
	path := filepath.Join(s.dir, name)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, content, 0o600)); err != nil {
		t.Fatal(err)
	}
	return path
}

func (s *fixture) sockets() string { return filepath.Join(s.short, "attest") }

// attester runs cp1's.
func (s *fixture) attester(t *testing.T) *process {
	t.Helper()
	return start(t, "attester", unit(t, "muster-attester"), s.ports["attester-metrics"],
		filepath.Join(*bin, "bootstrapper"), "attester", "--image", s.image(t, "attester", fmt.Sprintf("{mode: plain, path: %s/state}", s.dir)),
		"--dir", s.sockets(), "--tpm-lock", s.tpm.Lock, "--journal", filepath.Join(s.dir, "journal"))
}

// kubeconfig is a service account's.
func (s *fixture) kubeconfig(t *testing.T, account string) string {
	t.Helper()
	api, err := shared.As(t.Context(), namespace, account)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(s.dir, account+".kubeconfig")
	if err := kubetest.WriteKubeconfig(path, api); err != nil {
		t.Fatal(err)
	}
	return path
}

func owner() string { return "--owner-keys=" + base64.StdEncoding.EncodeToString(shared.Public) }

// anySerial is the flag of a service whose image accepts policies of any serial.
func (s *fixture) anySerial(t *testing.T) string {
	t.Helper()
	return "--image=" + s.write(t, "image.yaml", []byte("apiVersion: muster.dev/v1alpha1\nkind: ImageConfiguration\n"))
}

func (s *fixture) kms(t *testing.T) *process {
	t.Helper()
	root := filepath.Dir(s.write(t, "root/root", shared.Root[:]))
	s.write(t, "root/salt", shared.Salt[:])
	return start(t, "kms", chart(t, "kms"), s.ports["kms-metrics"],
		filepath.Join(*bin, "kms"), "--listen="+s.ports["kms"], "--metrics="+s.ports["kms-metrics"], "--node-name=cp1",
		"--attester="+attester.Socket(s.sockets(), attest.PurposeKMS), owner(), s.anySerial(t), "--root-dir="+root, "--kubeconfig="+s.kubeconfig(t, "kms"))
}

func (s *fixture) joinservice(t *testing.T) *process {
	t.Helper()
	for _, name := range []string{"ca.crt", "ca.key", "sa.pub", "sa.key", "front-proxy-ca.crt", "front-proxy-ca.key", "etcd/ca.crt", "etcd/ca.key", "encryption.yaml"} {
		s.write(t, "pki/"+name, []byte("content of "+name))
	}
	s.write(t, "pki/ca.crt", shared.CA())
	pod, err := shared.Pod(t.Context(), namespace, "joinservice", "cp1")
	if err != nil {
		t.Fatal(err)
	}
	token, err := shared.Token(t.Context(), namespace, "joinservice", kms.Audience, pod)
	if err != nil {
		t.Fatal(err)
	}
	return start(t, "joinservice", chart(t, "joinservice"), s.ports["joinservice-metrics"],
		filepath.Join(*bin, "joinservice"), "--listen="+s.ports["joinservice"], "--metrics="+s.ports["joinservice-metrics"], "--node-name=cp1",
		"--attester="+attester.Socket(s.sockets(), attest.PurposeJoinservice), owner(), s.anySerial(t), "--kms=https://"+s.ports["kms"],
		"--kms-token="+s.write(t, "token", []byte(token+"\n")), "--pki="+filepath.Join(s.dir, "pki"), "--audit="+filepath.Join(s.dir, "audit.jsonl"),
		"--kubeconfig="+s.kubeconfig(t, "joinservice"))
}

// bootstrapper runs a machine that waits for `muster init`.
func (s *fixture) bootstrapper(t *testing.T) *process {
	t.Helper()
	meta := s.write(t, "metadata.yaml", fmt.Appendf(nil, "apiVersion: muster.dev/v1alpha1\nkind: MachineMetadata\nname: node1\nrole: control-plane\naddresses: [192.168.77.11]\ninitSecretHash: %x\n", sha256.Sum256([]byte("secret"))))
	return start(t, "init", unit(t, "muster-bootstrapper"), s.ports["init-metrics"],
		filepath.Join(*bin, "bootstrapper"), "run", "--image", s.image(t, "init", fmt.Sprintf("{mode: plain, path: %s/state}", s.dir)), "--metadata", meta,
		"--journal", filepath.Join(s.dir, "init-journal"), "--tpm-lock", s.tpm.Lock, "--console", s.write(t, "console", nil))
}

// stateDisk is the beginning of a state disk, of the minimum length. It must be complete, or `unlock` reports a fault
// and does not listen for its owner.
func stateDisk(t *testing.T) []byte {
	t.Helper()
	const size = 32 << 20
	header := luks2test.Genuine(t, make([]byte, 32), luks2.HMACSHA256, luks2.LabelState).Bytes()
	return slices.Concat(header, make([]byte, luks2.Size-len(header)), luks2test.Superblock(size), make([]byte, size-luks2.Size-luks2.SuperblockSize))
}

// unlock runs the initramfs of a control plane that waits for its disk's key, from joinservice or from its owner.
func (s *fixture) unlock(t *testing.T) *process {
	t.Helper()
	meta := s.write(t, "metadata.yaml", []byte("apiVersion: muster.dev/v1alpha1\nkind: MachineMetadata\nname: node1\nrole: control-plane\naddresses: [192.168.77.11]\n"))
	device := s.write(t, "disk", stateDisk(t))
	return start(t, "unlock", unit(t, "muster-bootstrapper"), s.ports["unlock-metrics"],
		filepath.Join(*bin, "bootstrapper"), "unlock", "--image", s.image(t, "unlock", fmt.Sprintf("{mode: luks, path: %s}", device)), "--metadata", meta,
		"--tpm-lock", s.tpm.Lock, "--console", s.write(t, "console", nil))
}

// from dials from one address of the loopback network.
func from(source string) func(ctx context.Context, network, addr string) (net.Conn, error) {
	return (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}}).DialContext
}
