package ownerdir

import (
	"bytes"
	"crypto/ed25519"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func example(t *testing.T) New {
	t.Helper()
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	return New{
		Cluster: Cluster{
			Name: "prod", Endpoint: "192.0.2.11:9000", KubernetesVersion: "1.36.1", ControlPlaneEndpoint: "192.0.2.1:6443",
			PodCIDRs: []string{"10.244.0.0/16"}, ServiceCIDRs: []string{"10.96.0.0/16"}, Stage: StagePrepared,
		},
		Secrets: NewSecrets([32]byte{1, 2, 3}), OwnerKey: key, Policy: []byte("version: 1\n"),
	}
}

func mustCreate(t *testing.T, path string, n New) *Dir {
	t.Helper()
	d, err := Create(path, n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	return d
}

func TestEverythingIsPrivateAndReadBack(t *testing.T) {
	old := syscall.Umask(0)
	t.Cleanup(func() { syscall.Umask(old) })
	path, n := filepath.Join(t.TempDir(), "muster-prod"), example(t)
	d := mustCreate(t, path, n)
	err := filepath.WalkDir(path, func(p string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		st, err := e.Info()
		if err != nil {
			return err
		}
		want := fs.FileMode(0o600)
		if e.IsDir() {
			want = 0o700
		}
		if st.Mode().Perm() != want {
			t.Errorf("%s has mode %04o", p, st.Mode().Perm())
		}
		if strings.HasSuffix(p, ".new") {
			t.Errorf("%s was left behind", p)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	again, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = again.Close() }()
	s, err := again.Secrets()
	if err != nil || s != n.Secrets {
		t.Errorf("secrets are not read back: %v", err)
	}
	k, err := again.OwnerKey()
	if err != nil || !k.Equal(n.OwnerKey) {
		t.Errorf("the key is not read back: %v", err)
	}
	if c := again.Cluster(); c.Name != "prod" || c.OwnerID != OwnerID(n.OwnerKey.Public().(ed25519.PublicKey)) {
		t.Errorf("%+v", c)
	}
}

// B3: each file is on the disk before its name is, cluster.json is last, and the folder's own entry exists before
// Create returns.
func TestEverythingIsOnTheDiskBeforeCreateReturns(t *testing.T) {
	parent := t.TempDir()
	path := filepath.Join(parent, "muster-prod")
	var synced []string
	d, err := create(path, example(t), func(f *os.File) error {
		if strings.HasSuffix(f.Name(), ".new") {
			final := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(f.Name()), "."), ".new")
			if _, err := os.Stat(filepath.Join(path, final)); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s had its name before its content was on the disk", final)
			}
			synced = append(synced, final)
		} else {
			synced = append(synced, f.Name())
		}
		return f.Sync()
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = d.Close() }()
	if synced[len(synced)-1] != parent || synced[len(synced)-2] != path || synced[len(synced)-3] != clusterFile {
		t.Errorf("synced in the order %q", synced)
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.Name() != inUseFile && !slices.Contains(synced, e.Name()) {
			t.Errorf("%s was not synced", e.Name())
		}
	}
}

func TestAFailedSyncIsAnError(t *testing.T) {
	full := errors.New("no space left")
	for _, fail := range []string{rootFile, clusterFile} {
		path := filepath.Join(t.TempDir(), "muster-prod")
		_, err := create(path, example(t), func(f *os.File) error {
			if strings.Contains(f.Name(), fail) {
				return full
			}
			return nil
		})
		if !errors.Is(err, full) {
			t.Errorf("%s: %v", fail, err)
		}
		if _, err := Create(path, example(t)); !errors.Is(err, ErrOtherCluster) {
			t.Errorf("%s: half a folder was taken for a cluster's: %v", fail, err)
		}
	}
}

func TestTheSameInitIsResumed(t *testing.T) {
	path, n := filepath.Join(t.TempDir(), "muster-prod"), example(t)
	first := mustCreate(t, path, n)
	want, err := first.Secrets()
	if err != nil {
		t.Fatal(err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	n2 := example(t) // other key and secrets, but the same init secret and parameters
	n2.Policy = nil
	got, err := mustCreate(t, path, n2).Secrets()
	if err != nil || got != want {
		t.Errorf("resuming changed the secrets: %v", err)
	}
}

func TestAnotherClustersFolderIsNotTouched(t *testing.T) {
	for name, change := range map[string]func(*New){
		"another name":        func(n *New) { n.Cluster.Name = "test" },
		"another machine":     func(n *New) { n.Cluster.Endpoint = "192.0.2.12:9000" },
		"another network":     func(n *New) { n.Cluster.PodCIDRs = []string{"10.0.0.0/16"} },
		"another policy":      func(n *New) { n.Policy = []byte("version: 2\n") },
		"another init secret": func(n *New) { n.Secrets.Init[0]++ },
	} {
		t.Run(name, func(t *testing.T) {
			path, n := filepath.Join(t.TempDir(), "muster-prod"), example(t)
			d := mustCreate(t, path, n)
			if err := d.Close(); err != nil {
				t.Fatal(err)
			}
			before := contents(t, path)
			other := example(t)
			other.Secrets.Init = n.Secrets.Init
			change(&other)
			if _, err := Create(path, other); !errors.Is(err, ErrOtherCluster) {
				t.Errorf("got %v", err)
			}
			if after := contents(t, path); !bytes.Equal(before, after) {
				t.Error("a file was changed")
			}
		})
	}
}

func TestAFolderThatIsNotOursIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "muster-prod")
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := Create(path, example(t)); !errors.Is(err, ErrOtherCluster) {
		t.Errorf("got %v", err)
	}
	if _, err := Open(path); err == nil {
		t.Error("opened")
	}
}

func TestASecretThatOthersCanReadIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "muster-prod")
	d := mustCreate(t, path, example(t))
	if err := os.Chmod(d.File(rootFile), 0o640); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Secrets(); err == nil || !strings.Contains(err.Error(), "chmod") {
		t.Errorf("got %v", err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(path); err == nil || !strings.Contains(err.Error(), "chmod") {
		t.Errorf("got %v", err)
	}
}

func TestTwoProgramsDoNotShareAFolder(t *testing.T) {
	path, n := filepath.Join(t.TempDir(), "muster-prod"), example(t)
	mustCreate(t, path, n)
	if _, err := Open(path); !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), "in use by "+filepath.Base(os.Args[0])) || !strings.Contains(err.Error(), fmt.Sprintf("(process %d), since ", os.Getpid())) {
		t.Errorf("got %v", err)
	}
	v, err := View(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = v.Close() }()
	before := contents(t, path)
	if err := v.Write(AdminConf, nil); err == nil {
		t.Error("written without the lock")
	}
	if !bytes.Equal(before, contents(t, path)) {
		t.Error("a folder opened to read was changed")
	}
}

