//go:build runbook

package runbook

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
)

const (
	clusterName = "runbook"
	diskID      = "/var/lib/muster/state/uuid"
	diskCheck   = "/var/lib/muster/state/key-check"
)

var allNodes = []string{"node1", "node2", "node3", "node4", "node5"}

// One cluster lives through all of them, so a failure ends the rest.
func TestTheRunbooks(t *testing.T) {
	w := prepare(t)
	for _, book := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"first boot", w.firstBoot},
		{"reboot", w.reboot},
		{"rotate a key", w.rotateKey},
		{"etcd is full", w.etcdIsFull},
		{"lost TPM", func(t *testing.T) { w.lostTPM(t, "node4") }},
		{"cleared TPM", func(t *testing.T) { w.clearedTPM(t, "node5") }},
		{"exchanged disk", func(t *testing.T) { w.exchangedDisk(t, "node4") }},
		{"lost worker", w.lostWorker},
		{"lost control plane", w.lostControlPlane},
		{"lost quorum", w.lostQuorum},
		{"whole-cluster restart", w.restart},
		{"a cluster that was rolled back", w.rolledBack},
		{"uninstall", w.uninstall},
	} {
		if !t.Run(book.name, book.run) {
			return
		}
	}
}

func (w *fixture) firstBoot(t *testing.T) {
	w.owner(t, "first-policy", "node1", "NODES="+driver.NodeSubnet, "FLAGS=--operator --ek-key ecc-p384 --allow-plain-state")
	first := w.machine("node1")
	first.InitSecretHash = w.initSecretHash
	w.Add(t, first, w.machine("node4"))
	w.owner(t, "first-class", "node1") // repeated until its bootstrapper listens
	w.owner(t, "first-init", "node1", "CLUSTER="+clusterName, "API="+driver.ControlPlaneEndpoint, "PODS="+driver.PodSubnet, "SERVICES="+driver.ServiceSubnet)
	for _, n := range []string{"node1", "node4"} {
		w.owner(t, "node-ready", n)
	}
	w.well(t)
	w.Add(t, w.machine("node2"), w.machine("node3"), w.machine("node5"))
	w.newControlPlanes(t, "node2", "node3")
	w.owner(t, "node-ready", "node5")
	w.voters(t, "node1", "node1", "node2", "node3")
	w.well(t)
}

// newControlPlanes names machines that wait, and lets them join.
func (w *fixture) newControlPlanes(t *testing.T, nodes ...string) {
	t.Helper()
	for _, n := range nodes {
		w.owner(t, "new-control-plane", n, "MACHINE="+w.MachineID(t, address(n))) // its bootstrapper listens
	}
	for _, n := range nodes {
		w.owner(t, "node-ready", n)
	}
}

func (w *fixture) reboot(t *testing.T) {
	w.owner(t, "reboot-before", "node4")
	start := time.Now()
	if _, err := w.RebootNode(t.Context(), "node4"); err != nil {
		t.Fatal(err)
	}
	w.owner(t, "reboot-after", "node4")
	w.back(t, start, "node4")
	if out := w.get(t, "node/node4", "{.spec.unschedulable}"); out != "" {
		t.Errorf("node4 is still cordoned: %q", out)
	}

	// Power fails; no person acts.
	start = time.Now()
	each(t, []string{"node5", "node2"}, func(n string) error { _, err := w.RebootNode(t.Context(), n); return err })
	w.back(t, start, "node5", "node2")
	w.voters(t, "node1", "node1", "node2", "node3")
	w.well(t)
}

// rotateKey rotates the key that no running token or Secret depends on; e2e/controlplane rotates all.
func (w *fixture) rotateKey(t *testing.T) {
	accepted := func() string {
		return w.Must(t, "node2", "", "grep", "-c", "BEGIN CERTIFICATE", "/etc/kubernetes/pki/front-proxy-ca.crt")
	}
	before := w.Must(t, "node2", "", "cat", "/etc/kubernetes/pki/front-proxy-ca.crt")
	defer w.TakeOrders(t, w.kubectl, "rotate-key", "node1", "node2", "node3")()
	w.owner(t, "rotate-use", "node1", "KEY=front-proxy-ca")
	if n := strings.TrimSpace(accepted()); n != "2" {
		t.Errorf("node2 accepts %s authorities, want the old and the new one", n)
	}
	w.owner(t, "rotate-notes", "node1", "KEY=front-proxy-ca")
	w.owner(t, "rotate-finish", "node1", "KEY=front-proxy-ca")
	if n := strings.TrimSpace(accepted()); n != "1" || w.Must(t, "node2", "", "cat", "/etc/kubernetes/pki/front-proxy-ca.crt") == before {
		t.Errorf("node2 accepts %s authorities, want the new one alone", n)
	}
	w.well(t)
}

