// Package upgrade_test makes a real cluster in the lab, upgrades Muster in it, with and without failures, and checks
// the content of etcd.
package upgrade_test

import (
	"os/exec"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/lab/labtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const ownersFolder = "muster-upgrade"

// cluster is a lab with one control plane, initialized by its owner.
type cluster struct {
	*labtest.Cluster
}

// bringUp makes the cluster, and takes it down when the test ends.
func bringUp(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{labtest.Up(t, "muster-up")}
	c.Add(t, c.First(t))
	c.Init(t, "upgrade")
	return c
}

// images builds the services' images from the binaries in bin with another version, puts them into the lab's
// registry, and returns the path of their digests.json.
func (c *cluster) images(t *testing.T, bin, version string) string {
	t.Helper()
	dir := t.TempDir()
	build := exec.CommandContext(t.Context(), "go", "run", "-buildvcs=false", "./deploy/images", "-bin", bin, "-version", version, "-o", dir)
	build.Dir = c.Root
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if err := c.Push(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "digests.json")
}
