package enroll

import (
	"slices"

	"github.com/muster-k8s/muster/api/v1alpha1"
)

// maxControlPlaneAddresses bounds the list of [Enrollments.OtherControlPlaneAddresses].
const maxControlPlaneAddresses = 64

// OtherControlPlaneAddresses returns the addresses of the enrolled control planes except that one, sorted.
func (es *Enrollments) OtherControlPlaneAddresses(node string) []string {
	var out []string
	for _, n := range es.state.Cluster.Nodes.All() {
		if n.Name != node && n.Spec.Role == v1alpha1.RoleControlPlane && !n.ShutOut() && !es.Expired(n) {
			out = append(out, n.Spec.Addresses...)
		}
	}
	slices.Sort(out)
	return out[:min(len(out), maxControlPlaneAddresses)]
}
