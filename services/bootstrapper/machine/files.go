package machine

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// TemporaryPrefix begins the names of files that [WriteFile] has not renamed yet, which a crash can leave.
const TemporaryPrefix = ".muster-"

// WriteFile writes content to path so that a crash leaves the old file or the new one: temporary file, fsync, rename, fsync of the folder (B4). Missing
// folders are made with dirMode. A link at path is replaced, never followed.
func WriteFile(path string, content []byte, mode, dirMode fs.FileMode) error {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, dirMode); err != nil {
		return err
	}
	tmp, err := os.CreateTemp(dir, TemporaryPrefix+"*")
	if err != nil {
		return err
	}
	_, err = tmp.Write(content)
	err = errors.Join(err, tmp.Chmod(mode), tmp.Sync(), tmp.Close())
	if err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("write %s: %w", path, err), os.Remove(tmp.Name()))
	}
	return syncDir(dir)
}

// ReadUpTo reads a file of at most this many bytes.
func ReadUpTo(file string, most int64) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && int64(len(text)) > most {
		err = fmt.Errorf("%s has more than %d bytes", file, most)
	}
	return text, err
}

// Link makes path a symbolic link to target, by rename.
func Link(path, target string) error {
	dir := filepath.Dir(path)
	tmp := filepath.Join(dir, ".muster-link-"+filepath.Base(path))
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Symlink(target, tmp); err != nil {
		return err
	}
	if err := os.Rename(tmp, path); err != nil {
		return errors.Join(err, os.Remove(tmp))
	}
	return syncDir(dir)
}

// EmptyDir removes the content of dir and keeps dir itself, which may be a mount point. A missing folder is empty.
func EmptyDir(dir string) error {
	names, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, n := range names {
		err = errors.Join(err, os.RemoveAll(filepath.Join(dir, n.Name())))
	}
	return err
}

// Sync writes cached data of the file systems of some folders to their disks (syncfs(2)), for programs that do not sync their files. A missing folder is
// ignored.
func Sync(dirs ...string) error {
	for _, dir := range dirs {
		d, err := os.Open(dir)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		if err := errors.Join(unix.Syncfs(int(d.Fd())), d.Close()); err != nil {
			return fmt.Errorf("write %s to its disk: %w", dir, err)
		}
	}
	return nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
