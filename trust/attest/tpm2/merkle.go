package tpm2

import (
	"crypto/sha256"
	"math/bits"

	"github.com/muster-k8s/muster/trust/attest"
)

// Statements that wait for the TPM share a quote: it is made over the root of a Merkle
// tree of the shape of RFC 6962, section 2.1. Leaf: SHA-256(0x00 || statement); node:
// SHA-256(0x01 || left || right). One statement alone: the root is its leaf.
const (
	maxLeaves = 1024 // statements of one quote
	maxPath   = 10   // log2 of that
)

type digest = [sha256.Size]byte

func leaf(s attest.Statement) digest {
	return sha256.Sum256(append([]byte{0x00}, s[:]...))
}

func node(left, right digest) digest {
	b := make([]byte, 0, 1+2*sha256.Size)
	b = append(b, 0x01)
	b = append(b, left[:]...)
	return sha256.Sum256(append(b, right[:]...))
}

// split returns the largest power of two below n, for n > 1.
func split(n int) int { return 1 << (bits.Len(uint(n-1)) - 1) }

func root(leaves []digest) digest {
	if len(leaves) == 1 {
		return leaves[0]
	}
	k := split(len(leaves))
	return node(root(leaves[:k]), root(leaves[k:]))
}

// path returns the siblings on the way from leaf i to the root.
func path(leaves []digest, i int) []digest {
	if len(leaves) == 1 {
		return nil
	}
	k := split(len(leaves))
	if i < k {
		return append(path(leaves[:k], i), root(leaves[k:]))
	}
	return append(path(leaves[k:], i-k), root(leaves[:k]))
}

// rootFrom returns the root that follows from a leaf, its index and its path, and false if no tree
// has such a path. The number of leaves is not sent, because index and path length determine the
// side of each sibling. From the bottom up, a 1 bit of the index means a left sibling and a 0 bit a
// right one, until the node is the last of its level. After that there are only left siblings, one
// for each 1 bit. So this begins where the number of remaining hashes equals the number of
// remaining 1 bits. (Therefore the last leaf of a tree may also use the index that it has in a
// smaller tree. This is harmless: the verifier starts from its own statement, and nothing depends
// on the index.)
func rootFrom(l digest, index uint32, siblings []digest) (digest, bool) {
	if index >= maxLeaves || len(siblings) > maxPath {
		return digest{}, false
	}
	for i, sibling := range siblings {
		ones, left := bits.OnesCount32(index), len(siblings)-i
		if ones > left {
			return digest{}, false
		}
		if ones == left {
			index >>= bits.TrailingZeros32(index)
		}
		if index&1 == 1 {
			l = node(sibling, l)
		} else {
			l = node(l, sibling)
		}
		index >>= 1
	}
	return l, index == 0
}
