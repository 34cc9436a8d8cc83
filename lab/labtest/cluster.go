package labtest

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/muster-k8s/muster/lab/driver"
)

// Joinservice is where node1 lets machines join.
const Joinservice = "192.168.77.11:30090"

// Patience bounds what real machines need, on a computer that does other things too.
const Patience = 10 * time.Minute

// Cluster is a lab whose control plane is node1.
type Cluster struct {
	*driver.Lab
	// Root is the checkout.
	Root string
}

// First makes an init secret in the owner's folder and gives node1, which may be initialized with it.
func (c *Cluster) First(t *testing.T) driver.Node {
	t.Helper()
	var secret [32]byte
	_, _ = rand.Read(secret[:]) // never fails
	if err := os.WriteFile(filepath.Join(c.OwnerDir(), "init-secret.hex"), fmt.Appendf(nil, "%x\n", secret), 0o600); err != nil {
		t.Fatal(err)
	}
	hash := sha256.Sum256(secret[:])
	return driver.Node{Name: "node1", Role: "control-plane", InitSecretHash: hex.EncodeToString(hash[:])}
}

// Worker is a machine that asks node1 to let it join.
func Worker(name string) driver.Node {
	return driver.Node{Name: name, JoinEndpoints: []string{Joinservice}}
}

