// Package labtest gives a test a lab of its own, which is taken down when the test ends.
package labtest

import (
	"context"
	"os"
	"path/filepath"
	"testing"

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
	t.Cleanup(func() {
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

// UpFor is [Up] with certificates of control planes that live as long as validity says, as "8m".
func UpFor(t *testing.T, prefix, validity string, preinstalled ...string) *Cluster {
	t.Helper()
	lab, root := New(t, prefix)
	c := &Cluster{Lab: lab, Root: root}
	images := filepath.Join(root, "dist", "images")
	if err := lab.Up(t.Context(), driver.Up{
		Lab: filepath.Join(root, "bin", "lab"), Bootstrapper: filepath.Join(root, "bin", "bootstrapper"), Preinstalled: append([]string{"kubelet"}, preinstalled...),
		Muster: filepath.Join(root, "bin", "muster"),
		Images: []string{filepath.Join(images, "joinservice.tar"), filepath.Join(images, "kms.tar")}, Validity: validity,
	}); err != nil {
		t.Fatal(err)
	}
	c.Muster(t, "policy", "from-measurements", lab.MeasurementsPath(), "--ek-root", "ek-roots.pem", "--ek-key", "ecc-p384", "--operator",
		"--node-cidr", driver.NodeSubnet, "--role", "worker", "--role", "control-plane", "--allow-plain-state", "-o", "policy.yaml")
	return c
}
