// Package controlplane brings up a cluster of several control planes, which join one after another,
// kills the first one for good, and lets the rest admit a machine.
package controlplane

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	initSecretFile = "init-secret.hex"
	policyFile     = "policy.yaml"
	// ownersKubeconfig is where `muster init` writes it; its server is the load balancer.
	ownersKubeconfig = "muster-planes/admin.conf"
)

// cluster is a lab whose first control planes are nodes 1 to planes.
type cluster struct {
	*driver.Lab
	t      *testing.T
	root   string // the checkout
	planes int
	began  time.Time
}

func node(number int) string    { return fmt.Sprintf("node%d", number) }
func address(number int) string { return fmt.Sprintf("192.168.77.%d", 10+number) }

// endpoints are the joinservices of all control planes, those that are not there yet among them.
func (c *cluster) endpoints() []string {
	var out []string
	for i := range c.planes {
		out = append(out, address(i+1)+":30090")
	}
	return out
}

// bringUp makes the machines and initialises the first; the lab goes with the test.
func bringUp(t *testing.T, planes int) *cluster {
	t.Helper()
	lab, root := labtest.New(t, "muster-cp")
	c := &cluster{Lab: lab, t: t, root: root, planes: planes, began: time.Now()}
	t.Cleanup(func() { // before the lab is taken down
		if t.Failed() {
			c.logs()
		}
	})
	images := filepath.Join(root, "dist", "images")
	if err := lab.Up(t.Context(), driver.Up{
		Lab: filepath.Join(root, "bin", "lab"), Bootstrapper: filepath.Join(root, "bin", "bootstrapper"), Preinstalled: []string{"kubelet"},
		Images: []string{filepath.Join(images, "joinservice.tar"), filepath.Join(images, "kms.tar")},
	}); err != nil {
		t.Fatal(err)
	}
	c.muster("policy", "from-measurements", lab.MeasurementsPath(), "--ek-root", "ek-roots.pem", "--operator",
		"--node-cidr", driver.NodeSubnet, "--role", "worker", "--role", "control-plane", "--allow-plain-state", "-o", policyFile)
	c.boot()
	ids := c.machineIDs()
	c.say("machines have booted")
	c.muster("init", "--name", "planes", "--endpoint", address(1)+":9000", "--init-secret-file", initSecretFile, "--policy", policyFile,
		"--control-plane-endpoint", driver.ControlPlaneEndpoint, "--pod-cidr", driver.PodSubnet, "--service-cidr", driver.ServiceSubnet,
		"--components", "components.yaml", "--manifests", filepath.Join("manifests", "podnet.yaml"), "--images", filepath.Join(images, "digests.json"))
	c.say("node1 is initialised")
	for i := 2; i <= planes; i++ {
		c.muster("enroll", node(i), "--role", "control-plane", "--machine-id", ids[i])
	}
	c.say("the owner has enrolled the others")
	return c
}

// boot boots all control planes at the same time: those that are to join wait for the first.
func (c *cluster) boot() {
	c.t.Helper()
	var secret [32]byte
	_, _ = rand.Read(secret[:]) // never fails
	if err := os.WriteFile(filepath.Join(c.OwnerDir(), initSecretFile), fmt.Appendf(nil, "%x\n", secret), 0o600); err != nil {
		c.t.Fatal(err)
	}
	hash := sha256.Sum256(secret[:])
	errs := make([]error, c.planes)
	var wg sync.WaitGroup
	for i := range c.planes {
		n := driver.Node{Name: node(i + 1), Role: "control-plane", JoinEndpoints: c.endpoints()}
		if i == 0 {
			n.InitSecretHash, n.JoinEndpoints = hex.EncodeToString(hash[:]), nil
		}
		wg.Go(func() { _, errs[i] = c.AddNode(c.t.Context(), n) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		c.t.Fatal(err)
	}
}

// machineIDs asks the machines that wait, as their owner does, and judges them by the policy.
func (c *cluster) machineIDs() map[int]string {
	c.t.Helper()
	out := map[int]string{}
	for i := 2; i <= c.planes; i++ {
		var seen struct {
			Machine string `json:"machine"`
		}
		var text string
		c.until(time.Minute, func() (err error) { // its bootstrapper may not listen yet
			text, err = c.at(driver.Owner, "muster", "verify", address(i)+":9000", "--policy", policyFile, "--output", "json")
			return err
		})
		if err := json.Unmarshal([]byte(text), &seen); err != nil || len(seen.Machine) != 64 {
			c.t.Fatalf("%v: %s", err, text)
		}
		out[i] = seen.Machine
	}
	return out
}

func (c *cluster) say(format string, args ...any) {
	c.t.Helper()
	c.t.Logf("%5.1f s  %s", time.Since(c.began).Seconds(), fmt.Sprintf(format, args...))
}

// at runs a command in a machine or on the owner's seat and gives what it printed.
func (c *cluster) at(where string, argv ...string) (string, error) {
	cmd, err := c.Command(c.t.Context(), where, argv...)
	if err != nil {
		return "", err
	}
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s on %s: %w\n%s%s", argv[0], where, err, out.String(), stderr.String())
	}
	return out.String(), nil
}

// muster runs the owner's program, which must succeed, and shows what it prints.
func (c *cluster) muster(args ...string) string {
	c.t.Helper()
	out, err := c.at(driver.Owner, append([]string{"muster"}, args...)...)
	if err != nil {
		c.t.Fatal(err)
	}
	if out = strings.TrimSpace(out); out != "" {
		c.t.Logf("muster %s\n%s", args[0], out)
	}
	return out
}

// kubectl runs on the owner's seat, over the load balancer.
func (c *cluster) kubectl(args ...string) (string, error) {
	return c.at(driver.Owner, append([]string{"kubectl", "--kubeconfig", ownersKubeconfig, "--request-timeout=5s"}, args...)...)
}

// until repeats a check until it succeeds.
func (c *cluster) until(limit time.Duration, check func() error) {
	c.t.Helper()
	tick := time.NewTicker(200 * time.Millisecond)
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
			c.t.Fatalf("not within %s: %v", limit, err)
		case <-c.t.Context().Done():
			c.t.Fatalf("the test ends, and %v", err)
		}
	}
}

// ready waits until the nodes are.
func (c *cluster) ready(limit time.Duration, nodes ...string) {
	c.t.Helper()
	c.until(limit, func() error {
		out, err := c.kubectl("get", "nodes", "-o", `jsonpath={range .items[*]}{.metadata.name}={.status.conditions[?(@.type=="Ready")].status}{"\n"}{end}`)
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
func (c *cluster) logs() {
	for i := range c.planes + 1 {
		for _, log := range []string{"muster-bootstrapper", "kubelet"} {
			path := filepath.Join(c.Dir, "machines", node(i+1), "disk", "log", log+".log")
			b, err := os.ReadFile(path)
			if err != nil {
				continue
			}
			c.t.Logf("%s %s:\n%s", node(i+1), log, b[max(0, len(b)-4000):])
		}
	}
}