// raiseNoSpace has node1's etcd raise the NOSPACE alarm.
const raiseNoSpace = `ask() {
  curl -sS --fail --cacert /etc/kubernetes/pki/etcd/ca.crt --cert /etc/kubernetes/pki/etcd/server.crt --key /etc/kubernetes/pki/etcd/server.key "https://127.0.0.1:2379/v3/maintenance/$1" -d "$2"
}
id=$(ask status '{}' | grep -o '"member_id":"[0-9]*"' | head -n 1 | grep -o '[0-9]*')
ask alarm '{"action":"ACTIVATE","memberID":"'"$id"'","alarm":"NOSPACE"}'`

func (w *fixture) etcdIsFull(t *testing.T) {
	write := func(ctx context.Context) error {
		_, err := w.kubectl(ctx, "annotate", "node", "node4", "--overwrite", "example.com/written="+time.Now().Format("150405"))
		return err
	}
	w.Must(t, "node1", "", "sh", "-c", raiseNoSpace)
	labtest.Eventually(t, func(ctx context.Context) error {
		if err := write(ctx); err == nil || !strings.Contains(err.Error(), "database space exceeded") {
			return fmt.Errorf("a write to an etcd that is full: %w", err)
		}
		return nil
	})
	w.owner(t, "etcd-objects", "node1")
	if out := w.Block(t, "node1", "etcd-on-the-machine"); !strings.Contains(out, "NOSPACE") {
		t.Errorf("etcd's status on the machine:\n%s", out)
	}
	w.owner(t, "etcd-space", "node1", "ALIVE=node1")
	if err := write(t.Context()); err != nil {
		t.Error(err)
	}
	for _, n := range allNodes {
		w.owner(t, "node-ready", n)
	}
	w.well(t)
}

