// Package cpio writes the archive that Linux unpacks as its first root: the "newc" format
// (Linux, Documentation/driver-api/early-userspace/buffer-format.rst).
//
// Owners, times and inode numbers do not depend on where it was made, so the same files result in the same bytes.
package cpio

import (
	"bytes"
	"fmt"
	"io/fs"
	"path"
	"strings"
)

// Archive is one that grows in memory. Its zero value is empty.
type Archive struct {
	b    bytes.Buffer
	ino  uint32
	seen map[string]bool
}

// The type bits of a mode (POSIX, sys/stat.h).
const (
	typeDir  = 0o040000
	typeFile = 0o100000
	typeChar = 0o020000
)

// File adds a file, and the folders that lead to it.
func (a *Archive) File(name string, perm fs.FileMode, content []byte) error {
	return a.add(name, typeFile|uint32(perm.Perm()), 0, 0, content)
}

// Dir adds a folder, and those that lead to it. One that is there stays.
func (a *Archive) Dir(name string) error {
	if a.seen[clean(name)] {
		return nil
	}
	return a.add(name, typeDir|0o755, 0, 0, nil)
}

// CharDevice adds a character device, which Linux needs before the init program can mount any:
// without /dev/console it has no output.
func (a *Archive) CharDevice(name string, perm fs.FileMode, major, minor uint32) error {
	return a.add(name, typeChar|uint32(perm.Perm()), major, minor, nil)
}

func clean(name string) string { return strings.TrimPrefix(path.Clean("/"+name), "/") }

func (a *Archive) add(name string, mode, major, minor uint32, content []byte) error {
	name = clean(name)
	if name == "" || strings.ContainsRune(name, 0) {
		return fmt.Errorf("cpio: %q is no name", name)
	}
	if a.seen[name] {
		return fmt.Errorf("cpio: %s is there twice", name)
	}
	if dir := path.Dir(name); dir != "." {
		if err := a.Dir(dir); err != nil {
			return err
		}
	}
	if a.seen == nil {
		a.seen = map[string]bool{}
	}
	a.seen[name] = true
	a.ino++
	a.entry(a.ino, name, mode, major, minor, content)
	return nil
}

func (a *Archive) entry(ino uint32, name string, mode, major, minor uint32, content []byte) {
	links, owner, mtime, check := 1, 0, 0, 0
	fmt.Fprintf(&a.b, "070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%s\x00",
		ino, mode, owner, owner, links, mtime, len(content), 0, 0, major, minor, len(name)+1, check, name)
	a.pad()
	a.b.Write(content)
	a.pad()
}

func (a *Archive) pad() { a.b.Write(make([]byte, -a.b.Len()&3)) }

// Bytes ends the archive and returns it.
func (a *Archive) Bytes() []byte {
	a.entry(0, "TRAILER!!!", 0, 0, 0, nil)
	return a.b.Bytes()
}
