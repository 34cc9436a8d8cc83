//go:build vm

package vm

import (
	"strings"
	"testing"
)

// An attacker is root on a node once, and leaves files on the state disk that would give root again (B8).
func TestWhatRootLeavesOnTheStateDiskDoesNotRunAfterAReboot(t *testing.T) {
	w := bringUp(t)
	boot := w.join(t, w.worker("node7"), node7)
	said := w.shell(t, "node7", "evil", `
set -e
echo BEFORE $(sha256sum < /usr/local/bin/kubelet)
evil() { printf '#!/bin/sh\necho evil runs: %s > /dev/console\nexec /usr/local/bin/kubelet.real "$@"\n' "$1" > "$1.new"; chmod 755 "$1.new"; mv "$1.new" "$1"; }
cp /usr/local/bin/kubelet /usr/local/bin/kubelet.real
evil /usr/local/bin/kubelet
evil /opt/cni/bin/evil
evil /usr/local/bin/apparmor_parser
mkdir -p /etc/kubernetes/manifests /var/lib/containerd/opt/bin
evil /var/lib/containerd/opt/bin/containerd-shim-runc-v2
printf 'apiVersion: v1\nkind: Pod\nmetadata: {name: evil, namespace: kube-system}\nspec: {hostPID: true, containers: [{name: evil, image: "lab.muster.dev/echo:v1", args: [serve]}]}\n' > /etc/kubernetes/manifests/evil.yaml
echo LD_PRELOAD=/var/lib/kubelet/evil.so >> /var/lib/kubelet/kubeadm-flags.env
store=/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots
for p in $store/*/fs/kube-proxy $store/*/fs/*/kube-proxy $store/*/fs/*/*/kube-proxy $store/*/fs/*/*/*/kube-proxy; do [ -f $p ] && echo evil >> $p && echo PROXY $p; done
for n in $(ctr -n k8s.io images ls -q | grep /kube-proxy@); do ctr -n k8s.io images tag --force lab.muster.dev/echo:v1 $n && echo RENAMED $n; done
sed -i 's/^staticPodPath:.*/staticPodPath: \/var\/lib\/evil/; s/anonymous:/anonymous: #/' /var/lib/kubelet/config.yaml
sync
echo LEFT`)
	if !strings.Contains(said, "LEFT") || !strings.Contains(said, "PROXY /") || !strings.Contains(said, "RENAMED ") {
		t.Fatalf("root could not leave anything: %s", said)
	}
	_, sum, _ := strings.Cut(said, "BEFORE ")
	sum, _, _ = strings.Cut(sum, " ")
	w.boot(t, "node7", w.image)
	for _, what := range []string{"/usr/local/bin/kubelet differs", "/usr/local/bin/kubelet.real differs", "/usr/local/bin/apparmor_parser differs", "/opt/cni/bin/evil differs", "/etc/kubernetes/manifests/evil.yaml differs", "/var/lib/kubelet/kubeadm-flags.env differs", "/var/lib/kubelet/config.yaml differs"} {
		w.says(t, "node7", what, joinTime)
	}
	w.ready(t, "node7", boot)
	after := w.shell(t, "node7", "look", `
echo KUBELET $(sha256sum < /usr/local/bin/kubelet)
for f in /usr/local/bin/kubelet.real /usr/local/bin/apparmor_parser /opt/cni/bin/evil /etc/kubernetes/manifests/evil.yaml; do [ -e $f ] && echo STILL $f; done
for p in /var/lib/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots/*/fs/ /var/lib/containerd/muster-kept; do grep -rqs '^evil$' --include=kube-proxy $p && echo STILL $p; done
ctr -n k8s.io images ls | while read name type digest rest; do case $name in */kube-proxy@$digest) echo RIGHT $name;; */kube-proxy@*) echo STILL $name is $digest;; esac; done
grep -h LD_PRELOAD /var/lib/kubelet/kubeadm-flags.env && echo STILL flags
grep -h '^staticPodPath' /var/lib/kubelet/config.yaml
true`)
	if !strings.Contains(after, "KUBELET "+sum) || strings.Contains(after, "STILL") || !strings.Contains(after, "RIGHT ") || !strings.Contains(after, "staticPodPath: /etc/kubernetes/manifests") {
		t.Errorf("before %s, after the reboot:\n%s", sum, after)
	}
	if strings.Contains(w.console(t, "node7"), "evil runs") {
		t.Error("what root has left ran")
	}
}
