// Package verity makes the hash tree by which Linux checks each block of a read-only disk when it is read (Linux,
// Documentation/admin-guide/device-mapper/verity.rst), with SHA-256 and blocks of 4 KiB.
//
// The tree has neither salt nor superblock. Everything that its use needs is on the kernel's command line, which is
// measured; nothing on the disk is trusted.
package verity

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"

	"github.com/muster-k8s/muster/internal/image/layout"
)

const perBlock = layout.BlockSize / sha256.Size

// Tree reads data to its end, whose size must be a multiple of a block and at least two, and returns the tree, top level
// first, as the kernel expects it.
func Tree(data io.Reader) (layout.Root, []byte, error) {
	var r layout.Root
	level := []byte{}
	block := make([]byte, layout.BlockSize)
	for {
		_, err := io.ReadFull(data, block)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return r, nil, fmt.Errorf("hash tree: block %d: %w", r.Blocks, err)
		}
		sum := sha256.Sum256(block)
		level = append(level, sum[:]...)
		r.Blocks++
	}
	if r.Blocks < 2 {
		return r, nil, fmt.Errorf("hash tree: %d blocks of data, want two or more", r.Blocks)
	}
	var levels [][]byte
	for {
		level = append(level, make([]byte, -len(level)&(layout.BlockSize-1))...)
		levels = append(levels, level)
		if len(level) == layout.BlockSize {
			break
		}
		next := make([]byte, 0, len(level)/perBlock+layout.BlockSize)
		for i := 0; i < len(level); i += layout.BlockSize {
			sum := sha256.Sum256(level[i : i+layout.BlockSize])
			next = append(next, sum[:]...)
		}
		level = next
	}
	r.Hash = sha256.Sum256(level)
	var tree []byte
	for i := len(levels) - 1; i >= 0; i-- {
		tree = append(tree, levels[i]...)
	}
	return r, tree, nil
}
