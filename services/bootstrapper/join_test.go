package bootstrapper_test

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// worker returns a machine that joins, and a joinservice on another machine of the same image. The image has the owner's key.
func worker(t testing.TB) (*fixture, *joinservice) {
	t.Helper()
	w := newFixture(t, "node2")
	w.meta.Role = "worker"
	priv := w.signer
	j := newJoinservice(t, w, attesttest.NewMachine(t, w.ca, attesttest.Options{}), priv)
	w.meta.JoinEndpoints = []string{j.addr}
	return w, j
}

func (w *fixture) isNode(t testing.TB) {
	t.Helper()
	rec := w.record()
	bank, _ := w.tpm.Bank().Hash()
	if rec.Step != journal.StepDone || rec.Kind != journal.KindJoin || !bytes.Equal(w.tpm.PCRs()[15], attest.LockValue(bank, clusterID)) {
		t.Errorf("journal %+v", rec)
	}
	if !w.machine.Running(machine.UnitAttester) || !w.machine.Running(machine.UnitKubelet) {
		t.Error("units are not running")
	}
}

func TestAMachineJoins(t *testing.T) {
	w, j := worker(t)
	r := w.boot()
	if err := r.end(t); err != nil {
		t.Fatal(err, w.logged)
	}
	w.isNode(t)
	if len(j.callers) != 1 || j.callers[0] != w.tpm.ID() {
		t.Errorf("callers %v", j.callers)
	}
	pki := filepath.Join(w.root, "/var/lib/kubelet/pki")
	for _, name := range []string{"kubelet-client-", "kubelet-server-"} {
		to, err := os.Readlink(filepath.Join(pki, name+"current.pem"))
		if err != nil || !strings.HasPrefix(to, "/var/lib/kubelet/pki/"+name+"20") {
			t.Fatalf("%s -> %q, %v", name, to, err)
		}
		file := filepath.Join(w.root, to)
		b, err := os.ReadFile(file)
		st, _ := os.Stat(file)
		if err != nil || st.Mode().Perm() != 0o600 || !bytes.Contains(b, []byte("BEGIN CERTIFICATE")) || !bytes.Contains(b, []byte("BEGIN EC PRIVATE KEY")) {
			t.Errorf("%s: mode %v, %v", file, st.Mode(), err)
		}
		_, key, _ := bytes.Cut(b, []byte("-----BEGIN EC PRIVATE KEY-----\n"))
		if strings.Contains(w.logged.String(), string(key[:40])) {
			t.Error("a key is in the log")
		}
	}
	w.kubeletAsks(t, "https://192.168.77.1:6443")
	// K3: no file has the disk's key.
	key := bytes.Repeat([]byte{0xD1}, 32)
	if strings.Contains(w.logged.String(), hex.EncodeToString(key)) {
		t.Error("the disk key is in the log")
	}
	if counter(t, r.metrics, "muster_join_attempts_total", "ACCEPTED") != 1 || counter(t, r.metrics, "muster_insecure_config", "owner_key_unknown") != 0 {
		t.Error("metrics")
	}
	if !reflect.DeepEqual(w.record().OwnerKeys, journal.OwnerKeys(w.image.OwnerKeys)) {
		t.Error("the owner's key is not remembered")
	}
}

func TestAControlPlaneJoinsWithExactlyItsEightFiles(t *testing.T) {
	w, j := worker(t)
	w.meta.Role = "control-plane"
	r := w.boot()
	if err := r.end(t); err != nil {
		t.Fatal(err, w.logged)
	}
	w.isNode(t)
	for _, f := range pkiFiles {
		st, err := os.Stat(filepath.Join(w.root, "/etc/kubernetes/pki", f))
		want := fs.FileMode(0o600)
		if slices.Contains([]string{"ca.crt", "etcd/ca.crt", "front-proxy-ca.crt", "sa.pub"}, f) {
			want = 0o644
		}
		if err != nil || st.Mode().Perm() != want {
			t.Errorf("%s: %v, want mode %s", f, err, want)
		}
	}
	if j.requests[0].GetRole() != joinv1.Role_ROLE_CONTROL_PLANE {
		t.Error("role")
	}
	w.kubeletAsks(t, "https://"+w.meta.Addresses[0].String()+":6443") // its own API server: an attacker who redirects the cluster's endpoint can't cut a control plane off from it
}

