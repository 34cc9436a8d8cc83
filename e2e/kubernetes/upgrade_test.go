//go:build kubernetes

package kubernetes

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
)

func TestAClusterIsUpgradedWhileItsPowerIsCut(t *testing.T) {
	c := bringUp(t)
	report := c.ask(t)
	t.Run("a dry run shows the plan and changes nothing", c.dryRun)
	stop := c.attested(t)
	defer stop()

	// The first control plane loses its power in the middle of `kubeadm upgrade apply`, and then the owner's program ends.
	first := c.upgrade(t, "--components", driver.NextComponents)
	cut := c.cut(t, node(1), "its API server's static pod is replaced", c.replaced(t, versions.APIServer))
	select {
	case err := <-cut:
		if err != nil {
			t.Fatal(err)
		}
	case err := <-first.ended:
		t.Fatalf("the upgrade ended before the power was cut: %v\n%s", err, &first.said)
	}
	if err := first.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := <-first.ended; err == nil {
		t.Fatal("the upgrade ended before it was killed")
	}
	c.say(t, "node1 boots, and the owner's program is killed; it said\n%s", &first.said)
	t.Run("another list is refused meanwhile", c.otherList)
	t.Run("the owner sees that it is in progress", c.inProgress)

	// The folder has the list. One more of each kind of node loses its power.
	cuts := map[string]<-chan error{
		node(2):          c.cut(t, node(2), "etcd's static pod is replaced", c.replaced(t, versions.Etcd)),
		node(planes + 1): c.cut(t, node(planes+1), "it has the new kubeadm, and the old kubelet", c.halfway(node(planes+1))),
	}
	c.finish(t)
	for name, err := range cuts {
		select {
		case err := <-err:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(time.Minute):
			t.Errorf("%s was upgraded, and its power was never cut", name)
		}
	}
	c.say(t, "the upgrade is over")
	for _, name := range []string{node(1), node(2), node(planes + 1)} {
		if log := c.log(name, "muster-orders"); !strings.Contains(log, "order continues") {
			t.Errorf("%s did not go on with its order after the power cut:\n%s", name, log)
		}
	}
	t.Run("every node runs the new release", c.upgraded)
	t.Run("control planes are as hardened as before", c.hardened)
	t.Run("the cluster is sound", c.sound)
	t.Run("a new worker joins with the new release", c.joins)
	t.Run("the same command again changes nothing", c.again)
	report(t)
}

// command is a run of the owner's program.
type command struct {
	cmd   *exec.Cmd
	said  bytes.Buffer // complete after the end
	ended chan error
}

// upgrade starts `muster upgrade kubernetes`.
func (c *cluster) upgrade(t *testing.T, args ...string) *command {
	t.Helper()
	cmd, err := c.Command(t.Context(), driver.Owner, append([]string{"muster", "upgrade", "kubernetes", now, "--yes"}, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	r := &command{cmd: cmd, ended: make(chan error, 1)}
	cmd.Stdout, cmd.Stderr = &r.said, &r.said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { r.ended <- cmd.Wait() }()
	return r
}

// finish continues the upgrade without the list. A command that ends at a node without power says that it continues, and is repeated.
func (c *cluster) finish(t *testing.T) {
	t.Helper()
	const most = 3
	for try := 1; ; try++ {
		r := c.upgrade(t)
		err := <-r.ended
		c.say(t, "muster upgrade kubernetes %s, %d: %v\n%s", now, try, err, &r.said)
		switch said := r.said.String(); {
		case err == nil:
			return
		case !strings.Contains(said, "What to do:") || !strings.Contains(said, "muster upgrade kubernetes "+now):
			t.Fatal("it does not say what to do")
		case try == most:
			t.Fatal("it does not come to its end")
		}
	}
}

// cut cuts a machine's power as soon as its disk satisfies a condition, and boots the machine again. The result comes when it has booted.
func (c *cluster) cut(t *testing.T, name, when string, now func(disk string) bool) <-chan error {
	t.Helper()
	done := make(chan error, 1)
	disk := c.disk(name)
	if now(disk) {
		t.Fatalf("%s: %s before the upgrade begins, so nothing would be shown", name, when)
	}
	go func() {
		done <- func() error {
			ctx, cancel := context.WithTimeout(t.Context(), 3*patience)
			defer cancel()
			tick := time.NewTicker(20 * time.Millisecond)
			defer tick.Stop()
			for !now(disk) {
				select {
				case <-tick.C:
				case <-ctx.Done():
					return fmt.Errorf("%s: the power was to be cut when %s: %w", name, when, ctx.Err())
				}
			}
			if err := stopUpgrade(); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			c.say(t, "%s loses its power: %s", name, when)
			if _, err := c.RebootNode(ctx, name); err != nil {
				return fmt.Errorf("%s: boot after the power cut: %w", name, err)
			}
			return nil
		}()
	}()
	return done
}

// stopUpgrade stops the process that upgrades a node, of which there is one at a time: on a busy machine, it could end before the power is cut.
func stopUpgrade() error {
	found, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return err
	}
	for _, f := range found {
		if b, err := os.ReadFile(f); err != nil || string(b) != "/usr/bin/bootstrapper\x00upgrade\x00" {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(f)))
		if err != nil {
			return err
		}
		return syscall.Kill(pid, syscall.SIGSTOP)
	}
	return errors.New("no process upgrades a node any more")
}

