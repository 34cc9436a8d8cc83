// Package controlplane initializes a cluster of several control planes, which join one after another, kills the first
// one for good, and lets the others admit a machine.
package controlplane

import (
	"context"
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

// ownersKubeconfig is the path that `muster init` writes it to; its server is the load balancer.
const ownersKubeconfig = "muster-planes/admin.conf"

// cluster is a lab whose first control planes are nodes 1 to planes.
type cluster struct {
	*labtest.Cluster
	planes int
	began  time.Time
}

func node(number int) string    { return fmt.Sprintf("node%d", number) }
func address(number int) string { return fmt.Sprintf("192.168.77.%d", 10+number) }

// endpoints are the joinservices of all control planes, also of those that have not joined yet.
func (c *cluster) endpoints() []string {
	var out []string
	for i := range c.planes {
		out = append(out, address(i+1)+":30090")
	}
	return out
}

// bringUp makes the machines and initializes the first; the lab is removed after the test.
func bringUp(t *testing.T, planes int) *cluster {
	t.Helper()
	began := time.Now()
	c := &cluster{labtest.Up(t, "muster-cp"), planes, began}
	t.Cleanup(func() { // before the lab is taken down
		if t.Failed() {
			c.logs(t)
		}
	})
	// All boot at the same time: those that are to join wait for the first.
	machines := []driver.Node{c.First(t)}
	for i := 2; i <= planes; i++ {
		machines = append(machines, driver.Node{Name: node(i), Role: "control-plane", JoinEndpoints: c.endpoints()})
	}
	c.Add(t, machines...)
	ids := map[int]string{}
	for i := 2; i <= planes; i++ {
		ids[i] = c.MachineID(t, address(i))
	}
	c.say(t, "machines have booted")
	c.Init(t, "planes")
	c.say(t, "node1 is initialized")
	for i := 2; i <= planes; i++ {
		c.Muster(t, "enroll", node(i), "--role", "control-plane", "--machine-id", ids[i], "--timeout", "20m")
	}
	c.say(t, "the owner has enrolled the others")
	return c
}

func (c *cluster) say(t *testing.T, format string, args ...any) {
	t.Helper()
	t.Logf("%5.1f s  %s", time.Since(c.began).Seconds(), fmt.Sprintf(format, args...))
}

// kubectl runs on the owner's workstation, over the load balancer.
func (c *cluster) kubectl(ctx context.Context, args ...string) (string, error) {
	return c.At(ctx, driver.Owner, "", append([]string{"kubectl", "--kubeconfig", ownersKubeconfig, "--request-timeout=5s"}, args...)...)
}

// ready waits until the nodes are.
func (c *cluster) ready(t *testing.T, nodes ...string) {
	t.Helper()
	labtest.Eventually(t, func(ctx context.Context) error {
		out, err := c.kubectl(ctx, "get", "nodes", "-o", `jsonpath={range .items[*]}{.metadata.name}={.status.conditions[?(@.type=="Ready")].status}{"\n"}{end}`)
		if err != nil {
			return err
		}
		for _, n := range nodes {
			if !strings.Contains(out, n+"=True\n") {
				return fmt.Errorf("%s is not Ready: %q", n, strings.Fields(out))
			}
		}
		return nil
	})
}

// logs shows the ends of the machines' logs of a test that failed.
func (c *cluster) logs(t *testing.T) {
	t.Helper()
	for i := range c.planes + 1 {
		for _, log := range []string{"muster-bootstrapper", "kubelet"} {
			path := filepath.Join(c.Dir, "machines", node(i+1), "disk", "log", log+".log")
			b, err := os.ReadFile(path)
			if err != nil {
				continue
			}
			t.Logf("%s %s:\n%s", node(i+1), log, b[max(0, len(b)-4000):])
		}
	}
}
