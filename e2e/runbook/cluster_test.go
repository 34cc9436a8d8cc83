//go:build runbook

package runbook

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fixture is a lab and the owner's files. Nodes 1 to 3 are control planes, the others workers.
type fixture struct {
	*labtest.Cluster
	initSecretHash string
	began          time.Time
}

// prepare executes the steps before any machine boots, and brings up a lab with that owner's image; it is removed
// after the test.
func prepare(t *testing.T) *fixture {
	t.Helper()
	lab, root := labtest.New(t, "muster-rb")
	w := &fixture{Cluster: &labtest.Cluster{Lab: lab, Root: root}, began: time.Now()}
	t.Cleanup(func() { // before the lab is taken down
		if t.Failed() {
			w.logs(t)
		}
	})
	keys := t.TempDir()
	cmd := exec.CommandContext(t.Context(), "bash", "-euo", "pipefail", "-c", labtest.Runbooks(t, root)["first-keys"])
	cmd.Dir, cmd.Env = keys, append(os.Environ(), "PATH="+filepath.Join(root, "bin")+":"+os.Getenv("PATH"))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("block first-keys: %v\n%s", err, out)
	}
	images := filepath.Join(root, "dist", "images")
	if err := lab.Up(t.Context(), driver.Up{
		Lab: filepath.Join(root, "bin", "lab"), Bootstrapper: filepath.Join(root, "bin", "bootstrapper"), Preinstalled: []string{"kubelet"},
		OwnerKeys: line(t, filepath.Join(keys, "owner.pub")), Images: []string{filepath.Join(images, "joinservice.tar"), filepath.Join(images, "kms.tar")},
	}); err != nil {
		t.Fatal(err)
	}
	w.initSecretHash = line(t, filepath.Join(keys, "init.hash"))
	for to, from := range map[string]string{
		"owner.key": filepath.Join(keys, "owner.key"), "init.secret": filepath.Join(keys, "init.secret"), "measurements.json": lab.MeasurementsPath(),
		"ca.pem": filepath.Join(lab.OwnerDir(), "ek-roots.pem"), "cni.yaml": filepath.Join(lab.OwnerDir(), "manifests", "podnet.yaml"), "digests.json": filepath.Join(images, "digests.json"),
	} {
		b, err := os.ReadFile(from)
		if err == nil {
			err = os.WriteFile(filepath.Join(lab.OwnerDir(), to), b, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return w
}

// line returns a file's only line.
func line(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

func (w *fixture) say(t *testing.T, format string, args ...any) {
	t.Helper()
	t.Logf("%6.1f s  %s", time.Since(w.began).Seconds(), fmt.Sprintf(format, args...))
}

func address(node string) string { return "192.168.77.1" + strings.TrimPrefix(node, "node") }

// machine is the machine of that name before it has booted.
func (w *fixture) machine(node string) driver.Node {
	n := driver.Node{Name: node, KeepEtc: true} // as of machines that can be uninstalled
	for _, c := range []string{"node1", "node2", "node3"} {
		n.JoinEndpoints = append(n.JoinEndpoints, address(c)+":30090")
		if c == node {
			n.Role = "control-plane"
		}
	}
	return n
}

// blockTime limits a block, which has its own limits where it waits: ten minutes, and for a rotation more for each control plane.
const blockTime = 30 * time.Minute

// cutOff are the errors of programs whose API server was not reachable or became unavailable.
var cutOff = regexp.MustCompile(`EOF|connection re(?:set|fused)|Unable to connect|http2: |ServiceUnavailable|etcdserver: `)

// owner executes a block of the page on the owner's workstation, and repeats it, as a person would, if its connection
// broke.
func (w *fixture) owner(t *testing.T, title, node string, more ...string) {
	t.Helper()
	script, variables := labtest.Runbooks(t, w.Root)[title], slices.Concat(more, []string{"NODE=" + node, "ADDRESS=" + address(node)})
	if err := labtest.Within(t.Context(), blockTime, func(ctx context.Context) error {
		start := time.Now()
		out, said, err := w.RunBlock(ctx, script, driver.Owner, variables...)
		if err != nil && !cutOff.MatchString(err.Error()) {
			t.Fatalf("block %s for %s: %v", title, node, err)
		}
		t.Logf("block %s for %s, %.1f s: %v\n%s%s", title, node, time.Since(start).Seconds(), err, said, out)
		return err
	}); err != nil {
		t.Fatal(err)
	}
}

// refuses executes a block that must fail with a text.
func (w *fixture) refuses(t *testing.T, title, node, variable, want string) {
	t.Helper()
	script := labtest.Runbooks(t, w.Root)[title]
	if err := labtest.Within(t.Context(), blockTime, func(ctx context.Context) error {
		_, said, err := w.RunBlock(ctx, script, driver.Owner, variable, "NODE="+node, "ADDRESS="+address(node))
		if err != nil && (strings.Contains(said, want) || strings.Contains(err.Error(), want)) {
			return nil
		}
		return fmt.Errorf("block %s for %s is not refused with %q: %w\n%s", title, node, want, cmp.Or(err, errors.New("it succeeded")), said)
	}); err != nil {
		t.Fatal(err)
	}
}

// well repeats the page's last check until it finds no fault.
func (w *fixture) well(t *testing.T) {
	t.Helper()
	script := labtest.Runbooks(t, w.Root)["all-well"]
	labtest.Eventually(t, func(ctx context.Context) error {
		_, _, err := w.RunBlock(ctx, script, driver.Owner)
		return err
	})
	w.say(t, "doctor finds nothing wrong")
}

// kubectl runs on the owner's workstation, over the load balancer.
func (w *fixture) kubectl(ctx context.Context, args ...string) (string, error) {
	return w.At(ctx, driver.Owner, "", append([]string{"kubectl", "--kubeconfig", filepath.Join("muster-"+clusterName, "admin.conf"), "--request-timeout=5s"}, args...)...)
}

// enrollments returns the cluster's, by node.
func (w *fixture) enrollments(ctx context.Context) (map[string]v1alpha1.AttestedNode, error) {
	text, err := w.kubectl(ctx, "get", "attestednodes", "-o", "json")
	if err != nil {
		return nil, err
	}
	var list v1alpha1.AttestedNodeList
	if err := json.Unmarshal([]byte(text), &list); err != nil {
		return nil, err
	}
	out := map[string]v1alpha1.AttestedNode{}
	for _, n := range list.Items {
		out[n.Name] = n
	}
	return out, nil
}

// known is [fixture.enrollments] of now.
func (w *fixture) known(t *testing.T) (out map[string]v1alpha1.AttestedNode) {
	t.Helper()
	labtest.Eventually(t, func(ctx context.Context) (err error) {
		out, err = w.enrollments(ctx)
		return err
	})
	return out
}

// get returns a part of an object.
func (w *fixture) get(t *testing.T, object, path string) (out string) {
	t.Helper()
	labtest.Eventually(t, func(ctx context.Context) (err error) {
		out, err = w.kubectl(ctx, "get", object, "-o", "jsonpath="+path)
		return err
	})
	return out
}

// back waits until nodes are Ready whose kubelets have reported, and whose machines were accepted, after a time: the
// API's state may be older.
func (w *fixture) back(t *testing.T, since time.Time, nodes ...string) {
	t.Helper()
	labtest.Eventually(t, func(ctx context.Context) error {
		enrolled, err := w.enrollments(ctx)
		if err != nil {
			return err
		}
		for _, name := range nodes {
			v := enrolled[name].Status.LastVerdict
			if v == nil || !v.Accepted || v.Time.Time.Before(since.Truncate(time.Second)) {
				return fmt.Errorf("%s has not attested since: %+v", name, v)
			}
			out, err := w.kubectl(ctx, "get", "node/"+name, "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status} {.status.conditions[?(@.type=="Ready")].lastHeartbeatTime}`)
			if err != nil {
				return err
			}
			ready, at, _ := strings.Cut(out, " ")
			if beat, err := time.Parse(time.RFC3339, at); err != nil || ready != "True" || beat.Before(since.Truncate(time.Second)) {
				return fmt.Errorf("%s: Ready %s at %s", name, ready, at)
			}
		}
		return nil
	})
	w.say(t, "%s back, %.1f s after", strings.Join(nodes, ", "), time.Since(since).Seconds())
}

// voters waits until etcd has these members, and no learner.
func (w *fixture) voters(t *testing.T, at string, want ...string) {
	t.Helper()
	labtest.Eventually(t, func(ctx context.Context) error {
		voters, learners, err := w.Members(ctx, at)
		if err == nil && (!slices.Equal(voters, want) || len(learners) > 0) {
			err = fmt.Errorf("etcd has voters %v, learners %v", voters, learners)
		}
		return err
	})
}

// each runs a function for machines, all at once.
func each(t *testing.T, nodes []string, do func(node string) error) {
	t.Helper()
	errs := make([]error, len(nodes))
	var wg sync.WaitGroup
	for i, n := range nodes {
		wg.Go(func() { errs[i] = do(n) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// logs shows the ends of the machines' logs of a test that failed.
func (w *fixture) logs(t *testing.T) {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(w.Dir, "machines", "*", "disk", "log", "*.log"))
	if err != nil {
		t.Error(err)
	}
	for _, path := range paths {
		if base := filepath.Base(path); base != "muster-bootstrapper.log" && base != "kubelet.log" {
			continue
		}
		if b, err := os.ReadFile(path); err == nil {
			t.Logf("%s:\n%s", path, b[max(0, len(b)-4000):])
		}
	}
}
