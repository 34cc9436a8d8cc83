package disktest

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"go.uber.org/goleak"
)

const (
	memory = "/dev/shm"
	tmpfs  = 0x01021994 // TMPFS_MAGIC of statfs(2)
	enough = 1 << 30
)

// InMemory returns the tests of a package with their temporary folders in memory. It is for those that write thousands of small files as the machine's
// programs do, each with fsync: on a disk that takes more time than what they test. It changes nothing if TMPDIR is set, and where /dev/shm is no tmpfs with
// 1 GiB free, as in most containers.
//
//	goleak.VerifyTestMain(disktest.InMemory(m))
func InMemory(m goleak.TestingM) goleak.TestingM { return inMemory{m} }

type inMemory struct{ tests goleak.TestingM }

// Run implements [goleak.TestingM].
func (m inMemory) Run() int {
	var s syscall.Statfs_t
	if os.Getenv("TMPDIR") != "" || syscall.Statfs(memory, &s) != nil || s.Type != tmpfs || s.Bavail*uint64(s.Bsize) < enough {
		return m.tests.Run()
	}
	dir, err := os.MkdirTemp(memory, "muster-")
	if err := errors.Join(err, os.Setenv("TMPDIR", dir)); err != nil {
		fmt.Fprintln(os.Stderr, "the tests cannot start:", err)
		return 1
	}
	code := m.tests.Run()
	if err := os.RemoveAll(dir); err != nil {
		fmt.Fprintln(os.Stderr, "after the tests:", err)
		return max(code, 1)
	}
	return code
}
