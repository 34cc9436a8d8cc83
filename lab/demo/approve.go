package demo

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/muster-k8s/muster/lab/driver"
)

// approve boots a machine without an EK certificate, which waits until its owner lists it, and then joins without a restart.
func (r *run) approve(ctx context.Context) error {
	n := driver.Node{Name: "node6", JoinEndpoints: []string{node1Joinservice}, BareEK: true}
	if err := r.refuseMachine(ctx, n, "a machine whose TPM has no EK certificate, until it is approved", "EK_UNTRUSTED"); err != nil {
		return err
	}
	var id string
	err := until(ctx, func(ctx context.Context) error { // joinservice lists it some seconds after the refusal
		out, err := r.at(ctx, driver.Owner, r.muster(), "approve", "--output", "json")
		if err != nil {
			return err
		}
		var list struct {
			Waiting []struct {
				Machine  string `json:"machine"`
				Address  string `json:"address"`
				List     string `json:"list"`
				Differs  string `json:"differs"`
				Verified bool   `json:"verified"`
			} `json:"waiting"`
		}
		if err := json.Unmarshal([]byte(out), &list); err != nil {
			return err
		}
		for _, w := range list.Waiting {
			if w.Address == "192.168.77.16" && w.Verified && w.List == "tpm2.bareMachineIds" && w.Differs == "" {
				id = w.Machine
				return nil
			}
		}
		return fmt.Errorf("node6 is not among the machines that wait for an approval: %s", out)
	})
	if err != nil {
		return err
	}
	if err := r.show(ctx, driver.Owner, r.muster(), "approve"); err != nil {
		return err
	}
	// Nothing but its ID is known of such a TPM, so the ID is compared with the one on the machine's console.
	if out, err := r.at(ctx, n.Name, "bootstrapper", "doctor"); !strings.Contains(out, id) { // some checks fail on a machine that waits
		return fmt.Errorf("node6 shows another ID than %s on its console: %w\n%s", id, err, out)
	}
	if err := r.show(ctx, driver.Owner, r.muster(), "approve", id, "--yes", "--timeout", "20m"); err != nil {
		return err
	}
	return r.workerReady(ctx, n.Name)
}

// cloudMachine boots a machine whose attestation key the lab's cloud has certified, for a project that the policy lists.
func (r *run) cloudMachine(ctx context.Context) error {
	n := driver.Node{Name: "node7", JoinEndpoints: []string{node1Joinservice}, CloudKey: true}
	if _, err := r.Lab.AddNode(ctx, n); err != nil {
		return err
	}
	// Before it has joined, its port would show the endorsement, but it may join first. Afterwards the cluster has the ID under which it was
	// accepted, and that is a hash of the endorsement: the machine with this ID can't have shown an EK certificate.
	if err := r.workerReady(ctx, n.Name); err != nil {
		return err
	}
	id, err := r.kubectl(ctx, "get", "attestednode", n.Name, "-o", "jsonpath={.spec.machineID}")
	if err != nil {
		return err
	}
	out, err := r.at(ctx, n.Name, "bootstrapper", "doctor")
	if err != nil && out == "" { // a check that fails is not about this
		return err
	}
	for line := range strings.Lines(out) {
		if strings.Contains(line, "platform-ak") && strings.Contains(line, id) && id != "" {
			r.say("node7: %s", strings.TrimSpace(line))
			return nil
		}
	}
	return fmt.Errorf("node7 has joined as machine %q, which is not that of its platform key:\n%s", id, out)
}

// workerReady waits until a machine is a node, and notes the cluster's nodes.
func (r *run) workerReady(ctx context.Context, name string) error {
	if err := until(ctx, func(ctx context.Context) error { return r.workerIsReady(ctx, name) }); err != nil {
		return err
	}
	var err error
	r.report.Nodes, err = r.names(ctx, "nodes")
	r.say("%s is a node", name)
	return err
}

func (r *run) workerIsReady(ctx context.Context, name string) error {
	out, err := r.kubectl(ctx, "get", "node", name, "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`)
	if err == nil && out != "True" {
		err = fmt.Errorf("%s is there, Ready=%q", name, out)
	}
	return err
}
