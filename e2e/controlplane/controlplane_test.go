package controlplane

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/objects/etcdencryption"
	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
)

// planesEnv is the environment variable for the number of control planes; three without it.
const planesEnv = "MUSTER_E2E_CONTROL_PLANES"

func planes(t *testing.T) int {
	t.Helper()
	s := os.Getenv(planesEnv)
	if s == "" {
		return 3
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 3 || n > 9 {
		t.Fatalf("%s=%q: want 3 to 9", planesEnv, s)
	}
	return n
}

func TestControlPlanesJoinInTurnAndOutliveTheFirst(t *testing.T) {
	c := bringUp(t, planes(t))
	var all []string
	for i := range c.planes {
		all = append(all, node(i+1))
	}
	c.ready(t, all...)
	c.say(t, "%d control planes are Ready", c.planes)
	labtest.Eventually(t, func(ctx context.Context) error {
		voters, learners, err := c.Members(ctx, node(2))
		if err == nil && (!slices.Equal(voters, all) || len(learners) > 0) {
			err = fmt.Errorf("etcd has voters %v, learners %v", voters, learners)
		}
		return err
	})
	labtest.Eventually(t, c.servicesEverywhere)
	c.say(t, "etcd has %d members; joinservice and kms run on each", c.planes)
	c.show(t)
	t.Run("they joined one after another", c.joinLeasesDoNotOverlap)
	t.Run("each runs as hardened as the first", c.alike)
	t.Run("no pod is root on its node", c.refusesPods)
	t.Run("their keys are rotated", c.rotates)
	t.Run("and the cluster's CA", c.rotatesAuthority)

	if err := c.KillNode(t.Context(), node(1)); err != nil {
		t.Fatal(err)
	}
	killed := time.Now()
	c.say(t, "node1 has lost its power")
	last := c.planes + 1
	c.Add(t, driver.Node{Name: node(last), JoinEndpoints: c.endpoints()})
	c.ready(t, node(last))
	c.say(t, "%s is Ready, %.1f s after node1 was killed", node(last), time.Since(killed).Seconds())
	t.Run("another control plane admitted it", c.admitted)
	t.Run("the one that is lost leaves etcd by its owner's order", c.forgetsLost)
	c.show(t)
	t.Run("a cluster that has lost all control planes is restored", c.restores)
}

// forgetsLost forgets node1, which has no power: another control plane removes its etcd member (B11).
func (c *cluster) forgetsLost(t *testing.T) {
	done := make(chan error, 1)
	go func() {
		_, progress, err := c.Run(t.Context(), driver.Owner, "", "muster", "forget", node(1), "--yes")
		t.Logf("muster forget node1: %v\n%s", err, progress)
		done <- err
	}()
	labtest.Eventually(t, func(ctx context.Context) error {
		out, err := c.kubectl(ctx, "get", "attestednode", node(2), "-o", `jsonpath={.metadata.annotations.muster\.dev/order}`)
		if err == nil && !strings.Contains(out, `"args":{"member":"node1"}`) {
			err = fmt.Errorf("node2 has the order %q", out)
		}
		return err
	})
	c.Must(t, node(2), "", "systemctl", "restart", "muster-attester") // it attests at its start
	if err := <-done; err != nil {
		t.Error(err)
	}
	voters, learners, err := c.Members(t.Context(), node(2))
	if err != nil || slices.Contains(voters, node(1)) || len(voters) != c.planes-1 || len(learners) > 0 {
		t.Errorf("etcd has voters %v, learners %v: %v", voters, learners, err)
	}
}

// servicesEverywhere returns nil once every control plane runs both services.
func (c *cluster) servicesEverywhere(ctx context.Context) error {
	out, err := c.kubectl(ctx, "-n", "muster-system", "get", "daemonsets", "-o", `jsonpath={range .items[*]}{.metadata.name}={.status.numberReady}{"\n"}{end}`)
	if err != nil {
		return err
	}
	for _, name := range []string{"muster-joinservice", "muster-kms"} {
		if want := fmt.Sprintf("%s=%d\n", name, c.planes); !strings.Contains(out, want) {
			return fmt.Errorf("services that are ready: %q, want %q", out, want)
		}
	}
	return nil
}

// show prints the output for an operator.
func (c *cluster) show(t *testing.T) {
	t.Helper()
	t.Logf("kubectl get nodes\n%s", c.Must(t, driver.Owner, "", "kubectl", "--kubeconfig", ownersKubeconfig, "get", "nodes", "-o", "wide"))
	if !strings.Contains(c.Muster(t, "status", "--timeout", "20m"), node(2)) {
		t.Error("muster status does not know node2")
	}
}

// records reads the audit logs of all control planes' disks, by node.
func (c *cluster) records(t *testing.T) map[string][]audit.Record {
	t.Helper()
	out := map[string][]audit.Record{}
	for i := range c.planes {
		name := node(i + 1)
		grants := filepath.Join(c.Dir, "machines", name, "disk", "log", "muster", "audit.jsonl")
		for _, path := range []string{grants, audit.RefusedPath(grants)} {
			f, err := os.Open(path)
			if os.IsNotExist(err) {
				continue // no joinservice has run there
			}
			if err != nil {
				t.Fatal(err)
			}
			for s := bufio.NewScanner(f); s.Scan(); {
				var r audit.Record
				if err := json.Unmarshal(s.Bytes(), &r); err != nil {
					t.Fatal(err)
				}
				out[name] = append(out[name], r)
			}
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	return out
}

// leaseTrouble is what a bootstrapper's log says of a join lease that it did not hold to its end, or could not end.
var leaseTrouble = []string{"join lease was lost", "join lease may have been lost", "join lease could not be ended"}

// troubled reports whether a machine may have lost its join lease, as can happen on a busy computer.
func (c *cluster) troubled(t *testing.T, name string) bool {
	t.Helper()
	log, err := os.ReadFile(filepath.Join(c.Dir, "machines", name, "disk", "log", "muster-bootstrapper.log"))
	if err != nil {
		t.Fatal(err)
	}
	return slices.ContainsFunc(leaseTrouble, func(text string) bool { return strings.Contains(string(log), text) })
}

// joinLease is the time in which one machine held the join lease, by the audit logs.
type joinLease struct {
	node       string
	began, end time.Time
	troubled   bool // its end says nothing
}

func (c *cluster) joinLeasesDoNotOverlap(t *testing.T) {
	began, ended, busy := map[string]audit.Record{}, map[string]audit.Record{}, 0
	for _, records := range c.records(t) {
		for _, r := range records {
			switch {
			case r.Event == "ticket issued" && r.Role == "control-plane":
				began[r.Ticket] = r
			case r.Event == "turn ended":
				ended[r.Ticket] = r
			case r.Event == "ticket refused" && r.Reason == "CONTROL_PLANE_BUSY":
				busy++
			}
		}
	}
	var leases []joinLease
	for id, r := range began {
		e, ok := ended[id]
		troubled := c.troubled(t, r.Node)
		if !ok && !troubled {
			t.Errorf("the join lease of %s with ticket %s has no end", r.Node, id)
			continue
		}
		leases = append(leases, joinLease{r.Node, r.Time, e.Time, troubled})
	}
	slices.SortFunc(leases, func(a, b joinLease) int { return a.began.Compare(b.began) })
	seen := map[string]bool{}
	var last *joinLease // that was held to its end
	pairs := 0
	for _, n := range leases {
		t.Logf("%s: %s to %s, %.1f s; lost, perhaps: %t", n.node, n.began.Format("15:04:05.0"), n.end.Format("15:04:05.0"), n.end.Sub(n.began).Seconds(), n.troubled)
		seen[n.node] = true
		if last != nil {
			if pairs++; n.began.Before(last.end) {
				t.Errorf("%s began before %s had ended", n.node, last.node)
			}
		}
		if !n.troubled {
			last = &n
		}
	}
	if pairs == 0 {
		t.Error("no lease was held to its end before another began, so nothing was shown")
	}
	if len(seen) != c.planes-1 {
		t.Errorf("join leases of %v, want %d machines", seen, c.planes-1)
	}
	if busy == 0 {
		t.Error("nobody had to wait, so nothing was shown")
	}
	t.Logf("machines that had to wait were told so %d times", busy)
}

// refusesPods sends each API server the pods with which a user who may create pods in one namespace would become root
// on a node.
func (c *cluster) refusesPods(t *testing.T) {
	const pod = `{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "root", "namespace": "default"}, "spec": {"tolerations": [{"operator": "Exists"}], "containers": [{"name": "root", "image": "x"%s}]%s}}`
	for i := 1; i <= c.planes; i++ {
		create := func(container, spec string) error {
			_, err := c.At(t.Context(), driver.Owner, fmt.Sprintf(pod, container, spec), "kubectl", "--kubeconfig", ownersKubeconfig, "--server=https://"+address(i)+":6443", "create", "--dry-run=server", "-f", "-")
			return err
		}
		if err := create("", ""); err != nil {
			t.Errorf("%s refuses every pod: %v", node(i), err)
		}
		for what, err := range map[string]error{
			"a folder of the host":   create("", `, "volumes": [{"name": "host", "hostPath": {"path": "/"}}]`),
			"the host's network":     create("", `, "hostNetwork": true`),
			"the host's processes":   create("", `, "hostPID": true`),
			"a privileged container": create(`, "securityContext": {"privileged": true}`, ""),
			"a capability of root":   create(`, "securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}`, ""),
		} {
			if err == nil || !strings.Contains(err.Error(), "violates PodSecurity") {
				t.Errorf("%s allows a pod with %s: %v", node(i), what, err)
			}
		}
	}
}

// alike compares the arguments of the static pods of all control planes: the second and third must not be weaker than
// the first (J5), and one that encrypts under another key reads no Secret of the first.
func (c *cluster) alike(t *testing.T) {
	hardened := map[string][]string{
		"kube-apiserver":          {"--authorization-config=" + kubeadm.AuthzFile, "--admission-control-config-file=" + kubeadm.AdmissionFile, "--enable-bootstrap-token-auth=false", "--kubelet-certificate-authority=/etc/kubernetes/pki/ca.crt", "--encryption-provider-config=" + etcdencryption.File},
		"kube-controller-manager": {"--controllers=*,-certificatesigningrequest-approving-controller", "--cluster-signing-duration=24h"},
		"kube-scheduler":          nil,
	}
	for program, want := range hardened {
		first := c.flags(t, 1, program)
		for _, f := range want {
			if !slices.Contains(first, f) {
				t.Errorf("node1's %s runs without %s", program, f)
			}
		}
		for i := 2; i <= c.planes; i++ {
			if got := c.flags(t, i, program); !slices.Equal(got, first) {
				t.Errorf("%s's %s runs with\n%v\nand node1's with\n%v", node(i), program, got, first)
			}
		}
	}
	for _, file := range []string{kubeadm.AuthzFile, kubeadm.AdmissionFile, "/etc/kubernetes/pki/ca.key", "/etc/kubernetes/pki/sa.key", "/etc/kubernetes/pki/etcd/ca.key", etcdencryption.File} {
		var first string
		for i := range c.planes {
			out := c.Must(t, node(i+1), "", "sh", "-c", "sha256sum "+file+" && stat -c '%a %u %g' "+file)
			if i == 0 {
				first = out
			}
			if out != first {
				t.Errorf("%s on %s differs from node1's: %s, %s", file, node(i+1), out, first)
			}
		}
	}
}

// flags returns a static pod's command line and mounts, sorted, with placeholders for the node's own address and
// name.
func (c *cluster) flags(t *testing.T, number int, program string) []string {
	t.Helper()
	out := c.Must(t, node(number), "", "cat", "/etc/kubernetes/manifests/"+program+".yaml")
	var pod corev1.Pod
	if err := yaml.Unmarshal([]byte(out), &pod); err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, container := range pod.Spec.Containers {
		all = append(all, container.Image)
		all = append(all, container.Command...)
		for _, m := range container.VolumeMounts {
			all = append(all, fmt.Sprintf("mount %s at %s, read-only %t", m.Name, m.MountPath, m.ReadOnly))
		}
	}
	for i, f := range all {
		all[i] = strings.ReplaceAll(f, address(number), "ADDRESS")
	}
	slices.Sort(all)
	return all
}

func (c *cluster) admitted(t *testing.T) {
	for name, records := range c.records(t) {
		for _, r := range records {
			if r.Event != "ticket issued" || r.Node != node(c.planes+1) {
				continue
			}
			t.Logf("%s's joinservice admitted %s", name, r.Node)
			if name != node(1) {
				return
			}
		}
	}
	t.Error("no audit log of another control plane has its ticket")
}
