// Package demo runs the demonstration as a test, and then lets in, repaired, whom the
// demonstration refused: what was refused was refused for its one fault.
package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/lab/demo"
	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestDemonstration(t *testing.T) {
	lab, root := labtest.New(t, "muster-e2e")
	c := &cluster{lab: lab}
	report, err := demo.Run(t.Context(), demo.Options{
		Lab: lab, Bin: filepath.Join(root, "bin"), Images: filepath.Join(root, "dist", "images"), Out: t.Output(), Keep: true,
		WhileTokenWorks: c.withoutAdmissionTheTokenGetsACertificateRequest,
	})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(report.Nodes, []string{"node1", "node2", "node5"}) {
		t.Errorf("admitted: %v", report.Nodes)
	}
	if !slices.Equal(report.Members, []string{"node1", "node5"}) {
		t.Errorf("etcd's members: %v", report.Members)
	}
	var reasons []string
	for _, r := range report.Refusals {
		reasons = append(reasons, r.Reason)
	}
	if want := []string{"POLICY_REFUSED", "EK_UNTRUSTED", "PEER_NOT_ATTESTED", "TLS", "ADMISSION", "ADMISSION"}; !slices.Equal(reasons, want) {
		t.Errorf("refused with %v, want %v", reasons, want)
	}
	t.Run("the policy is the manifest's, older than every machine", c.policyIsTheManifests)
	t.Run("node2's certificate is good with node2's key", c.keyMakesTheDifference)
	t.Run("the owner's seat has the owner's programs", c.ownersSeat)
	t.Run("the owner enrols a control plane beforehand", c.enroll)
	for _, name := range []string{"node3", "node4", "node9"} {
		t.Run(name+" is admitted once its one fault is repaired", func(t *testing.T) {
			if err := lab.RemoveNode(t.Context(), name); err != nil {
				t.Fatal(err)
			}
			if _, err := lab.AddNode(t.Context(), driver.Node{Name: name, JoinEndpoints: []string{"192.168.77.11:30090"}}); err != nil {
				t.Fatal(err)
			}
			if err := ready(t.Context(), lab, name); err != nil {
				t.Error(err)
			}
		})
	}
}

// cluster is what the demonstration has left up.
type cluster struct{ lab *driver.Lab }

func (c *cluster) at(ctx context.Context, where, stdin string, argv ...string) (string, error) {
	cmd, err := c.lab.Command(ctx, where, argv...)
	if err != nil {
		return "", err
	}
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("%s: %w: %s", argv[0], err, out)
	}
	return string(out), nil
}

func (c *cluster) kubectl(ctx context.Context, stdin string, args ...string) (string, error) {
	return c.at(ctx, "node1", stdin, append([]string{"kubectl", "--kubeconfig", "/etc/kubernetes/admin.conf"}, args...)...)
}

