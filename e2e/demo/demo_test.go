// Package demo runs the demonstration as a test, and then repairs and admits the machines that it refused, to prove
// that each refusal had only its one reason.
package demo

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/lab/demo"
	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Invariant J5.
func TestDemonstration(t *testing.T) {
	lab, root := labtest.New(t, "muster-e2e")
	c := &cluster{&labtest.Cluster{Lab: lab, Root: root}}
	report, err := demo.Run(t.Context(), demo.Options{
		Lab: lab, Bin: filepath.Join(root, "bin"), Images: filepath.Join(root, "dist", "images"), Out: t.Output(), Keep: true,
		WhileTokenWorks: c.withoutAdmissionTheTokenGetsACertificateRequest,
	})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(report.Nodes, []string{"node1", "node2", "node5", "node6", "node7"}) {
		t.Errorf("admitted: %v", report.Nodes)
	}
	if !slices.Equal(report.Members, []string{"node1", "node5"}) {
		t.Errorf("etcd's members: %v", report.Members)
	}
	var reasons []string
	for _, r := range report.Refusals {
		reasons = append(reasons, r.Reason)
	}
	if want := []string{"EK_UNTRUSTED", "POLICY_REFUSED", "EK_UNTRUSTED", "PEER_NOT_ATTESTED", "TLS", "ADMISSION", "ADMISSION"}; !slices.Equal(reasons, want) {
		t.Errorf("refused with %v, want %v", reasons, want)
	}
	t.Run("the policy's image is the manifest's", c.policyIsTheManifests)
	t.Run("node2's certificate is good with node2's key", c.keyMakesTheDifference)
	t.Run("the owner's workstation has the owner's programs", c.ownersWorkstation)
	t.Run("the owner enrolls a control plane beforehand", c.enroll)
	refused := []string{"node3", "node4", "node9"}
	var again []driver.Node
	for _, name := range refused {
		if err := c.RemoveNode(t.Context(), name); err != nil {
			t.Fatal(err)
		}
		again = append(again, labtest.Worker(name))
	}
	c.Add(t, again...) // all at once: none needs another one
	for _, name := range refused {
		t.Run(name+" is admitted once its one fault is repaired", func(t *testing.T) { c.Ready(t, name) })
	}
}

// cluster is the cluster that the demonstration has left.
type cluster struct {
	*labtest.Cluster
}

// withoutAdmissionTheTokenGetsACertificateRequest removes the only check that refuses the intruder's token, Muster's
// admission policy, and restores it.
func (c *cluster) withoutAdmissionTheTokenGetsACertificateRequest(ctx context.Context) error {
	const binding = "muster-node-certificates"
	saved, err := c.Kubectl(ctx, "get", "validatingadmissionpolicybinding", binding, "-o", "json")
	if err != nil {
		return err
	}
	if _, err := c.Kubectl(ctx, "delete", "validatingadmissionpolicybinding", binding); err != nil {
		return err
	}
	// The demonstration restarts the API server, and the controllers that lost it come back one back-off later.
	if err := labtest.Within(ctx, labtest.Patience, func(ctx context.Context) error { return c.requestWithToken(ctx, "201") }); err != nil {
		return err
	}
	if _, err := c.Kubectl(ctx, "delete", "csr", "-l", "by=intruder"); err != nil {
		return err
	}
	var object map[string]any
	if err := json.Unmarshal([]byte(saved), &object); err != nil {
		return err
	}
	object["metadata"] = map[string]any{
		"name": binding, "labels": object["metadata"].(map[string]any)["labels"], "annotations": object["metadata"].(map[string]any)["annotations"],
	}
	again, err := json.Marshal(object)
	if err != nil {
		return err
	}
	if _, err := c.At(ctx, "node1", string(again), "kubectl", "--kubeconfig", "/etc/kubernetes/admin.conf", "create", "-f", "-"); err != nil {
		return err
	}
	return labtest.Within(ctx, labtest.Patience, func(ctx context.Context) error {
		err := c.requestWithToken(ctx, "422")
		if err != nil { // requests that were accepted before the policy was in force again
			_, _ = c.Kubectl(ctx, "delete", "csr", "-l", "by=intruder")
		}
		return err
	})
}

