// Package labtest gives a test a lab of its own, which is taken down when the test ends.
package labtest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/lab/driver"
)

// New names a lab in a new folder below /var/lib, whose name begins with prefix (short: Unix sockets are
// below it), and gives the root of the checkout beside it. What the lab does stands in the test's log. The
// test's working folder is e2e/NAME, as `go test` has it.
func New(t *testing.T, prefix string) (lab *driver.Lab, root string) {
	t.Helper()
	dir, err := os.MkdirTemp("/var/lib", prefix)
	if err != nil {
		t.Fatalf("%v: this test makes machines out of namespaces, so it needs root", err)
	}
	if root, err = filepath.Abs("../.."); err != nil {
		t.Fatal(err)
	}
	if lab, err = driver.Open(dir, t.Output()); err != nil {
		t.Fatal(err)
	}
	done := whileUp(lab)
	t.Cleanup(func() {
		defer done()
		if err := lab.Down(context.WithoutCancel(t.Context())); err != nil {
			t.Errorf("take the lab down: %v", err)
		}
	})
	return lab, root
}

// Up brings a lab up, named as by [New], with the images of Muster's services. Its owner has a policy.yaml,
// older than every machine, that accepts its machines as workers and as control planes. Kubelet and the
// programs named are in the machines' image; the others are components.
func Up(t *testing.T, prefix string, preinstalled ...string) *Cluster {
	t.Helper()
	return UpFor(t, prefix, "", preinstalled...)
}

// UpFor is [Up] with control planes' certificates that are valid for the time validity, such as "8m".
func UpFor(t *testing.T, prefix, validity string, preinstalled ...string) *Cluster {
	t.Helper()
	return newCluster(t, prefix, driver.Up{Validity: validity, Preinstalled: preinstalled})
}

// UpEmpty is [Up] with machines that have no container image yet: they pull all of them from the mirror.
func UpEmpty(t *testing.T, prefix string) *Cluster {
	t.Helper()
	return newCluster(t, prefix, driver.Up{NoPreload: true})
}

// UpPrevious is [Up] with clusters of the previous release: [driver.Components] lists it, and [driver.NextComponents] the current one.
// No program of Kubernetes is in the machines' image, where an upgrade would change what firmware measures.
func UpPrevious(t *testing.T, prefix string) *Cluster {
	t.Helper()
	return newCluster(t, prefix, driver.Up{Previous: true})
}

func newCluster(t *testing.T, prefix string, u driver.Up) *Cluster {
	t.Helper()
	lab, root := New(t, prefix)
	c := &Cluster{Lab: lab, Root: root}
	images := filepath.Join(root, "dist", "images")
	u.Lab, u.Bootstrapper, u.Muster = filepath.Join(root, "bin", "lab"), filepath.Join(root, "bin", "bootstrapper"), filepath.Join(root, "bin", "muster")
	if !u.Previous {
		u.Preinstalled = append([]string{"kubelet"}, u.Preinstalled...)
	}
	u.Images = []string{filepath.Join(images, "joinservice.tar"), filepath.Join(images, "kms.tar")}
	if err := lab.Up(t.Context(), u); err != nil {
		t.Fatal(err)
	}
	c.Muster(t, "policy", "from-measurements", lab.MeasurementsPath(), "--class", lab.ClassFlag(), "--ek-root", "ek-roots.pem", "--ek-key", "ecc-p384", "--operator",
		"--node-cidr", driver.NodeSubnet, "--role", "worker", "--role", "control-plane", "--allow-plain-state", "-o", "policy.yaml")
	return c
}

// ShortLife is how long nodes' certificates live after [Cluster.ShortenCertificates]: Kubernetes signs none for less.
const ShortLife = 10 * time.Minute

// ShortenCertificates makes nodes' certificates live that long: those of tickets, and those that kubelets renew. Node1 is the only control plane.
func (c *Cluster) ShortenCertificates(t *testing.T) {
	t.Helper()
	c.Must(t, "node1", "", "sed", "-i", "s/--cluster-signing-duration=24h/--cluster-signing-duration=10m/", "/etc/kubernetes/manifests/kube-controller-manager.yaml")
	patch := `[{"op":"add","path":"/spec/template/spec/containers/0/args/-","value":"--certificate-life=10m"},{"op":"add","path":"/spec/template/spec/containers/0/args/-","value":"--verdict-max-age=2m"}]`
	Eventually(t, func(ctx context.Context) error {
		_, err := c.Kubectl(ctx, "-n", "muster-system", "patch", "daemonset", "muster-joinservice", "--type=json", "-p", patch)
		return err
	})
	Eventually(t, func(ctx context.Context) error {
		out, err := c.Kubectl(ctx, "-n", "kube-system", "get", "pods", "-l", "component=kube-controller-manager", "-o", `jsonpath={.items[*].spec.containers[0].command} {.items[*].status.containerStatuses[0].ready}`)
		if err != nil || !strings.Contains(out, "--cluster-signing-duration=10m") || !strings.HasSuffix(out, " true") {
			return fmt.Errorf("the controller manager is %q, %w", out, err)
		}
		_, err = c.Kubectl(ctx, "-n", "muster-system", "rollout", "status", "daemonset/muster-joinservice", "--timeout=5s")
		return err
	})
}
