//go:build kubernetes

package kubernetes

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/internal/objects/etcdencryption"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
)

// upgraded checks each node's kubelet and each of Kubernetes' pods.
func (c *cluster) upgraded(t *testing.T) {
	listed := images(t, c.next)
	for i := 1; i <= nodes; i++ {
		labtest.Eventually(t, func(ctx context.Context) error { return c.runs(ctx, node(i), now) })
	}
	labtest.Eventually(t, func(ctx context.Context) error { return c.RunsListed(ctx, listed, planes, nodes) })
	for i := 1; i <= planes; i++ {
		labtest.Eventually(t, func(ctx context.Context) error {
			out, err := c.kubectl(ctx, "--server=https://"+address(i)+":6443", "get", "--raw", "/version")
			if err == nil && !strings.Contains(out, `"v`+now+`"`) {
				err = fmt.Errorf("%s's API server is %s", node(i), out)
			}
			return err
		})
	}
	for i := 1; i <= nodes; i++ {
		if out := c.Must(t, node(i), "", "kubeadm", "version", "-o", "short"); strings.TrimSpace(out) != "v"+now {
			t.Errorf("%s has kubeadm %s", node(i), out)
		}
		// What kubeadm keeps for its way back has etcd's data in it.
		if out := c.Must(t, node(i), "", "sh", "-c", "ls -d /etc/kubernetes/tmp/kubeadm-backup-* 2>/dev/null || true"); out != "" {
			t.Errorf("%s keeps %s", node(i), out)
		}
	}
	// Sandboxes are the listed image by its digest (B9): of kube-proxy on control planes, and of the workload on the worker that came first. Those that
	// run go on, so the last worker may have none yet.
	for i := 1; i <= planes+1; i++ {
		labtest.Eventually(t, func(ctx context.Context) error {
			names, err := c.At(ctx, node(i), "", "sh", "-c", "ctr -n k8s.io images ls | awk '$3 == \""+listed[versions.Pause].Digest+"\" { print $1 }'")
			if err != nil {
				return err
			}
			out, err := c.At(ctx, node(i), "", "ctr", "-n", "k8s.io", "containers", "ls")
			if err == nil && !slices.ContainsFunc(strings.Fields(names), func(name string) bool { return slices.Contains(strings.Fields(out), name) }) {
				err = fmt.Errorf("%s runs no sandbox of %s:\n%s", node(i), listed[versions.Pause], out)
			}
			return err
		})
	}
	info, err := c.info(t.Context())
	if err != nil || info.KubernetesVersion != now || info.Next != nil || info.Previous != nil || !slices.Equal(info.Images, c.next.Images) {
		t.Errorf("the cluster describes itself as %+v, %v", info, err)
	}
	var kept struct {
		KubernetesVersion string
		Upgrade           any
	}
	if err := json.Unmarshal([]byte(c.folderRecord(t)), &kept); err != nil || kept.KubernetesVersion != now || kept.Upgrade != nil {
		t.Errorf("the owner's folder has %+v, %v", kept, err)
	}
	if out, err := c.kubectl(t.Context(), "-n", "kube-system", "get", "configmap", "kubeadm-config", "-o", "jsonpath={.data.ClusterConfiguration}"); err != nil || !strings.Contains(out, "kubernetesVersion: v"+now) || !strings.Contains(out, listed[versions.Etcd].Tag) {
		t.Errorf("kubeadm's configuration of the cluster: %v\n%s", err, out)
	}
}

// hardened looks for what Muster adds to kubeadm's static pods: kubeadm writes them anew (J5).
func (c *cluster) hardened(t *testing.T) {
	want := map[string][]string{
		versions.APIServer:         {"--authorization-config=" + kubeadm.AuthzFile, "--admission-control-config-file=" + kubeadm.AdmissionFile, "--enable-bootstrap-token-auth=false", "--kubelet-certificate-authority=/etc/kubernetes/pki/ca.crt", "--encryption-provider-config=" + etcdencryption.File},
		versions.ControllerManager: {"--controllers=*,-certificatesigningrequest-approving-controller", "--cluster-signing-duration=24h"},
	}
	for program, flags := range want {
		var first []string
		for i := 1; i <= planes; i++ {
			var pod corev1.Pod
			if err := yaml.Unmarshal([]byte(c.Must(t, node(i), "", "cat", "/etc/kubernetes/manifests/"+program+".yaml")), &pod); err != nil {
				t.Fatal(err)
			}
			got := slices.Clone(pod.Spec.Containers[0].Command)
			for n := range got {
				got[n] = strings.ReplaceAll(got[n], address(i), "ADDRESS")
			}
			slices.Sort(got)
			for _, f := range flags {
				if !slices.Contains(got, f) {
					t.Errorf("%s's %s runs without %s", node(i), program, f)
				}
			}
			if i == 1 {
				first = got
			}
			if !slices.Equal(got, first) {
				t.Errorf("%s's %s runs with\n%v\nand node1's with\n%v", node(i), program, got, first)
			}
		}
	}
	if out, err := c.kubectl(t.Context(), "-n", "kube-system", "get", "secrets", "--field-selector", "type=bootstrap.kubernetes.io/token", "-o", "name"); err != nil || strings.TrimSpace(out) != "" {
		t.Errorf("bootstrap tokens: %q, %v", out, err)
	}
}

// sound asks etcd and the owner's program.
func (c *cluster) sound(t *testing.T) {
	var all []string
	for i := 1; i <= planes; i++ {
		all = append(all, node(i))
	}
	labtest.Eventually(t, func(ctx context.Context) error {
		voters, learners, err := c.Members(ctx, node(2))
		if err == nil && (!slices.Equal(voters, all) || len(learners) > 0) {
			err = fmt.Errorf("etcd has voters %v, learners %v", voters, learners)
		}
		return err
	})
	labtest.Eventually(t, func(ctx context.Context) error {
		_, err := c.At(ctx, driver.Owner, "", "muster", "status", "--check", "--timeout", "5m")
		return err
	})
	out, said, err := c.Run(t.Context(), driver.Owner, "", "muster", "doctor", "--timeout", "20m")
	t.Logf("muster doctor: %v\n%s%s", err, said, out)
	if err != nil {
		t.Error("doctor finds something wrong")
	}
	labtest.Eventually(t, func(ctx context.Context) error {
		_, err := c.kubectl(ctx, "-n", "muster-system", "rollout", "status", "daemonset/muster-joinservice", "--timeout=5s")
		return err
	})
}

func (c *cluster) joins(t *testing.T) {
	c.Add(t, machine(nodes+1))
	labtest.Eventually(t, func(ctx context.Context) error { return c.runs(ctx, node(nodes+1), now) })
	labtest.Eventually(t, func(ctx context.Context) error { return c.RunsListed(ctx, images(t, c.next), planes, nodes+1) })
	c.say(t, "%s is Ready with Kubernetes %s", node(nodes+1), now)
}

func (c *cluster) again(t *testing.T) {
	before := c.folderRecord(t)
	r := c.upgrade(t)
	if err := <-r.ended; err != nil {
		t.Errorf("%v\n%s", err, &r.said)
	}
	if strings.Contains(r.said.String(), "ordered:") || c.folderRecord(t) != before {
		t.Errorf("something was done:\n%s", &r.said)
	}
}
