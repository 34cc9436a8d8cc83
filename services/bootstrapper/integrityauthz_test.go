package bootstrapper_test

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/internal/objects/podsecurity"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
)

// B8: an authorizer that root has added would outlive reboots, upgrades and rotations.
func TestTheAPIServersAuthorizersAreThoseOfTheProgram(t *testing.T) {
	for at, tt := range map[string]struct{ evil, want string }{
		strings.TrimPrefix(kubeadm.AuthzFile, "/"):     {kubeadm.AuthzConfig + "- {type: AlwaysAllow, name: evil}\n", kubeadm.AuthzConfig},
		strings.TrimPrefix(kubeadm.AdmissionFile, "/"): {"apiVersion: apiserver.config.k8s.io/v1\nkind: AdmissionConfiguration\nplugins: []\n", podsecurity.Config},
	} {
		for name, change := range map[string]func(t *testing.T, w *fixture){
			"changed":        func(t *testing.T, w *fixture) { w.put(t, at, tt.evil) },
			"large":          func(t *testing.T, w *fixture) { w.leave(t, at, false) },
			"a folder":       func(t *testing.T, w *fixture) { w.leave(t, at, true) },
			"missing":        func(t *testing.T, w *fixture) { w.drop(t, at) },
			"without folder": func(t *testing.T, w *fixture) { w.drop(t, filepath.Dir(at)); w.put(t, filepath.Dir(at), "evil") },
			"a link": func(t *testing.T, w *fixture) {
				w.put(t, "elsewhere", tt.evil)
				link(t, filepath.Join(w.root, at), filepath.Join(w.root, "elsewhere"), false)
			},
		} {
			w := rebooted(t)
			if w.get(at) != tt.want {
				t.Fatalf("before the attack, %s is %q", at, w.get(at))
			}
			change(t, w)
			w.startAgain(t)
			if !w.small(at) || w.get(at) != tt.want {
				t.Errorf("%s: %s is not the program's", name, at)
			}
			if !strings.Contains(w.get("run/muster/state-findings"), at) && !strings.Contains(w.get("run/muster/state-findings"), filepath.Dir(at)) {
				t.Errorf("%s, %s: no finding: %q", at, name, w.get("run/muster/state-findings"))
			}
		}
	}
}

// drop removes a file or a folder of the machine.
func (w *fixture) drop(t *testing.T, at string) {
	t.Helper()
	if err := os.RemoveAll(filepath.Join(w.root, at)); err != nil {
		t.Fatal(err)
	}
}

// A worker has no API server, and the owner of a cluster that was adopted has chosen its authorizers.
func TestAuthorizersOfOthersAreLeftAlone(t *testing.T) {
	at := strings.TrimPrefix(kubeadm.AuthzFile, "/")
	w := rebooted(t)
	w.put(t, at, "the owner's")
	w.desires(t, func(d *component.Desired) { d.Adopted = true })
	w.startAgain(t)
	if w.get(at) != "the owner's" {
		t.Errorf("an adopted control plane: %q", w.get(at))
	}
	w = rebooted(t)
	w.becomesWorker(t)
	w.drop(t, at)
	w.startAgain(t)
	if _, err := os.Stat(filepath.Join(w.root, at)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a worker: %v", err)
	}
}

// Control planes have the content of the image that they joined with. If you change it, let checkAuthz replace the earlier content, by its SHA-256, without a
// finding: otherwise each update of control planes looks like an attack.
func TestEarlierImagesHaveTheSameAuthorizationAndAdmission(t *testing.T) {
	for name, tt := range map[string]struct{ content, want string }{
		kubeadm.AuthzFile:     {kubeadm.AuthzConfig, "36e3d15d3f9d13ae4b9d4ab18e9457422089588185c396de080602ff122cc7d4"},
		kubeadm.AdmissionFile: {podsecurity.Config, "5d4cc9fdc842adcc580f2108fb40692141b6e8a29e5fa0c13a4f4de6080aa944"},
	} {
		if sum := sha256.Sum256([]byte(tt.content)); hex.EncodeToString(sum[:]) != tt.want {
			t.Errorf("%s has the SHA-256 %x", name, sum)
		}
	}
}
