//go:build renewal

package renewal

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
)

var (
	planes  = []string{"node1", "node2", "node3"}
	workers = []string{"node4", "node5"}
)

// No clock is changed: after its boot, a machine finds certificates that ended while it was off, signed by the
// cluster's own authority. The only action is to switch machines on.
func TestMachinesThatWereOffForLongerThanTheirCertificatesComeBack(t *testing.T) {
	w := &fixture{labtest.Up(t, "muster-e2e")}
	endpoints := []string{"192.168.77.11:30090", "192.168.77.12:30090", "192.168.77.13:30090"}
	machines := []driver.Node{w.First(t)}
	for _, name := range planes[1:] {
		machines = append(machines, driver.Node{Name: name, Role: "control-plane", JoinEndpoints: endpoints})
	}
	for _, name := range workers {
		machines = append(machines, driver.Node{Name: name, JoinEndpoints: endpoints})
	}
	w.Add(t, machines...)
	ids := map[string]string{"node2": w.MachineID(t, "192.168.77.12"), "node3": w.MachineID(t, "192.168.77.13")}
	w.Init(t, "poweroff")
	for name, id := range ids {
		w.Muster(t, "enroll", name, "--role", "control-plane", "--machine-id", id)
	}
	all := append(append([]string{}, planes...), workers...)
	for _, name := range all {
		w.Ready(t, name)
	}
	t.Log("all nodes are Ready")

	t.Run("no node has a client certificate for longer than a day", func(t *testing.T) { w.noLongLife(t, all) })
	t.Run("one worker", func(t *testing.T) {
		before := w.expire(t, "node4")
		w.off(t, "node4")
		w.on(t, "node4")
		w.back(t, before)
	})
	t.Run("a banned machine gets nothing at boot", func(t *testing.T) {
		w.bannedGetsNothing(t, "node5", func() {
			w.off(t, "node5")
			w.on(t, "node5")
		})
	})
	t.Run("a worker and a control plane that run on", func(t *testing.T) {
		before := w.expire(t, "node3", "node4")
		for name := range before {
			w.Must(t, name, "", "systemctl", "start", "kubelet")
		}
		w.back(t, before)
	})
	t.Run("a banned machine that runs on gets nothing", func(t *testing.T) {
		w.bannedGetsNothing(t, "node5", func() { w.Must(t, "node5", "", "systemctl", "start", "kubelet") })
	})
	t.Run("all of them", func(t *testing.T) {
		before := w.expire(t, all...)
		w.off(t, all...)
		began := time.Now()
		w.on(t, all...)
		w.back(t, before)
		t.Logf("three control planes and two workers are Ready %s after they were switched on", time.Since(began).Round(time.Second))
		w.noLongLife(t, all)
	})
	t.Run("their owner, whose kubeconfig has ended too", func(t *testing.T) { w.ownerReturns(t, "poweroff") })
}

// bannedGetsNothing bans a node whose certificates have ended, and has it ask the other nodes; once it is allowed it
// comes back.
func (w *fixture) bannedGetsNothing(t *testing.T, node string, ask func()) {
	t.Helper()
	refused := func(ctx context.Context) int {
		out, _ := w.At(ctx, node, "", "grep", "the kubelet's certificates are not renewed yet", "/var/log/muster-bootstrapper.log") // an error of grep means that there is none
		return strings.Count(out, `"reason":"BANNED"`)
	}
	ban := func(banned bool) { // API servers restart after a ban
		labtest.Eventually(t, func(ctx context.Context) error {
			_, err := w.Kubectl(ctx, "patch", "attestednode", node, "--type=merge", "-p", fmt.Sprintf(`{"spec":{"banned":%t}}`, banned))
			return err
		})
	}
	ban(true)
	before, count := w.expire(t, node), refused(t.Context())
	ask()
	within(t, func(ctx context.Context) error {
		if n := refused(ctx); n == count {
			return fmt.Errorf("it was refused %d times, as before", n)
		}
		var records strings.Builder
		for _, name := range planes {
			out, _ := w.At(ctx, name, "", "grep", "-h", `"connection refused"\|"renewal refused"`, "/var/log/muster/audit.jsonl", "/var/log/muster/audit-refused.jsonl")
			records.WriteString(out)
		}
		if !strings.Contains(records.String(), "BANNED") {
			return fmt.Errorf("no record of a refusal: %s", &records)
		}
		return nil
	})
	if c, err := w.certificate(t.Context(), node, "client"); err != nil || !c.Equal(before[node]) {
		t.Errorf("it has a certificate until %s, %v", c.NotAfter, err)
	}
	if out, err := w.At(t.Context(), node, "", "systemctl", "is-active", "kubelet"); err == nil {
		t.Errorf("its kubelet is %s", out)
	}
	ban(false)
	w.back(t, before)
}

