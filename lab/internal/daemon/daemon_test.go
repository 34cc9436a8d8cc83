package daemon

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestWhatAMachineMayBeCalled(t *testing.T) {
	for name, ok := range map[string]bool{
		"node1": true, "intruder": true, "a-b-c": true, "abcdefghijklmn": true,
		"": false, "owner": false, "Node1": false, "../x": false, "1node": false, "abcdefghijklmno": false, "a b": false,
	} {
		if err := (NodeRequest{Name: name, Number: 1}).check(); (err == nil) != ok {
			t.Errorf("%q: %v", name, err)
		}
	}
	for number, ok := range map[int]bool{0: false, 1: true, 240: true, 241: false, -1: false} {
		if err := (NodeRequest{Name: "node1", Number: number}).check(); (err == nil) != ok {
			t.Errorf("number %d: %v", number, err)
		}
	}
}

func TestANameOrANumberIsTakenOnce(t *testing.T) {
	d := &Daemon{machines: map[string]*running{}}
	if err := d.reserve("node1", 1); err != nil {
		t.Fatal(err)
	}
	for _, r := range []NodeRequest{{Name: "node1", Number: 2}, {Name: "node2", Number: 1}} {
		if err := d.reserve(r.Name, r.Number); err == nil {
			t.Errorf("%+v was reserved beside node1 with number 1", r)
		}
	}
	if err := d.reserve("node2", 2); err != nil {
		t.Error(err)
	}
	if _, err := d.take("node1"); err == nil {
		t.Error("a machine that still boots was taken away")
	}
}

func TestALabThatIsNotUpSaysSo(t *testing.T) {
	if _, err := NewClient(t.TempDir()).Status(t.Context()); !errors.Is(err, ErrNotRunning) {
		t.Errorf("%v", err)
	}
}

func TestLabsInTwoFoldersHaveTwoCgroups(t *testing.T) {
	if a, b := CgroupName("/a"), CgroupName("/b"); a == b {
		t.Errorf("both are %s", a)
	}
}

func TestAClonedStoreSharesBlobsAndOwnsItsDatabases(t *testing.T) {
	from, to := filepath.Join(t.TempDir(), "golden"), filepath.Join(t.TempDir(), "containerd")
	for name, content := range map[string]string{"content/blob": "blob", "bolt/meta.db": "meta"} {
		p := filepath.Join(from, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := cloneStore(context.WithoutCancel(t.Context()), from, to); err != nil {
		t.Fatal(err)
	}
	same := func(name string) bool {
		a, err := os.Stat(filepath.Join(from, name))
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.Stat(filepath.Join(to, name))
		if err != nil {
			t.Fatal(err)
		}
		return os.SameFile(a, b)
	}
	if !same("content/blob") {
		t.Error("a blob was copied: a machine's start would take seconds")
	}
	if same("bolt/meta.db") {
		t.Error("two machines would write one database")
	}
	if b, err := os.ReadFile(filepath.Join(to, "bolt/meta.db")); err != nil || string(b) != "meta" {
		t.Errorf("%q, %v", b, err)
	}
}
