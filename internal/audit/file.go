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
	keep    = 5        // files beside the one that is written to
)

// openFile opens path for appending, and ends a line that a crash cut off.
func openFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := repair(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	// The name must survive a crash as well as the content.
	if err := syncDir(filepath.Dir(path)); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

type file struct {
	*os.File

	limit int64 // bytes
}

func (f *file) commit() error { return f.Sync() }

func (f *file) size() int64 {
	info, err := f.Stat()
	if err != nil {
		return -1
	}
	return info.Size()
}

func (f *file) undo(size int64) {
	if size >= 0 {
		_ = f.Truncate(size) // best effort: repair ends a torn line at the next start
	}
}

func repair(f *os.File) error {
	info, err := f.Stat()
	if err != nil || info.Size() == 0 {
		return err
	}
	size := info.Size()
	last := make([]byte, 1)
	if _, err := f.ReadAt(last, size-1); err != nil {
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

// prepare sees to it that what is written to is the file at the path, and that it has room
// for n bytes. Where that fails, records go on into the file that is open, so that none is
// lost and J3 holds; the next one tries again.
func (f *file) prepare(n int) {
	if f.current() && f.size()+int64(n) > f.limit {
		f.rotate()
	}
	if f.current() {
		return
	}
	// Somebody renamed it: this process, another one, or an operator.
	next, err := openFile(f.Name())
	if err != nil {
		return
	}
	_ = f.Close() // all of it is synced
	f.File = next
}

// current reports whether the file that is open is the one at the path. What is no file, like
// a device, always is.
func (f *file) current() bool {
	open, err := f.Stat()
	if err != nil || !open.Mode().IsRegular() {
		return true
	}
	named, err := os.Stat(f.Name())
	return err == nil && os.SameFile(open, named)
}

// rotate renames the file and those before it. Of several processes one does it.
func (f *file) rotate() {
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() || info.Size() == 0 {
		return
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		return
	}
	defer func() { _ = syscall.Flock(int(f.Fd()), syscall.LOCK_UN) }()
	if !f.current() {
		return
	}
	name := func(i int) string { return fmt.Sprintf("%s.%d", f.Name(), i) }
	for i := keep - 1; i >= 1; i-- {
		if err := os.Rename(name(i), name(i+1)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return
		}
	}
	_ = os.Rename(f.Name(), name(1)) // openFile syncs the folder
}

func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