// kubeletAsks checks that the kubelet uses its certificate at server, and that nothing of kubeadm's discovery is left.
func (w *fixture) kubeletAsks(t *testing.T, server string) {
	t.Helper()
	conf, err := os.ReadFile(filepath.Join(w.root, kubeadm.KubeletConf))
	if err != nil || !strings.Contains(string(conf), "server: "+server+"\n") || !strings.Contains(string(conf), clientFile) {
		t.Errorf("%s, %v; want %s", conf, err, server)
	}
	if _, err := os.Stat(filepath.Join(w.root, kubeadm.DiscoveryConf)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s: %v", kubeadm.DiscoveryConf, err)
	}
}

func TestRequestsAreWhatJoinserviceWants(t *testing.T) {
	w, j := worker(t)
	r := w.boot()
	if err := r.end(t); err != nil {
		t.Fatal(err)
	}
	req := j.requests[0]
	for name, der := range map[string][]byte{"client": req.GetKubeletClientCsr(), "serving": req.GetKubeletServingCsr()} {
		csr, err := x509.ParseCertificateRequest(der)
		if err != nil || csr.CheckSignature() != nil {
			t.Fatal(name, err)
		}
		if csr.Subject.String() != "CN=system:node:node2,O=system:nodes" {
			t.Errorf("%s: subject %s", name, csr.Subject)
		}
		if serving := name == "serving"; serving != (len(csr.DNSNames) == 1 && csr.DNSNames[0] == "node2" && len(csr.IPAddresses) == 1 && csr.IPAddresses[0].Equal(net.IPv4(192, 168, 77, 11))) {
			t.Errorf("%s: SAN %v %v", name, csr.DNSNames, csr.IPAddresses)
		}
	}
	if req.GetDiskMode() != joinv1.DiskMode_DISK_MODE_PLAIN || req.GetNodeName() != "node2" {
		t.Error(req)
	}
}

