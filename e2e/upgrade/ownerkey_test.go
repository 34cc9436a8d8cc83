package upgrade_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
)

// ownerKey rotates the owner's key of a cluster whose machines run, as docs/certificates.md has it: with two new images.
func (c *release) ownerKey(t *testing.T) {
	keys := c.rotate(t, "--prepare")
	if len(keys) != 2 {
		t.Fatalf("an image of before the switch has the keys %q, want two", keys)
	}
	both, err := c.UpdateImage("v2", keys...)
	if err != nil {
		t.Fatal(err)
	}
	c.accept(t, 2, c.MeasurementsPath(), both)
	c.commitRefused(t, "node1", "the image of node1 does not have the new key")

	c.reboot(t, keys, "node1", "node2", "node3", "node4") // node5 keeps the image with the old key
	c.commitRefused(t, "node5", "the image of node5 does not have the new key")
	c.reboot(t, keys, "node5")
	last := c.rotate(t, "--commit", "--yes")
	if !slices.Equal(last, keys[1:]) {
		t.Errorf("an image of after the switch has the keys %q, want %q", last, keys[1:])
	}
	if again := c.rotate(t, "--commit", "--yes"); !slices.Equal(again, last) {
		t.Errorf("the same step again gives %q", again)
	}
	c.Add(t, labtest.Worker("node6")) // with v2
	c.Ready(t, "node6")

	only, err := c.UpdateImage("v3", last...)
	if err != nil {
		t.Fatal(err)
	}
	c.accept(t, 4, both, only) // 3 is that of --commit
	all := []string{"node1", "node2", "node3", "node4", "node5", "node6"}
	c.reboot(t, last, all...)
	c.accept(t, 5, only)
	if got := c.rotate(t, "--finish", "--yes"); !slices.Equal(got, last) {
		t.Errorf("after the rotation an image has the keys %q, want %q", got, last)
	}
	if values, err := c.plain(t.Context(), "get", "values", "muster"); err != nil || !strings.Contains(values, last[0]) || strings.Contains(values, keys[0]) {
		t.Errorf("the services' values: %v\n%s", err, values)
	}
	c.Add(t, labtest.Worker("node7"))
	c.Ready(t, "node7")
	c.reboot(t, last, "node2") // it asks services that know the new key alone
}

// rotate takes a step of the rotation, and returns the keys that the next image has.
func (c *release) rotate(t *testing.T, args ...string) []string {
	t.Helper()
	out, progress, err := c.Run(t.Context(), driver.Owner, "", append([]string{"muster", "rotate", "owner-key", "--output", "json", "--wait", "10m", "--timeout", "30m"}, args...)...)
	t.Logf("muster rotate owner-key %q: %v\n%s%s", args, err, progress, out)
	if err != nil {
		t.Fatal(err)
	}
	var step struct{ OwnerKeys []string }
	for d := json.NewDecoder(strings.NewReader(out)); ; { // the events of the upgrade are before the result
		if err := d.Decode(&step); errors.Is(err, io.EOF) {
			return step.OwnerKeys
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

// commitRefused expects that the new key can't sign yet, and that a node is named.
func (c *release) commitRefused(t *testing.T, node, want string) {
	t.Helper()
	_, err := c.At(t.Context(), driver.Owner, "", "muster", "rotate", "owner-key", "--commit", "--yes")
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Fatalf("%s: %v, want %q", node, err, want)
	}
	if _, err := os.Stat(filepath.Join(c.OwnerDir(), ownersFolder, "owner-previous.key")); err == nil {
		t.Fatal("the new key signs")
	}
}

// accept puts a policy with these images in force.
func (c *release) accept(t *testing.T, serial int, measurements ...string) {
	t.Helper()
	file := fmt.Sprintf("policy-%d.yaml", serial)
	c.Muster(t, append(append([]string{"policy", "from-measurements"}, measurements...), "--ek-root", "ek-roots.pem", "--ek-key", "ecc-p384", "--operator", "--node-cidr", driver.NodeSubnet,
		"--role", "worker", "--role", "control-plane", "--allow-plain-state", "--serial", fmt.Sprint(serial), "-o", file)...)
	c.Muster(t, "policy", "apply", file)
}

// reboot boots nodes with the newest image, and waits until they have attested that its configuration has these keys.
func (c *release) reboot(t *testing.T, keys []string, nodes ...string) {
	t.Helper()
	since := time.Now().Truncate(time.Second) // as precise as times in objects are
	var boots sync.WaitGroup
	for _, n := range nodes {
		boots.Go(func() {
			if _, err := c.RebootNode(t.Context(), n); err != nil {
				t.Errorf("reboot %s: %v", n, err)
			}
		})
	}
	boots.Wait()
	if t.Failed() {
		t.FailNow()
	}
	for _, n := range nodes {
		labtest.Eventually(t, func(ctx context.Context) error {
			out, err := c.Kubectl(ctx, "get", "attestednode", n, "-o", "json")
			var e v1alpha1.AttestedNode
			if err == nil {
				err = json.Unmarshal([]byte(out), &e)
			}
			if err != nil {
				return err
			}
			if v := e.Status.LastVerdict; v == nil || v.Time.Time.Before(since) || !slices.Equal(e.Status.OwnerKeys, keys) {
				return fmt.Errorf("%s has reported the keys %q, with the verdict %+v", n, e.Status.OwnerKeys, v)
			}
			return nil
		})
		c.Ready(t, n)
	}
}
