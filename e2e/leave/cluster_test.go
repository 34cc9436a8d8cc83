// Package leave removes names from machines of a real cluster: one is forgotten and its name is given to another
// machine, one gets a new TPM.
package leave

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/lab/labtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// cluster is a lab with a control plane, node1, and workers.
type cluster struct {
	*labtest.Cluster
}

// bringUp makes the cluster of node1, node2 and node3, and takes it down when the test ends.
func bringUp(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{labtest.Up(t, "muster-leave")}
	c.Add(t, c.First(t), labtest.Worker("node2"), labtest.Worker("node3"))
	c.Init(t, "leave")
	c.Ready(t, "node2")
	c.Ready(t, "node3")
	return c
}
