package bootstrapper_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/client-go/tools/clientcmd"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

const (
	clientFile  = "/var/lib/kubelet/pki/kubelet-client-current.pem"
	servingFile = "/var/lib/kubelet/pki/kubelet-server-current.pem"
	kubeletConf = "/etc/kubernetes/kubelet.conf"
)

// kubeletPair returns the certificate that the kubelet would load.
func (w *fixture) kubeletPair(t testing.TB, name string) *x509.Certificate {
	t.Helper()
	file := filepath.Join(w.root, name)
	if to, err := os.Readlink(file); err == nil {
		file = filepath.Join(w.root, to)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(text, text)
	if err != nil {
		t.Fatal(err)
	}
	return pair.Leaf
}

// holdsNoLongLife checks all files of the disk: no client certificate of a node is valid for more than a day (J7).
func (w *fixture) holdsNoLongLife(t *testing.T) {
	t.Helper()
	found := 0
	err := filepath.Walk(filepath.Join(w.root, "/var/lib/kubelet"), func(p string, st os.FileInfo, err error) error {
		if err != nil || !st.Mode().IsRegular() {
			return err
		}
		text, err := os.ReadFile(p)
		for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
			c, err := x509.ParseCertificate(block.Bytes)
			if err != nil || !slices.Contains(c.ExtKeyUsage, x509.ExtKeyUsageClientAuth) {
				continue
			}
			found++
			if life := c.NotAfter.Sub(c.NotBefore); life > 24*time.Hour+15*time.Minute {
				t.Errorf("%s is good for %s", p, life)
			}
		}
		return err
	})
	if err != nil || found == 0 {
		t.Errorf("%d client certificates, %v", found, err)
	}
	conf, err := clientcmd.LoadFromFile(filepath.Join(w.root, kubeletConf))
	if err != nil {
		t.Fatal(err)
	}
	u := conf.AuthInfos[conf.Contexts[conf.CurrentContext].AuthInfo]
	if u.ClientCertificate != clientFile || u.ClientKey != clientFile || len(u.ClientCertificateData)+len(u.ClientKeyData) > 0 {
		t.Errorf("kubelet.conf names %q, and holds %d bytes", u.ClientCertificate, len(u.ClientCertificateData)+len(u.ClientKeyData))
	}
}

func TestNoNodeKeepsAClientCertificateForLonger(t *testing.T) {
	for name, become := range map[string]func(t *testing.T) *fixture{
		"the first control plane": func(t *testing.T) *fixture {
			w := first(t)
			r := w.boot()
			if out := w.init(t.Context(), r, w.request()); out.err != nil {
				t.Fatal(out.err, w.logged)
			}
			if err := r.end(t); err != nil {
				t.Fatal(err)
			}
			return w
		},
		"a control plane that was adopted": func(t *testing.T) *fixture {
			w := controlPlane(t)
			r := w.boot()
			if out := w.adopt(t.Context(), r, w.adoption()); out.err != nil {
				t.Fatal(out.err, w.logged)
			}
			if err := r.end(t); err != nil {
				t.Fatal(err)
			}
			return w
		},
		"a control plane that joined": func(t *testing.T) *fixture {
			w, _ := worker(t)
			w.meta.Role = "control-plane"
			if err := w.boot().end(t); err != nil {
				t.Fatal(err, w.logged)
			}
			return w
		},
		"a worker": func(t *testing.T) *fixture {
			w, _ := worker(t)
			if err := w.boot().end(t); err != nil {
				t.Fatal(err, w.logged)
			}
			return w
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := become(t)
			w.holdsNoLongLife(t)
			if conf, err := clientcmd.LoadFromFile(filepath.Join(w.root, kubeletConf)); err != nil || name == "the first control plane" && conf.Clusters[conf.Contexts[conf.CurrentContext].Cluster].Server != "https://192.168.77.11:6443" {
				t.Errorf("kubelet.conf: %v", err) // it uses its own machine's API server, as kubeadm sets it
			}
			if c := w.kubeletPair(t, clientFile); c.Subject.CommonName != "system:node:"+w.meta.Name || !w.machine.Running(machine.UnitKubelet) {
				t.Errorf("its kubelet is %s", c.Subject)
			}
		})
	}
}

// later moves the clock while the machine is off.
func (w *fixture) later(d time.Duration) {
	w.reboot()
	w.now = func() time.Time { return time.Now().Add(d) }
}