// Add boots machines, all at once.
func (c *Cluster) Add(t *testing.T, nodes ...driver.Node) {
	t.Helper()
	errs := make([]error, len(nodes))
	var wg sync.WaitGroup
	for i, n := range nodes {
		wg.Go(func() { _, errs[i] = c.AddNode(t.Context(), n) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// Init makes node1 the first of a cluster of that name.
func (c *Cluster) Init(t *testing.T, name string) {
	t.Helper()
	c.Muster(t, c.InitArgs(name)...)
}

// InitArgs are the arguments of the owner's program in [Cluster.Init].
func (c *Cluster) InitArgs(name string) []string {
	return []string{
		"init", "--name", name, "--endpoint", "192.168.77.11:9000", "--init-secret-file", "init-secret.hex", "--owner-key-file", driver.OwnerKeyFile, "--policy", "policy.yaml",
		"--control-plane-endpoint", driver.ControlPlaneEndpoint, "--pod-cidr", driver.PodSubnet, "--service-cidr", driver.ServiceSubnet,
		"--components", "components.yaml", "--manifests", filepath.Join("manifests", "podnet.yaml"), "--images", filepath.Join(c.Root, "dist", "images", "digests.json"),
	}
}

// Run runs a command in a machine or on the owner's workstation and gives what it printed on each stream; an error
// has both.
func (c *Cluster) Run(ctx context.Context, where, stdin string, argv ...string) (out, problems string, err error) {
	cmd, err := c.Command(ctx, where, argv...)
	if err != nil {
		return "", "", err
	}
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &stdout, &stderr
	if err = cmd.Run(); err != nil {
		err = fmt.Errorf("%s on %s: %w\n%s%s", argv[0], where, err, &stdout, &stderr)
	}
	return stdout.String(), stderr.String(), err
}

// At is [Cluster.Run] for its standard output.
func (c *Cluster) At(ctx context.Context, where, stdin string, argv ...string) (string, error) {
	out, _, err := c.Run(ctx, where, stdin, argv...)
	return out, err
}

// Must is [Cluster.At], and fails the test on an error.
func (c *Cluster) Must(t *testing.T, where, stdin string, argv ...string) string {
	t.Helper()
	out, err := c.At(t.Context(), where, stdin, argv...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// Muster runs the owner's program on the owner's workstation, and shows all that it prints.
func (c *Cluster) Muster(t *testing.T, args ...string) string {
	t.Helper()
	out, progress, err := c.Run(t.Context(), driver.Owner, "", append([]string{"muster"}, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("muster %s\n%s%s", strings.Join(args[:min(2, len(args))], " "), progress, out)
	return out
}

// Kubectl runs kubectl on node1, as its administrator.
func (c *Cluster) Kubectl(ctx context.Context, args ...string) (string, error) {
	return c.At(ctx, "node1", "", kubectl(args)...)
}

// MustKubectl is [Cluster.Kubectl], and fails the test on an error.
func (c *Cluster) MustKubectl(t *testing.T, args ...string) string {
	t.Helper()
	return c.Must(t, "node1", "", kubectl(args)...)
}

// Apply applies a manifest.
func (c *Cluster) Apply(t *testing.T, manifest string) {
	t.Helper()
	c.Must(t, "node1", manifest, kubectl([]string{"apply", "-f", "-"})...)
}

func kubectl(args []string) []string {
	return append([]string{"kubectl", "--kubeconfig", "/etc/kubernetes/admin.conf"}, args...)
}

// Ready waits until a node is.
func (c *Cluster) Ready(t *testing.T, name string) {
	t.Helper()
	start := time.Now()
	Eventually(t, func(ctx context.Context) error { return c.IsReady(ctx, name) })
	t.Logf("%s Ready after %.1f s", name, time.Since(start).Seconds())
}

// IsReady returns nil if a node is.
func (c *Cluster) IsReady(ctx context.Context, name string) error {
	out, err := c.Kubectl(ctx, "--request-timeout=10s", "get", "node", name, "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`)
	if err == nil && out != "True" {
		err = fmt.Errorf("%s is not Ready: %q", name, out)
	}
	return err
}

// MachineID asks a machine that waits, as its owner does, and judges it by the policy.
func (c *Cluster) MachineID(t *testing.T, address string) string {
	t.Helper()
	var out string
	Eventually(t, func(ctx context.Context) (err error) { // its bootstrapper may not listen yet
		out, err = c.At(ctx, driver.Owner, "", "muster", "verify", address+":9000", "--policy", "policy.yaml", "--output", "json")
		return err
	})
	t.Logf("muster verify %s\n%s", address, out)
	var seen struct {
		Machine string `json:"machine"`
	}
	if err := json.Unmarshal([]byte(out), &seen); err != nil || len(seen.Machine) != 64 {
		t.Fatalf("which machine is it? %v", err)
	}
	return seen.Machine
}

// Members asks the etcd of a control plane for its members, over its JSON gateway and with the
// certificate that kubeadm made for such questions.
func (c *Cluster) Members(ctx context.Context, node string) (voters, learners []string, err error) {
	const pki = "/etc/kubernetes/pki/etcd/"
	out, err := c.At(ctx, node, "", "curl", "-sS", "--max-time", "60", "--cacert", pki+"ca.crt", "--cert", pki+"healthcheck-client.crt", "--key", pki+"healthcheck-client.key",
		"-d", "{}", "https://127.0.0.1:2379/v3/cluster/member/list")
	if err != nil {
		return nil, nil, err
	}
	var list struct {
		Members []struct {
			Name      string `json:"name"`
			IsLearner bool   `json:"isLearner"`
		} `json:"members"`
	}
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		return nil, nil, fmt.Errorf("%w: %s", err, out)
	}
	for _, m := range list.Members {
		if m.IsLearner {
			learners = append(learners, m.Name)
		} else {
			voters = append(voters, m.Name)
		}
	}
	slices.Sort(voters)
	return voters, learners, nil
}

// Eventually asks every 300 ms, for [Patience] at most, until check has no complaint.
func Eventually(t *testing.T, check func(context.Context) error) {
	t.Helper()
	if err := Within(t.Context(), Patience, check); err != nil {
		t.Fatal(err)
	}
}

// Within is [Eventually] with another limit, and gives check's last complaint.
func Within(ctx context.Context, limit time.Duration, check func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	tick := time.NewTicker(300 * time.Millisecond)
	defer tick.Stop()
	var complaint error
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		if complaint == nil || ctx.Err() == nil { // that its last command was cut short explains nothing
			complaint = err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("not within %s: %w", limit, complaint)
		case <-tick.C:
		}
	}
}
