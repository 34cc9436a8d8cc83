package imagestore

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

// B3, B8: killed or failing anywhere, the next boot has the same images, and containerd never starts with the old database.
func TestAnInterruptedRenewalKeepsTheImages(t *testing.T) {
	p := pull(t)
	for _, at := range []string{"stop " + machine.UnitContainerd, "start " + machine.UnitContainerd} {
		s, m, _ := rebooted(t, p)
		cut := errors.New("the power goes away")
		m.Step = func(name string) error {
			if name == at {
				return cut
			}
			return nil
		}
		if err := s.Renew(t.Context()); !errors.Is(err, cut) {
			t.Fatalf("%s: %v", at, err)
		}
		m.Step = nil
		if err := m.Runs(machine.UnitContainerd); err != nil { // the next boot
			t.Fatal(err)
		}
		before := len(m.Calls())
		if err := s.Renew(t.Context()); err != nil {
			t.Fatal(err)
		}
		if calls := m.Calls()[before:]; !slices.Contains(calls, "stop "+machine.UnitContainerd) {
			t.Errorf("%s: the store was renewed while containerd ran: %q", at, calls)
		}
		if got := s.list(t); !slices.Equal(got, p.names()) {
			t.Errorf("%s: %q", at, got)
		}
	}
	// Killed during the import: containerd has a part.
	s, m, _ := rebooted(t, p)
	m.Step = func(name string) error {
		if name == "images are imported" {
			panic(name)
		}
		return nil
	}
	func() {
		defer func() {
			if recover() == nil {
				t.Error("it was not interrupted")
			}
		}()
		_ = s.Renew(t.Context())
	}()
	m.Step = nil
	if err := machine.WriteFile(s.on("io.containerd.metadata.v1.bolt/half"), nil, 0o600, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := s.Renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(s.on("io.containerd.metadata.v1.bolt/half")); err == nil || !slices.Equal(s.list(t), p.names()) {
		t.Errorf("%q, %v", s.list(t), err)
	}
}

// containerd refuses some images that it has pulled: that costs only these.
func TestAnImageThatContainerdRefusesCostsNoOther(t *testing.T) {
	p := pull(t)
	s, m, _ := rebooted(t, p)
	m.Step = func(name string) error {
		if name == "images are imported" {
			m.Step = nil
			return errors.New("content digest sha256:7: not found")
		}
		return nil
	}
	if err := s.Renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := s.list(t); len(got) != len(p.names())-1 || !slices.Contains(p.names(), got[0]) {
		t.Errorf("%q", got)
	}
}

// When containerd has the images, a power cut during the removal of the layout does not make the next boot use what is left of it.
func TestAPowerCutInTheLastRemovalKeepsTheImages(t *testing.T) {
	p := pull(t)
	s, m, _ := rebooted(t, p)
	at := s.on(kept + "/blobs/sha256/zz")
	m.Step = func(name string) error {
		if name != "images are imported" {
			return nil
		}
		m.Step = nil
		return errors.Join(os.Mkdir(at, 0o700), unix.Mount("none", at, "tmpfs", 0, ""))
	}
	cut := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread ends with its namespace, and the mount
		if err := errors.Join(unix.Unshare(unix.CLONE_FS|unix.CLONE_NEWNS), unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")); err != nil {
			cut <- err
			return
		}
		cut <- s.Renew(t.Context())
	}()
	if err := <-cut; !errors.Is(err, unix.EBUSY) { // a mount can't be removed
		t.Fatalf("the removal was not interrupted: %v", err)
	}
	if err := s.Renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := s.list(t); !slices.Equal(got, p.names()) {
		t.Errorf("%q", got)
	}
	if left, err := filepath.Glob(s.on("muster-*")); err != nil || len(left) > 0 {
		t.Errorf("%q is left, %v", left, err)
	}
}

// Whoever was root can have left an interrupted renewal as well.
func TestWhatLooksLikeAnInterruptedRenewalIsVerified(t *testing.T) {
	p := pull(t)
	s, _, found := rebooted(t, p)
	descriptor := func(hex, name string) v1.Descriptor {
		return v1.Descriptor{Digest: v1.Hash{Algorithm: "sha256", Hex: hex}, Annotations: map[string]string{nameAnnotation: name}}
	}
	text, err := json.Marshal(v1.IndexManifest{Manifests: []v1.Descriptor{
		descriptor(hexOf(p.index), p.proxy), // the name of another image
		descriptor(hexOf(p.index), "registry.example/proxy:v1"),
		descriptor(hexOf(p.index), p.app),
	}})
	if err != nil {
		t.Fatal(err)
	}
	evil := fmt.Sprintf("%064x", 1)
	if err := errors.Join(
		os.MkdirAll(s.on(kept), 0o700), os.Rename(s.on(blobs), s.on(kept+"/blobs")),
		os.WriteFile(s.on(kept+"/index.json"), text, 0o600), os.WriteFile(s.on(kept+"/manifest.json"), []byte("[]"), 0o600),
		os.WriteFile(s.on(kept+"/blobs/sha256/"+evil), []byte("evil"), 0o600),
	); err != nil {
		t.Fatal(err)
	}
	if err := s.Renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := s.list(t); !slices.Equal(got, []string{p.app}) || len(*found) != 1 {
		t.Errorf("%q, found %q", got, *found)
	}
	if _, err := os.Lstat(blobAt(s, evil)); err == nil {
		t.Error("content was kept under a wrong name")
	}
}
