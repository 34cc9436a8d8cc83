package token

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/lab/byhand"
	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
)

// ownToken has the content of a ticket's token from joinservice, made by a user who may create Secrets.
const ownToken = "mustrx.0123456789abcdef"

const ownSecret = `apiVersion: v1
kind: Secret
metadata: {name: bootstrap-token-mustrx, namespace: kube-system}
type: bootstrap.kubernetes.io/token
stringData: {token-id: mustrx, token-secret: 0123456789abcdef, usage-bootstrap-authentication: "true", auth-extra-groups: "system:bootstrappers:muster"}
`

// asks files a request for a node's certificate, in a dry run, with only a token, and returns the status of the
// answer.
func (c *cluster) asks(ctx context.Context, t *testing.T, token string) (string, error) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return "", err
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: "system:node:node9", Organization: []string{"system:nodes"}}}, key)
	if err != nil {
		return "", err
	}
	request := base64.StdEncoding.EncodeToString(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}))
	body := `{"apiVersion":"certificates.k8s.io/v1","kind":"CertificateSigningRequest","metadata":{"name":"node9"},"spec":{"request":"` + request +
		`","signerName":"kubernetes.io/kube-apiserver-client-kubelet","usages":["digital signature","client auth"]}}`
	out, err := c.At(ctx, "node1", body, "curl", "-sS", "--max-time", "60", "--cacert", "/etc/kubernetes/pki/ca.crt", "-H", "Content-Type: application/json",
		"-H", "Authorization: Bearer "+token, "--data", "@-", "-o", "/root/answer", "-w", "%{http_code}",
		"https://192.168.77.1:6443/apis/certificates.k8s.io/v1/certificatesigningrequests?dryRun=All")
	return out, err
}

// answers waits for a status of asks, once the API server knows the token.
func (c *cluster) answers(t *testing.T, token, status string) {
	t.Helper()
	labtest.Eventually(t, func(ctx context.Context) error {
		have, err := c.asks(ctx, t, token)
		if err == nil && have != status {
			err = fmt.Errorf("a request for a node's certificate with token %.6s: HTTP %s, want %s", token, have, status)
		}
		return err
	})
}

// watchTokens returns the bootstrap tokens that come and go until stop is called.
func (c *cluster) watchTokens(t *testing.T) (stop func() string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	cmd, err := c.Command(ctx, "node1", "kubectl", "--kubeconfig", "/etc/kubernetes/admin.conf", "-n", "kube-system", "get", "secrets",
		"--field-selector", "type=bootstrap.kubernetes.io/token", "-w", "-o", "name")
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	cmd.Stdout, cmd.WaitDelay = &out, time.Second // the test does not wait for programs in the machine
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return func() string {
		cancel()
		_ = cmd.Wait() // it was killed
		return out.String()
	}
}

func (c *cluster) tokens(ctx context.Context) (string, error) {
	return c.Kubectl(ctx, "-n", "kube-system", "get", "secrets", "--field-selector", "type=bootstrap.kubernetes.io/token", "-o", "name")
}

