package ownerdir

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// BackupsFolder holds backups of the cluster (muster backup), and backups of the cluster's objects, each in a folder named by its time.
const BackupsFolder = "backups"

// Backup writes files into a new folder below [BackupsFolder] and returns its path. A folder with its final name is
// complete and on the disk.
func (d *Dir) Backup(now time.Time, files map[string][]byte) (string, error) {
	if d.sync == nil {
		return "", errors.New("the owner's folder was opened to read only")
	}
	parent := d.File(BackupsFolder)
	if err := os.MkdirAll(parent, 0o700); err != nil {
		return "", err
	}
	if err := d.sync(d.lock); err != nil {
		return "", err
	}
	name := now.UTC().Format("20060102T150405.000Z")
	tmp, err := os.MkdirTemp(parent, "."+name+"-*.new") // 0700
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(tmp) // finds nothing after the rename
	for _, file := range slices.Sorted(maps.Keys(files)) {
		if err := d.writeSynced(filepath.Join(tmp, file), files[file]); err != nil {
			return "", fmt.Errorf("backup: %w", err)
		}
	}
	if err := d.syncFolder(tmp); err != nil {
		return "", err
	}
	path := filepath.Join(parent, name)
	if err := os.Rename(tmp, path); err != nil {
		return "", err
	}
	return path, d.syncFolder(parent)
}

func (d *Dir) writeSynced(path string, content []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.Write(content); err != nil {
		return err
	}
	return d.sync(f)
}

func (d *Dir) syncFolder(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return d.sync(f)
}
