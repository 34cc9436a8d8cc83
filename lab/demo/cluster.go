package demo

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/muster-k8s/muster/lab/driver"
)

const (
	node1Init        = "192.168.77.11:9000"
	node1Joinservice = "192.168.77.11:30090"
	initSecretFile   = "init-secret.hex"
	policyFile       = "policy.yaml"
)

func (r *run) up(ctx context.Context) error {
	return r.Lab.Up(ctx, driver.Up{
		Lab:          filepath.Join(r.Bin, "lab"),
		Bootstrapper: filepath.Join(r.Bin, "bootstrapper"),
		Preinstalled: []string{"kubelet"},
		Muster:       r.muster(),
		Images:       []string{filepath.Join(r.Images, "joinservice.tar"), filepath.Join(r.Images, "kms.tar")},
	})
}

func (r *run) policy(ctx context.Context) error {
	s, err := r.Lab.Status(ctx)
	if err != nil {
		return err
	}
	if len(s.Machines) > 0 {
		return errors.New("machines exist already: a policy from now on could have been read back from one")
	}
	return r.show(ctx, driver.Owner, r.muster(), "policy", "from-measurements", r.Lab.MeasurementsPath(),
		"--ek-root", "ek-roots.pem", "--ek-key", "ecc-p384", "--operator", "--platform-root", driver.CloudRoots, "--platform-project", driver.CloudProject, "--node-cidr", driver.NodeSubnet, "--role", "worker", "--role", "control-plane", "--allow-plain-state", "-o", policyFile)
}

// firmware accepts what node1 has as firmware, which all machines of the lab share.
func (r *run) firmware(ctx context.Context) error {
	argv := []string{r.muster(), "policy", "add-class", "lab-firmware", "--from", node1Init, "--policy", policyFile}
	err := until(ctx, func(ctx context.Context) error { // its bootstrapper may not listen yet
		out, err := r.at(ctx, driver.Owner, argv...)
		if err == nil {
			r.say("%s$ %s\n%s", driver.Owner, strings.Join(argv, " "), out)
		}
		return err
	})
	if err != nil {
		return err
	}
	return r.show(ctx, driver.Owner, r.muster(), "policy", "check", policyFile)
}

func (r *run) muster() string { return filepath.Join(r.Bin, "muster") }

func (r *run) boot(ctx context.Context) error {
	secret := make([]byte, 32)
	if _, err := rand.Read(secret); err != nil {
		return err
	}
	if err := r.writeOwner(initSecretFile, []byte(hex.EncodeToString(secret)+"\n")); err != nil {
		return err
	}
	hash := sha256.Sum256(secret)
	var wg sync.WaitGroup
	errs := make([]error, 2)
	wg.Go(func() {
		_, errs[0] = r.Lab.AddNode(ctx, driver.Node{Name: "node1", Role: "control-plane", InitSecretHash: hex.EncodeToString(hash[:])})
	})
	wg.Go(func() {
		_, errs[1] = r.Lab.AddNode(ctx, driver.Node{Name: "node2", JoinEndpoints: []string{node1Joinservice}})
	})
	wg.Wait()
	return errors.Join(errs...)
}

func (r *run) init(ctx context.Context) error {
	return r.show(ctx, driver.Owner, r.muster(), "init",
		"--name", cluster, "--endpoint", node1Init, "--init-secret-file", initSecretFile, "--owner-key-file", driver.OwnerKeyFile, "--policy", policyFile,
		"--control-plane-endpoint", driver.ControlPlaneEndpoint, "--pod-cidr", driver.PodSubnet, "--service-cidr", driver.ServiceSubnet,
		"--components", "components.yaml", "--manifests", filepath.Join("manifests", "podnet.yaml"),
		"--images", filepath.Join(r.Images, "digests.json"))
}