// Invariant J5.
func TestAClusterMadeByHandGetsMuster(t *testing.T) {
	c := bringUp(t)
	c.byHand(t)
	// Muster is to end this: anyone with kubeadm's token can become a node of any name.
	c.answers(t, byhand.Token, "201")

	c.install(t, "--policy", "policy.yaml")
	c.Ready(t, "node1")
	alive := c.alive(t, "node4")

	t.Run("a token alone does not become a node", func(t *testing.T) {
		c.answers(t, byhand.Token, "422") // refused by admission: RBAC would allow it
		if why := c.Must(t, "node1", "", "cat", "/root/answer"); !strings.Contains(why, "node certificates come from Muster's joinservice only") {
			t.Errorf("refused for another reason: %s", why)
		}
		c.Apply(t, ownSecret)
		c.answers(t, ownToken, "403") // RBAC's
	})
	t.Run("doctor names what the hand has left, and is content without it", func(t *testing.T) {
		out, err := c.doctor(t.Context())
		for _, left := range []string{"bootstrap-token-" + byhand.Token[:6], "bootstrap-token-mustrx", "kubeadm:kubelet-bootstrap", "kubeadm:node-autoapprove-bootstrap"} {
			if err == nil || !strings.Contains(out, left) {
				t.Errorf("it does not name %s: %v\n%s", left, err, out)
			}
		}
		c.MustKubectl(t, "-n", "kube-system", "delete", "secret", "bootstrap-token-mustrx", "bootstrap-token-"+byhand.Token[:6])
		c.MustKubectl(t, "delete", "clusterrolebinding", "kubeadm:kubelet-bootstrap", "kubeadm:node-autoapprove-bootstrap", "kubeadm:node-autoapprove-certificate-rotation")
		labtest.Eventually(t, func(ctx context.Context) error {
			out, err := c.doctor(ctx)
			if err != nil {
				return fmt.Errorf("%w\n%s", err, out)
			}
			return nil
		})
	})
	t.Run("an attested machine joins, and its token ends", func(t *testing.T) {
		stop := c.watchTokens(t)
		c.Add(t, labtest.Worker("node2"))
		c.Ready(t, "node2")
		labtest.Eventually(t, func(ctx context.Context) error {
			left, err := c.tokens(ctx)
			if err == nil && left != "" {
				err = errors.New("still there: " + left)
			}
			return err
		})
		seen := stop()
		if !strings.Contains(seen, "secret/bootstrap-token-") {
			t.Errorf("its ticket had no token: %q", seen)
		}
		if _, err := c.At(t.Context(), "node2", "", "test", "!", "-e", "/run/muster/kubeadm.yaml"); err != nil {
			t.Errorf("kubeadm's configuration is left: %v", err)
		}
	})
	t.Run("a machine with a changed bootstrapper is refused", func(t *testing.T) {
		c.Add(t, driver.Node{Name: "node3", JoinEndpoints: []string{labtest.Joinservice}, TamperBootstrapper: true})
		labtest.Eventually(t, func(ctx context.Context) error {
			out, err := c.At(ctx, driver.Owner, "", "muster", "status", "--directory", "muster-token", "--output", "json")
			if !strings.Contains(out, "POLICY_REFUSED") {
				return fmt.Errorf("not refused: %w\n%s", err, out)
			}
			return nil
		})
		if left, err := c.tokens(t.Context()); err != nil || left != "" {
			t.Errorf("it got a token: %s %v", left, err)
		}
	})
	t.Run("a node of before goes on, and doctor says what it is", func(t *testing.T) {
		labtest.Eventually(t, func(context.Context) error {
			if c.alive(t, "node4") == alive {
				return errors.New("node4 has not renewed its lease since Muster is there")
			}
			return nil
		})
		if out, err := c.doctor(t.Context()); err != nil || !strings.Contains(out, "node4 was a node before Muster was installed") {
			t.Errorf("%v\n%s", err, out)
		}
	})
	t.Run("install again changes nothing", func(t *testing.T) {
		c.install(t)
		if out, err := c.Kubectl(t.Context(), "-n", "muster-system", "get", "configmap", "muster-node-access", "-o", "jsonpath={.data.unattested}"); err != nil || !strings.Contains(out, "node4") {
			t.Errorf("node4 may not write any more: %q %v", out, err)
		}
	})
	t.Run("an upgrade keeps the credential", func(t *testing.T) {
		if err := os.WriteFile(filepath.Join(c.OwnerDir(), "values.yaml"), []byte("kms: {resources: {requests: {cpu: 11m}}}\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		c.Muster(t, "upgrade", "--directory", "muster-token", "--chart-values", "values.yaml", "--wait", "10m", "--timeout", "30m")
		out, err := c.Kubectl(t.Context(), "-n", "muster-system", "get", "ds", "muster-joinservice", "-o", "jsonpath={.spec.template.spec.containers[0].args}")
		if err != nil || !strings.Contains(out, "--join-credential=token") {
			t.Errorf("%s %v", out, err)
		}
	})
	t.Run("a node can be forgotten", func(t *testing.T) {
		c.Muster(t, "forget", "node2", "--directory", "muster-token", "--yes", "--timeout", "20m")
		if out, err := c.Kubectl(t.Context(), "get", "node,attestednode", "node2", "--ignore-not-found", "-o", "name"); err != nil || out != "" {
			t.Errorf("left: %s %v", out, err)
		}
	})
}

func (c *cluster) install(t *testing.T, more ...string) {
	t.Helper()
	c.Muster(t, append([]string{
		"install", "--name", "token", "--endpoint", "192.168.77.11:9000", "--init-secret-file", "init-secret.hex", "--owner-key-file", driver.OwnerKeyFile, "--control-plane-endpoint", driver.ControlPlaneEndpoint,
		"--components", "components.yaml", "--images", filepath.Join(c.Root, "dist", "images", "digests.json"),
	}, more...)...)
}

// alive returns when a node last reported that it is ready; empty if it has not yet.
func (c *cluster) alive(t *testing.T, node string) string {
	t.Helper()
	return c.MustKubectl(t, "-n", "kube-node-lease", "get", "lease", node, "--ignore-not-found", "-o", "jsonpath={.spec.renewTime}")
}

func (c *cluster) doctor(ctx context.Context) (string, error) {
	return c.At(ctx, driver.Owner, "", "muster", "doctor", "--directory", "muster-token", "--timeout", "20m")
}
