package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/muster-k8s/muster/lab/driver"
)

const (
	node5Machine     = "192.168.77.15:9000"
	node5Joinservice = "192.168.77.15:30090"
)

// secondControlPlane has the owner enroll a machine for the role, without which it gets no CA keys, and waits until
// etcd has it.
func (r *run) secondControlPlane(ctx context.Context) error {
	n := driver.Node{Name: "node5", Role: "control-plane", JoinEndpoints: []string{node1Joinservice, node5Joinservice}}
	if _, err := r.Lab.AddNode(ctx, n); err != nil {
		return err
	}
	var sight struct {
		Machine string `json:"machine"`
	}
	err := until(ctx, func(ctx context.Context) error { // its bootstrapper may not listen yet
		out, err := r.at(ctx, driver.Owner, r.muster(), "verify", node5Machine, "--output", "json")
		if err != nil {
			return err
		}
		return json.Unmarshal([]byte(out), &sight)
	})
	if err != nil {
		return err
	}
	if err := r.show(ctx, driver.Owner, r.muster(), "enroll", n.Name, "--role", "control-plane", "--machine-id", sight.Machine, "--timeout", "20m"); err != nil {
		return err
	}
	err = until(ctx, func(ctx context.Context) error {
		out, err := r.kubectl(ctx, "get", "node", n.Name, "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status} {.metadata.labels}`)
		if err != nil {
			return err
		}
		if !strings.HasPrefix(out, "True ") || !strings.Contains(out, "node-role.kubernetes.io/control-plane") {
			return fmt.Errorf("%s is no control plane that is Ready: %s", n.Name, out)
		}
		if r.report.Members, err = r.etcdMembers(ctx); err == nil && !slices.Equal(r.report.Members, []string{"node1", n.Name}) {
			err = fmt.Errorf("etcd's members are %v", r.report.Members)
		}
		return err
	})
	if err != nil {
		return err
	}
	if err := r.show(ctx, "node1", "kubectl", "--kubeconfig", "/etc/kubernetes/admin.conf", "get", "nodes", "-o", "wide"); err != nil {
		return err
	}
	r.say("etcd: %s", strings.Join(r.report.Members, ", "))
	r.report.Nodes, err = r.names(ctx, "nodes")
	return err
}

// etcdMembers asks node1's etcd, over its JSON gateway, for the voting members; it fails if there is a member without
// a vote.
func (r *run) etcdMembers(ctx context.Context) ([]string, error) {
	const pki = "/etc/kubernetes/pki/etcd/"
	out, err := r.at(ctx, "node1", "curl", "-sS", "--max-time", "60", "--cacert", pki+"ca.crt", "--cert", pki+"healthcheck-client.crt", "--key", pki+"healthcheck-client.key",
		"-d", "{}", "https://127.0.0.1:2379/v3/cluster/member/list")
	if err != nil {
		return nil, err
	}
	var list struct {
		Members []struct {
			Name      string `json:"name"`
			IsLearner bool   `json:"isLearner"`
		} `json:"members"`
	}
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		return nil, fmt.Errorf("etcd: %w: %s", err, out)
	}
	var names []string
	for _, m := range list.Members {
		if m.IsLearner {
			return nil, errors.New("etcd has a member that is not done joining: " + m.Name)
		}
		names = append(names, m.Name)
	}
	slices.Sort(names)
	return names, nil
}
