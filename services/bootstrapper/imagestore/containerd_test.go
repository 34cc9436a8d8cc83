package imagestore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/muster-k8s/muster/internal/kubetest"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

// containerd is a machine with a real containerd, whose unit is a process of the test.
type containerd struct {
	machine.Machine
	bin, dir string
	cmd      *exec.Cmd
	log      bytes.Buffer
}

const containerdConfig = `version = 3
root = %[1]q
state = %[2]q
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.nri.v1.nri", "io.containerd.tracing.processor.v1.otlp", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.blockfile", "io.containerd.snapshotter.v1.erofs"]

[grpc]
  address = %[3]q

[plugins."io.containerd.cri.v1.images"]
  snapshotter = "native"
`

// newContainerd returns a machine on which containerd runs until the test ends.
func newContainerd(t *testing.T) (*containerd, Store) {
	t.Helper()
	bin, err := kubetest.Binaries()
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "store") // a path that a socket may have
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	c := &containerd{Machine: machine.Real{}, bin: bin, dir: dir}
	s := Store{
		Root: dir, Machine: c, Socket: "unix://" + c.socket(), Pause: 50 * time.Millisecond, Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
		Found: func(what, done string) { t.Logf("found: %s: %s", what, done) },
	}
	config := fmt.Sprintf(containerdConfig, s.on(""), filepath.Join(dir, "state"), c.socket())
	if err := os.WriteFile(filepath.Join(dir, "config.toml"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Unit(context.Background(), "stop", machine.UnitContainerd); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Log(c.log.String())
		}
	})
	if err := c.Unit(t.Context(), "start", machine.UnitContainerd); err != nil {
		t.Fatal(err)
	}
	if _, err := s.names(t.Context()); err != nil { // it listens
		t.Fatal(err)
	}
	return c, s
}

func (c *containerd) socket() string { return filepath.Join(c.dir, "s") }

func (c *containerd) Unit(ctx context.Context, verb, unit string) error {
	if unit != machine.UnitContainerd {
		return errors.New(unit)
	}
	if verb == "stop" {
		if c.cmd == nil {
			return nil
		}
		err := c.cmd.Process.Signal(syscall.SIGTERM)
		_ = c.cmd.Wait()
		c.cmd = nil
		return err
	}
	c.cmd = exec.CommandContext(context.WithoutCancel(ctx), filepath.Join(c.bin, "containerd"), "--config", filepath.Join(c.dir, "config.toml"))
	c.cmd.Stdout, c.cmd.Stderr = &c.log, &c.log
	return c.cmd.Start()
}

// ImportImages runs the same ctr as [machine.Real], from the folder of the Kubernetes programs.
func (c *containerd) ImportImages(ctx context.Context, socket string, archive io.Reader) error {
	cmd := exec.CommandContext(ctx, filepath.Join(c.bin, "ctr"), machine.ImportArguments(socket)...)
	cmd.Stdin = archive
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

func (c *containerd) ctr(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), filepath.Join(c.bin, "ctr"), append([]string{"--address", c.socket(), "--namespace", "k8s.io"}, args...)...).CombinedOutput()
	if err != nil {
		t.Fatalf("ctr %q: %v: %s", args, err, out)
	}
	return string(out)
}

// target returns the digest of the image that containerd has by a name.
func (c *containerd) target(t *testing.T, name string) string {
	t.Helper()
	for line := range strings.Lines(c.ctr(t, "images", "list")) {
		if f := strings.Fields(line); f[0] == name {
			return f[2]
		}
	}
	return ""
}

// B8: root changes a program in an unpacked layer, gives an image the name of another one, and flips a bit of a layer. None of it is there after Renew, with
// a real containerd, and the images that are whole can be unpacked without a registry.
func TestWhatRootLeftInContainerdsStoreIsNotUsed(t *testing.T) {
	c, s := newContainerd(t)
	names := func() []string {
		t.Helper()
		got, err := s.names(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		slices.Sort(got)
		return got
	}
	p, changed := pull(t), pull(t)
	for _, images := range []pulled{p, changed} {
		file := filepath.Join(c.dir, "images.tar")
		if err := os.WriteFile(file, images.archive(t).Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
		c.ctr(t, "images", "import", "--local", "--platform", "linux/"+runtime.GOARCH, "--snapshotter", "native", file)
	}
	if got := names(); len(got) != 4 {
		t.Fatalf("%q", got)
	}
	snapshots := s.on("io.containerd.snapshotter.v1.native/snapshots")
	unpacked, err := os.ReadDir(snapshots)
	if err != nil || len(unpacked) == 0 {
		t.Fatalf("%v, %v", unpacked, err)
	}
	if err := os.WriteFile(filepath.Join(snapshots, unpacked[0].Name(), "evil"), []byte("evil"), 0o700); err != nil {
		t.Fatal(err)
	}
	c.ctr(t, "images", "tag", "--force", p.app, p.proxy)
	if c.target(t, p.proxy) != p.index {
		t.Fatal("the name was not given to another image")
	}
	layer, err := os.OpenFile(blobAt(s, changed.layers[changed.proxy]), os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := layer.WriteAt([]byte("evil"), 100); err != nil {
		t.Fatal(err)
	}
	if err := layer.Close(); err != nil {
		t.Fatal(err)
	}

	if err := s.Renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := []string{p.app, p.proxy, changed.app}
	slices.Sort(want)
	if got := names(); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	for _, name := range want {
		if got := c.target(t, name); !strings.HasSuffix(name, "@"+got) || got == "" {
			t.Errorf("%s is %q", name, got)
		}
	}
	if left, _ := os.ReadDir(snapshots); len(left) != 0 {
		t.Errorf("unpacked layers are left: %v", left)
	}
	c.ctr(t, "containers", "create", "--snapshotter", "native", p.proxy, "c", "program") // it unpacks the image, as the kubelet's first container does
	layers, err := os.ReadDir(snapshots)
	if err != nil || len(layers) == 0 {
		t.Errorf("%v, %v", layers, err)
	}
	for _, l := range layers {
		if _, err := os.Lstat(filepath.Join(snapshots, l.Name(), "evil")); err == nil {
			t.Error("what root left is in a layer")
		}
	}
}
