package charts_test

import (
	"os"
	"strings"
	"testing"
)

// J5: a subject that may approve requests of another signer for clients could make itself a node. The test of the
// golden file proves that the chart renders this.
func TestNobodyMayApproveForOtherSigners(t *testing.T) {
	b, err := os.ReadFile("testdata/rendered.yaml")
	if err != nil {
		t.Fatal(err)
	}
	rules := strings.Split(string(b), "resources: [signers]\n")
	if len(rules) != 2 {
		t.Fatalf("%d rules about signers, want 1", len(rules)-1)
	}
	names, _, _ := strings.Cut(strings.TrimSpace(rules[1]), "\n")
	if names != "resourceNames: [kubernetes.io/kube-apiserver-client-kubelet, kubernetes.io/kubelet-serving]" {
		t.Errorf("approvals for %s", names)
	}
}
