//go:build renewal

package renewal

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	life        = 10 * time.Minute
	joinservice = "192.168.77.11:30090"
)

type world struct {
	*driver.Lab
	root string
}

// Node2 renews both certificates by itself. Node3's attester is stopped: it gets neither, and the reason
// stands where one looks for it; once it attests again it gets both, before the old ones end.
func TestNodesLiveLongerThanTheirCertificates(t *testing.T) {
	w := bringUp(t)
	w.shorten(t)
	for _, name := range []string{"node2", "node3"} {
		if _, err := w.AddNode(t.Context(), driver.Node{Name: name, JoinEndpoints: []string{joinservice}}); err != nil {
			t.Fatal(err)
		}
	}
	kinds := []string{"client", "server"}
	first := map[string]*x509.Certificate{}
	for _, name := range []string{"node2", "node3"} {
		w.until(t, 3*time.Minute, func() error { return w.ready(t, name) })
		for _, kind := range kinds {
			c, err := w.certificate(t, name, kind)
			if err != nil {
				t.Fatal(err)
			}
			first[name+kind] = c
			t.Logf("%s's %s certificate: %s to %s", name, kind, c.NotBefore, c.NotAfter)
			if left := time.Until(c.NotAfter); left > life {
				t.Fatalf("%s's %s certificate lives %s longer, want %s at most", name, kind, left, life)
			}
		}
	}
	if out, err := w.at(t, "node3", "systemctl", "stop", "muster-attester"); err != nil {
		t.Fatal(out, err)
	}

	waiting := func(signer string) error {
		out, err := w.kubectl(t, "get", "csr", "-o", "json")
		if err != nil {
			return err
		}
		var list struct {
			Items []struct {
				Spec   struct{ Username, SignerName string }
				Status struct{ Conditions []any }
			}
		}
		if err := json.Unmarshal([]byte(out), &list); err != nil {
			return err
		}
		for _, o := range list.Items {
			if o.Spec.Username == "system:node:node3" && o.Spec.SignerName == signer && len(o.Status.Conditions) == 0 {
				return nil
			}
		}
		return fmt.Errorf("node3 has not asked for a certificate of %s", signer)
	}
	w.until(t, life, func() error {
		err := errors.Join(waiting("kubernetes.io/kube-apiserver-client-kubelet"), waiting("kubernetes.io/kubelet-serving"))
		if err != nil && time.Until(first["node3client"].NotAfter) < time.Minute {
			t.Fatalf("one minute before the certificate ends: %v", err)
		}
		return err
	})
	t.Log("node3 waits for both certificates")
	for _, kind := range kinds {
		c, err := w.certificate(t, "node3", kind)
		if err != nil || !c.Equal(first["node3"+kind]) {
			t.Errorf("node3's %s certificate was renewed without a verdict: %v", kind, err)
		}
	}
	w.until(t, time.Minute, func() error {
		out, err := w.kubectl(t, "get", "events", "--field-selector", "involvedObject.name=node3,reason=RenewalWaits", "-o", "jsonpath={.items[*].message}")
		if err != nil || !strings.Contains(out, "VERDICT_OLD") {
			return fmt.Errorf("no event says why: %q, %w", out, err)
		}
		t.Log("event: ", out)
		return nil
	})
	out, err := w.kubectl(t, "-n", "muster-system", "logs", "ds/muster-joinservice")
	if err != nil || !strings.Contains(out, `"a kubelet's certificate request waits"`) || !strings.Contains(out, `"reason":"VERDICT_OLD"`) {
		t.Errorf("joinservice's log does not say why: %v", err)
	}

	if out, err := w.at(t, "node3", "systemctl", "start", "muster-attester"); err != nil {
		t.Fatal(out, err)
	}
	for _, name := range []string{"node3", "node2"} {
		for _, kind := range kinds {
			w.until(t, life, func() error {
				c, err := w.certificate(t, name, kind)
				if err != nil {
					return err
				}
				if c.Equal(first[name+kind]) {
					if time.Now().After(c.NotAfter) {
						t.Fatalf("%s's %s certificate ended, and was not renewed", name, kind)
					}
					return fmt.Errorf("%s has its first %s certificate", name, kind)
				}
				t.Logf("%s's %s certificate is renewed, to %s", name, kind, c.NotAfter)
				return nil
			})
		}
	}
	// The first ones end, and the nodes go on.
	for _, name := range []string{"node2", "node3"} {
		end := first[name+"client"].NotAfter
		w.until(t, life, func() error {
			out, err := w.kubectl(t, "-n", "kube-node-lease", "get", "lease", name, "-o", "jsonpath={.spec.renewTime}")
			if err != nil {
				return err
			}
			renewed, err := time.Parse(time.RFC3339Nano, out)
			if err != nil || !renewed.After(end) {
				return fmt.Errorf("%s's lease is of %s, and its first certificate ended at %s: %w", name, out, end, err)
			}
			return w.ready(t, name)
		})
	}
	out, err = w.kubectl(t, "get", "csr", "-o", "wide")
	t.Log(out, err)
}