func (r *run) join(ctx context.Context) error {
	return until(ctx, func(ctx context.Context) error {
		out, err := r.kubectl(ctx, "get", "node", "node2", "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`)
		if err != nil {
			return err
		}
		if out != "True" {
			return fmt.Errorf("node2 is there, Ready=%q", out)
		}
		return nil
	})
}

func (r *run) look(ctx context.Context) error {
	admin := []string{"kubectl", "--kubeconfig", "/etc/kubernetes/admin.conf"}
	for _, what := range [][]string{{"get", "nodes", "-o", "wide"}, {"get", "attestednodes"}, {"get", "attestationpolicies"}, {"-n", "muster-system", "get", "pods", "-o", "wide"}} {
		if err := r.show(ctx, "node1", append(admin, what...)...); err != nil {
			return err
		}
	}
	if err := r.show(ctx, driver.Owner, r.muster(), "status", "--timeout", "20m"); err != nil {
		return err
	}
	nodes, err := r.names(ctx, "nodes")
	if err != nil {
		return err
	}
	r.report.Nodes = nodes
	if !slices.Equal(nodes, []string{"node1", "node2"}) {
		return fmt.Errorf("the cluster's nodes are %v", nodes)
	}
	for _, q := range [][2]string{
		{"nodes", `jsonpath={range .items[*]}{.status.conditions[?(@.type=="Ready")].status}{" "}{end}`},
		{"attestednodes", `jsonpath={range .items[*]}{.status.lastVerdict.accepted}{" "}{end}`},
	} {
		err := until(ctx, func(ctx context.Context) error { // on a busy computer, a node may be late for once
			out, err := r.kubectl(ctx, "get", q[0], "-o", q[1])
			if err != nil {
				return err
			}
			if got := strings.Fields(strings.ToLower(out)); !slices.Equal(got, []string{"true", "true"}) {
				return fmt.Errorf("%s: Ready, or accepted: %v", q[0], got)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (r *run) names(ctx context.Context, resource string) ([]string, error) {
	out, err := r.kubectl(ctx, "get", resource, "-o", `jsonpath={range .items[*]}{.metadata.name}{"\n"}{end}`)
	if err != nil {
		return nil, err
	}
	names := strings.Fields(out)
	slices.Sort(names)
	return names, nil
}

// echo starts a pod on each node and has each fetch the other's answer by its pod IP and by the service's name.
func (r *run) echo(ctx context.Context) error {
	manifest, err := os.ReadFile(r.owner(filepath.Join("manifests", "echo.yaml")))
	if err != nil {
		return err
	}
	if _, err := r.pipe(ctx, "node1", manifest, "kubectl", "--kubeconfig", "/etc/kubernetes/admin.conf", "apply", "-f", "-"); err != nil {
		return err
	}
	pods := make(map[string][2]string) // node → name and IP of its pod
	err = until(ctx, func(ctx context.Context) error {
		out, err := r.kubectl(ctx, "get", "pods", "-l", "app=echo", "-o",
			`jsonpath={range .items[?(@.status.phase=="Running")]}{.spec.nodeName} {.metadata.name} {.status.podIP}{"\n"}{end}`)
		if err != nil {
			return err
		}
		clear(pods)
		for line := range strings.Lines(out) {
			if f := strings.Fields(line); len(f) == 3 {
				pods[f[0]] = [2]string{f[1], f[2]}
			}
		}
		if len(pods) < 2 {
			return fmt.Errorf("echo runs on %d nodes", len(pods))
		}
		return nil
	})
	if err != nil {
		return err
	}
	for from, to := range map[string]string{"node1": "node2", "node2": "node1"} {
		// kube-proxy and routes follow the pods a moment later.
		err := until(ctx, func(ctx context.Context) error {
			out, err := r.kubectl(ctx, "exec", pods[from][0], "--", "/echo", "get", "http://"+pods[to][1]+":8080/")
			if err != nil {
				return err
			}
			if !strings.Contains(out, "node="+to) {
				return fmt.Errorf("the pod on %s got %q", from, out)
			}
			r.say("pod on %s asked the pod on %s: %s", from, to, strings.TrimSpace(out))
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// Cluster makes a cluster of node1, its control plane, and node2, a worker, and leaves it running for other tests. It
// is the first half of [Run].
func Cluster(ctx context.Context, o Options) (err error) {
	for _, path := range []*string{&o.Bin, &o.Images} {
		if *path, err = filepath.Abs(*path); err != nil {
			return err
		}
	}
	r := &run{Options: o, started: time.Now()}
	o.Lab.Log = &indent{to: o.Out}
	for _, s := range []struct {
		name string
		do   func(context.Context) error
	}{
		{"Lab", r.up}, {"Policy", r.policy}, {"Boot node1 and node2", r.boot}, {"Firmware", r.firmware}, {"muster init", r.init}, {"node2 joins", r.join},
	} {
		if err := r.step(ctx, s.name, s.do); err != nil {
			return err
		}
	}
	return nil
}