// K3
func TestNothingPrintsASecret(t *testing.T) {
	s := NewSecrets([32]byte{0xde, 0xad, 0xbe, 0xef})
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%x", "%d"} {
		if got := fmt.Sprintf(verb, s); got != "ownerdir.Secrets[secret]" {
			t.Errorf("%s prints %q", verb, got)
		}
	}
	path := filepath.Join(t.TempDir(), "init")
	const digits = "not-hex-but-secret-not-hex-but-secret-not-hex-but-secret-not-hex"
	if err := os.WriteFile(path, []byte(digits), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadInitSecret(path); err == nil || strings.Contains(err.Error(), "secret-not") {
		t.Errorf("got %v", err)
	}
}

func TestKeyAndSecretFiles(t *testing.T) {
	dir := t.TempDir()
	public, err := NewKeyFile(filepath.Join(dir, "key"))
	if err != nil {
		t.Fatal(err)
	}
	key, err := ReadKey(filepath.Join(dir, "key"))
	if err != nil || !public.Equal(key.Public()) {
		t.Errorf("the key is not read back: %v", err)
	}
	want, err := NewInitSecretFile(filepath.Join(dir, "secret"))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := ReadInitSecret(filepath.Join(dir, "secret")); err != nil || got != want {
		t.Errorf("the secret is not read back: %v", err)
	}
	if _, err := NewKeyFile(filepath.Join(dir, "key")); !errors.Is(err, fs.ErrExist) {
		t.Errorf("a key was overwritten: %v", err)
	}
	if _, err := ReadKey(filepath.Join(dir, "secret")); err == nil {
		t.Error("a secret was taken for a key")
	}
	if err := os.Chmod(filepath.Join(dir, "secret"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadInitSecret(filepath.Join(dir, "secret")); err == nil {
		t.Error("a secret that everybody can read was accepted")
	}
}

func contents(t *testing.T, path string) []byte {
	t.Helper()
	var all bytes.Buffer
	entries, err := os.ReadDir(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		b, err := os.ReadFile(filepath.Join(path, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&all, "%s\n%s\n", e.Name(), b)
	}
	return all.Bytes()
}
