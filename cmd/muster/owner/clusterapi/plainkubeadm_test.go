package clusterapi

import (
	"context"
	"encoding/json"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/kubernetes/cmd/kubeadm/app/phases/bootstraptoken/clusterinfo"
	"k8s.io/kubernetes/cmd/kubeadm/app/phases/bootstraptoken/node"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

func TestOnlyWhatMusterSetLeavesTheConfiguration(t *testing.T) {
	const rest = "apiServer: {certSANs: [a]}\nkind: ClusterConfiguration\n"
	for name, tt := range map[string]struct {
		in      string
		removed int
		left    string // in the result
	}{
		"as kubeadm writes it": {rest, 0, "certSANs"},
		"as muster init": {
			"apiServer:\n  extraArgs:\n  - {name: enable-bootstrap-token-auth, value: \"false\"}\n  - {name: etcd-compaction-interval, value: 30s}\ncontrollerManager:\n  extraArgs:\n  - {name: controllers, value: \"*,-certificatesigningrequest-approving-controller\"}\n  - {name: cluster-signing-duration, value: 24h}\n",
			3, "etcd-compaction-interval",
		},
		"another list of controllers":   {"controllerManager:\n  extraArgs:\n  - {name: controllers, value: \"*,-csrapproving\"}\n", 0, "-csrapproving"},
		"another life of certificates":  {"controllerManager:\n  extraArgs:\n  - {name: cluster-signing-duration, value: 48h}\n", 0, "48h"},
		"the same in another component": {"scheduler:\n  extraArgs:\n  - {name: cluster-signing-duration, value: 24h}\n", 0, "24h"},
		"another authority of kubelets": {"apiServer:\n  extraArgs:\n  - {name: kubelet-certificate-authority, value: /etc/other.crt}\n", 0, "/etc/other.crt"},
		"arguments that are no list":    {"apiServer: {extraArgs: {a: b}}\n", 0, "a: b"},
	} {
		out, removed, err := plainCluster(tt.in)
		if err != nil || len(removed) != tt.removed || !strings.Contains(out, tt.left) {
			t.Errorf("%s: removed %q, %v\n%s", name, removed, err, out)
		}
		if again, more, err := plainCluster(out); err != nil || len(more) > 0 || again != out {
			t.Errorf("%s, again: %q, %v", name, more, err)
		}
	}
	for text, want := range map[string]int{"serverTLSBootstrap: true\n": 1, "serverTLSBootstrap: false\n": 0, "rotateCertificates: true\n": 0} {
		if out, removed, err := plainKubelet(text); err != nil || len(removed) != want || want > 0 && strings.Contains(out, "TLS") {
			t.Errorf("%s: %q, %v", text, removed, err)
		}
	}
	for _, plain := range []func(string) (string, []string, error){plainCluster, plainKubelet} {
		if _, _, err := plain("\tx"); err == nil {
			t.Error("text that is no YAML was accepted")
		}
	}
}

func TestTheApproverRunsUnlessItIsOff(t *testing.T) {
	for list, want := range map[string]bool{
		"": true, "*": true, "*,bootstrapsigner,tokencleaner": true, approver: true, formerApprover: true,
		"*,-" + approver: false, "*,-" + formerApprover: false, "-" + approver + "," + approver: false, "bootstrapsigner": false, "namespace-controller,*x": false,
	} {
		if got := runs(list, true, approver, formerApprover); got != want {
			t.Errorf("--controllers=%s: %t", list, got)
		}
	}
	for list, want := range map[string]bool{"": false, "*": false, "*,bootstrapsigner": true, "*,-bootstrapsigner": false} {
		if got := runs(list, false, "bootstrapsigner"); got != want {
			t.Errorf("--controllers=%s: the signer of cluster-info runs: %t", list, got)
		}
	}
}

// The objects are those that the kubeadm of this Kubernetes version writes.
func TestWhatIsRestoredIsWhatKubeadmWrites(t *testing.T) {
	api := start(t)
	text, err := os.ReadFile(api.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	c, err := Connect(text)
	if err != nil {
		t.Fatal(err)
	}
	all, err := c.bootstrapObjects()
	if err != nil {
		t.Fatal(err)
	}
	missing, err := c.RestoreBootstrap(t.Context(), true)
	if err != nil || len(missing) != len(all) {
		t.Fatalf("missing %q, %v", missing, err)
	}
	if got, err := c.RestoreBootstrap(t.Context(), false); err != nil || !slices.Equal(got, missing) {
		t.Fatalf("restored %q, %v", got, err)
	}
	ours := contents(t, c, all)
	for _, o := range all {
		if err := api.Client.Delete(t.Context(), o.DeepCopy()); err != nil {
			t.Fatal(err)
		}
	}
	k, err := kubernetes.NewForConfig(api.Admin)
	if err != nil {
		t.Fatal(err)
	}
	admin, err := clientcmd.Load(text)
	if err != nil {
		t.Fatal(err)
	}
	for _, write := range []func() error{
		func() error { return node.AllowBootstrapTokensToPostCSRs(k) },
		func() error { return node.AllowBootstrapTokensToGetNodes(k) },
		func() error { return node.AutoApproveNodeBootstrapTokens(k) },
		func() error { return node.AutoApproveNodeCertificateRotation(k) },
		func() error { return clusterinfo.CreateBootstrapConfigMapIfNotExists(k, admin) },
		func() error { return clusterinfo.CreateClusterInfoRBACRules(k) },
	} {
		if err := write(); err != nil {
			t.Fatal(err)
		}
	}
	if theirs := contents(t, c, all); !reflect.DeepEqual(ours, theirs) {
		a, _ := json.MarshalIndent(ours, "", " ")
		b, _ := json.MarshalIndent(theirs, "", " ")
		t.Errorf("Muster writes\n%s\nkubeadm\n%s", a, b)
	}
	// What is there stays, also if it differs.
	one := &unstructured.Unstructured{}
	one.SetGroupVersionKind(all[0].GroupVersionKind())
	if err := c.client.Get(t.Context(), client.ObjectKeyFromObject(all[0]), one); err != nil {
		t.Fatal(err)
	}
	one.Object["subjects"] = []any{}
	if err := c.client.Update(t.Context(), one); err != nil {
		t.Fatal(err)
	}
	if got, err := c.RestoreBootstrap(t.Context(), false); err != nil || len(got) > 0 {
		t.Errorf("restored %q, %v", got, err)
	}
}

// contents reads objects without the metadata that the API server sets.
func contents(t *testing.T, c *Client, all []*unstructured.Unstructured) map[string]any {
	t.Helper()
	out := map[string]any{}
	for _, o := range all {
		have := &unstructured.Unstructured{}
		have.SetGroupVersionKind(o.GroupVersionKind())
		if err := c.client.Get(context.WithoutCancel(t.Context()), client.ObjectKeyFromObject(o), have); err != nil {
			t.Fatal(err)
		}
		labels := have.GetLabels()
		have.Object["metadata"] = metav1.ObjectMeta{Labels: labels}
		out[describe(o)] = have.Object
	}
	return out
}