// A joinservice is accepted only if its machine matches the owner's policy (A7).
func TestAJoinserviceIsJudged(t *testing.T) {
	for name, tt := range map[string]struct {
		setUp func(t *testing.T, w *fixture) *attesttest.Machine // the joinservice's machine
		other bool                                               // signed by another owner
		lists func(w *fixture) []*attesttest.Machine             // the policy's control planes; nil: the joinservice's machine
		want  attestv1.Reason                                    // 0: accepted
	}{
		"the same image, the owner's policy": {setUp: func(t *testing.T, w *fixture) *attesttest.Machine {
			return attesttest.NewMachine(t, w.ca, attesttest.Options{})
		}},
		"another image": {want: attestv1.Reason_REASON_POLICY_REFUSED, setUp: func(t *testing.T, w *fixture) *attesttest.Machine {
			return attesttest.NewMachine(t, w.ca, attesttest.Options{Image: "tampered"})
		}},
		"another EK root": {want: attestv1.Reason_REASON_EK_UNTRUSTED, setUp: func(t *testing.T, _ *fixture) *attesttest.Machine {
			return attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{})
		}},
		"a policy of another owner": {want: attestv1.Reason_REASON_POLICY_SIGNATURE, other: true, setUp: func(t *testing.T, w *fixture) *attesttest.Machine {
			return attesttest.NewMachine(t, w.ca, attesttest.Options{})
		}},
		// An attacker with root rights on a worker, also a banned one, has a genuine machine of the cluster, its attester's socket of the purpose
		// joinservice, and the policy in force.
		"a worker, with the real policy": {
			want: attestv1.Reason_REASON_SERVER_NOT_LISTED, lists: func(w *fixture) []*attesttest.Machine {
				return []*attesttest.Machine{attesttest.NewMachine(w.t, w.ca, attesttest.Options{})}
			},
			setUp: func(t *testing.T, w *fixture) *attesttest.Machine {
				return attesttest.NewMachine(t, w.ca, attesttest.Options{})
			},
		},
		"a policy that lists no machine": {
			want: attestv1.Reason_REASON_SERVER_NOT_LISTED, lists: func(*fixture) []*attesttest.Machine { return []*attesttest.Machine{} },
			setUp: func(t *testing.T, w *fixture) *attesttest.Machine {
				return attesttest.NewMachine(t, w.ca, attesttest.Options{})
			},
		},
		"no owner's key, and no switch": {want: attestv1.Reason_REASON_MACHINE_CONFIG, setUp: func(t *testing.T, w *fixture) *attesttest.Machine {
			w.image.OwnerKeys = nil
			return attesttest.NewMachine(t, w.ca, attesttest.Options{})
		}},
		"no owner's key, the same image": {setUp: func(t *testing.T, w *fixture) *attesttest.Machine {
			w.image.OwnerKeys, w.image.NoOwnerKey = nil, true
			return attesttest.NewMachine(t, w.ca, attesttest.Options{})
		}},
		"no owner's key, another image": {want: attestv1.Reason_REASON_POLICY_REFUSED, setUp: func(t *testing.T, w *fixture) *attesttest.Machine {
			w.image.OwnerKeys, w.image.NoOwnerKey = nil, true
			return attesttest.NewMachine(t, w.ca, attesttest.Options{Image: "tampered"})
		}},
		"no owner's key, another EK root": {want: attestv1.Reason_REASON_EK_UNTRUSTED, setUp: func(t *testing.T, w *fixture) *attesttest.Machine {
			w.image.OwnerKeys, w.image.NoOwnerKey = nil, true
			return attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{})
		}},
		"no owner's key, no roots": {want: attestv1.Reason_REASON_MACHINE_CONFIG, setUp: func(t *testing.T, w *fixture) *attesttest.Machine {
			w.image.OwnerKeys, w.image.NoOwnerKey, w.image.EKRoots = nil, true, nil
			return attesttest.NewMachine(t, w.ca, attesttest.Options{})
		}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newFixture(t, "node2")
			w.meta.Role = "worker"
			pub, priv := ownerKey(t)
			w.image.OwnerKeys = attest.OwnerKeys{pub}
			if tt.other {
				_, priv = ownerKey(t)
			}
			var changes []func(*attestv1.Policy)
			if tt.lists != nil {
				changes = append(changes, attesttest.ControlPlanes(tt.lists(w)...))
			}
			j := newJoinservice(t, w, tt.setUp(t, w), priv, changes...)
			w.meta.JoinEndpoints = []string{j.addr}
			unknown := w.image.NoOwnerKey
			r := w.start(tt.want)
			defer r.kill(t)
			if tt.want == attestv1.Reason_REASON_UNSPECIFIED {
				eventually(t, "joined", func() bool { return w.record().Step == journal.StepDone })
			} else if j.asked() != 0 || w.record().Locked() {
				t.Error("something was sent, or done")
			}
			if got := counter(t, r.metrics, "muster_insecure_config", "owner_key_unknown") == 1; got != unknown {
				t.Errorf("muster_insecure_config %v, want %v", got, unknown)
			}
		})
	}
}

// B2: an init wins while the joinservice issues a ticket: the ticket is returned.
func TestATicketThatLosesTheRaceIsGivenBack(t *testing.T) {
	w, j := worker(t)
	w.meta.Role = "control-plane"
	w.allowInit()
	asked, release := make(chan struct{}, 1), make(chan struct{})
	j.script(func(context.Context, *joinv1.IssueJoinTicketRequest) (*joinv1.IssueJoinTicketResponse, error) {
		asked <- struct{}{}
		<-release
		return nil, nil
	}, nil)
	// The ticket arrives after the init has taken the lock, and the init continues after the ticket was returned, so the linger time of a result has no
	// effect.
	w.machine.Step = func(name string) error {
		if name == "kubeadm init begins" {
			close(release)
			eventually(t, "the ticket is given back", func() bool { return j.givenBack() == 1 })
		}
		return nil
	}
	r := w.boot()
	<-asked
	out := w.init(t.Context(), r, w.request())
	if out.err != nil {
		t.Fatal(out.err)
	}
	if err := r.end(t); err != nil {
		t.Fatal(err)
	}
	if j.givenBack() != 1 || w.record().Kind != journal.KindInit {
		t.Errorf("%d tickets given back", j.givenBack())
	}
	if slices.Contains(w.machine.Calls(), "kubeadm join") {
		t.Error("kubeadm join ran")
	}
}

