//go:build runbook

package runbook

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/muster-k8s/muster/lab/byhand"
	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
)

// uninstall is the last runbook. From then on, one machine's kubelet renews, and a machine without Muster joins, by kubeadm alone.
func (w *fixture) uninstall(t *testing.T) {
	before := w.containers(t)
	if len(before) == 0 {
		t.Fatal("the cluster has no pods that could go on")
	}
	for _, n := range []string{"node1", "node2", "node3"} {
		w.Block(t, n, "uninstall-control-plane", "NODE="+n)
		w.answers(t)
	}
	// Machines that were forgotten in this test are off.
	w.owner(t, "uninstall", "node1", "FLAGS=--let-back-in")
	for _, n := range allNodes {
		w.Block(t, n, "uninstall-machine", "NODE="+n)
	}
	since := time.Now()
	labtest.Eventually(t, func(ctx context.Context) error { // an annotation that was on its way may come once more
		out, err := w.At(ctx, driver.Owner, "", "muster", "uninstall", "--yes", "--let-back-in")
		if err == nil && !strings.Contains(out, "Nothing of Muster is left") {
			err = errors.New(out)
		}
		return err
	})
	w.plainReady(t, since, allNodes...)
	since = time.Now() // nothing of this boot is there any more, as the file by which Muster lets the kubelet start
	w.Must(t, "node5", "", "systemctl", "reboot")
	w.plainReady(t, since, "node5")
	w.restarted(t, before, "node5")
	w.renews(t, "node4")
	w.joinsByKubeadm(t, "node7")
	w.plainReady(t, since, append([]string{"node7"}, allNodes...)...)
	after := w.containers(t)
	for pod, container := range before {
		if after[pod] != container {
			t.Errorf("%s ran in %s, and runs in %q", pod, container, after[pod])
		}
	}
	for _, n := range allNodes {
		if out, err := w.At(t.Context(), n, "", "pgrep", "-x", "bootstrapper"); err == nil {
			t.Errorf("%s still runs Muster: %s", n, out)
		}
	}
	w.say(t, "the cluster goes on without Muster")
}

// containers returns the containers' IDs of all running pods but Muster's and static ones, by namespace and name.
func (w *fixture) containers(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	labtest.Eventually(t, func(ctx context.Context) error {
		text, err := w.kubectl(ctx, "get", "pods", "-A", "-o", "json")
		if err != nil {
			return err
		}
		var l corev1.PodList
		if err := json.Unmarshal([]byte(text), &l); err != nil {
			return err
		}
		clear(out)
		for _, p := range l.Items {
			if p.Namespace == "muster-system" || p.Annotations[corev1.MirrorPodAnnotationKey] != "" || p.Status.Phase != corev1.PodRunning {
				continue
			}
			for _, c := range p.Status.ContainerStatuses {
				out[p.Namespace+"/"+p.Name+"/"+c.Name] = c.ContainerID
			}
		}
		return nil
	})
	return maps.Clone(out)
}

// restarted removes the pods of a node that was restarted from those whose containers must be as before.
func (w *fixture) restarted(t *testing.T, before map[string]string, node string) {
	t.Helper()
	out, err := w.kubectl(t.Context(), "get", "pods", "-A", "--field-selector", "spec.nodeName="+node, "-o", `jsonpath={range .items[*]}{.metadata.namespace}/{.metadata.name}/{"\n"}{end}`)
	if err != nil {
		t.Fatal(err)
	}
	for _, pod := range strings.Fields(out) {
		maps.DeleteFunc(before, func(name, _ string) bool { return strings.HasPrefix(name, pod) })
	}
}

// plainReady waits until nodes are Ready whose kubelets have renewed their Leases since: a Node is Ready for 50 s after its kubelet has ended.
func (w *fixture) plainReady(t *testing.T, since time.Time, nodes ...string) {
	t.Helper()
	labtest.Eventually(t, func(ctx context.Context) error {
		for _, name := range nodes {
			ready, err := w.kubectl(ctx, "get", "node/"+name, "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`)
			if err != nil {
				return err
			}
			at, err := w.kubectl(ctx, "-n", "kube-node-lease", "get", "lease/"+name, "-o", "jsonpath={.spec.renewTime}")
			if err != nil {
				return err
			}
			if renewed, err := time.Parse(time.RFC3339, at); err != nil || ready != "True" || renewed.Before(since) {
				return fmt.Errorf("%s: Ready %s, Lease renewed at %s", name, ready, at)
			}
		}
		return nil
	})
}

// fileRequest files a node's own request for the next client certificate, as its kubelet does after two thirds of a certificate's life.
const fileRequest = `openssl ecparam -name prime256v1 -genkey -noout -out /root/next.key
request=$(openssl req -new -key /root/next.key -subj "/O=system:nodes/CN=system:node:$NODE" | base64 -w0)
kubectl --kubeconfig /etc/kubernetes/kubelet.conf create -f - <<END
apiVersion: certificates.k8s.io/v1
kind: CertificateSigningRequest
metadata: {name: next-$NODE}
spec: {signerName: kubernetes.io/kube-apiserver-client-kubelet, usages: [digital signature, client auth], request: $request}
END`

func (w *fixture) renews(t *testing.T, node string) {
	t.Helper()
	w.Must(t, node, "", "env", "NODE="+node, "bash", "-euo", "pipefail", "-c", fileRequest)
	labtest.Eventually(t, func(ctx context.Context) error {
		out, err := w.kubectl(ctx, "get", "csr", "next-"+node, "-o", "jsonpath={.status}")
		if err == nil && !strings.Contains(out, `"certificate":`) {
			err = fmt.Errorf("the request of %s: %s", node, out)
		}
		return err
	})
	w.say(t, "%s renews without Muster", node)
}

// joinsByKubeadm has a machine without Muster join with a bootstrap token.
func (w *fixture) joinsByKubeadm(t *testing.T, node string) {
	t.Helper()
	w.Must(t, "node1", "", "kubeadm", "token", "create", byhand.Token, "--kubeconfig", "/etc/kubernetes/admin.conf")
	config, err := byhand.Join([]byte(w.Must(t, "node1", "", "cat", "/etc/kubernetes/pki/ca.crt")), byhand.Node{Name: node, Address: address(node)})
	if err != nil {
		t.Fatal(err)
	}
	w.Add(t, driver.Node{Name: node, NoBootstrapper: true})
	w.Must(t, node, string(config), "kubeadm", "join", "--config", "/dev/stdin")
	w.say(t, "%s has joined by kubeadm alone", node)
}
