package component

import (
	"archive/tar"
	"errors"
	"os"
	"path/filepath"
	"testing"

	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
)

// An attacker who was root once can leave a folder in the place of a file, or a file in that of a folder. Neither may keep the machine from starting.
func TestAFolderInPlaceOfAFileIsReplacedAndAFileInPlaceOfAFolder(t *testing.T) {
	single := []byte("kubeadm")
	packed := archive(t, false, entryOf{name: "empty", kind: tar.TypeDir}, entryOf{name: "sub/host-local", body: "hl"})
	singleURL, _ := mirror(t, serve(single))
	packedURL, _ := mirror(t, serve(packed))
	extract := file(packedURL, packed, "/opt/cni/bin")
	extract.Extract, extract.Mode = true, 0
	deeper := file(packedURL, packed, "/usr/local/lib/muster/plugins")
	deeper.Extract, deeper.Mode = true, 0
	for name, tt := range map[string]struct {
		c          *initv1.Component
		at         string
		folder     bool
		want, file string
	}{
		"a program that is a folder":              {file(singleURL, single, "/usr/local/bin/kubeadm"), "usr/local/bin/kubeadm", true, "kubeadm", "usr/local/bin/kubeadm"},
		"a program's folder that is a file":       {file(singleURL, single, "/usr/local/lib/muster/a/b/c"), "usr/local/lib/muster/a", false, "kubeadm", "usr/local/lib/muster/a/b/c"},
		"an unfinished download that is a folder": {file(singleURL, single, "/usr/local/bin/kubeadm"), "usr/local/bin/" + tempPrefix + "1-0", true, "kubeadm", "usr/local/bin/kubeadm"},
		"a file of an archive that is a folder":   {extract, "opt/cni/bin/sub/host-local", true, "hl", "opt/cni/bin/sub/host-local"},
		"a folder of an archive that is a file":   {extract, "opt/cni/bin/sub", false, "hl", "opt/cni/bin/sub/host-local"},
		"an empty folder that is a file":          {extract, "opt/cni/bin/empty", false, "hl", "opt/cni/bin/sub/host-local"},
		"an archive's folder that is a file":      {deeper, "usr/local/lib/muster/plugins", false, "hl", "usr/local/lib/muster/plugins/sub/host-local"},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			left := filepath.Join(root, tt.at)
			if tt.folder {
				left = filepath.Join(left, "inside")
			}
			if err := errors.Join(os.MkdirAll(filepath.Dir(left), 0o755), os.WriteFile(left, []byte("evil"), 0o755)); err != nil {
				t.Fatal(err)
			}
			if err := install(t, root, tt.c); err != nil {
				t.Fatal(err)
			}
			if got, err := os.ReadFile(filepath.Join(root, tt.file)); err != nil || string(got) != tt.want {
				t.Errorf("%q, %v", got, err)
			}
			noLeftovers(t, root)
		})
	}
}
