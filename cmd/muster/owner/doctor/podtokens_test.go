package doctor

import (
	"os"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/internal/checkup"
)

// apiServer is a static pod of kubeadm's, as its kubelet reports it.
func apiServer(name string, args ...string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "kube-apiserver-" + name, Labels: map[string]string{"component": "kube-apiserver"}},
		Spec: corev1.PodSpec{NodeName: "node1", TerminationGracePeriodSeconds: new(int64(0)), Containers: []corev1.Container{{
			Name: "kube-apiserver", Image: "x", Command: append([]string{"kube-apiserver", "--secure-port=6443"}, args...),
		}}},
	}
}

func TestAPIServersThatGivePodsTokensForAYear(t *testing.T) {
	text, err := os.ReadFile(shared.Kubeconfig)
	try(t, err)
	kube, err := clusterapi.Connect(text)
	try(t, err, shared.Namespace(t.Context(), "kube-system"))
	try(t, shared.Client.DeleteAllOf(t.Context(), &corev1.Pod{}, client.InNamespace("kube-system"), client.MatchingLabels{"component": "kube-apiserver"}, client.GracePeriodSeconds(0)))
	for name, tt := range map[string]struct {
		pods []*corev1.Pod
		want []checkup.Level
	}{
		"none is a pod":                        {nil, []checkup.Level{checkup.Warn}},
		"by default":                           {[]*corev1.Pod{apiServer("a")}, []checkup.Level{checkup.Warn}},
		"said so":                              {[]*corev1.Pod{apiServer("a", extendTokens+"=true")}, []checkup.Level{checkup.Warn}},
		"without a value":                      {[]*corev1.Pod{apiServer("a", extendTokens)}, []checkup.Level{checkup.Warn}},
		"the last word counts":                 {[]*corev1.Pod{apiServer("a", extendTokens+"=false", extendTokens+"=true")}, []checkup.Level{checkup.Warn}},
		"another argument that begins like it": {[]*corev1.Pod{apiServer("a", extendTokens+"s=false")}, []checkup.Level{checkup.Warn}},
		"one of two":                           {[]*corev1.Pod{apiServer("a", extendTokens+"=false"), apiServer("b")}, []checkup.Level{checkup.Warn}},
		"two of two":                           {[]*corev1.Pod{apiServer("a"), apiServer("b")}, []checkup.Level{checkup.Warn, checkup.Warn}},
		"none":                                 {[]*corev1.Pod{apiServer("a", extendTokens+"=false")}, []checkup.Level{checkup.OK}},
	} {
		t.Run(name, func(t *testing.T) {
			for _, p := range tt.pods {
				defer created(p)(t)(t)
			}
			d := &doctor{kube: kube}
			try(t, d.podTokens(t.Context()))
			if len(d.Findings) != len(tt.want) {
				t.Fatalf("%+v", d.Findings)
			}
			for i, f := range d.Findings {
				if f.Check != CheckPodTokens || f.Level != tt.want[i] {
					t.Errorf("%+v", f)
				}
			}
		})
	}
}
