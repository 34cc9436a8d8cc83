package clusterview

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
)

// Whatever other programs write into an object, it costs each replica no more memory than a normal one.
func TestWhatIsKeptOfObjectsThatOthersWriteIsBounded(t *testing.T) {
	const most = 2 << 10
	big, many := strings.Repeat("x", 1<<20), make([]string, 50000)
	for i := range many {
		many[i] = fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255)
	}
	meta := metav1.ObjectMeta{
		Name: "x", Annotations: map[string]string{"a": big}, Labels: map[string]string{"a": big}, Finalizers: []string{big}, GenerateName: big,
		OwnerReferences: []metav1.OwnerReference{{Name: big}}, ManagedFields: []metav1.ManagedFieldsEntry{{Manager: big}},
	}
	request := &certificatesv1.CertificateSigningRequest{ObjectMeta: meta, Spec: certificatesv1.CertificateSigningRequestSpec{
		Request: []byte(big), SignerName: certificatesv1.KubeletServingSignerName, Username: "system:node:w1", Groups: []string{"system:nodes", big},
		Extra: map[string]certificatesv1.ExtraValue{nodeaccess.CredentialID: {"X509SHA256=0"}, "other": {big}}, Usages: []certificatesv1.KeyUsage{certificatesv1.KeyUsage(big)},
	}}
	request.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{Type: "Other", Message: big}, {Type: certificatesv1.CertificateDenied, Message: big}}
	request.Status.Certificate = []byte(big)
	service := &corev1.Service{ObjectMeta: meta, Spec: corev1.ServiceSpec{ClusterIPs: []string{"10.96.0.9"}, ExternalIPs: many, ExternalName: big, LoadBalancerSourceRanges: many}}
	node := &corev1.Node{ObjectMeta: meta, Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: big}}}}
	for _, ip := range many {
		service.Status.LoadBalancer.Ingress = append(service.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: ip})
		node.Status.Addresses = append(node.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeHostName, Address: ip}, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: ip})
		node.Status.Conditions = append(node.Status.Conditions, corev1.NodeCondition{Type: "Other", Message: ip})
	}
	node.Status.Conditions = append(node.Status.Conditions, corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Message: big})
	for name, tt := range map[string]struct {
		slim func(any) (any, error)
		of   any
		want []string // the part that is kept
	}{
		"a certificate request": {slimRequest, request, []string{"system:node:w1", "X509SHA256=0", `"system:nodes"`, `"Denied"`, certificatesv1.KubeletServingSignerName}},
		"a Service":             {slimService, service, []string{"10.96.0.9"}},
		"a Node":                {slimNode, node, []string{`"10.0.0.0"`, `"Ready"`}},
	} {
		t.Run(name, func(t *testing.T) {
			slim, err := tt.slim(tt.of)
			if err != nil {
				t.Fatal(err)
			}
			b, err := json.Marshal(slim)
			if err != nil {
				t.Fatal(err)
			}
			if len(b) > most {
				t.Errorf("%d bytes are kept, want %d at most: %.300s", len(b), most, b)
			}
			for _, w := range tt.want {
				if !strings.Contains(string(b), w) {
					t.Errorf("%s is lost: %.500s", w, b)
				}
			}
		})
	}
}
