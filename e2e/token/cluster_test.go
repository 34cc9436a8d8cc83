// Package token puts Muster into a real cluster that kubeadm made by hand, and has an attested machine join it with a
// bootstrap token in its ticket.
package token

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/lab/byhand"
	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const joinservice1 = "192.168.77.11:30090"

// cluster is a lab with a control plane, node1.
type cluster struct {
	*labtest.Cluster
}

// bringUp makes a lab with a machine that waits for its owner, node1, and one that knows nothing of Muster, node4. It is
// taken down when the test ends.
func bringUp(t *testing.T) *cluster {
	t.Helper()
	lab, root := labtest.New(t, "muster-token")
	c := &cluster{&labtest.Cluster{Lab: lab, Root: root}}
	images := filepath.Join(root, "dist", "images")
	if err := lab.Up(t.Context(), driver.Up{
		Lab: filepath.Join(root, "bin", "lab"), Bootstrapper: filepath.Join(root, "bin", "bootstrapper"), Preinstalled: []string{"kubelet", "kubeadm", "kubectl"},
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
	for _, n := range []driver.Node{{Name: "node1", Role: "control-plane", InitSecretHash: hex.EncodeToString(hash[:])}, {Name: "node4", NoBootstrapper: true}} {
		if _, err := lab.AddNode(t.Context(), n); err != nil {
			t.Fatal(err)
		}
	}
	return c
}

// byHand makes a cluster of both as kubeadm's manual says, with kubeadm's defaults and its bootstrap token.
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
	c.apply(t, string(network))
	if config, err = byhand.Join([]byte(c.Must(t, "node1", "", "cat", "/etc/kubernetes/pki/ca.crt")), byhand.Node{Name: "node4", Address: "192.168.77.14"}); err != nil {
		t.Fatal(err)
	}
	c.Must(t, "node4", string(config), "kubeadm", "join", "--config", "/dev/stdin")
	c.Ready(t, "node1")
	c.Ready(t, "node4")
}

func (c *cluster) apply(t *testing.T, manifest string) {
	t.Helper()
	c.Must(t, "node1", manifest, "kubectl", "--kubeconfig", "/etc/kubernetes/admin.conf", "apply", "-f", "-")
}
