//go:build long

package controlplane

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/lab/labtest"
)

// The power fails when etcd has just given the second member its vote: the first one alone is half of them and does
// not answer, so the second must come back by itself before anything can be repaired.
func TestAControlPlaneCutOffInTheMiddleOfItsJoinComesBack(t *testing.T) {
	c := bringUp(t, 2)
	labtest.Eventually(t, func(context.Context) error {
		if log := c.bootstrapperLog(t, 2); !strings.Contains(log, "Waiting for the new etcd member to join the cluster") {
			return fmt.Errorf("node2's join has not got that far: %s", log[max(0, len(log)-300):])
		}
		return nil
	})
	if _, err := c.RebootNode(t.Context(), node(2)); err != nil {
		t.Fatal(err)
	}
	cut := time.Now()
	c.say(t, "node2 lost its power as a member of etcd, and boots")
	// The API answers again after some minutes; a node that was Ready then must be NotReady before kubeadm takes its name.
	if err := labtest.Within(t.Context(), 12*time.Minute, func(ctx context.Context) error {
		out, err := c.kubectl(ctx, "get", "nodes", "-o", "wide")
		if err != nil {
			return err
		}
		voters, learners, err := c.Members(ctx, node(1))
		if err == nil && (!slices.Equal(voters, []string{node(1), node(2)}) || len(learners) > 0) {
			err = fmt.Errorf("etcd has voters %v, learners %v", voters, learners)
		}
		if log := c.bootstrapperLog(t, 2); err == nil && !strings.Contains(log, "this machine is a node") {
			err = fmt.Errorf("node2 is not done\n%s\n%s", out, log[max(0, len(log)-600):])
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	c.ready(t, node(1), node(2))
	c.say(t, "node2 is a control plane %.1f s after its power was cut", time.Since(cut).Seconds())
	log := c.bootstrapperLog(t, 2)
	for _, want := range []string{"starting what the unfinished join has left", "removed an etcd member that an unfinished join had left", "cleaning up after an earlier try"} {
		if !strings.Contains(log, want) {
			t.Errorf("node2's log does not say: %s", want)
		}
	}
	c.show(t)
}

func (c *cluster) bootstrapperLog(t *testing.T, number int) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(c.Dir, "machines", node(number), "disk", "log", "muster-bootstrapper.log"))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