// bringUp makes a cluster of one control plane.
func bringUp(t *testing.T) *world {
	t.Helper()
	lab, root := labtest.New(t, "muster-e2e")
	w := &world{lab, root}
	bin, images := filepath.Join(root, "bin"), filepath.Join(root, "dist", "images")
	if err := lab.Up(t.Context(), driver.Up{
		Lab: filepath.Join(bin, "lab"), Bootstrapper: filepath.Join(bin, "bootstrapper"), Preinstalled: []string{"kubelet"},
		Images: []string{filepath.Join(images, "joinservice.tar"), filepath.Join(images, "kms.tar")},
	}); err != nil {
		t.Fatal(err)
	}
	secret := make([]byte, 32)
	_, _ = rand.Read(secret) // never fails
	hash := sha256.Sum256(secret)
	if err := os.WriteFile(filepath.Join(lab.OwnerDir(), "init-secret.hex"), []byte(hex.EncodeToString(secret)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	muster := filepath.Join(bin, "muster")
	for _, argv := range [][]string{
		{"policy", "from-measurements", lab.MeasurementsPath(), "--ek-root", "ek-roots.pem", "--operator", "--node-cidr", driver.NodeSubnet, "--role", "worker", "--role", "control-plane", "--allow-plain-state", "-o", "policy.yaml"},
		nil, // the machine, which is younger than the policy
		{
			"init", "--name", "renewal", "--endpoint", "192.168.77.11:9000", "--init-secret-file", "init-secret.hex", "--policy", "policy.yaml",
			"--control-plane-endpoint", driver.ControlPlaneEndpoint, "--pod-cidr", driver.PodSubnet, "--service-cidr", driver.ServiceSubnet,
			"--components", "components.yaml", "--manifests", filepath.Join("manifests", "podnet.yaml"), "--images", filepath.Join(images, "digests.json"),
		},
	} {
		if argv == nil {
			if _, err := lab.AddNode(t.Context(), driver.Node{Name: "node1", Role: "control-plane", InitSecretHash: hex.EncodeToString(hash[:])}); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if out, err := w.at(t, driver.Owner, append([]string{muster}, argv...)...); err != nil {
			t.Fatal(out, err)
		}
	}
	return w
}

// shorten makes certificates live ten minutes: those of tickets, and those that kubelets renew.
func (w *world) shorten(t *testing.T) {
	t.Helper()
	if out, err := w.at(t, "node1", "sed", "-i", "s/--cluster-signing-duration=24h/--cluster-signing-duration=10m/", "/etc/kubernetes/manifests/kube-controller-manager.yaml"); err != nil {
		t.Fatal(out, err)
	}
	patch := `[{"op":"add","path":"/spec/template/spec/containers/0/args/-","value":"--certificate-life=10m"},{"op":"add","path":"/spec/template/spec/containers/0/args/-","value":"--verdict-max-age=2m"}]`
	w.until(t, time.Minute, func() error {
		_, err := w.kubectl(t, "-n", "muster-system", "patch", "daemonset", "muster-joinservice", "--type=json", "-p", patch)
		return err
	})
	w.until(t, 3*time.Minute, func() error {
		out, err := w.kubectl(t, "-n", "kube-system", "get", "pods", "-l", "component=kube-controller-manager", "-o", `jsonpath={.items[*].spec.containers[0].command} {.items[*].status.containerStatuses[0].ready}`)
		if err != nil || !strings.Contains(out, "--cluster-signing-duration=10m") || !strings.HasSuffix(out, " true") {
			return fmt.Errorf("the controller manager is %q, %w", out, err)
		}
		_, err = w.kubectl(t, "-n", "muster-system", "rollout", "status", "daemonset/muster-joinservice", "--timeout=5s")
		return err
	})
}

func (w *world) at(t *testing.T, where string, argv ...string) (string, error) {
	t.Helper()
	cmd, err := w.Command(t.Context(), where, argv...)
	if err != nil {
		return "", err
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("%s on %s: %w: %s", argv[0], where, err, out)
	}
	return string(out), nil
}

func (w *world) kubectl(t *testing.T, args ...string) (string, error) {
	t.Helper()
	return w.at(t, "node1", append([]string{"kubectl", "--kubeconfig", "/etc/kubernetes/admin.conf"}, args...)...)
}

func (w *world) ready(t *testing.T, node string) error {
	t.Helper()
	out, err := w.kubectl(t, "get", "node", node, "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`)
	if err == nil && out != "True" {
		err = fmt.Errorf("%s is there, Ready=%q", node, out)
	}
	return err
}

// certificate is what the node's kubelet uses now.
func (w *world) certificate(t *testing.T, node, kind string) (*x509.Certificate, error) {
	t.Helper()
	out, err := w.at(t, node, "cat", "/var/lib/kubelet/pki/kubelet-"+kind+"-current.pem")
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode([]byte(out))
	if block == nil || block.Type != "CERTIFICATE" {
		return nil, fmt.Errorf("%s's %s certificate is no PEM", node, kind)
	}
	return x509.ParseCertificate(block.Bytes)
}

func (w *world) until(t *testing.T, limit time.Duration, check func() error) {
	t.Helper()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	end := time.After(limit)
	for {
		err := check()
		if err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-end:
			t.Fatalf("not after %s: %v", limit, err)
		case <-t.Context().Done():
			t.Fatal(err)
		}
	}
}