func (w *fixture) lostTPM(t *testing.T, node string) {
	before := w.known(t)
	labtest.Eventually(t, func(ctx context.Context) error {
		_, err := w.kubectl(ctx, "label", "node", node, "--overwrite", "rack=seven")
		return err
	})
	disk := func() string { return w.Must(t, node, "", "cat", diskID, diskCheck) }
	had := disk()
	if err := errors.Join(w.KillNode(t.Context(), node), w.ExchangeTPM(t.Context(), node)); err != nil {
		t.Fatal(err)
	}
	if _, err := w.RebootNode(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	id := w.MachineID(t, address(node)) // it waits, and reports its new ID
	if id == before[node].Spec.MachineID {
		t.Fatal("the TPM is the old one")
	}
	labtest.Eventually(t, func(ctx context.Context) error { // as the page says
		out, err := w.At(ctx, driver.Owner, "", "muster", "status")
		if err == nil && !strings.Contains(out, "NAME_TAKEN") {
			err = fmt.Errorf("muster status shows nobody who waits for a name:\n%s", out)
		}
		return err
	})
	start := time.Now()
	w.refuses(t, "tpm-replace", node, "MACHINE="+before[node].Spec.MachineID, "is expected at this address")
	w.owner(t, "tpm-replace", node, "MACHINE="+id)
	w.owner(t, "tpm-joined", node)
	w.back(t, start, node)
	if now := w.known(t)[node].Spec; now.MachineID != id || now.DiskID != before[node].Spec.DiskID {
		t.Errorf("enrolled: %+v", now)
	}
	if got := disk(); got != had {
		t.Errorf("the disk or its key is another one: %q, was %q", got, had)
	}
	if out := w.get(t, "node/"+node, "{.metadata.labels.rack}"); out != "seven" {
		t.Errorf("the Node is another one: label %q", out)
	}
	w.well(t)
}

// clearedTPM clears the TPM of a machine that has been rebooted since it joined.
func (w *fixture) clearedTPM(t *testing.T, node string) {
	before := w.known(t)[node]
	if err := w.ClearTPM(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	if _, err := w.RebootNode(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	labtest.Eventually(t, func(ctx context.Context) error {
		enrolled, err := w.enrollments(ctx)
		if n := enrolled[node]; err == nil && !meta.IsStatusConditionTrue(n.Status.Conditions, v1alpha1.ConditionCloned) {
			err = fmt.Errorf("%s: %+v", node, n.Status)
		}
		return err
	})
	start := time.Now()
	w.owner(t, "tpm-cleared", node)
	w.back(t, start, node)
	if now := w.known(t)[node]; now.UID != before.UID || now.Spec.MachineID != before.Spec.MachineID || now.Spec.Banned {
		t.Errorf("enrolled: %+v", now.Spec)
	}
	w.well(t)
}

func (w *fixture) lostWorker(t *testing.T) {
	if err := w.RemoveNode(t.Context(), "node5"); err != nil {
		t.Fatal(err)
	}
	w.owner(t, "lost-worker", "node5")
	start := time.Now()
	w.Add(t, w.machine("node5"))
	w.owner(t, "node-ready", "node5")
	w.back(t, start, "node5")
	w.well(t)
}

func (w *fixture) lostControlPlane(t *testing.T) {
	if err := w.RemoveNode(t.Context(), "node1"); err != nil {
		t.Fatal(err)
	}
	w.answers(t)
	w.owner(t, "lost-control-plane", "node1")
	start := time.Now()
	w.Add(t, w.machine("node1"))
	w.newControlPlanes(t, "node1")
	w.back(t, start, "node1")
	w.voters(t, "node2", "node1", "node2", "node3")
	w.well(t)
}

// policy reads the policy in force.
func (w *fixture) policy(t *testing.T) (out map[string]any) {
	t.Helper()
	if err := json.Unmarshal([]byte(w.get(t, "attestationpolicy/default", "{.spec.policy}")), &out); err != nil {
		t.Fatal(err)
	}
	return out
}

// answers waits until the API does.
func (w *fixture) answers(t *testing.T) {
	t.Helper()
	labtest.Eventually(t, func(ctx context.Context) error { _, err := w.kubectl(ctx, "get", "--raw", "/readyz"); return err })
}

func (w *fixture) lostQuorum(t *testing.T) {
	before, policy := w.known(t), w.policy(t)
	each(t, []string{"node1", "node2"}, func(n string) error { return w.RemoveNode(t.Context(), n) })
	labtest.Eventually(t, func(ctx context.Context) error {
		if out, err := w.kubectl(ctx, "get", "nodes"); err == nil {
			return errors.New("etcd answers still: " + out)
		}
		return nil
	})
	// The remaining one was off too: its kubelet has had no API server since it started.
	if _, err := w.RebootNode(t.Context(), "node3"); err != nil {
		t.Fatal(err)
	}
	labtest.Eventually(t, func(ctx context.Context) error {
		_, err := w.At(ctx, "node3", "", "pgrep", "-x", "etcd")
		return err
	})
	start := time.Now()
	w.say(t, "node1 and node2 are gone, node3 was rebooted, and the API answers nobody")
	w.Block(t, "node3", "quorum-force")
	w.voters(t, "node3", "node3")
	w.answers(t)
	w.owner(t, "quorum-forget", "node3", "LOST=node1 node2")
	w.back(t, start, "node3", "node4", "node5")
	after := w.known(t)
	if got := slices.Sorted(maps.Keys(after)); !slices.Equal(got, []string{"node3", "node4", "node5"}) {
		t.Errorf("enrolled: %v", got)
	}
	for name, n := range after {
		if n.UID != before[name].UID || n.Spec.MachineID != before[name].Spec.MachineID {
			t.Errorf("%s was enrolled as %+v, and is as %+v", name, before[name].Spec, n.Spec)
		}
	}
	now := w.policy(t)
	if listed, ok := now["controlPlanes"].([]any); !ok || len(listed) != 1 || listed[0] != after["node3"].Spec.MachineID { // A7
		t.Errorf("the policy lists %v as control planes, want node3 alone", now["controlPlanes"])
	}
	for _, changed := range []string{"controlPlanes", "serial"} {
		delete(policy, changed)
		delete(now, changed)
	}
	if !reflect.DeepEqual(now, policy) {
		t.Errorf("the policy changed:\n%v\n%v", policy, now)
	}

	start = time.Now()
	w.Add(t, w.machine("node6"))
	w.owner(t, "node-ready", "node6")
	w.back(t, start, "node6")
	if err := w.RemoveNode(t.Context(), "node6"); err != nil { // five machines are enough for what follows
		t.Fatal(err)
	}
	w.owner(t, "lost-worker", "node6")
	w.Add(t, w.machine("node1"), w.machine("node2"))
	w.newControlPlanes(t, "node1", "node2")
	w.back(t, start, "node1", "node2")
	w.voters(t, "node3", "node1", "node2", "node3")
	w.well(t)
}

func (w *fixture) restart(t *testing.T) {
	before := w.known(t)
	each(t, allNodes, func(n string) error { return w.KillNode(t.Context(), n) })
	start := time.Now()
	w.say(t, "all machines are off")
	each(t, allNodes, func(n string) error { _, err := w.RebootNode(t.Context(), n); return err })
	w.Block(t, driver.Owner, "restart-wait")
	w.back(t, start, allNodes...)
	w.voters(t, "node1", "node1", "node2", "node3")
	if now := slices.Sorted(maps.Keys(w.known(t))); !slices.Equal(now, slices.Sorted(maps.Keys(before))) {
		t.Errorf("enrolled: %v", now)
	}
	w.well(t)
}
