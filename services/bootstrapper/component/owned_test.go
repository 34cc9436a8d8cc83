package component

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// A process that has another name of the file, or owns it, could change it after it was compared (B8). Run as root.
func TestAFileThatSomebodyElseCouldChangeIsInstalledAnew(t *testing.T) {
	root, content := t.TempDir(), []byte("kubelet")
	url, asked := mirror(t, serve(content))
	c := file(url, content, "/usr/local/bin/kubelet")
	at := filepath.Join(root, "usr/local/bin/kubelet")
	for name, change := range map[string]func() error{
		"another name":  func() error { return os.Link(at, filepath.Join(root, "second")) },
		"another owner": func() error { return os.Chown(at, 1, 1) },
	} {
		if err := errors.Join(install(t, root, c), change()); err != nil {
			t.Fatal(name, err)
		}
		before := asked.Load()
		if err := install(t, root, c); err != nil {
			t.Fatal(name, err)
		}
		if asked.Load() != before+1 {
			t.Errorf("%s: it was not installed anew", name)
		}
	}
}
