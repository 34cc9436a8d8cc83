// Package token installs Muster in a real cluster that kubeadm made, and has an attested machine join it with a
// bootstrap token in its ticket.
package token

import (
	"os"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/lab/byhand"
	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// cluster is a lab with a control plane, node1.
type cluster struct {
	*labtest.Cluster
}

// bringUp makes a lab with a machine that waits for its owner, node1, and one without Muster, node4. It is taken down
// when the test ends.
func bringUp(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{labtest.Up(t, "muster-token", "kubeadm", "kubectl")}
	c.Add(t, c.First(t), driver.Node{Name: "node4", NoBootstrapper: true})
	return c
}

// byHand makes a cluster of both as kubeadm's manual describes, with kubeadm's defaults and its bootstrap token.
func (c *cluster) byHand(t *testing.T) {
	t.Helper()
	config, err := byhand.Init([]byte(c.Must(t, "node1", "", "cat", "/etc/muster/image.yaml")), byhand.Node{Name: "node1", Address: "192.168.77.11"})
	if err != nil {
		t.Fatal(err)
	}
	c.Must(t, "node1", string(config), "kubeadm", "init", "--config", "/dev/stdin")
	network, err := os.ReadFile(filepath.Join(c.OwnerDir(), "manifests", "podnet.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	c.Apply(t, string(network))
	if config, err = byhand.Join([]byte(c.Must(t, "node1", "", "cat", "/etc/kubernetes/pki/ca.crt")), byhand.Node{Name: "node4", Address: "192.168.77.14"}); err != nil {
		t.Fatal(err)
	}
	c.Must(t, "node4", string(config), "kubeadm", "join", "--config", "/dev/stdin")
	c.Ready(t, "node1")
	c.Ready(t, "node4")
}
