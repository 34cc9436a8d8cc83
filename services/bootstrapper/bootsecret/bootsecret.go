// Package bootsecret keeps the secret of this boot, by which a cluster distinguishes this machine from a copy of it (J11).
//
// The secret is on a file system in memory, so that each boot has another one and no copy of a disk has it. The first process that needs it makes it:
// `bootstrapper unlock` in the initramfs, whose /run moves to the running system, or else a process of the running system.
package bootsecret

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/muster-k8s/muster/trust/keys"
)

// Path is the secret's path below the root of the file system. Its folder is empty after each boot.
const Path = "/run/muster/boot-secret"

// Load returns the secret of this boot, and makes it if there is none. Of several processes at the same time, one makes it.
func Load(root string) (keys.BootSecret, error) {
	path := filepath.Join(root, Path)
	s, err := read(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err = create(path); err == nil {
			s, err = read(path)
		}
	}
	if err != nil {
		return keys.BootSecret{}, fmt.Errorf("the secret of this boot: %w", err)
	}
	return s, nil
}

func read(path string) (keys.BootSecret, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return keys.BootSecret{}, err
	}
	defer clear(b) // K3
	s, err := keys.ParseBootSecret(b)
	if err != nil {
		return keys.BootSecret{}, fmt.Errorf("%s: %w: reboot the machine", path, err)
	}
	return s, nil
}

// create writes the whole file before it has its name, and keeps an existing one.
func create(path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".boot-secret-*") // mode 0600 (K3)
	if err != nil {
		return err
	}
	secret := keys.NewBootSecret().Expose()
	defer clear(secret)
	_, err = f.Write(secret)
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Link(f.Name(), path)
	}
	if errors.Is(err, fs.ErrExist) {
		err = nil
	}
	return errors.Join(err, os.Remove(f.Name()))
}
