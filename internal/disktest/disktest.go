// Package disktest gives tests a small disk of their own, to be filled.
package disktest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
)

// Small gives a folder that is a file system of so many bytes. It is mounted in a mount
// namespace of its own, which ends with the test, also with one that is killed: the
// machine's mounts stay as they are. Other processes can use the path as long as this one
// lives. It needs root.
func Small(t testing.TB, bytes int) string {
	t.Helper()
	at := t.TempDir()
	type made struct {
		path string
		err  error
	}
	mounted, over, gone := make(chan made), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(gone)
		// The thread has the namespace. It is never unlocked, so it ends with this goroutine.
		runtime.LockOSThread()
		err := errors.Join(
			syscall.Unshare(syscall.CLONE_NEWNS|syscall.CLONE_FS),
			syscall.Mount("", "/", "", syscall.MS_PRIVATE|syscall.MS_REC, ""),
			syscall.Mount("small", at, "tmpfs", 0, fmt.Sprintf("size=%d,mode=700", bytes)),
		)
		mounted <- made{fmt.Sprintf("/proc/%d/task/%d/root%s", os.Getpid(), syscall.Gettid(), at), err}
		<-over
	}()
	m := <-mounted
	t.Cleanup(func() {
		close(over)
		<-gone
	})
	if m.err != nil {
		t.Fatalf("mount a small disk, which needs root: %v", m.err)
	}
	return m.path
}

// Fill takes all that is free of the file system that dir is on, and gives what frees it
// again.
func Fill(t testing.TB, dir string) (free func()) {
	t.Helper()
	path := filepath.Join(dir, "filler")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	for chunk := make([]byte, 4096); err == nil; {
		_, err = f.Write(chunk)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("fill %s: %v, want that no space is left", dir, err)
	}
	return func() {
		t.Helper()
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
}
