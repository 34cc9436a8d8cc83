package main

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// B8: whoever has the folder in a container can't make the kubelet run a program as root.
func TestNobodyWritesInThePluginFolder(t *testing.T) {
	config, err := os.ReadFile("../files/image.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(config), pluginFolder); n != 2 {
		t.Errorf("image.yaml names %s %d times, want it for the kubelet and for kube-controller-manager", pluginFolder, n)
	}
	at := filepath.Join(t.TempDir(), "plugins")
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread with its namespace ends with this goroutine
		done <- func() error {
			if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS); err != nil {
				return err
			}
			if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
				return err
			}
			if err := emptyFolder(at); err != nil {
				return err
			}
			if err := os.Mkdir(filepath.Join(at, "vendor~driver"), 0o755); !errors.Is(err, unix.EROFS) {
				t.Errorf("root writes there: %v", err)
			}
			return nil
		}()
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}
