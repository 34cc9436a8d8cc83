//go:build renewal

package renewal

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/lab/labtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const life = labtest.ShortLife

type fixture struct {
	*labtest.Cluster
}

// Node2 renews both certificates by itself. Node3's attester is stopped: it gets neither, and the reason is shown
// where an operator looks for it; once it attests again it gets both, before the old ones end (J7).
func TestNodesLiveLongerThanTheirCertificates(t *testing.T) {
	w := bringUp(t)
	w.ShortenCertificates(t)
	w.Add(t, labtest.Worker("node2"), labtest.Worker("node3"))
	kinds := []string{"client", "server"}
	first := map[string]*x509.Certificate{}
	for _, name := range []string{"node2", "node3"} {
		w.Ready(t, name)
		for _, kind := range kinds {
			c, err := w.certificate(t.Context(), name, kind)
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
	w.Must(t, "node3", "", "systemctl", "stop", "muster-attester")

	waiting := func(ctx context.Context, signer string) error {
		out, err := w.Kubectl(ctx, "get", "csr", "-o", "json")
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
	within(t, func(ctx context.Context) error {
		err := errors.Join(waiting(ctx, "kubernetes.io/kube-apiserver-client-kubelet"), waiting(ctx, "kubernetes.io/kubelet-serving"))
		if err != nil && time.Until(first["node3client"].NotAfter) < time.Minute {
			t.Fatalf("one minute before the certificate ends: %v", err)
		}
		return err
	})
	t.Log("node3 waits for both certificates")
	for _, kind := range kinds {
		c, err := w.certificate(t.Context(), "node3", kind)
		if err != nil || !c.Equal(first["node3"+kind]) {
			t.Errorf("node3's %s certificate was renewed without a verdict: %v", kind, err)
		}
	}
	labtest.Eventually(t, func(ctx context.Context) error {
		out, err := w.Kubectl(ctx, "get", "events", "--field-selector", "involvedObject.name=node3,reason=RenewalWaits", "-o", "jsonpath={.items[*].message}")
		if err != nil || !strings.Contains(out, "VERDICT_OLD") {
			return fmt.Errorf("no event says why: %q, %w", out, err)
		}
		t.Log("event: ", out)
		return nil
	})
	out, err := w.Kubectl(t.Context(), "-n", "muster-system", "logs", "ds/muster-joinservice")
	if err != nil || !strings.Contains(out, `"a kubelet's certificate request waits"`) || !strings.Contains(out, `"reason":"VERDICT_OLD"`) {
		t.Errorf("joinservice's log does not say why: %v", err)
	}

	w.Must(t, "node3", "", "systemctl", "start", "muster-attester")
	for _, name := range []string{"node3", "node2"} {
		for _, kind := range kinds {
			within(t, func(ctx context.Context) error {
				c, err := w.certificate(ctx, name, kind)
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
		within(t, func(ctx context.Context) error {
			out, err := w.Kubectl(ctx, "-n", "kube-node-lease", "get", "lease", name, "-o", "jsonpath={.spec.renewTime}")
			if err != nil {
				return err
			}
			renewed, err := time.Parse(time.RFC3339Nano, out)
			if err != nil || !renewed.After(end) {
				return fmt.Errorf("%s's lease is of %s, and its first certificate ended at %s: %w", name, out, end, err)
			}
			return w.IsReady(ctx, name)
		})
	}
	out, err = w.Kubectl(t.Context(), "get", "csr", "-o", "wide")
	t.Log(out, err)
}

// bringUp makes a cluster of one control plane.
func bringUp(t *testing.T) *fixture {
	t.Helper()
	w := &fixture{labtest.Up(t, "muster-e2e")}
	w.Add(t, w.First(t))
	w.Init(t, "renewal")
	return w
}

// certificate is the one that the node's kubelet uses now.
func (w *fixture) certificate(ctx context.Context, node, kind string) (*x509.Certificate, error) {
	out, err := w.At(ctx, node, "", "cat", "/var/lib/kubelet/pki/kubelet-"+kind+"-current.pem")
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode([]byte(out))
	if block == nil || block.Type != "CERTIFICATE" {
		return nil, fmt.Errorf("%s's %s certificate is no PEM", node, kind)
	}
	return x509.ParseCertificate(block.Bytes)
}

// within waits for a condition while a certificate is valid.
func within(t *testing.T, check func(context.Context) error) {
	t.Helper()
	if err := labtest.Within(t.Context(), life, check); err != nil {
		t.Fatal(err)
	}
}