// requestWithToken asks for a node's certificate with the bootstrap token, and expects that HTTP status.
func (c *cluster) requestWithToken(ctx context.Context, want string) error {
	const script = `set -eu
openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout /dev/null -subj /O=system:nodes/CN=system:node:intruder -out /root/i.csr 2>/dev/null
printf '{"apiVersion":"certificates.k8s.io/v1","kind":"CertificateSigningRequest","metadata":{"generateName":"intruder-","labels":{"by":"intruder"}},"spec":{"signerName":"kubernetes.io/kube-apiserver-client-kubelet","usages":["digital signature","client auth"],"request":"%s"}}' "$(base64 -w0 /root/i.csr)" |
curl -sS --max-time 60 --cacert /root/ca.crt -H "Authorization: Bearer abcdef.0123456789abcdef" -H 'Content-Type: application/json' -o /dev/null -w '%{http_code}' --data-binary @- https://192.168.77.11:6443/apis/certificates.k8s.io/v1/certificatesigningrequests`
	out, err := c.At(ctx, "node9", "", "sh", "-c", script)
	if err != nil {
		return err
	}
	if out != want {
		return fmt.Errorf("HTTP %s, want %s", out, want)
	}
	return nil
}

// policyIsTheManifests fails if the policy's image was read back from a machine: its values must be those of the
// image's manifest.
func (c *cluster) policyIsTheManifests(t *testing.T) {
	m, err := c.Measurements()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(c.OwnerDir(), "policy.yaml")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var policy struct {
		TPM2 struct {
			Images []struct {
				PCRs []struct {
					Index int    `json:"index"`
					Value string `json:"value"`
				} `json:"pcrs"`
			} `json:"images"`
		} `json:"tpm2"`
	}
	if err := yaml.Unmarshal(b, &policy); err != nil {
		t.Fatal(err)
	}
	if len(policy.TPM2.Images) != 1 || len(policy.TPM2.Images[0].PCRs) != len(m.PCRs) || len(m.PCRs) == 0 {
		t.Fatalf("the policy has the images %v, the manifest %v", policy.TPM2.Images, m.PCRs)
	}
	for _, p := range policy.TPM2.Images[0].PCRs {
		if want := m.PCRs[strconv.Itoa(p.Index)]; p.Value != want {
			t.Errorf("PCR %d: the policy accepts %s, the manifest says %s", p.Index, p.Value, want)
		}
	}
}

// keyMakesTheDifference sends the intruder's refused request with node2's own key.
func (c *cluster) keyMakesTheDifference(t *testing.T) {
	const url = "https://192.168.77.1:6443/api/v1/namespaces/kube-system/configmaps/kubeadm-config"
	get := func(ctx context.Context, where, cert, key, ca string) (string, error) {
		return c.At(ctx, where, "", "curl", "-sS", "--max-time", "60", "--cacert", ca, "--cert", cert, "--key", key, "-o", "/dev/null", "-w", "%{http_code}", url)
	}
	const current = "/var/lib/kubelet/pki/kubelet-client-current.pem"
	labtest.Eventually(t, func(ctx context.Context) error {
		out, err := get(ctx, "node2", current, current, "/etc/kubernetes/pki/ca.crt")
		if err == nil && out != "200" {
			err = fmt.Errorf("node2's certificate with its key: HTTP %s", out)
		}
		return err
	})
	if out, err := get(t.Context(), "node9", "/root/client.crt", "/root/own.key", "/root/ca.crt"); err == nil {
		t.Errorf("node2's certificate with another key: %s", out)
	}
}

func (c *cluster) ownersWorkstation(t *testing.T) {
	for _, argv := range [][]string{{"muster", "version"}, {"muster", "status", "--output", "json", "--timeout", "20m"}, {"kubectl", "version", "--client"}} {
		if out, err := c.At(t.Context(), driver.Owner, "", argv...); err != nil || out == "" {
			t.Errorf("%v: %q %v", argv, out, err)
		}
	}
}

func (c *cluster) enroll(t *testing.T) {
	id := strings.Repeat("ab", 32)
	enroll := func(id string) error {
		_, err := c.At(t.Context(), driver.Owner, "", "muster", "enroll", "node8", "--role", "control-plane", "--machine-id", id, "--timeout", "20m")
		return err
	}
	for range 2 { // a repetition changes nothing
		if err := enroll(id); err != nil {
			t.Fatal(err)
		}
	}
	if err := enroll(strings.Repeat("cd", 32)); err == nil || !strings.Contains(err.Error(), "NAME_TAKEN") {
		t.Errorf("another machine took the name: %v", err)
	}
	out, err := c.Kubectl(t.Context(), "get", "attestednode", "node8", "-o", "jsonpath={.spec.machineID} {.spec.role}")
	if err != nil || out != id+" control-plane" {
		t.Errorf("enrolled: %q %v", out, err)
	}
}
