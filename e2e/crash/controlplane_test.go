package crash

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"

	"github.com/muster-k8s/muster/lab/driver"
)

// killsAControlPlane kills the bootstrapper of a second control plane in each phase of its join,
// within kubeadm's own included: before, while and after its etcd becomes a member. It ends as a
// control plane, and etcd has two voters and nothing of the tries before.
func (r *realLab) killsAControlPlane(t *testing.T) {
	r.t = t
	const name = "node6"
	m, err := r.AddNode(t.Context(), driver.Node{Name: name, Role: "control-plane", JoinEndpoints: []string{"192.168.77.11:30090"}})
	if err != nil {
		t.Fatal(err)
	}
	var seen struct {
		Machine string `json:"machine"`
	}
	r.until(name+" listens", func(ctx context.Context) error {
		out, err := r.at(ctx, driver.Owner, r.muster(), "verify", m.Address+":9000", "--policy", "policy.yaml", "--output", "json")
		if err != nil {
			return err
		}
		return json.Unmarshal([]byte(out), &seen)
	})
	v := r.victim(name)
	r.must(driver.Owner, r.muster(), "enroll", name, "--role", "control-plane", "--machine-id", seen.Machine)
	for _, at := range []point{
		{"waiting", phase("WAITING")},
		{"locked", phase("LOCKED")},
		{"disk", phase("DISK")},
		{"components", phase("COMPONENTS")},
		{"configured", says("certificates and configuration are in place")},
		{"kubeadm preflight", says("kubeadm join: preflight")},
		{"kubeadm certs", says("kubeadm join: certs")},
		{"kubeadm kubeconfig", says("kubeadm join: kubeconfig")},
		{"kubeadm control-plane", says("kubeadm join: control-plane")},
		{"kubeadm kubelet-start", says("kubeadm join: kubelet-start")},
		{"kubeadm etcd", says("kubeadm join: etcd")},
		{"kubeadm mark-control-plane", says("kubeadm join: mark-control-plane")},
		{"kubeadm has finished", phase("KUBEADM")},
	} {
		v.killAt(at.what, at.fits)
	}
	v.joined()
	r.ready(name)
	r.until("etcd has two voters and no learner", func(ctx context.Context) error {
		const pki = "/etc/kubernetes/pki/etcd/"
		out, err := r.at(ctx, "node1", "curl", "-sS", "--max-time", "5", "--cacert", pki+"ca.crt", "--cert", pki+"healthcheck-client.crt", "--key", pki+"healthcheck-client.key",
			"-d", "{}", "https://127.0.0.1:2379/v3/cluster/member/list")
		if err != nil {
			return err
		}
		var list struct {
			Members []struct {
				Name      string `json:"name"`
				IsLearner bool   `json:"isLearner"`
			} `json:"members"`
		}
		if err := json.Unmarshal([]byte(out), &list); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		for _, m := range list.Members {
			if m.IsLearner {
				return fmt.Errorf("%s is a learner", m.Name)
			}
		}
		if len(list.Members) != 2 {
			return fmt.Errorf("%d members: %s", len(list.Members), out)
		}
		return nil
	})
	t.Log(r.must("node1", "kubectl", "--kubeconfig", "/etc/kubernetes/admin.conf", "get", "nodes,attestednodes"))
}
