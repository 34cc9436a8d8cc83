// Package keys derives a cluster's keys from its root secret.
//
// A cluster has one root secret and one salt, both made by its owner. Every purpose has a
// method of its own with its label inside (K1), so no name that a caller chooses can land
// on another purpose's key. Derivation is HKDF with SHA-256 (RFC 5869):
//
//	disk key            = HKDF(root, salt, "muster/v1/disk/" || disk ID)
//	etcd encryption key = HKDF(root, salt, "muster/v1/etcd-encryption")
//	measurement secret  = HKDF(root, salt, "muster/v1/measurement-secret")
//	cluster ID          = HKDF(measurement secret, measurement salt, "muster/v1/cluster-id")
//
// each 32 bytes long. The vectors in testdata are computed by a second, independent program.
//
// Secrets are types that print as their name under every verb of fmt and refuse to be
// marshalled (K3), and that cannot be compared with ==, which is not constant time.
package keys

import (
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
)

// Size is the length in bytes of a root secret, a salt, each key and a cluster ID.
const Size = 32

const (
	infoDisk        = "muster/v1/disk/"
	infoEtcd        = "muster/v1/etcd-encryption"
	infoMeasurement = "muster/v1/measurement-secret"
	infoClusterID   = "muster/v1/cluster-id"
)

// ErrDiskID says that a text is not a disk's ID.
var ErrDiskID = errors.New("a disk ID is a UUID in its 36-character lower-case form")

// ErrLength says that a root secret or a salt does not have [Size] bytes.
var ErrLength = errors.New("a root secret and a salt have 32 bytes each")

// DiskID names a state disk: a UUID in its 36-character lower-case form (RFC 9562, section
// 4). Its zero value names no disk.
type DiskID struct{ s string }

// ParseDiskID checks s. There is exactly one spelling for each disk, since the spelling
// goes into the derivation. The error wraps [ErrDiskID].
func ParseDiskID(s string) (DiskID, error) {
	if len(s) != 36 {
		return DiskID{}, fmt.Errorf("%w, not %d characters", ErrDiskID, len(s))
	}
	for i := range len(s) {
		c, dash := s[i], i == 8 || i == 13 || i == 18 || i == 23
		if dash != (c == '-') || (!dash && (c < '0' || c > '9') && (c < 'a' || c > 'f')) {
			return DiskID{}, fmt.Errorf("%w: character %d is wrong", ErrDiskID, i)
		}
	}
	return DiskID{s}, nil
}

// String gives the ID as it was parsed; empty for the zero value.
func (d DiskID) String() string { return d.s }

// ClusterID names a cluster. It is no secret: machines extend PCR 15 with its SHA-256.
type ClusterID [Size]byte

// String gives the ID in 64 lower-case hexadecimal digits.
func (c ClusterID) String() string { return hex.EncodeToString(c[:]) }

// Root is a cluster's root secret with its salt.
type Root struct {
	_    [0]func() // not comparable: == is not constant time
	key  secret
	salt secret
}

// NewRoot takes a root secret and a salt. The arrays are copied.
func NewRoot(root, salt [Size]byte) *Root {
	return &Root{key: hide(root[:]), salt: hide(salt[:])}
}

// ParseRoot takes a root secret and a salt of exactly [Size] bytes each; otherwise the
// error wraps [ErrLength]. 32 zero bytes are refused too: they are what a secret looks like
// that nobody filled in.
func ParseRoot(root, salt []byte) (*Root, error) {
	if len(root) != Size || len(salt) != Size {
		return nil, fmt.Errorf("%w, not %d and %d", ErrLength, len(root), len(salt))
	}
	if [Size]byte(root) == [Size]byte{} {
		return nil, errors.New("the root secret is all zeroes")
	}
	return NewRoot([Size]byte(root), [Size]byte(salt)), nil
}

// Disk derives the key of one disk. The zero DiskID gives an error wrapping [ErrDiskID].
func (r *Root) Disk(id DiskID) (Disk, error) {
	if id.s == "" {
		return Disk{}, ErrDiskID
	}
	return Disk{key: derive(r.key, r.salt.reveal(), infoDisk+id.s)}, nil
}

// EtcdEncryption derives the key with which the API servers encrypt what they keep in etcd. Every
// control plane has it, and whoever has the root secret can derive it again.
func (r *Root) EtcdEncryption() EtcdEncryption {
	return EtcdEncryption{key: derive(r.key, r.salt.reveal(), infoEtcd)}
}

// ClusterID derives the cluster's ID. The measurement secret on the way stays inside.
func (r *Root) ClusterID(measurementSalt [Size]byte) ClusterID {
	m := derive(r.key, r.salt.reveal(), infoMeasurement)
	return ClusterID(derive(m, measurementSalt[:], infoClusterID).reveal())
}

// Disk is the key of one state disk, 32 bytes.
type Disk struct {
	_   [0]func() // not comparable: == is not constant time
	key secret
}

// ParseDisk takes a key as it came over the wire: exactly [Size] bytes, else the error
// wraps [ErrLength]. The slice is copied.
func ParseDisk(key []byte) (Disk, error) {
	if len(key) != Size {
		return Disk{}, fmt.Errorf("disk key: %w, not %d", ErrLength, len(key))
	}
	return Disk{key: hide(key)}, nil
}

// Expose gives a copy of the key, for the one place that sends or uses it. It is nil for
// the zero Disk.
func (d Disk) Expose() []byte { return d.key.reveal() }

// EtcdEncryption is the first key of encryption at rest, 32 bytes: an operator may add others.
type EtcdEncryption struct {
	_   [0]func() // not comparable: == is not constant time
	key secret
}

// Expose gives a copy of the key, for the one place that writes it down. It is nil for the zero
// EtcdEncryption.
func (e EtcdEncryption) Expose() []byte { return e.key.reveal() }

// derive cannot fail: RFC 5869 limits the length to 255 hashes, and the key is 32 bytes long.
func derive(key secret, salt []byte, info string) secret {
	out, err := hkdf.Key(sha256.New, key.reveal(), salt, info, Size)
	if err != nil {
		panic("keys: HKDF-SHA256 of 32 bytes: " + err.Error())
	}
	return hide(out)
}
