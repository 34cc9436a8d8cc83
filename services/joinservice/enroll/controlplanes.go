package enroll

import (
	"slices"

	"github.com/muster-k8s/muster/api/v1alpha1"
)

// maxControlPlanes bounds the list of [Enrollments.OtherControlPlanes].
const maxControlPlanes = 64

// OtherControlPlanes returns the addresses of the enrolled control planes except that one, sorted.
func (es *Enrollments) OtherControlPlanes(node string) []string {
	var out []string
	for _, n := range es.state.Cluster.Nodes.All() {
		if n.Name != node && n.Spec.Role == v1alpha1.RoleControlPlane && !n.ShutOut() && !es.Vacant(n) {
			out = append(out, n.Spec.Addresses...)
		}
	}
	slices.Sort(out)
	return out[:min(len(out), maxControlPlanes)]
}
