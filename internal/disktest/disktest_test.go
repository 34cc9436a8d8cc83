package disktest

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestASmallDiskIsFullAndCanBeFreed(t *testing.T) {
	dir := Small(t, 64<<10)
	file := filepath.Join(dir, "file")
	free := Fill(t, dir)
	if err := os.WriteFile(file, []byte("x"), 0o600); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("a write on a full disk: %v", err)
	}
	free()
	if err := os.WriteFile(file, []byte("x"), 0o600); err != nil {
		t.Error(err)
	}
	mounts, err := os.ReadFile("/proc/1/mounts")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(mounts), t.Name()) {
		t.Error("the machine sees the mount")
	}
}