// A control plane that was off for longer than its kubelet's certificates are valid starts again without help.
func TestAControlPlaneSignsItsKubeletsCertificates(t *testing.T) {
	w := first(t)
	r := w.boot()
	if out := w.init(t.Context(), r, w.request()); out.err != nil {
		t.Fatal(out.err, w.logged)
	}
	if err := r.end(t); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		off     time.Duration
		renewed bool
	}{{time.Hour, false}, {30 * time.Hour, true}, {31 * time.Hour, false}, {700 * time.Hour, true}} {
		before := w.kubeletPair(t, clientFile)
		w.later(tt.off)
		w.meta.Addresses = append(w.meta.Addresses[:1:1], netip.MustParseAddr("192.168.77.100")) // as the machine's host has it from now on
		calls := len(w.machine.Calls())
		if err := w.boot().end(t); err != nil {
			t.Fatal(err)
		}
		if !w.machine.Running(machine.UnitKubelet) {
			t.Errorf("after %s the kubelet does not run", tt.off)
		}
		now, client, serving := w.now(), w.kubeletPair(t, clientFile), w.kubeletPair(t, servingFile)
		if client.Equal(before) == tt.renewed {
			t.Fatalf("after %s the certificate is of %s, and was of %s", tt.off, client.NotBefore, before.NotBefore)
		}
		if c := w.machine.Calls()[calls:]; slices.Contains(c, "stop "+machine.UnitKubelet) != tt.renewed || c[len(c)-1] != "start "+machine.UnitKubelet {
			t.Errorf("after %s: %q", tt.off, c)
		}
		ca := x509.NewCertPool()
		text, err := os.ReadFile(filepath.Join(w.root, "/etc/kubernetes/pki/ca.crt"))
		if err != nil || !ca.AppendCertsFromPEM(text) {
			t.Fatal(err)
		}
		for use, c := range map[x509.ExtKeyUsage]*x509.Certificate{x509.ExtKeyUsageClientAuth: client, x509.ExtKeyUsageServerAuth: serving} {
			if _, err := c.Verify(x509.VerifyOptions{Roots: ca, KeyUsages: []x509.ExtKeyUsage{use}, CurrentTime: now}); err != nil {
				t.Error(err)
			}
			if c.Subject.String() != "CN=system:node:node1,O=system:nodes" || c.IsCA || c.NotAfter.After(now.Add(24*time.Hour)) {
				t.Errorf("%s, until %s", c.Subject, c.NotAfter)
			}
		}
		if serving.VerifyHostname("192.168.77.100") == nil {
			t.Errorf("after %s its kubelet has a certificate for an address that nobody has checked", tt.off)
		}
		if err := serving.VerifyHostname("192.168.77.11"); err != nil || len(client.DNSNames)+len(client.IPAddresses) > 0 {
			t.Errorf("%v, %v", err, client.IPAddresses)
		}
		if tt.renewed && bytes.Equal(client.RawSubjectPublicKeyInfo, before.RawSubjectPublicKeyInfo) {
			t.Error("the key is the old one")
		}
		w.holdsNoLongLife(t)
	}
}

