package statecheck

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"

	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/provision"
)

// B8: a link that is not found, because the disk returns an error, would be there for the kubelet.
func TestAnErrorOfTheDiskEndsTheComparison(t *testing.T) {
	for name, tt := range map[string]struct {
		unreadable string
		step       func(ck *check, ctx context.Context) error
	}{
		"a pod's volumes":           {"var/lib/kubelet/pods/1/volumes", (*check).checkVolumes},
		"pods":                      {"var/lib/kubelet/pods", (*check).checkVolumes},
		"the kubelet's folder":      {"var/lib/kubelet", (*check).checkVolumes},
		"what a worker has not":     {"etc/kubernetes", (*check).checkWorker},
		"a worker's authority":      {"etc/kubernetes", func(ck *check, _ context.Context) error { return ck.mayHaveAuthority(&component.Desired{}, false) }},
		"static pods":               {"etc/kubernetes", func(ck *check, ctx context.Context) error { return ck.checkManifests(ctx, true, nil) }},
		"the place of a folder":     {"etc/kubernetes", func(ck *check, ctx context.Context) error { return ck.wantFolder(ctx, "/etc/kubernetes/pki") }},
		"new keys":                  {"etc/kubernetes/pki", func(ck *check, ctx context.Context) error { return ck.checkStaged(ctx, nil) }},
		"a file of the kubelet's":   {"var/lib/kubelet/x", func(ck *check, ctx context.Context) error { return ck.checkTree(ctx, "/var/lib/kubelet") }},
		"a file that is read whole": {"var/lib/kubelet/x", (*check).checkFiles},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			if err := os.Chmod(filepath.Dir(root), 0o755); err != nil {
				t.Fatal(err)
			}
			at := filepath.Join(root, tt.unreadable)
			if err := errors.Join(os.MkdirAll(at, 0o755), os.Chmod(root, 0o755), os.Chmod(at, 0o700)); err != nil {
				t.Fatal(err)
			}
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			if err := syscall.Setfsuid(65534); err != nil { // of this thread, which is not root's then
				t.Fatal(err)
			}
			err := tt.step(&check{Node: &provision.Node{Config: provision.Config{Root: root}}}, t.Context())
			if err := syscall.Setfsuid(0); err != nil {
				t.Fatal(err)
			}
			if !errors.Is(err, fs.ErrPermission) {
				t.Errorf("it went on: %v", err)
			}
		})
	}
}

// The attester runs during the comparison, and replaces its files by rename.
func TestAFileThatIsReplacedMeanwhileIsNoError(t *testing.T) {
	root := t.TempDir()
	ck := &check{Node: &provision.Node{Config: provision.Config{Root: root}}}
	missing := filepath.Join(root, "missing")
	if err := errors.Join(ck.ownFile(t.Context(), missing, "/missing"), ck.ownFolder(t.Context(), missing, "/missing")); err != nil {
		t.Error(err)
	}
}
