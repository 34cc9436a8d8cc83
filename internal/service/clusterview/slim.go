package clusterview

import (
	"slices"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
)

// The limits of what is stored of objects that other programs write. The rest is cut off.
const (
	// maxNodeAddresses is per Node: its kubelet writes them. Real ones have a handful.
	maxNodeAddresses = 16
	// maxAddress is the longest text of an IP address, in bytes.
	maxAddress = 45
	// maxClusterIPs is what the API server allows per Service: one of each family.
	maxClusterIPs = 2
	// maxMessage is the limit of a condition's message in bytes.
	maxMessage = 256
	// maxCertificate is the limit of a signed certificate in bytes of PEM.
	maxCertificate = 16 << 10
)

// slimNode keeps the parts of a Node that joinservice uses: its name, its addresses, and whether it is Ready and labeled as
// a control plane.
func slimNode(o any) (any, error) {
	n, ok := o.(*corev1.Node)
	if !ok {
		return o, nil
	}
	var addresses []corev1.NodeAddress
	for _, a := range n.Status.Addresses {
		if (a.Type == corev1.NodeInternalIP || a.Type == corev1.NodeExternalIP) && len(a.Address) <= maxAddress && len(addresses) < maxNodeAddresses {
			addresses = append(addresses, a)
		}
	}
	var ready []corev1.NodeCondition
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			ready = append(ready, corev1.NodeCondition{Type: c.Type, Status: c.Status, LastTransitionTime: c.LastTransitionTime})
		}
	}
	var labels map[string]string
	if _, ok := n.Labels[clusterinfo.ControlPlaneLabel]; ok {
		labels = map[string]string{clusterinfo.ControlPlaneLabel: ""}
	}
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: n.Name, UID: n.UID, ResourceVersion: n.ResourceVersion, Labels: labels},
		Status:     corev1.NodeStatus{Addresses: addresses, Conditions: ready},
	}, nil
}

// slimService keeps a Service's cluster IPs, which the API server assigns. Addresses that its author chooses (externalIPs)
// or that another program must route (the status of a load balancer) block no address.
func slimService(o any) (any, error) {
	s, ok := o.(*corev1.Service)
	if !ok {
		return o, nil
	}
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: s.Name, Namespace: s.Namespace, UID: s.UID, ResourceVersion: s.ResourceVersion},
		Spec:       corev1.ServiceSpec{ClusterIPs: slices.Clone(first(maxClusterIPs, s.Spec.ClusterIPs))},
	}, nil
}

// TicketWindow labels a certificate request that joinservice files for a ticket with the minute of filing.
const TicketWindow = "muster.dev/ticket-window"

// slimRequest keeps of a certificate request the user that filed it, with which certificate, and the decision: below 2 KiB
// while it is open. Code that decides on a request reads it from the API server.
func slimRequest(o any) (any, error) {
	r, ok := o.(*certificatesv1.CertificateSigningRequest)
	if !ok {
		return o, nil
	}
	out := &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{Name: r.Name, UID: r.UID, ResourceVersion: r.ResourceVersion, CreationTimestamp: r.CreationTimestamp},
		Spec:       certificatesv1.CertificateSigningRequestSpec{SignerName: r.Spec.SignerName, Username: r.Spec.Username},
	}
	if slices.Contains(r.Spec.Groups, clusterinfo.NodeGroup) {
		out.Spec.Groups = []string{clusterinfo.NodeGroup}
	}
	if ids := r.Spec.Extra[nodeaccess.CredentialID]; len(ids) > 0 {
		out.Spec.Extra = map[string]certificatesv1.ExtraValue{nodeaccess.CredentialID: slices.Clone(first(1, ids))}
	}
	if window := r.Labels[TicketWindow]; window != "" {
		out.Labels = map[string]string{TicketWindow: window}
	}
	for _, c := range r.Status.Conditions {
		switch c.Type { // each type occurs once
		case certificatesv1.CertificateApproved, certificatesv1.CertificateDenied, certificatesv1.CertificateFailed:
			out.Status.Conditions = append(out.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{Type: c.Type, Status: c.Status, Message: c.Message[:min(len(c.Message), maxMessage)]})
		}
	}
	if len(r.Status.Certificate) <= maxCertificate {
		out.Status.Certificate = r.Status.Certificate
	}
	return out, nil
}

// first returns the first n of all, or all if there are fewer.
func first[T any](n int, all []T) []T { return all[:min(n, len(all))] }
