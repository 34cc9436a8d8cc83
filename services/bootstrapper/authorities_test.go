package bootstrapper_test

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"testing"

	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/kubelet"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

// While the cluster's authority is rotated, tickets have two of one name, in either order. kube-controller-manager takes a file with one.
func TestAMachineJoinsWhileTheAuthorityIsRotated(t *testing.T) {
	for _, role := range []string{"worker", "control-plane"} {
		for name, order := range map[string]func(own, other []byte) []byte{
			"the signer is the first":  func(own, other []byte) []byte { return slices.Concat(own, other) },
			"the signer is the second": func(own, other []byte) []byte { return slices.Concat(other, own) },
		} {
			t.Run(role+", "+name, func(t *testing.T) {
				w, j := worker(t)
				w.meta.Role = role
				_, other := worker(t)
				both := order(certPEM(j.ca), certPEM(other.ca))
				j.script(nil, func(r *joinv1.IssueJoinTicketResponse) {
					r.CaCertificate = both
					for _, f := range r.GetControlPlaneFiles() {
						if f.GetPath() == "ca.crt" {
							f.Content = both
						}
					}
				})
				r := w.boot()
				if err := r.end(t); err != nil {
					t.Fatal(err, w.logged)
				}
				w.isNode(t)
				if c, err := kubelet.ClusterOf(w.root, kubeadm.KubeletConf); err != nil || !bytes.Equal(bytes.TrimSpace(c.CertificateAuthorityData), bytes.TrimSpace(both)) {
					t.Errorf("%+v, %v", c, err)
				}
				if role == "worker" {
					return
				}
				for file, want := range map[string][]byte{"ca.crt": both, "muster-signing.crt": certPEM(j.ca)} {
					if got, err := os.ReadFile(filepath.Join(w.root, machine.PKIFolder, file)); err != nil || !bytes.Equal(got, want) {
						t.Errorf("%s: %s, %v", file, got, err)
					}
				}
			})
		}
	}
}