// A kubelet that was started with the machine has read the manifests that are about to change, and stops none of their pods until it reaches an API
// server, which may be one of them: the kubelet is restarted.
func TestAControlPlaneStopsItsKubeletBeforeItRenewsWhatKubeadmIssued(t *testing.T) {
	w := first(t)
	r := w.boot()
	if out := w.init(t.Context(), r, w.request()); out.err != nil {
		t.Fatal(out.err, w.logged)
	}
	if err := r.end(t); err != nil {
		t.Fatal(err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(-time.Minute)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(w.root, "/etc/kubernetes/pki/apiserver.crt"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	w.later(time.Minute)
	calls := len(w.machine.Calls())
	if err := w.boot().end(t); err != nil {
		t.Fatal(err)
	}
	if c := slices.DeleteFunc(w.machine.Calls()[calls:], func(c string) bool { return !strings.HasSuffix(c, " "+machine.UnitKubelet) }); c[0] != "stop "+machine.UnitKubelet || c[len(c)-1] != "start "+machine.UnitKubelet {
		t.Errorf("%q", c)
	}
}

// The journal is that of another cluster than the one in the machine's PCR 15: nothing is signed.
func TestAForeignControlPlaneSignsNothing(t *testing.T) {
	w := first(t)
	r := w.boot()
	if out := w.init(t.Context(), r, w.request()); out.err != nil {
		t.Fatal(out.err, w.logged)
	}
	if err := r.end(t); err != nil {
		t.Fatal(err)
	}
	before := w.kubeletPair(t, clientFile)
	w.later(30 * time.Hour)
	w.tpm.LockTo([32]byte{9})
	if err := w.boot().end(t); attest.ReasonOf(err) != attestv1.Reason_REASON_LOCK_FOREIGN {
		t.Errorf("%v", err)
	}
	if !w.kubeletPair(t, clientFile).Equal(before) || w.machine.Running(machine.UnitKubelet) {
		t.Error("the kubelet has a new certificate, or runs")
	}
}

// joined returns a worker that has joined and is off.
func joined(t *testing.T) (*fixture, *joinservice) {
	t.Helper()
	w, j := worker(t)
	if err := w.boot().end(t); err != nil {
		t.Fatal(err, w.logged)
	}
	w.screen = filepath.Join(t.TempDir(), "screen")
	if err := os.WriteFile(w.screen, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	return w, j
}

func TestAWorkerAsksForNewCertificatesBeforeItsKubeletStarts(t *testing.T) {
	for name, tt := range map[string]struct {
		off  time.Duration // certificates of this joinservice are valid for 61 minutes
		asks bool
	}{
		"soon":                     {30 * time.Minute, false},
		"past two thirds":          {45 * time.Minute, true},
		"after they ended":         {2 * time.Hour, true},
		"long after they ended":    {1000 * time.Hour, true},
		"past two thirds by a lot": {59 * time.Minute, true},
	} {
		t.Run(name, func(t *testing.T) {
			w, j := joined(t)
			before := w.kubeletPair(t, clientFile)
			w.later(tt.off)
			j.ahead.Store(int64(tt.off))
			if err := w.boot().end(t); err != nil {
				t.Fatal(err)
			}
			asked, client := j.renewedCSRs(), w.kubeletPair(t, clientFile)
			if len(asked) > 0 != tt.asks || client.Equal(before) == tt.asks || !w.machine.Running(machine.UnitKubelet) {
				t.Fatalf("asked %d times, has one until %s", len(asked), client.NotAfter)
			}
			w.holdsNoLongLife(t)
			if !tt.asks {
				return
			}
			csr, err := x509.ParseCertificateRequest(asked[0].GetKubeletClientCsr())
			if err != nil || !bytes.Equal(csr.RawSubjectPublicKeyInfo, client.RawSubjectPublicKeyInfo) || bytes.Equal(csr.RawSubjectPublicKeyInfo, before.RawSubjectPublicKeyInfo) {
				t.Errorf("the key is not one that was made for the request: %v", err)
			}
			if now := w.now(); now.Before(client.NotBefore) || now.After(client.NotAfter) || w.kubeletPair(t, servingFile).NotAfter.Before(now) {
				t.Errorf("at %s it is valid to %s", now, client.NotAfter)
			}
		})
	}
}

// A machine that receives no certificates does not start its kubelet, shows the reason, and asks again.
func TestAWorkerWithoutCertificatesWaits(t *testing.T) {
	for name, tt := range map[string]struct {
		renew func(w *fixture, out *joinv1.RenewNodeCertificatesResponse) error
		want  string // on its console
	}{
		"banned": {func(*fixture, *joinv1.RenewNodeCertificatesResponse) error {
			return attest.Refuse(attestv1.Reason_REASON_BANNED, "no")
		}, "BANNED"},
		"a certificate for another key": {func(_ *fixture, out *joinv1.RenewNodeCertificatesResponse) error {
			out.KubeletClientCertificate = out.GetKubeletServingCertificate()
			return nil
		}, "REQUEST_INVALID"},
		"no certificate": {func(_ *fixture, out *joinv1.RenewNodeCertificatesResponse) error {
			out.KubeletServingCertificate = nil
			return nil
		}, "REQUEST_INVALID"},
	} {
		t.Run(name, func(t *testing.T) {
			w, j := joined(t)
			before := w.kubeletPair(t, clientFile)
			w.later(2 * time.Hour)
			j.ahead.Store(int64(2 * time.Hour))
			j.onRenewal(func(_ int, out *joinv1.RenewNodeCertificatesResponse) error { return tt.renew(w, out) })
			r := w.boot()
			eventually(t, "it asks again", func() bool { return len(j.renewedCSRs()) > 2 })
			eventually(t, "its console says why", func() bool {
				b, err := os.ReadFile(w.screen)
				return err == nil && strings.Contains(string(b), "waiting for new certificates of the node node2") && strings.Contains(string(b), tt.want)
			})
			if w.machine.Running(machine.UnitKubelet) || !w.kubeletPair(t, clientFile).Equal(before) {
				t.Error("its kubelet runs, or has another certificate")
			}
			j.onRenewal(nil)
			if err := r.end(t); err != nil {
				t.Fatal(err)
			}
			if !w.machine.Running(machine.UnitKubelet) || w.kubeletPair(t, clientFile).Equal(before) {
				t.Error("its kubelet does not run, or has no new certificate")
			}
		})
	}
}

// A7: also after a long time off, a worker asks only machines that the owner's policy lists.
func TestAWorkerAsksOnlyAControlPlaneForNewCertificates(t *testing.T) {
	w, j := joined(t)
	before := w.kubeletPair(t, clientFile)
	w.later(2 * time.Hour)
	j.ahead.Store(int64(2 * time.Hour))
	pub, priv := ownerKey(t)
	w.image.OwnerKeys = attest.OwnerKeys{pub}
	lists := func(m *attesttest.Machine) {
		j.signs(attest.SignPolicy(priv, attesttest.Policy(t, w.ca, []*attesttest.Machine{w.tpm}, attesttest.ControlPlanes(m))))
	}
	lists(w.tpm)
	r := w.boot()
	eventually(t, "its console says why", func() bool {
		b, err := os.ReadFile(w.screen)
		return err == nil && strings.Contains(string(b), "SERVER_NOT_LISTED")
	})
	if len(j.renewedCSRs()) > 0 || w.machine.Running(machine.UnitKubelet) || !w.kubeletPair(t, clientFile).Equal(before) {
		t.Error("it asked, its kubelet runs, or it has another certificate")
	}
	lists(j.host)
	if err := r.end(t); err != nil {
		t.Fatal(err)
	}
	if !w.machine.Running(machine.UnitKubelet) || w.kubeletPair(t, clientFile).Equal(before) {
		t.Error("its kubelet does not run, or has no new certificate")
	}
}

// With a clock that is behind, certificates look as if they were not valid yet, also new ones, which the machine reports. Once the clock is right, the
// old ones are valid.
func TestAWorkerWhoseClockIsBehindWaitsForTheTime(t *testing.T) {
	w, j := joined(t)
	before := w.kubeletPair(t, clientFile)
	w.reboot()
	var off atomic.Int64
	off.Store(int64(-30 * time.Minute))
	w.now = func() time.Time { return time.Now().Add(time.Duration(off.Load())) }
	r := w.boot()
	eventually(t, "it says that its clock is off", func() bool {
		b, err := os.ReadFile(w.screen)
		return err == nil && strings.Contains(string(b), "CLOCK_SKEW") && len(j.renewedCSRs()) > 0
	})
	if w.machine.Running(machine.UnitKubelet) {
		t.Error("its kubelet runs")
	}
	off.Store(0)
	if err := r.end(t); err != nil {
		t.Fatal(err)
	}
	if !w.machine.Running(machine.UnitKubelet) {
		t.Error("its kubelet does not run")
	}
	if c := w.kubeletPair(t, clientFile); c.NotAfter.Before(before.NotAfter) {
		t.Errorf("until %s", c.NotAfter)
	}
}

// With valid certificates a worker does not wait long for a joinservice.
func TestAWorkerWithValidCertificatesGoesOnWithoutNewOnes(t *testing.T) {
	w, _ := joined(t)
	w.renewal = 100 * time.Millisecond
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w.meta.JoinEndpoints = []string{l.Addr().String()}
	if err := l.Close(); err != nil { // no server listens there
		t.Fatal(err)
	}
	before := w.kubeletPair(t, clientFile)
	w.later(50 * time.Minute)
	if err := w.boot().end(t); err != nil {
		t.Fatal(err)
	}
	if !w.machine.Running(machine.UnitKubelet) || !w.kubeletPair(t, clientFile).Equal(before) {
		t.Error("its kubelet does not run")
	}
}
