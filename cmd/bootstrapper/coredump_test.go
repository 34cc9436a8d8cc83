package main

import (
	"io"
	"syscall"
	"testing"
)

// K3: commands have keys in memory, and the disk of a core dump may not be encrypted.
func TestACommandLeavesNoCoreDump(t *testing.T) {
	var before syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_CORE, &before); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_CORE, &syscall.Rlimit{Cur: before.Max, Max: before.Max}); err != nil {
		t.Fatal(err)
	}
	if err := run(t.Context(), []string{"version"}, io.Discard, io.Discard); err != nil {
		t.Fatal(err)
	}
	var after syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_CORE, &after); err != nil || after != (syscall.Rlimit{}) {
		t.Errorf("the limit is %+v, %v", after, err)
	}
}