func TestAnInitIsRefusedOnceAJoinHasTheLock(t *testing.T) {
	w, _ := worker(t)
	w.meta.Role = "control-plane"
	w.allowInit()
	reached, release := make(chan struct{}), make(chan struct{})
	w.machine.Step = func(name string) error {
		if name == "kubeadm join begins" {
			close(reached)
			<-release
		}
		return nil
	}
	r := w.boot()
	<-reached
	out := w.init(t.Context(), r, w.request())
	close(release)
	if reason(out.err) != "NODE_LOCKED" || !strings.Contains(out.err.Error(), "a join") {
		t.Error(out.err)
	}
	if err := r.end(t); err != nil {
		t.Fatal(err)
	}
	w.isNode(t)
}

// An error in a ticket is found before the machine is changed (B4).
func TestABadTicketIsGivenBackAndChangesNothing(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*joinv1.IssueJoinTicketResponse)
		role   string
		want   attestv1.Reason
	}{
		"a short cluster ID":         {want: attestv1.Reason_REASON_REQUEST_INVALID, change: func(r *joinv1.IssueJoinTicketResponse) { r.ClusterId = r.GetClusterId()[1:] }},
		"another cluster's ID":       {want: attestv1.Reason_REASON_LOCK_FOREIGN, change: func(r *joinv1.IssueJoinTicketResponse) { r.ClusterId = bytes.Repeat([]byte{0xC2}, 32) }},
		"no disk key":                {want: attestv1.Reason_REASON_REQUEST_INVALID, change: func(r *joinv1.IssueJoinTicketResponse) { r.DiskKey = nil }},
		"an endpoint that is a path": {want: attestv1.Reason_REASON_REQUEST_INVALID, change: func(r *joinv1.IssueJoinTicketResponse) { r.ControlPlaneEndpoint = "x/y:1" }},
		"certificates swapped": {want: attestv1.Reason_REASON_REQUEST_INVALID, change: func(r *joinv1.IssueJoinTicketResponse) {
			r.KubeletClientCertificate, r.KubeletServingCertificate = r.GetKubeletServingCertificate(), r.GetKubeletClientCertificate()
		}},
		"a certificate of another authority": {want: attestv1.Reason_REASON_REQUEST_INVALID, change: func(r *joinv1.IssueJoinTicketResponse) { r.CaCertificate = r.GetKubeletClientCertificate() }},
		"no authority":                       {want: attestv1.Reason_REASON_REQUEST_INVALID, change: func(r *joinv1.IssueJoinTicketResponse) { r.CaCertificate = []byte("x") }},
		"a component elsewhere":              {want: attestv1.Reason_REASON_COMPONENT_PATH, change: func(r *joinv1.IssueJoinTicketResponse) { r.Components[0].Path = "/etc/ld.so.preload" }},
		"an image by its tag":                {want: attestv1.Reason_REASON_REQUEST_INVALID, change: func(r *joinv1.IssueJoinTicketResponse) { r.Images[0], _, _ = strings.Cut(r.GetImages()[0], "@") }},
		"no images":                          {want: attestv1.Reason_REASON_REQUEST_INVALID, change: func(r *joinv1.IssueJoinTicketResponse) { r.Images = nil }},
		"a worker with files": {want: attestv1.Reason_REASON_TICKET_FILE, change: func(r *joinv1.IssueJoinTicketResponse) {
			r.ControlPlaneFiles = []*joinv1.ControlPlaneFile{{Path: "ca.crt", Content: []byte("x")}}
		}},
		"a climbing file":  {role: "control-plane", want: attestv1.Reason_REASON_TICKET_FILE, change: func(r *joinv1.IssueJoinTicketResponse) { r.ControlPlaneFiles[1].Path = "../admin.conf" }},
		"an absolute file": {role: "control-plane", want: attestv1.Reason_REASON_TICKET_FILE, change: func(r *joinv1.IssueJoinTicketResponse) { r.ControlPlaneFiles[1].Path = "/etc/shadow" }},
		"a file too many": {role: "control-plane", want: attestv1.Reason_REASON_TICKET_FILE, change: func(r *joinv1.IssueJoinTicketResponse) {
			r.ControlPlaneFiles = append(r.ControlPlaneFiles, &joinv1.ControlPlaneFile{Path: "apiserver.key", Content: []byte("x")})
		}},
		"a file twice":   {role: "control-plane", want: attestv1.Reason_REASON_TICKET_FILE, change: func(r *joinv1.IssueJoinTicketResponse) { r.ControlPlaneFiles[1] = r.GetControlPlaneFiles()[2] }},
		"a file missing": {role: "control-plane", want: attestv1.Reason_REASON_TICKET_FILE, change: func(r *joinv1.IssueJoinTicketResponse) { r.ControlPlaneFiles = r.GetControlPlaneFiles()[1:] }},
		"an empty file":  {role: "control-plane", want: attestv1.Reason_REASON_TICKET_FILE, change: func(r *joinv1.IssueJoinTicketResponse) { r.ControlPlaneFiles[3].Content = nil }},
		"another ca.crt": {role: "control-plane", want: attestv1.Reason_REASON_TICKET_FILE, change: func(r *joinv1.IssueJoinTicketResponse) { r.ControlPlaneFiles[0].Content = []byte("x") }},
	} {
		t.Run(name, func(t *testing.T) {
			w, j := worker(t)
			if tt.role != "" {
				w.meta.Role = tt.role
			}
			j.script(nil, tt.change)
			r := w.start(tt.want)
			eventually(t, "given back", func() bool { return j.givenBack() > 0 })
			if w.record().Locked() || len(w.machine.Calls()) != 0 || w.exists("/etc/kubernetes") || w.exists("/var/lib/kubelet") {
				t.Error("the machine was changed")
			}
			// The machine joins once only the wrong input is repaired.
			j.script(nil, nil)
			if err := r.end(t); err != nil {
				t.Fatal(err)
			}
			w.isNode(t)
		})
	}
}

