// Package upgrade_test brings up a real cluster in the lab, upgrades Muster in it, well and badly,
// and looks at what etcd holds.
package upgrade_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	joinservice1 = "192.168.77.11:30090"
	ownersFolder = "muster-upgrade"
)

// cluster is a lab with one control plane, initialised by its owner.
type cluster struct {
	*driver.Lab
	root string // the checkout
}

// bringUp makes the cluster, and takes it down when the test ends.
func bringUp(t *testing.T) *cluster {
	t.Helper()
	lab, root := labtest.New(t, "muster-up")
	c := &cluster{Lab: lab, root: root}
	images := filepath.Join(root, "dist", "images")
	err := lab.Up(t.Context(), driver.Up{
		Lab: filepath.Join(root, "bin", "lab"), Bootstrapper: filepath.Join(root, "bin", "bootstrapper"), Preinstalled: []string{"kubelet"},
		Images: []string{filepath.Join(images, "joinservice.tar"), filepath.Join(images, "kms.tar")},
	})
	if err != nil {
		t.Fatal(err)
	}
	c.mustMuster(t, "policy", "from-measurements", lab.MeasurementsPath(), "--ek-root", "ek-roots.pem", "--operator",
		"--node-cidr", driver.NodeSubnet, "--allow-plain-state", "-o", "policy.yaml")
	var secret [32]byte
	_, _ = rand.Read(secret[:])
	if err := os.WriteFile(filepath.Join(lab.OwnerDir(), "init-secret.hex"), fmt.Appendf(nil, "%x\n", secret), 0o600); err != nil {
		t.Fatal(err)
	}
	hash := sha256.Sum256(secret[:])
	if _, err := lab.AddNode(t.Context(), driver.Node{Name: "node1", Role: "control-plane", InitSecretHash: hex.EncodeToString(hash[:])}); err != nil {
		t.Fatal(err)
	}
	c.mustMuster(t, "init", "--name", "upgrade", "--endpoint", "192.168.77.11:9000", "--init-secret-file", "init-secret.hex", "--policy", "policy.yaml",
		"--control-plane-endpoint", driver.ControlPlaneEndpoint, "--pod-cidr", driver.PodSubnet, "--service-cidr", driver.ServiceSubnet,
		"--components", "components.yaml", "--manifests", filepath.Join("manifests", "podnet.yaml"), "--images", filepath.Join(images, "digests.json"))
	return c
}

// at runs a command in a machine or on the owner's seat and gives all that it printed.
func (c *cluster) at(ctx context.Context, where string, argv ...string) (string, error) {
	cmd, err := c.Command(ctx, where, argv...)
	if err != nil {
		return "", err
	}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s on %s: %w\n%s", argv[0], where, err, out.String())
	}
	return out.String(), nil
}

func (c *cluster) muster(ctx context.Context, args ...string) (string, error) {
	return c.at(ctx, driver.Owner, append([]string{filepath.Join(c.root, "bin", "muster")}, args...)...)
}

func (c *cluster) mustMuster(t *testing.T, args ...string) string {
	t.Helper()
	out, err := c.muster(t.Context(), args...)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("muster %s\n%s", args[0], out)
	return out
}

func (c *cluster) kubectl(ctx context.Context, args ...string) (string, error) {
	return c.at(ctx, "node1", append([]string{"kubectl", "--kubeconfig", "/etc/kubernetes/admin.conf"}, args...)...)
}

// ready waits until a node is.
func (c *cluster) ready(ctx context.Context, name string) error {
	return until(ctx, func() error {
		out, err := c.kubectl(ctx, "get", "node", name, "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`)
		if err == nil && out != "True" {
			err = fmt.Errorf("%s is not Ready: %q", name, out)
		}
		return err
	})
}

func (c *cluster) add(t *testing.T, name string) {
	t.Helper()
	if _, err := c.AddNode(t.Context(), driver.Node{Name: name, JoinEndpoints: []string{joinservice1}}); err != nil {
		t.Fatal(err)
	}
}

// images builds the services' images from the binaries in bin with another version, puts them into
// the lab's registry, and gives the path of their digests.json.
func (c *cluster) images(t *testing.T, bin, version string) string {
	t.Helper()
	dir := t.TempDir()
	build := exec.CommandContext(t.Context(), "go", "run", "-buildvcs=false", "./deploy/images", "-bin", bin, "-version", version, "-o", dir)
	build.Dir = c.root
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if err := c.Push(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "digests.json")
}

func until(ctx context.Context, check func() error) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	tick := time.NewTicker(300 * time.Millisecond)
	defer tick.Stop()
	for {
		err := check()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-tick.C:
		}
	}
}
