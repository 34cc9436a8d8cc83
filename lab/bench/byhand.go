package bench

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/muster-k8s/muster/lab/byhand"
	"github.com/muster-k8s/muster/lab/driver"
)

// byHand makes the same cluster with kubeadm alone: a bootstrap token, no attestation.
func (r *run) byHand(ctx context.Context) (Sample, error) {
	var s Sample
	nodes := []byhand.Node{{Name: "node1", Address: "192.168.77.11"}, {Name: "node2", Address: "192.168.77.12"}}
	if err := r.boot(ctx, driver.Node{Name: "node1", Role: "control-plane", NoBootstrapper: true}, driver.Node{Name: "node2", NoBootstrapper: true}); err != nil {
		return s, err
	}
	image, err := r.at(ctx, "node1", nil, "cat", "/etc/muster/image.yaml")
	if err != nil {
		return s, err
	}
	config, err := byhand.Init(image, nodes[0])
	if err != nil {
		return s, err
	}
	start := time.Now()
	if _, err := r.at(ctx, "node1", config, "kubeadm", "init", "--config", "/dev/stdin"); err != nil {
		return s, err
	}
	s.Init.Kubeadm = since(start)
	admin, err := r.at(ctx, "node1", nil, "cat", "/etc/kubernetes/admin.conf")
	if err != nil {
		return s, err
	}
	if err := os.WriteFile(filepath.Join(r.Lab.OwnerDir(), adminByHand), admin, 0o600); err != nil {
		return s, err
	}
	if _, err := r.at(ctx, driver.Owner, nil, "kubectl", "--kubeconfig", adminByHand, "apply", "-f", network); err != nil {
		return s, err
	}
	if err := r.ready(ctx, adminByHand, "node1"); err != nil {
		return s, err
	}
	s.Init.Ready = since(start)
	s.Init.Done = s.Init.Ready

	ca, err := r.at(ctx, "node1", nil, "cat", "/etc/kubernetes/pki/ca.crt")
	if err != nil {
		return s, err
	}
	if config, err = byhand.Join(ca, nodes[1]); err != nil {
		return s, err
	}
	start = time.Now()
	if _, err := r.at(ctx, "node2", config, "kubeadm", "join", "--config", "/dev/stdin"); err != nil {
		return s, err
	}
	s.Join.Kubeadm = since(start)
	if err := r.ready(ctx, adminByHand, "node2"); err != nil {
		return s, err
	}
	s.Join.Ready = since(start)
	s.Join.Done = s.Join.Ready
	return s, nil
}

const (
	adminByHand = "admin-by-hand.conf"
	network     = "manifests/podnet.yaml"
)

// boot starts machines, all at once.
func (r *run) boot(ctx context.Context, nodes ...driver.Node) error {
	errs := make([]error, len(nodes))
	var wg sync.WaitGroup
	for i, n := range nodes {
		wg.Go(func() { _, errs[i] = r.Lab.AddNode(ctx, n) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

func since(t time.Time) float64 { return time.Since(t).Seconds() }
