package upgrade

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

var errKilled = errors.New("killed")

// The machine goes down at any step. After its next boot it can run what it was, or what it becomes, and the order goes on to its end.
func TestAnUpgradeSurvivesBeingKilledAnywhere(t *testing.T) {
	for _, controlPlane := range []bool{true, false} {
		part := map[bool]string{true: ownerorder.PartOnly, false: ownerorder.PartNode}[controlPlane]
		for at := 1; ; at++ {
			n := newNode(t, controlPlane)
			seen, died := 0, ""
			n.crash = func(what string) error {
				if seen++; seen >= at { // nothing happens after it
					if died == "" {
						died = what
					}
					return errKilled
				}
				return nil
			}
			n.ready = 5 * time.Millisecond
			_, err := n.run(n.args(part))
			n.crash, n.ready = nil, time.Minute
			if died == "" {
				if err != nil {
					t.Fatal(err)
				}
				t.Logf("%d steps, control plane: %t", at-1, controlPlane)
				break
			}
			if err == nil {
				t.Fatalf("it lives after %s", died)
			}
			n.boots(died)
			if _, err := n.run(n.args(part)); err != nil {
				t.Fatalf("killed at %q, then: %v", died, err)
			}
			n.isNew()
			if controlPlane && n.cluster.addons == nil {
				t.Errorf("killed at %q: the add-ons are old", died)
			}
			if t.Failed() {
				t.Fatalf("killed at %q", died)
			}
		}
	}
}

// boots restarts the machine.
func (n *node) boots(died string) {
	n.t.Helper()
	if err := n.machine.Reboot(); err != nil {
		n.t.Fatal(err)
	}
	if _, err := PutBackUnlisted(n.root, n.controlPlane, n.image()); err != nil {
		n.t.Fatalf("killed at %q: %v", died, err)
	}
	if n.controlPlane {
		for _, name := range kubeadm.StaticPods() {
			if err := n.image().ListedPod(n.root, name, []byte(n.get(kubeadm.Manifests+"/"+name+".yaml")), images(oldVersion), images(newVersion)); err != nil {
				n.t.Errorf("killed at %q: %s: %v", died, name, err)
			}
		}
	}
	if _, _, err := n.image().CheckKubelet([]byte(n.get(kubeletConfig))); err != nil {
		n.t.Errorf("killed at %q: %v", died, err)
	}
	kept, err := component.ListFile(n.on(component.KeptList)).Load()
	if err != nil {
		n.t.Fatal(err)
	}
	pinned, err := versions.ParseImages(kept.Images)
	if err == nil {
		err = component.PinSandbox(n.t.Context(), n.root, n.machine, pinned[versions.Pause])
	}
	n.put("/run/muster/kubelet-may-start", "")
	if err := errors.Join(err, n.machine.Unit(n.t.Context(), "start", machine.UnitKubelet)); err != nil {
		n.t.Fatal(err)
	}
}

// The unit's time limit would kill a kubeadm that begins too late.
func TestAnUpgradeThatWaitsTooLongDoesNotBegin(t *testing.T) {
	n := newNode(t, true)
	n.cluster.busy, n.begin = true, 50*time.Millisecond
	if _, err := n.run(n.args(ownerorder.PartFirst)); err == nil || !strings.Contains(err.Error(), "could not start within 50ms") {
		t.Errorf("%v", err)
	}
	for _, controlPlane := range []bool{true, false} {
		n = newNode(t, controlPlane)
		n.begin = time.Nanosecond
		if _, err := n.run(n.args(ownerorder.PartNode)); err == nil || slices.Contains(n.machine.Calls(), "kubeadm upgrade node") {
			t.Errorf("%v, %q", err, n.machine.Calls())
		}
		n.begin = time.Hour
		if _, err := n.run(n.args(ownerorder.PartNode)); err != nil {
			t.Error(err)
		}
	}
}
