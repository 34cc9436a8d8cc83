//go:build kubernetes

package kubernetes

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	folder           = "muster-kubernetes"
	ownersKubeconfig = folder + "/admin.conf" // its server is the load balancer
	planes           = 3
	nodes            = planes + 2
	patience         = 20 * time.Minute // of a node's upgrade with a boot in its middle
)

var (
	old = strings.TrimPrefix(driver.PreviousRelease().Version, "v")
	now = strings.TrimPrefix(driver.CurrentRelease().Version, "v")
)

func node(number int) string    { return fmt.Sprintf("node%d", number) }
func address(number int) string { return fmt.Sprintf("192.168.77.%d", 10+number) }

// cluster is a lab whose nodes 1 to planes are control planes, the others workers.
type cluster struct {
	*labtest.Cluster
	began time.Time
	next  versions.List // of the release that the cluster is upgraded to
}

// list reads a component list of the owner's folder.
func (c *cluster) list(t *testing.T, file string) versions.List {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(c.OwnerDir(), file))
	if err != nil {
		t.Fatal(err)
	}
	l, err := versions.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func images(t *testing.T, l versions.List) versions.Images {
	t.Helper()
	i, err := versions.ParseImages(l.Images)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// bringUp makes a cluster of the previous release; the lab is removed after the test.
func bringUp(t *testing.T) *cluster {
	t.Helper()
	began := time.Now()
	c := &cluster{Cluster: labtest.UpPrevious(t, "muster-ku"), began: began}
	t.Cleanup(func() { // before the lab is taken down
		if t.Failed() {
			c.logs(t)
		}
	})
	c.next = c.list(t, driver.NextComponents)
	machines := []driver.Node{c.First(t)}
	for i := 2; i <= nodes; i++ {
		machines = append(machines, machine(i))
	}
	c.Add(t, machines...)
	ids := map[int]string{}
	for i := 2; i <= planes; i++ {
		ids[i] = c.MachineID(t, address(i))
	}
	c.Muster(t, append(c.InitArgs("kubernetes"), "--kubernetes", old)...)
	for i := 2; i <= planes; i++ {
		c.Muster(t, "enroll", node(i), "--role", "control-plane", "--machine-id", ids[i], "--timeout", "20m")
	}
	for i := 1; i <= nodes; i++ {
		labtest.Eventually(t, func(ctx context.Context) error { return c.runs(ctx, node(i), old) })
	}
	c.say(t, "%d control planes and %d workers are Ready with Kubernetes %s", planes, nodes-planes, old)
	return c
}

func endpoints() []string {
	var out []string
	for i := 1; i <= planes; i++ {
		out = append(out, address(i)+":30090")
	}
	return out
}

func machine(number int) driver.Node {
	n := driver.Node{Name: node(number), JoinEndpoints: endpoints()}
	if number <= planes {
		n.Role = "control-plane"
	}
	return n
}

func (c *cluster) say(t *testing.T, format string, args ...any) {
	t.Helper()
	t.Logf("%6.1f s  %s", time.Since(c.began).Seconds(), fmt.Sprintf(format, args...))
}

// kubectl runs on the owner's workstation, over the load balancer.
func (c *cluster) kubectl(ctx context.Context, args ...string) (string, error) {
	return c.At(ctx, driver.Owner, "", append([]string{"kubectl", "--kubeconfig", ownersKubeconfig, "--request-timeout=10s"}, args...)...)
}

// apply applies a manifest from the owner's workstation.
func (c *cluster) apply(t *testing.T, manifest string) {
	t.Helper()
	labtest.Eventually(t, func(ctx context.Context) error {
		_, err := c.At(ctx, driver.Owner, manifest, "kubectl", "--kubeconfig", ownersKubeconfig, "--request-timeout=10s", "apply", "-f", "-")
		return err
	})
}

// runs returns nil if a node is Ready, takes pods, and its kubelet has the version.
func (c *cluster) runs(ctx context.Context, name, version string) error {
	out, err := c.kubectl(ctx, "get", "node", name, "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status} {.status.nodeInfo.kubeletVersion} {.spec.unschedulable}`)
	if want := "True v" + version; err == nil && strings.TrimSpace(out) != want {
		err = fmt.Errorf("%s is %q, want %q", name, strings.TrimSpace(out), want)
	}
	return err
}

// info returns the cluster's description of itself.
func (c *cluster) info(ctx context.Context) (*clusterinfo.Info, error) {
	out, err := c.kubectl(ctx, "-n", clusterinfo.Namespace, "get", "configmap", clusterinfo.ConfigMap, "-o", `jsonpath={.data.cluster\.json}`)
	if err != nil {
		return nil, err
	}
	return clusterinfo.Parse([]byte(out))
}

// attested has the attester of each machine that gets an order attest at once: it does at its start, and else each five minutes.
// The returned function ends that.
func (c *cluster) attested(t *testing.T) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		seen := map[string]string{}
		tick := time.NewTicker(2 * time.Second)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			out, err := c.kubectl(ctx, "get", "attestednodes", "-o", "json")
			if err != nil {
				continue // control planes lose their power
			}
			var all v1alpha1.AttestedNodeList
			if err := json.Unmarshal([]byte(out), &all); err != nil {
				t.Error(err)
				return
			}
			for _, n := range all.Items {
				order := n.Annotations[v1alpha1.OwnerOrder]
				if order == "" || order == seen[n.Name] {
					continue
				}
				if _, err := c.At(ctx, n.Name, "", "systemctl", "restart", "muster-attester"); err == nil {
					seen[n.Name] = order
				}
			}
		}
	})
	return func() { cancel(); wg.Wait() }
}

// log returns a log of a machine's unit.
func (c *cluster) log(name, unit string) string {
	b, err := os.ReadFile(filepath.Join(c.disk(name), "log", unit+".log"))
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// disk is the folder of a machine's disk on this computer.
func (c *cluster) disk(name string) string { return filepath.Join(c.Dir, "machines", name, "disk") }

// logs shows the ends of the machines' logs of a test that failed.
func (c *cluster) logs(t *testing.T) {
	t.Helper()
	for i := range nodes + 1 {
		for _, unit := range []string{"muster-bootstrapper", "muster-orders", "muster-upgrade", "kubelet"} {
			if log := c.log(node(i+1), unit); log != "" {
				t.Logf("%s %s:\n%s", node(i+1), unit, log[max(0, len(log)-5000):])
			}
		}
	}
}
