package labtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/lab/driver"
)

// Cluster is a lab whose control plane is node1.
type Cluster struct {
	*driver.Lab
	// Root is the checkout.
	Root string
}

// At runs a command in a machine or on the owner's seat and gives what it printed.
func (c *Cluster) At(ctx context.Context, where, stdin string, argv ...string) (string, error) {
	cmd, err := c.Command(ctx, where, argv...)
	if err != nil {
		return "", err
	}
	var out, problems bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &out, &problems
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s on %s: %w\n%s%s", argv[0], where, err, out.String(), problems.String())
	}
	return out.String(), nil
}

// Must is [Cluster.At] where only success lets the test go on.
func (c *Cluster) Must(t *testing.T, where, stdin string, argv ...string) string {
	t.Helper()
	out, err := c.At(t.Context(), where, stdin, argv...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// Muster runs the owner's program on the owner's seat.
func (c *Cluster) Muster(t *testing.T, args ...string) string {
	t.Helper()
	out := c.Must(t, driver.Owner, "", append([]string{filepath.Join(c.Root, "bin", "muster")}, args...)...)
	t.Logf("muster %s\n%s", strings.Join(args[:min(2, len(args))], " "), out)
	return out
}

// Kubectl runs kubectl on node1, as its administrator.
func (c *Cluster) Kubectl(ctx context.Context, args ...string) (string, error) {
	return c.At(ctx, "node1", "", append([]string{"kubectl", "--kubeconfig", "/etc/kubernetes/admin.conf"}, args...)...)
}

// Ready waits until a node is.
func (c *Cluster) Ready(t *testing.T, name string) {
	t.Helper()
	start := time.Now()
	Eventually(t, func(ctx context.Context) error {
		out, err := c.Kubectl(ctx, "get", "node", name, "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`)
		if err == nil && out != "True" {
			err = fmt.Errorf("%s is not Ready: %q", name, out)
		}
		return err
	})
	t.Logf("%s Ready after %.1f s", name, time.Since(start).Seconds())
}

// Eventually asks every 300 ms, for 4 minutes at most, until check has no complaint.
func Eventually(t *testing.T, check func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	tick := time.NewTicker(300 * time.Millisecond)
	defer tick.Stop()
	for {
		err := check(ctx)
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatal(errors.Join(ctx.Err(), err))
		case <-tick.C:
		}
	}
}