func TestTheServersHintIsHonoured(t *testing.T) {
	w, j := worker(t)
	const hint = 400 * time.Millisecond
	first := true
	j.script(func(context.Context, *joinv1.IssueJoinTicketRequest) (*joinv1.IssueJoinTicketResponse, error) {
		if first {
			first = false
			return nil, attest.RefuseFor(hint, attestv1.Reason_REASON_BUSY, "busy")
		}
		return nil, nil
	}, nil)
	r := w.boot()
	if err := r.end(t); err != nil {
		t.Fatal(err)
	}
	if wait := j.at[1].Sub(j.at[0]); wait < hint {
		t.Errorf("came back after %s", wait)
	}
	if counter(t, r.metrics, "muster_join_attempts_total", "BUSY") != 1 {
		t.Error("metrics")
	}
}

// An endpoint that refuses, hangs or does not exist costs one stagger.
func TestEndpointsThatDontAnswerAreSteppedOver(t *testing.T) {
	w, j := worker(t)
	silent, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	gone := silent.Addr().String()
	_ = silent.Close()
	w.meta.JoinEndpoints = []string{gone, "192.0.2.1:30090", j.addr}
	r := w.boot()
	if err := r.end(t); err != nil {
		t.Fatal(err, w.logged)
	}
	w.isNode(t)
}