// replaced is the condition that the manifest of a static pod is away or has the new image.
func (c *cluster) replaced(t *testing.T, pod string) func(disk string) bool {
	t.Helper()
	digest := images(t, c.next)[pod].Digest
	return func(disk string) bool {
		b, err := os.ReadFile(filepath.Join(disk, "kubernetes", "manifests", pod+".yaml"))
		return errors.Is(err, fs.ErrNotExist) || bytes.Contains(b, []byte(digest))
	}
}

// halfway is the condition that a machine's kubeadm is the new one.
func (c *cluster) halfway(name string) func(disk string) bool {
	kubeadm := filepath.Join(c.disk(name), "programs", "up", "kubeadm")
	before, _ := os.Stat(kubeadm) // nil if the machine has it in its image
	return func(string) bool {
		// Another file, not another hash: a worker is done seconds after it has the new kubeadm.
		now, err := os.Stat(kubeadm)
		return err == nil && !os.SameFile(before, now)
	}
}

func (c *cluster) dryRun(t *testing.T) {
	before, err := c.info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	kept := c.folderRecord(t)
	said, problem, err := c.Run(t.Context(), driver.Owner, "", "muster", "upgrade", "kubernetes", now, "--components", driver.NextComponents, "--dry-run")
	t.Logf("%s%s", said, problem)
	if err != nil {
		t.Fatal(err)
	}
	for i := 1; i <= nodes; i++ {
		if !strings.Contains(said, node(i)) {
			t.Errorf("the plan does not name %s", node(i))
		}
	}
	if !strings.Contains(said, old) || !strings.Contains(said, now) {
		t.Error("the plan does not name both versions")
	}
	after, err := c.info(t.Context())
	if err != nil || after.Next != nil || after.KubernetesVersion != before.KubernetesVersion || c.folderRecord(t) != kept {
		t.Errorf("the dry run has changed something: %+v, %v", after, err)
	}
	if out, err := c.kubectl(t.Context(), "get", "attestednodes", "-o", `jsonpath={.items[*].metadata.annotations.muster\.dev/order}`); err != nil || out != "" {
		t.Errorf("the dry run has ordered something: %q, %v", out, err)
	}
}

// folderRecord returns the owner's record of the cluster.
func (c *cluster) folderRecord(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(c.OwnerDir(), folder, "cluster.json"))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// otherList is the list of the release before, which has the right form.
func (c *cluster) otherList(t *testing.T) {
	out, said, err := c.Run(t.Context(), driver.Owner, "", "muster", "upgrade", "kubernetes", now, "--yes", "--components", driver.Components)
	if err == nil {
		t.Fatalf("another list was accepted:\n%s%s", out, said)
	}
	t.Log(err)
	info, err := c.info(t.Context())
	if err != nil || info.Next == nil || strings.Join(info.Next.Images, " ") != strings.Join(c.next.Images, " ") {
		t.Errorf("the cluster's next release is %+v, %v", info, err)
	}
}

func (c *cluster) inProgress(t *testing.T) {
	labtest.Eventually(t, func(ctx context.Context) error {
		out, err := c.At(ctx, driver.Owner, "", "muster", "status", "--timeout", "5m")
		if err == nil && (!strings.Contains(out, now) || !strings.Contains(strings.ToLower(out), "upgrade")) {
			err = fmt.Errorf("muster status names no upgrade to %s:\n%s", now, out)
		}
		return err
	})
}