// withoutAdmissionTheTokenGetsACertificateRequest takes away the one thing that refuses the
// intruder's token, Muster's admission policy, and puts it back.
func (c *cluster) withoutAdmissionTheTokenGetsACertificateRequest(ctx context.Context) error {
	const binding = "muster-node-certificates"
	saved, err := c.kubectl(ctx, "", "get", "validatingadmissionpolicybinding", binding, "-o", "json")
	if err != nil {
		return err
	}
	if _, err := c.kubectl(ctx, "", "delete", "validatingadmissionpolicybinding", binding); err != nil {
		return err
	}
	if err := until(ctx, func() error { return c.requestWithToken(ctx, "201") }); err != nil {
		return err
	}
	if _, err := c.kubectl(ctx, "", "delete", "csr", "-l", "by=intruder"); err != nil {
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
	if _, err := c.kubectl(ctx, string(again), "create", "-f", "-"); err != nil {
		return err
	}
	return until(ctx, func() error {
		err := c.requestWithToken(ctx, "422")
		if err != nil { // what got through before the policy was in force again
			_, _ = c.kubectl(ctx, "", "delete", "csr", "-l", "by=intruder")
		}
		return err
	})
}

// requestWithToken asks for a node's certificate with the bootstrap token, and wants that
// HTTP status.
func (c *cluster) requestWithToken(ctx context.Context, want string) error {
	const script = `set -eu
openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout /dev/null -subj /O=system:nodes/CN=system:node:intruder -out /root/i.csr 2>/dev/null
printf '{"apiVersion":"certificates.k8s.io/v1","kind":"CertificateSigningRequest","metadata":{"generateName":"intruder-","labels":{"by":"intruder"}},"spec":{"signerName":"kubernetes.io/kube-apiserver-client-kubelet","usages":["digital signature","client auth"],"request":"%s"}}' "$(base64 -w0 /root/i.csr)" |
curl -sS --max-time 5 --cacert /root/ca.crt -H "Authorization: Bearer abcdef.0123456789abcdef" -H 'Content-Type: application/json' -o /dev/null -w '%{http_code}' --data-binary @- https://192.168.77.11:6443/apis/certificates.k8s.io/v1/certificatesigningrequests`
	out, err := c.at(ctx, "node9", "", "sh", "-c", script)
	if err != nil {
		return err
	}
	if out != want {
		return fmt.Errorf("HTTP %s, want %s", out, want)
	}
	return nil
}

// policyIsTheManifests fails if the policy's values were read back from a machine: they are
// those of the image's manifest, and the file was there before any machine was.
func (c *cluster) policyIsTheManifests(t *testing.T) {
	m, err := c.lab.Measurements()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(c.lab.OwnerDir(), "policy.yaml")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var policy struct {
		TPM2 struct {
			PCRs []struct {
				Index  int      `json:"index"`
				Values []string `json:"values"`
			} `json:"pcrs"`
		} `json:"tpm2"`
	}
	if err := yaml.Unmarshal(b, &policy); err != nil {
		t.Fatal(err)
	}
	seen := 0
	for _, p := range policy.TPM2.PCRs {
		want, ok := m.PCRs[strconv.Itoa(p.Index)]
		if !ok || !slices.Equal(p.Values, []string{want}) {
			t.Errorf("PCR %d: the policy accepts %v, the manifest says %s", p.Index, p.Values, want)
		}
		seen++
	}
	if seen != len(m.PCRs) || seen == 0 {
		t.Errorf("the policy has %d PCRs, the manifest %d", seen, len(m.PCRs))
	}
	written, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	machines, err := filepath.Glob(filepath.Join(c.lab.Dir, "machines", "*", "machine.json"))
	if err != nil || len(machines) < 2 {
		t.Fatalf("machines %v: %v", machines, err)
	}
	for _, m := range machines {
		made, err := os.Stat(m)
		if err != nil {
			t.Fatal(err)
		}
		if !made.ModTime().After(written.ModTime()) {
			t.Errorf("%s is older than the policy", m)
		}
	}
}

// keyMakesTheDifference is the intruder's refused request with node2's own key.
func (c *cluster) keyMakesTheDifference(t *testing.T) {
	const url = "https://192.168.77.1:6443/api/v1/namespaces/kube-system/configmaps/kubeadm-config"
	get := func(where, cert, key, ca string) (string, error) {
		return c.at(t.Context(), where, "", "curl", "-sS", "--max-time", "5", "--cacert", ca, "--cert", cert, "--key", key, "-o", "/dev/null", "-w", "%{http_code}", url)
	}
	const current = "/var/lib/kubelet/pki/kubelet-client-current.pem"
	if out, err := get("node2", current, current, "/etc/kubernetes/pki/ca.crt"); err != nil || out != "200" {
		t.Errorf("node2's certificate with its key: %s %v", out, err)
	}
	if out, err := get("node9", "/root/client.crt", "/root/own.key", "/root/ca.crt"); err == nil {
		t.Errorf("node2's certificate with another key: %s", out)
	}
}

func (c *cluster) ownersSeat(t *testing.T) {
	for _, argv := range [][]string{{"muster", "version"}, {"muster", "status", "--output", "json"}, {"kubectl", "version", "--client"}} {
		if out, err := c.at(t.Context(), driver.Owner, "", argv...); err != nil || out == "" {
			t.Errorf("%v: %q %v", argv, out, err)
		}
	}
}

func (c *cluster) enroll(t *testing.T) {
	id := strings.Repeat("ab", 32)
	enroll := func(id string) (string, error) {
		return c.at(t.Context(), driver.Owner, "", "muster", "enroll", "node6", "--role", "control-plane", "--machine-id", id)
	}
	for range 2 { // the same again changes nothing
		if _, err := enroll(id); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := enroll(strings.Repeat("cd", 32)); err == nil || !strings.Contains(out, "NAME_TAKEN") {
		t.Errorf("another machine took the name: %s %v", out, err)
	}
	out, err := c.kubectl(t.Context(), "", "get", "attestednode", "node6", "-o", "jsonpath={.spec.machineID} {.spec.role}")
	if err != nil || out != id+" control-plane" {
		t.Errorf("enrolled: %q %v", out, err)
	}
}

// until repeats a check for at most three minutes: the demonstration restarts the API server, and
// the controllers that lost it come back one back-off later.
func until(ctx context.Context, check func() error) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	tick := time.NewTicker(300 * time.Millisecond)
	defer tick.Stop()
	for {
		err := check()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-tick.C:
		}
	}
}

// ready waits until the node is.
func ready(ctx context.Context, lab *driver.Lab, name string) error {
	c := &cluster{lab: lab}
	return until(ctx, func() error {
		out, err := c.kubectl(ctx, "", "get", "node", name, "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`)
		if err == nil && out != "True" {
			err = fmt.Errorf("%s is not Ready: %q", name, out)
		}
		return err
	})
}
