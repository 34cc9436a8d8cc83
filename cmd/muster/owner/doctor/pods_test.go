package doctor

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/internal/kubetest"
	"github.com/muster-k8s/muster/internal/objects/podsecurity"
)

func TestNamespacesWithPodsThatAreRootOnTheirNode(t *testing.T) {
	config := filepath.Join(t.TempDir(), "admission.yaml")
	try(t, os.WriteFile(config, []byte(strings.ReplaceAll(podsecurity.Config, "enforce: baseline", "enforce: privileged")), 0o600))
	byDefault, err := kubetest.StartWith(t.Context(), []string{"--admission-control-config-file=" + config})
	try(t, err)
	defer func() { try(t, byDefault.Stop()) }()
	for _, tt := range []struct {
		name   string
		api    *kubetest.Cluster
		labels map[string]string
		want   checkup.Level
		says   string
	}{
		{"clusters of muster init", shared, nil, checkup.OK, "allows them"},
		{"clusters of muster init, for administrators alone", shared, map[string]string{podsecurity.Label: "privileged"}, checkup.OK, "only administrators should create pods: users"},
		{"Kubernetes' default", byDefault, nil, checkup.Warn, "default, kube-node-lease, kube-public, users"},
		{"one is labeled", byDefault, map[string]string{podsecurity.Label: "baseline"}, checkup.Warn, "default, kube-node-lease, kube-public"},
		{"for administrators alone", byDefault, map[string]string{podsecurity.Label: "privileged"}, checkup.Warn, "default, kube-node-lease, kube-public; namespaces with the label, where only administrators should create pods: users"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			text, err := os.ReadFile(tt.api.Kubeconfig)
			try(t, err)
			kube, err := clusterapi.Connect(text)
			try(t, err)
			ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "users", Labels: tt.labels}}
			if err := tt.api.Client.Create(t.Context(), ns); err != nil {
				try(t, tt.api.Client.Update(t.Context(), ns))
			}
			d := &doctor{kube: kube}
			try(t, d.privilegedPods(t.Context()))
			if len(d.Findings) != 1 || d.Findings[0].Check != CheckPods || d.Findings[0].Level != tt.want || !strings.HasSuffix(d.Findings[0].Detail, tt.says) {
				t.Errorf("%+v", d.Findings)
			}
			var pods corev1.PodList
			try(t, tt.api.Client.List(t.Context(), &pods))
			for _, p := range pods.Items {
				if p.Namespace != "kube-system" {
					t.Errorf("pod %s/%s is there", p.Namespace, p.Name)
				}
			}
		})
	}
	t.Run("something else refuses the pod", func(t *testing.T) {
		ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "limited"}}
		limit := &corev1.LimitRange{ObjectMeta: metav1.ObjectMeta{Namespace: "limited", Name: "small"}, Spec: corev1.LimitRangeSpec{Limits: []corev1.LimitRangeItem{
			{Type: corev1.LimitTypeContainer, Max: corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("1Ki")}},
		}}}
		try(t, byDefault.Client.Create(t.Context(), ns), byDefault.Client.Create(t.Context(), limit))
		text, err := os.ReadFile(byDefault.Kubeconfig)
		try(t, err)
		kube, err := clusterapi.Connect(text)
		try(t, err)
		d := &doctor{kube: kube}
		again := time.NewTicker(100 * time.Millisecond)
		defer again.Stop()
		for until := time.Now().Add(patience); len(d.Findings) != 2 && time.Now().Before(until); <-again.C { // the API server learns of the limit by a watch
			d.Findings = nil
			try(t, d.privilegedPods(t.Context()))
		}
		if len(d.Findings) != 2 || d.Findings[0].Level != checkup.Warn || !strings.Contains(d.Findings[0].Detail, "in namespace limited: the test pod was refused") || !strings.Contains(d.Findings[0].Detail, "maximum memory usage") {
			t.Errorf("%+v", d.Findings)
		}
	})
}

// reports is a harm: node1 has these addresses.
func reports(addresses ...string) func(*testing.T) func(*testing.T) {
	report := func(t *testing.T, addresses []string) {
		t.Helper()
		change(t, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1"}}, true, func(n *corev1.Node) {
			n.Status.Addresses = nil
			for _, a := range addresses {
				n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
			}
		})
	}
	return func(t *testing.T) func(*testing.T) {
		t.Helper()
		report(t, addresses)
		return func(t *testing.T) { t.Helper(); report(t, nil) }
	}
}
