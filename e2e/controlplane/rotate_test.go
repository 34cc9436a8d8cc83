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
		if key == clusterinfo.ClusterCA { // it ends when kubelets have replaced their certificates, after hours
			continue
		}
		c.Muster(t, "rotate", string(key), "--dry-run")
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
