package controlplane

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
)

// ordering runs a command that gives orders to control planes, one after another.
func (c *cluster) ordering(t *testing.T, args ...string) {
	t.Helper()
	var nodes []string
	for i := range c.planes {
		nodes = append(nodes, node(i+1))
	}
	defer c.TakeOrders(t, c.kubectl, "rotate-key", nodes...)()
	_, progress, err := c.Run(t.Context(), driver.Owner, "", append([]string{"muster"}, args...)...)
	t.Logf("muster %s: %v\n%s", strings.Join(args, " "), err, progress)
	if err != nil {
		t.Fatal(err)
	}
}

// mayBegin waits until a command has nothing to complain of: static pods are Ready, and nodes have reported, some time after a boot.
func (c *cluster) mayBegin(t *testing.T, args ...string) {
	t.Helper()
	labtest.Eventually(t, func(ctx context.Context) error {
		_, said, err := c.Run(ctx, driver.Owner, "", append(append([]string{"muster"}, args...), "--dry-run")...)
		if err != nil {
			err = fmt.Errorf("%w: %s", err, said)
		}
		return err
	})
}

// token returns a new token of a service account.
func (c *cluster) token(t *testing.T) (token string) {
	t.Helper()
	labtest.Eventually(t, func(ctx context.Context) (err error) {
		token, err = c.kubectl(ctx, "-n", "default", "create", "token", "default", "--duration", "4h")
		return err
	})
	return strings.TrimSpace(token)
}

// taken checks on each API server whether it takes a token.
func (c *cluster) taken(t *testing.T, token string, want bool) {
	t.Helper()
	for i := range c.planes {
		labtest.Eventually(t, func(ctx context.Context) error {
			out, _, err := c.Run(ctx, node(i+1), "", "curl", "-sk", "-o", "/dev/null", "-w", "%{http_code}", "-H", "Authorization: Bearer "+token, "https://127.0.0.1:6443/api/v1/namespaces/default/pods")
			// 403: the token is genuine, and its account may list no pods. 401: it is not.
			if code := map[bool]string{true: "403", false: "401"}[want]; err == nil && out != code {
				err = fmt.Errorf("%s answers %s, want %s", node(i+1), out, code)
			}
			return err
		})
	}
}

// rotates rotates the keys that `muster rotate` replaces at once, while the cluster runs.
func (c *cluster) rotates(t *testing.T) {
	old := c.token(t)
	if _, err := c.kubectl(t.Context(), "-n", "default", "create", "secret", "generic", "before", "--from-literal=a=b"); err != nil {
		t.Fatal(err)
	}
	for _, key := range clusterinfo.RotatedKeys() {
		if key == clusterinfo.ClusterCA {
			continue // rotatesAuthority
		}
		c.mayBegin(t, "rotate", string(key))
		c.ordering(t, "rotate", string(key), "--yes")
		c.say(t, "the %s is new, and the old one still accepted", key)
		c.taken(t, old, true)
		if key == clusterinfo.ServiceAccountKey {
			c.taken(t, c.token(t), true)
		}
		c.ordering(t, "rotate", string(key), "--finish", "--early", "--yes")
		c.say(t, "the old %s is dropped", key)
		if key == clusterinfo.ServiceAccountKey {
			c.taken(t, old, false)
			old = c.token(t)
			c.taken(t, old, true)
		}
	}
	for i := range c.planes { // each API server reads what was encrypted with the old key
		if out := c.Must(t, node(i+1), "", "kubectl", "--kubeconfig", "/etc/kubernetes/admin.conf", "--server", "https://127.0.0.1:6443", "-n", "default", "get", "secret", "before", "-o", "jsonpath={.data.a}"); out != "Yg==" {
			t.Errorf("%s reads %q", node(i+1), out)
		}
	}
	if out, err := c.At(t.Context(), driver.Owner, "", "muster", "encryption-config", "encryption.yaml"); err == nil {
		t.Errorf("a key that is not the cluster's was derived: %s", out)
	}
}

// rotatesAuthority rotates the cluster's CA. Kubelets replace their certificates within a day: here each loses them, and its machine boots.
func (c *cluster) rotatesAuthority(t *testing.T) {
	old, err := c.kubectl(t.Context(), "get", "attestednode", node(1), "-o", "jsonpath={.status.authorities[*]}")
	if err != nil || len(old) != 64 {
		t.Fatalf("node1 trusts %q: %v", old, err)
	}
	c.mayBegin(t, "rotate", "cluster-ca")
	c.ordering(t, "rotate", "cluster-ca", "--yes")
	c.say(t, "the new CA is used, and the old one still accepted")
	c.refusesToFinish(t, "node2")
	for i := range c.planes { // each gets the CAs with the answer, and reports them five minutes later
		c.Must(t, node(i+1), "", "systemctl", "restart", "muster-attester")
	}
	for i := range c.planes {
		name := node(i + 1)
		c.reports(t, name, "authorities", func(ids []string) bool { return len(ids) == 2 })
		c.Must(t, name, "", "sh", "-c", "rm /var/lib/kubelet/pki/kubelet-client-* /var/lib/kubelet/pki/kubelet-server-*")
		if _, err := c.RebootNode(t.Context(), name); err != nil {
			t.Fatal(err)
		}
		c.reports(t, name, "kubeletAuthorities", func(ids []string) bool { return len(ids) == 1 && ids[0] != old })
		c.ready(t, name)
		c.say(t, "%s has booted, and its kubelet has certificates of the new CA", name)
	}
	c.mayBegin(t, "rotate", "cluster-ca", "--finish")
	c.ordering(t, "rotate", "cluster-ca", "--finish", "--yes")
	c.say(t, "the old CA is dropped")
	for i := range c.planes {
		name := node(i + 1)
		if n := strings.Count(c.Must(t, name, "", "cat", "/etc/kubernetes/pki/ca.crt"), "BEGIN CERTIFICATE"); n != 1 {
			t.Errorf("%s trusts %d CAs", name, n)
		}
		if _, err := c.kubectl(t.Context(), "-n", "kube-system", "logs", "--tail=1", "kube-apiserver-"+name); err != nil {
			t.Errorf("its API server and the kubelet of %s do not accept each other: %v", name, err)
		}
	}
	if text, err := c.At(t.Context(), driver.Owner, "", "cat", "muster-planes/former-cas.pem"); err != nil || strings.Count(text, "BEGIN CERTIFICATE") != 1 {
		t.Errorf("the owner's folder knows no former CA: %v %s", err, text)
	}
}

// refusesToFinish checks that the old CA is not dropped while a node uses it.
func (c *cluster) refusesToFinish(t *testing.T, name string) {
	t.Helper()
	if _, said, err := c.Run(t.Context(), driver.Owner, "", "muster", "rotate", "cluster-ca", "--finish", "--yes"); err == nil || !strings.Contains(said+err.Error(), name) {
		t.Fatalf("the old CA is dropped while %s uses it: %v\n%s", name, err, said)
	}
}

// reports waits until a node's machine has reported a list of authorities that fits.
func (c *cluster) reports(t *testing.T, name, list string, fits func(ids []string) bool) {
	t.Helper()
	labtest.Eventually(t, func(ctx context.Context) error {
		out, err := c.kubectl(ctx, "get", "attestednode", name, "-o", "jsonpath={.status."+list+"[*]}")
		if err == nil && !fits(strings.Fields(out)) {
			err = fmt.Errorf("%s reports %s %q", name, list, out)
		}
		return err
	})
}
