package renewal

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A renewal and an upgrade of one machine don't restart static pods at the same time.
func TestAnUpgradePausesTheRenewal(t *testing.T) {
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, folder), 0o700); err != nil {
		t.Fatal(err)
	}
	p := plane{root: root}
	resume, err := Pause(t.Context(), root, time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	if unlock, err := p.exclusive(); err == nil {
		unlock()
		t.Error("a renewal begins")
	}
	short, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := Pause(short, root, time.Millisecond); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a second upgrade: %v", err)
	}
	resume()
	// A renewal that was begun ends first.
	if err := os.Mkdir(filepath.Join(root, Folder), 0o700); err != nil {
		t.Fatal(err)
	}
	short, cancel = context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := Pause(short, root, time.Millisecond); err == nil || !strings.Contains(err.Error(), "being put in place") {
		t.Errorf("in the middle of a renewal: %v", err)
	}
	unlock, err := p.exclusive()
	if err != nil {
		t.Fatalf("the renewal can't end: %v", err)
	}
	got := make(chan error, 1)
	go func() {
		resume, err := Pause(t.Context(), root, time.Millisecond)
		if err == nil {
			resume()
		}
		got <- err
	}()
	if err := os.Remove(filepath.Join(root, Folder)); err != nil {
		t.Fatal(err)
	}
	unlock()
	if err := <-got; err != nil {
		t.Error(err)
	}
}

func TestANoteIsReadFromAManifest(t *testing.T) {
	root := t.TempDir()
	if note, err := NoteOf(root, "etcd"); err != nil || note != "" {
		t.Errorf("%q, %v", note, err)
	}
	file := filepath.Join(root, manifests, "etcd.yaml")
	for text, want := range map[string]string{"metadata: {annotations: {muster.dev/certificates: abcd}}": "abcd", "metadata: {name: etcd}": "", "": ""} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o700), os.WriteFile(file, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
		if note, err := NoteOf(root, "etcd"); err != nil || note != want {
			t.Errorf("%q: %q, %v", text, note, err)
		}
	}
}

// J8: the renewal of the machine that is upgraded must not take the upgrade's lease for its own.
func TestAnUpgradeHoldsTheLeaseUnderItsOwnName(t *testing.T) {
	root := t.TempDir()
	const conf = "apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: 'https://127.0.0.1:1'}}]\nusers: [{name: u}]\ncontexts: [{name: x, context: {cluster: c, user: u}}]\ncurrent-context: x\n"
	for _, name := range []string{"admin.conf", "controller-manager.conf"} {
		if err := errors.Join(os.MkdirAll(filepath.Join(root, folder), 0o700), os.WriteFile(filepath.Join(root, folder, name), []byte(conf), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	own, err := connect(root, "node1", nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	u, err := ConnectUpgrade(root, "node1", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	if own.holder != "renewal/node1" || u.c.holder != "upgrade/node1" {
		t.Errorf("%q and %q", own.holder, u.c.holder)
	}
}