// noLongLife reads the certificates from the disks, and compares them with the owner's output.
func (w *fixture) noLongLife(t *testing.T, nodes []string) {
	t.Helper()
	for _, name := range nodes {
		c, err := w.certificate(t.Context(), name, "client")
		if err != nil {
			t.Fatal(err)
		}
		if life := c.NotAfter.Sub(c.NotBefore); life > 24*time.Hour+15*time.Minute || c.Subject.CommonName != "system:node:"+name {
			t.Errorf("%s: %s, good for %s", name, c.Subject, life)
		}
		if conf := w.Must(t, name, "", "cat", "/etc/kubernetes/kubelet.conf"); strings.Contains(conf, "client-certificate-data") || strings.Contains(conf, "client-key-data") {
			t.Errorf("%s: kubelet.conf has a certificate of its own", name)
		}
		files := w.Must(t, name, "", "sh", "-c", "for f in /var/lib/kubelet/pki/kubelet-client-2*.pem; do cat $f; done")
		for block, rest := pem.Decode([]byte(files)); block != nil; block, rest = pem.Decode(rest) {
			if old, err := x509.ParseCertificate(block.Bytes); err == nil && old.NotAfter.Sub(old.NotBefore) > 24*time.Hour+15*time.Minute {
				t.Errorf("%s: there is a certificate until %s on its disk", name, old.NotAfter)
			}
		}
		within(t, func(ctx context.Context) error { // it attests every five minutes
			out, err := w.Kubectl(ctx, "get", "attestednode", name, "-o", "jsonpath={.status.certificates.clientExpiresAt}")
			if want := c.NotAfter.UTC().Format(time.RFC3339); err != nil || out != want {
				return fmt.Errorf("%s: status says %q, and its certificate ends at %s: %w", name, out, want, err)
			}
			return nil
		})
	}
}

// expire gives the nodes certificates that have ended, and returns the clients'.
func (w *fixture) expire(t *testing.T, nodes ...string) map[string]*x509.Certificate {
	t.Helper()
	pair, err := tls.X509KeyPair([]byte(w.Must(t, "node1", "", "cat", "/etc/kubernetes/pki/ca.crt")), []byte(w.Must(t, "node1", "", "cat", "/etc/kubernetes/pki/ca.key")))
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]*x509.Certificate{}
	for _, name := range nodes {
		w.Must(t, name, "", "systemctl", "stop", "kubelet")
		for kind, use := range map[string]x509.ExtKeyUsage{"client": x509.ExtKeyUsageClientAuth, "server": x509.ExtKeyUsageServerAuth} {
			key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
			if err != nil {
				t.Fatal(err)
			}
			template := &x509.Certificate{
				SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "system:node:" + name, Organization: []string{"system:nodes"}}, DNSNames: []string{name},
				NotBefore: time.Now().Add(-25 * time.Hour), NotAfter: time.Now().Add(-time.Hour), KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{use},
			}
			der, err := x509.CreateCertificate(rand.Reader, template, pair.Leaf, key.Public(), pair.PrivateKey)
			if err != nil {
				t.Fatal(err)
			}
			private, err := x509.MarshalECPrivateKey(key)
			if err != nil {
				t.Fatal(err)
			}
			text := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})) + string(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: private}))
			w.Must(t, name, text, "sh", "-c", "cat > $(readlink -f /var/lib/kubelet/pki/kubelet-"+kind+"-current.pem)")
			if kind == "client" {
				if out[name], err = x509.ParseCertificate(der); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	return out
}

func each(t *testing.T, nodes []string, do func(string) error) {
	t.Helper()
	errs := make([]error, len(nodes))
	var wg sync.WaitGroup
	for i, n := range nodes {
		wg.Go(func() { errs[i] = do(n) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func (w *fixture) off(t *testing.T, nodes ...string) {
	t.Helper()
	each(t, nodes, func(n string) error { return w.KillNode(t.Context(), n) })
}

func (w *fixture) on(t *testing.T, nodes ...string) {
	t.Helper()
	each(t, nodes, func(n string) error { _, err := w.RebootNode(t.Context(), n); return err })
}

// back waits until the nodes are Ready with other certificates, by what they have reported since.
func (w *fixture) back(t *testing.T, before map[string]*x509.Certificate) {
	t.Helper()
	began := time.Now()
	for name, old := range before {
		within(t, func(ctx context.Context) error {
			c, err := w.certificate(ctx, name, "client")
			if err != nil {
				return err
			}
			if c.Equal(old) || time.Now().After(c.NotAfter) {
				return fmt.Errorf("%s has the certificate that ended at %s", name, c.NotAfter)
			}
			out, err := w.Kubectl(ctx, "-n", "kube-node-lease", "get", "lease", name, "-o", "jsonpath={.spec.renewTime}")
			if err != nil {
				return err
			}
			if renewed, err := time.Parse(time.RFC3339Nano, out); err != nil || renewed.Before(began) {
				return fmt.Errorf("%s's lease is of %s: %w", name, out, err)
			}
			return w.IsReady(ctx, name)
		})
		t.Logf("%s is Ready %s later", name, time.Since(began).Round(time.Second))
	}
}