// B3: the machine stops at each effect of a join in turn, and still becomes a node.
func TestAJoinThatDiesAnywhereEndsAsANode(t *testing.T) {
	for _, role := range []string{"worker", "control-plane"} {
		for point := 0; ; point++ {
			w, j := worker(t)
			w.meta.Role = role
			w.dieAfter(point)
			r := w.boot()
			if err := r.end(t); err == nil {
				if point < 18 {
					t.Fatalf("only %d effects: %q", point, w.steps)
				}
				break
			}
			died := w.steps[len(w.steps)-1]
			w.dieAfter(-1)
			if point%2 == 0 {
				w.reboot()
			}
			r = w.boot()
			if err := r.end(t); err != nil {
				t.Fatalf("dead at %s: %v\n%s", died, err, w.logged)
			}
			w.isNode(t)
			if n := j.asked(); n > 2 {
				t.Errorf("dead at %s: asked %d times", died, n)
			}
			if t.Failed() {
				t.Fatalf("dead at %d, %s\n%s", point, died, w.logged)
			}
		}
	}
}

func TestAKubeadmJoinThatFailsIsRepeatedWithANewTicket(t *testing.T) {
	w, j := worker(t)
	fails := 2
	w.machine.Step = func(name string) error {
		if name == "kubeadm join is half done" && fails > 0 {
			fails--
			return os.ErrDeadlineExceeded
		}
		return nil
	}
	r := w.boot()
	if err := r.end(t); err != nil {
		t.Fatal(err)
	}
	w.isNode(t)
	if j.asked() != 3 || counter(t, r.metrics, "muster_join_attempts_total", "KUBEADM_FAILED") != 2 {
		t.Errorf("asked %d times", j.asked())
	}
	if bytes.Equal(j.requests[0].GetKubeletClientCsr(), j.requests[1].GetKubeletClientCsr()) {
		t.Error("a key was used twice")
	}
	if j.givenBack() != 0 {
		t.Error("a ticket of a locked machine was given back")
	}
}

// The mainboard was replaced: the credentials of the node on the disk belong to another TPM, which is retired.
func TestANodeWithAnotherTPMJoinsAnew(t *testing.T) {
	w, j := worker(t)
	if err := w.boot().end(t); err != nil {
		t.Fatal(err, w.logged)
	}
	w.isNode(t)
	w.reboot()
	if err := w.boot().end(t); err != nil || j.asked() != 1 {
		t.Fatalf("the same TPM: %v, asked %d times", err, j.asked())
	}
	w.tpm = attesttest.NewMachine(t, w.ca, attesttest.Options{})
	w.reboot()
	if err := w.boot().end(t); err != nil {
		t.Fatal(err, w.logged)
	}
	w.isNode(t)
	ran := slices.DeleteFunc(w.machine.Calls(), func(c string) bool { return !strings.HasPrefix(c, "kubeadm ") })
	if len(j.callers) != 2 || j.callers[1] != w.tpm.ID() || w.record().MachineID != w.tpm.ID().String() || !slices.Equal(ran, []string{"kubeadm join", "kubeadm reset", "kubeadm join"}) {
		t.Errorf("callers %v, ran %q, journal %+v", j.callers, ran, w.record())
	}
}

func TestAMachineThatIsLockedStaysWithItsCluster(t *testing.T) {
	w, j := worker(t)
	w.dieAfter(8) // at some step after the lock
	r := w.boot()
	_ = r.end(t)
	if !w.record().Locked() {
		t.Fatal("not locked")
	}
	w.dieAfter(-1)
	// The joinservice's machine now belongs to another cluster.
	j.host.Reboot()
	j.host.LockTo([32]byte{0xC2})
	r = w.boot()
	defer r.kill(t)
	eventually(t, "refused", func() bool { return counter(t, r.metrics, "muster_join_attempts_total", "LOCK_FOREIGN") > 0 })
	if slices.Contains(w.machine.Calls(), "kubeadm join") && w.record().Step == journal.StepDone {
		t.Error("it joined another cluster")
	}
}
