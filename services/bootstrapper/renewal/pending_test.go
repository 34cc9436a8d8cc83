package renewal

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
)

// B8: what a renewal has prepared would be put in place after the comparison of the disk.
func TestARenewalThatCannotBeReadIsPending(t *testing.T) {
	root := t.TempDir()
	p := plane{root: root}
	if p.pending() {
		t.Error("nothing is there")
	}
	at := filepath.Join(root, Folder)
	if err := errors.Join(os.MkdirAll(at, 0o700), os.Chmod(filepath.Dir(at), 0o700)); err != nil {
		t.Fatal(err)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := syscall.Setfsuid(65534); err != nil { // of this thread, which is not root's then
		t.Fatal(err)
	}
	pending := p.pending()
	if err := syscall.Setfsuid(0); err != nil {
		t.Fatal(err)
	}
	if !pending {
		t.Error("an error counts as nothing")
	}
}
