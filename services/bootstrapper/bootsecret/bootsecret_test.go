package bootsecret

import (
	"bytes"
	"os"
	"path/filepath"
	"sync"
	"testing"
)

func TestOneSecretForEachBoot(t *testing.T) {
	root := t.TempDir()
	secrets := make([][]byte, 8)
	var all sync.WaitGroup
	for i := range secrets {
		all.Go(func() {
			s, err := Load(root)
			if err != nil {
				t.Error(err)
			}
			secrets[i] = s.Expose()
		})
	}
	all.Wait()
	for _, s := range secrets {
		if len(s) != 32 || !bytes.Equal(s, secrets[0]) {
			t.Fatalf("processes have %d and %d bytes, or other ones", len(s), len(secrets[0]))
		}
	}
	path := filepath.Join(root, Path)
	if st, err := os.Stat(path); err != nil || st.Mode() != 0o600 {
		t.Errorf("%v, %v", st.Mode(), err)
	}
	if left, err := os.ReadDir(filepath.Dir(path)); err != nil || len(left) != 1 {
		t.Errorf("%v, %v", left, err)
	}
	if err := os.RemoveAll(filepath.Dir(path)); err != nil { // a reboot
		t.Fatal(err)
	}
	next, err := Load(root)
	if err != nil || bytes.Equal(next.Expose(), secrets[0]) {
		t.Errorf("after a boot: the same, or %v", err)
	}
}

// A damaged file is not replaced: another secret within one boot means a copy.
func TestADamagedSecretIsAnError(t *testing.T) {
	root := t.TempDir()
	path := filepath.Join(root, Path)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, make([]byte, 31), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(root); err == nil {
		t.Error("it is accepted")
	}
}
