// Package disktest gives tests a small file system that they can fill, and their temporary folders in memory.
package disktest

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

// Small returns a folder that is a file system of that many bytes. It is mounted in the mount namespace of a process that
// ends with the test, also if the test is killed: the machine's mounts do not change. Other processes can use the path
// until then. It needs root.
func Small(t testing.TB, bytes int) string {
	t.Helper()
	at := t.TempDir()
	// The process ends when its standard input is closed, which the kernel does when this process ends. A thread of this
	// process with its own namespace would have to end with the test, and the kernel ends with a thread the processes that
	// it started with Pdeathsig: other tests' TPMs.
	cmd := exec.Command("unshare", "--mount", "--propagation", "private", "sh", "-ec",
		`mount -t tmpfs -o "size=$1,mode=700" small "$0"; echo; exec cat`, at, fmt.Sprint(bytes))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(in.Close(), cmd.Wait()); err != nil {
			t.Errorf("unmount a small disk: %v", err)
		}
	})
	if _, err := bufio.NewReader(out).ReadByte(); err != nil {
		t.Fatalf("mount a small disk, which needs root: %v", err)
	}
	return fmt.Sprintf("/proc/%d/root%s", cmd.Process.Pid, at)
}

// Fill fills the free space of dir's file system, and returns a function that frees it again.
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
