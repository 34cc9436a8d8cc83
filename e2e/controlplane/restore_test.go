package controlplane

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
)

// backup has node2 make a backup by its owner's order (B11), and returns the path of the file on this computer.
func (c *cluster) backup(t *testing.T) (file string, epoch uint64) {
	t.Helper()
	type result struct {
		out string
		err error
	}
	done := make(chan result, 1)
	go func() {
		out, progress, err := c.Run(t.Context(), driver.Owner, "", "muster", "backup", "--from", node(2), "--output", "json")
		t.Logf("muster backup: %v\n%s%s", err, progress, out)
		done <- result{out, err}
	}()
	labtest.Eventually(t, func(ctx context.Context) error {
		out, err := c.kubectl(ctx, "get", "attestednode", node(2), "-o", `jsonpath={.metadata.annotations.muster\.dev/order}`)
		if err == nil && !strings.Contains(out, `"action":"backup"`) {
			err = fmt.Errorf("node2 has the order %q", out)
		}
		return err
	})
	c.Must(t, node(2), "", "systemctl", "restart", "muster-attester") // it attests at its start
	r := <-done
	if r.err != nil {
		t.Fatal(r.err)
	}
	var info struct {
		File  string
		Epoch uint64
	}
	if err := json.Unmarshal([]byte(r.out), &info); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(c.OwnerDir(), info.File), info.Epoch
}

// refusesDamaged changes one byte of a copy.
func (c *cluster) refusesDamaged(t *testing.T, file string) {
	t.Helper()
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	content[len(content)/2] ^= 1
	if err := os.WriteFile(filepath.Join(c.OwnerDir(), "damaged.age"), content, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := c.At(t.Context(), driver.Owner, "", "muster", "backup", "verify", "damaged.age"); err == nil || !strings.Contains(err.Error(), "damaged.age is refused") {
		t.Errorf("a damaged backup: %v\n%s", err, out)
	}
}

// restores takes the power from all control planes, and restores the cluster on a new machine. The worker stays.
func (c *cluster) restores(t *testing.T) {
	worker, first := node(c.planes+1), node(c.planes+2)
	apply := func(name string) {
		t.Helper()
		if _, err := c.kubectl(t.Context(), "create", "configmap", name); err != nil {
			t.Fatal(err)
		}
	}
	apply("before")
	file, epoch := c.backup(t)
	apply("after")
	c.Muster(t, "backup", "verify", file)
	c.refusesDamaged(t, file)
	c.Muster(t, "backup", "--latest", "--to", "fetched")
	url, err := c.Publish(file)
	if err != nil {
		t.Fatal(err)
	}
	restore := []string{"muster", "restore", file, "--url", url, "--endpoint", address(c.planes + 2)}
	if _, err := c.At(t.Context(), driver.Owner, "", append(restore, "--accept-epoch", fmt.Sprint(epoch))...); err == nil || !strings.Contains(err.Error(), "the cluster is not lost") {
		t.Errorf("a cluster that runs is restored: %v", err)
	}
	for i := 2; i <= c.planes; i++ {
		if err := c.KillNode(t.Context(), node(i)); err != nil {
			t.Fatal(err)
		}
	}
	lost := time.Now()
	c.say(t, "all control planes have lost their power")
	if _, err := c.At(t.Context(), driver.Owner, "", restore...); err == nil || !strings.Contains(err.Error(), "CLUSTER_ROLLED_BACK") {
		t.Errorf("a backup is restored without its owner's word: %v", err)
	}
	secret, err := os.ReadFile(filepath.Join(c.OwnerDir(), "init-secret.hex"))
	if err != nil {
		t.Fatal(err)
	}
	raw, err := hex.DecodeString(strings.TrimSpace(string(secret)))
	if err != nil {
		t.Fatal(err)
	}
	hash := sha256.Sum256(raw)
	c.Add(t, driver.Node{Name: first, Role: "control-plane", InitSecretHash: hex.EncodeToString(hash[:])})
	c.Muster(t, append(restore[1:], "--accept-epoch", fmt.Sprint(epoch))...)
	c.say(t, "restored on %s, %.1f s after the loss", first, time.Since(lost).Seconds())
	c.ready(t, first)
	if out, err := c.kubectl(t.Context(), "get", "configmaps", "-o", "name"); err != nil || !strings.Contains(out, "configmap/before\n") || strings.Contains(out, "configmap/after\n") {
		t.Errorf("the cluster has %q: %v", strings.Fields(out), err)
	}
	// Its certificates, its pods and its verdicts go on.
	c.ready(t, worker)
	c.say(t, "%s is Ready", worker)
	voters, learners, err := c.Members(t.Context(), first)
	if err != nil || len(voters) != 1 || voters[0] != first || len(learners) > 0 {
		t.Errorf("etcd has voters %v, learners %v: %v", voters, learners, err)
	}
	// Further control planes join it as they join any cluster (docs/backup.md).
	second := node(c.planes + 3)
	c.Add(t, driver.Node{Name: second, Role: "control-plane", JoinEndpoints: []string{address(c.planes+2) + ":30090"}})
	c.Muster(t, "enroll", second, "--role", "control-plane", "--machine-id", c.MachineID(t, address(c.planes+3)), "--timeout", "20m")
	c.ready(t, second)
	labtest.Eventually(t, func(ctx context.Context) error {
		voters, learners, err := c.Members(ctx, second)
		if err == nil && (len(voters) != 2 || len(learners) > 0) {
			err = fmt.Errorf("etcd has voters %v, learners %v", voters, learners)
		}
		return err
	})
	c.say(t, "%s is a control plane of the restored cluster", second)
	c.Muster(t, "status")
}
