package component

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

// containerd is a machine whose containerd reads the file with the sandbox's image when it starts.
type containerd struct {
	machine.Machine

	file   string
	dies   error // why the program ends before containerd has started
	starts int
	uses   string
}

func (c *containerd) Unit(context.Context, string, string) error {
	if c.dies != nil {
		return c.dies
	}
	text, err := os.ReadFile(c.file)
	c.starts, c.uses = c.starts+1, string(text)
	return err
}

// B9: a program that is killed before containerd has started again leaves it with the image that it had, by tag. The next one has it started.
func TestContainerdIsStartedForTheSandboxsImageAlsoAfterACrash(t *testing.T) {
	root := t.TempDir()
	c := &containerd{file: filepath.Join(root, sandboxFile)}
	crash := errors.New("killed")
	for i, digest := range []string{"1", "2"} { // the second one is that of an upgrade
		image := versions.Image{Repository: "registry.example/pause", Tag: "3.10", Digest: "sha256:" + strings.Repeat(digest, 64)}
		pin := func() error { return PinSandbox(t.Context(), root, c, image) }
		c.dies = crash
		for range 2 {
			if err := pin(); !errors.Is(err, crash) {
				t.Fatalf("it was not begun: %v", err)
			}
		}
		c.dies = nil
		for range 2 { // once it has read the file, it is left alone
			if err := pin(); err != nil || c.starts != i+1 || !strings.Contains(c.uses, image.String()) {
				t.Errorf("%v: containerd has started %d times, and uses %s", err, c.starts, c.uses)
			}
		}
	}
	// Whoever starts containerd otherwise records that.
	image := versions.Image{Repository: "registry.example/pause", Tag: "3.11", Digest: "sha256:" + strings.Repeat("3", 64)}
	if restart, err := NameSandbox(root, image); err != nil || !restart {
		t.Errorf("%v, %v", restart, err)
	}
	if restart, err := NameSandbox(root, image); err != nil || !restart {
		t.Errorf("nothing has read it: %v, %v", restart, err)
	}
	if err := SandboxRead(root, image); err != nil {
		t.Fatal(err)
	}
	if err := PinSandbox(t.Context(), root, c, image); err != nil || c.starts != 2 {
		t.Errorf("%v: containerd has started %d times", err, c.starts)
	}
}
