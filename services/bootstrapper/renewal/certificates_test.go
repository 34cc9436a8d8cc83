package renewal

import (
	"os"
	"path/filepath"
	"testing"
)

func TestADiskThatDoesNotTellIsNoWorker(t *testing.T) {
	for name, tt := range map[string]struct {
		change      func(path string) error
		is, unknown bool
	}{
		"the authority's key":       {change: func(path string) error { return os.WriteFile(path, nil, 0o600) }, is: true},
		"no key":                    {change: func(string) error { return nil }},
		"no folder":                 {change: func(path string) error { return os.Remove(filepath.Dir(path)) }},
		"a link that leads nowhere": {change: func(path string) error { return os.Symlink(filepath.Base(path), path) }, unknown: true},
		"a file in place of the folder": {change: func(path string) error {
			if err := os.Remove(filepath.Dir(path)); err != nil {
				return err
			}
			return os.WriteFile(filepath.Dir(path), nil, 0o600)
		}, unknown: true},
	} {
		root := t.TempDir()
		if err := os.MkdirAll(filepath.Join(root, pki), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := tt.change(filepath.Join(root, pki, "ca.key")); err != nil {
			t.Fatal(err)
		}
		if is, err := IsControlPlane(root); is != tt.is || (err != nil) != tt.unknown {
			t.Errorf("%s: %t, %v", name, is, err)
		}
	}
}
