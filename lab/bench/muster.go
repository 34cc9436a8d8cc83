package bench

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/muster-k8s/muster/lab/driver"
)

const (
	policyFile     = "bench-policy.yaml"
	initSecretFile = "bench-init-secret.hex"
	joinEndpoint   = "192.168.77.11:30090"
)

func (r *run) tool() string { return filepath.Join(r.Bin, "muster") }

func (r *run) policy(ctx context.Context) error {
	_, err := r.at(ctx, driver.Owner, nil, r.tool(), "policy", "from-measurements", r.Lab.MeasurementsPath(), "--class", r.Lab.ClassFlag(), "--ek-root", "ek-roots.pem", "--ek-key", "ecc-p384", "--operator",
		"--node-cidr", driver.NodeSubnet, "--role", "worker", "--role", "control-plane", "--allow-plain-state", "-o", policyFile)
	return err
}

// muster makes a cluster through Muster: init with the network's manifest, and a join. The second machine boots once
// the first is a cluster, so its join does not wait.
func (r *run) muster(ctx context.Context) (Sample, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s := Sample{Stages: map[string]float64{}}
	name := fmt.Sprintf("bench%d", r.round)
	secret := make([]byte, 32)
	_, _ = rand.Read(secret) // never fails
	if err := os.WriteFile(filepath.Join(r.Lab.OwnerDir(), initSecretFile), []byte(hex.EncodeToString(secret)+"\n"), 0o600); err != nil {
		return s, err
	}
	hash := sha256.Sum256(secret)
	if err := r.boot(ctx, driver.Node{Name: "node1", Role: "control-plane", InitSecretHash: hex.EncodeToString(hash[:])}); err != nil {
		return s, err
	}
	admin := filepath.Join("muster-"+name, "admin.conf")
	start := time.Now()
	var wg sync.WaitGroup
	defer wg.Wait()
	var readyErr error
	wg.Go(func() { s.Init.Ready, readyErr = r.whenReady(ctx, start, admin) })
	out, err := r.at(ctx, driver.Owner, nil, r.tool(), "init", "--output", "json", "--name", name, "--endpoint", "192.168.77.11:9000",
		"--init-secret-file", initSecretFile, "--owner-key-file", driver.OwnerKeyFile, "--policy", policyFile, "--control-plane-endpoint", driver.ControlPlaneEndpoint,
		"--pod-cidr", driver.PodSubnet, "--service-cidr", driver.ServiceSubnet, "--components", "components.yaml", "--manifests", network,
		"--images", filepath.Join(r.Images, "digests.json"))
	if err != nil {
		cancel()
		return s, err
	}
	s.Init.Done = since(start)
	if wg.Wait(); readyErr != nil {
		return s, readyErr
	}
	if err := r.initStages(&s, start, out); err != nil {
		return s, err
	}

	if err := r.boot(ctx, driver.Node{Name: "node2", JoinEndpoints: []string{joinEndpoint}}); err != nil {
		return s, err
	}
	if err := r.ready(ctx, admin, "node2"); err != nil {
		return s, err
	}
	if err := r.joinStages(ctx, &s, time.Now()); err != nil {
		return s, err
	}
	if err := r.usage(ctx, &s); err != nil {
		return s, err
	}
	s.Requests, err = r.requests(ctx)
	return s, err
}

// logLine is the part of a line of the bootstrapper's log that the measurement reads.
type logLine struct {
	Time  time.Time `json:"time"`
	Msg   string    `json:"msg"`
	Phase string    `json:"phase"`
	Text  string    `json:"text"`
}

// log returns the lines of a machine's bootstrapper.
func (r *run) log(ctx context.Context, node string) ([]logLine, error) {
	out, err := r.at(ctx, node, nil, "cat", "/var/log/muster-bootstrapper.log")
	if err != nil {
		return nil, err
	}
	var lines []logLine
	for text := range strings.Lines(string(out)) {
		var l logLine
		if json.Unmarshal([]byte(text), &l) == nil && !l.Time.IsZero() {
			lines = append(lines, l)
		}
	}
	if len(lines) == 0 {
		return nil, fmt.Errorf("the bootstrapper's log on %s has no line", node)
	}
	return lines, nil
}
