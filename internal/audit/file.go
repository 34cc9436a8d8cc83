package audit

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

const (
	maxSize = 64 << 20 // of a file, in bytes
	keep    = 5        // files beside the current one
)

// Kept is how many bytes of records are kept at least, in the files beside the current one.
const Kept = keep * maxSize

// file is written to by one process at a time, so that a process removes only its own bytes after a failed write, and
// rotation happens once.
type file struct {
	*os.File

	limit int64 // bytes
}

// openFile opens path for appending, and completes a line that a crash cut off.
func openFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := repair(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	// Both name and content must survive a crash.
	if err := syncDir(filepath.Dir(path)); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// lock waits until no other process writes to the file.
func lock(f *os.File) error {
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		return &os.PathError{Op: "flock", Path: f.Name(), Err: err}
	}
	return nil
}

func unlock(f *os.File) { _ = syscall.Flock(int(f.Fd()), syscall.LOCK_UN) } // closing would unlock it too

func repair(f *os.File) error {
	if err := lock(f); err != nil { // a line that is being written is complete first
		return err
	}
	defer unlock(f)
	info, err := f.Stat()
	if err != nil || info.Size() == 0 {
		return err
	}
	last := make([]byte, 1)
	if _, err := f.ReadAt(last, info.Size()-1); err != nil {
		return err
	}
	if last[0] == '\n' {
		return nil
	}
	if _, err := f.Write([]byte{'\n'}); err != nil {
		return err
	}
	return f.Sync()
}

// append implements sink (J3).
func (f *file) append(line []byte) error {
	if err := f.claim(int64(len(line))); err != nil {
		return fmt.Errorf("write the audit record: %w", err)
	}
	defer unlock(f.File)
	before, err := f.Stat()
	if err != nil {
		return fmt.Errorf("write the audit record: %w", err)
	}
	if _, err := f.Write(line); err != nil {
		if before.Mode().IsRegular() {
			_ = f.Truncate(before.Size()) // best effort: repair ends a torn line at the next start
		}
		return fmt.Errorf("write the audit record: %w", err)
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("make the audit record stable: %w", err)
	}
	return nil
}

// claim locks the file at the path, with room for n bytes. If renaming or opening fails, records continue in the open file,
// so that none is lost and J3 holds; the next call tries again.
func (f *file) claim(n int64) error {
	for {
		if err := lock(f.File); err != nil {
			return err
		}
		if f.current() && (!f.full(n) || !f.rotate()) {
			return nil
		}
		// It was renamed: by this process, another one, or an operator.
		next, err := openFile(f.Name())
		if err != nil {
			return nil //nolint:nilerr // see above: the open and locked file takes the record
		}
		unlock(f.File)
		_ = f.Close() // all of it is synced
		f.File = next
	}
}

func (f *file) full(n int64) bool {
	info, err := f.Stat()
	return err == nil && info.Mode().IsRegular() && info.Size() > 0 && info.Size()+n > f.limit
}

// current reports whether the open file is the one at the path. A path that is not a regular file, like a device, always
// is.
func (f *file) current() bool {
	open, err := f.Stat()
	if err != nil || !open.Mode().IsRegular() {
		return true
	}
	named, err := os.Stat(f.Name())
	return err == nil && os.SameFile(open, named)
}

// rotate renames the locked file, and those before it. It reports whether it did.
func (f *file) rotate() bool {
	name := func(i int) string { return fmt.Sprintf("%s.%d", f.Name(), i) }
	for i := keep - 1; i >= 1; i-- {
		if err := os.Rename(name(i), name(i+1)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return false
		}
	}
	return os.Rename(f.Name(), name(1)) == nil // openFile syncs the folder
}

func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
