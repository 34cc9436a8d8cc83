package backups

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"hash"
)

// tail checks that what is written to it ends with the SHA-256 of what is before, as etcd's snapshots do.
type tail struct {
	before hash.Hash
	last   []byte
}

func newTail() *tail { return &tail{before: sha256.New()} }

// Write keeps the last 32 bytes back.
func (t *tail) Write(p []byte) (int, error) {
	t.last = append(t.last, p...)
	if n := len(t.last) - sha256.Size; n > 0 {
		t.before.Write(t.last[:n])
		t.last = append(t.last[:0], t.last[n:]...)
	}
	return len(p), nil
}

func (t *tail) check() error {
	if len(t.last) != sha256.Size || !bytes.Equal(t.last, t.before.Sum(nil)) {
		return errors.New("etcd's snapshot is cut off or damaged: its SHA-256 is not that of its content")
	}
	return nil
}
