// Package leave takes names from machines of a real cluster: one is forgotten and its name goes to
// another machine, one gets a new TPM.
package leave

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const joinservice1 = "192.168.77.11:30090"

// cluster is a lab with a control plane, node1, and workers.
type cluster struct {
	*labtest.Cluster
}

// bringUp makes the cluster, and takes it down when the test ends.
func bringUp(t *testing.T, workers ...string) *cluster {
	t.Helper()
	lab, root := labtest.New(t, "muster-leave")
	c := &cluster{&labtest.Cluster{Lab: lab, Root: root}}
	images := filepath.Join(root, "dist", "images")
	if err := lab.Up(t.Context(), driver.Up{
		Lab: filepath.Join(root, "bin", "lab"), Bootstrapper: filepath.Join(root, "bin", "bootstrapper"), Preinstalled: []string{"kubelet"},
		Images: []string{filepath.Join(images, "joinservice.tar"), filepath.Join(images, "kms.tar")},
	}); err != nil {
		t.Fatal(err)
	}
	c.Muster(t, "policy", "from-measurements", lab.MeasurementsPath(), "--ek-root", "ek-roots.pem", "--operator",
		"--node-cidr", driver.NodeSubnet, "--allow-plain-state", "-o", "policy.yaml")
	var secret [32]byte
	_, _ = rand.Read(secret[:]) // never fails
	if err := os.WriteFile(filepath.Join(lab.OwnerDir(), "init-secret.hex"), fmt.Appendf(nil, "%x\n", secret), 0o600); err != nil {
		t.Fatal(err)
	}
	hash := sha256.Sum256(secret[:])
	machines := []driver.Node{{Name: "node1", Role: "control-plane", InitSecretHash: hex.EncodeToString(hash[:])}}
	for _, w := range workers {
		machines = append(machines, driver.Node{Name: w, JoinEndpoints: []string{joinservice1}})
	}
	errs := make([]error, len(machines))
	var wg sync.WaitGroup
	for i, m := range machines {
		wg.Go(func() { _, errs[i] = lab.AddNode(t.Context(), m) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	c.Muster(t, "init", "--name", "leave", "--endpoint", "192.168.77.11:9000", "--init-secret-file", "init-secret.hex", "--policy", "policy.yaml",
		"--control-plane-endpoint", driver.ControlPlaneEndpoint, "--pod-cidr", driver.PodSubnet, "--service-cidr", driver.ServiceSubnet,
		"--components", "components.yaml", "--manifests", filepath.Join("manifests", "podnet.yaml"), "--images", filepath.Join(images, "digests.json"))
	for _, w := range workers {
		c.Ready(t, w)
	}
	return c
}
