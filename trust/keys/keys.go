// Package keys derives a cluster's keys from its root secret.
//
// A cluster has one root secret and one salt, both made by its owner; the pair has a version. Every
// purpose has its own method with a fixed label (K1), so no name that a caller chooses can produce
// another purpose's key. Derivation is HKDF with SHA-256 (RFC 5869):
//
//	disk key            = HKDF(root, salt, "muster/v2/disk" || 0 || version || disk ID || disk salt)
//	etcd encryption key = HKDF(root, salt, "muster/v2/etcd-encryption" || 0 || version)
//	measurement secret  = HKDF(root, salt, "muster/v2/measurement-secret" || 0 || version)
//	cluster ID          = HKDF(measurement secret, measurement salt, "muster/v2/cluster-id" || 0 || version)
//
// each 32 bytes long. The version is that of the root secret, 4 bytes, big-endian; a disk ID has 36
// bytes and a disk's salt 32. No label has a zero byte, so no two inputs are equal. After its salt
// is deleted, the key of a disk cannot be derived any more (K4). A second, independent program
// computed the vectors in testdata.
//
// Secrets are types that print as their name under every verb of fmt, refuse to be marshaled (K3),
// and cannot be compared with ==, which is not constant time.
package keys

import (
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
)

// Size is the length in bytes of a root secret, a salt, each key and a cluster ID.
const Size = 32

const (
	labelDisk        = "muster/v2/disk"
	labelEtcd        = "muster/v2/etcd-encryption"
	labelMeasurement = "muster/v2/measurement-secret"
	labelClusterID   = "muster/v2/cluster-id"
)

// Version numbers the root secrets of one cluster, from 1. It is part of every derivation. The zero value is none.
type Version uint32

// FirstVersion is the version of a new cluster's root secret.
const FirstVersion Version = 1

// ErrDiskID means that a text is not a disk's ID.
var ErrDiskID = errors.New("a disk ID is a UUID in its 36-character lower-case form")

// ErrLength means that a root secret or a salt does not have [Size] bytes.
var ErrLength = errors.New("a root secret and a salt have 32 bytes each")

// DiskID identifies a state disk: a UUID in its 36-character lower-case form (RFC 9562, section 4).
// Its zero value identifies no disk.
type DiskID struct{ s string }

// ParseDiskID checks s. Each disk has exactly one spelling, since the spelling is an input of the
// derivation. The error wraps [ErrDiskID].
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

// String returns the ID as parsed; empty for the zero value.
func (d DiskID) String() string { return d.s }

// ErrDiskSalt means that a text is not the salt of a disk.
var ErrDiskSalt = errors.New("a disk's salt has 64 lower-case hexadecimal digits, and is not zero")

// DiskSalt is a random input of a disk's key. It is not secret, but the key cannot be derived any
// more once the salt is deleted everywhere (K4). The zero value is no salt.
type DiskSalt [Size]byte

// NewDiskSalt returns a random salt.
func NewDiskSalt() DiskSalt {
	var s DiskSalt
	_, _ = rand.Read(s[:]) // never fails
	return s
}

// ParseDiskSalt reads the result of [DiskSalt.String]. The error wraps [ErrDiskSalt].
func ParseDiskSalt(text string) (DiskSalt, error) {
	b, err := hex.DecodeString(text)
	if err != nil || len(b) != Size || DiskSalt(b) == (DiskSalt{}) || hex.EncodeToString(b) != text {
		return DiskSalt{}, ErrDiskSalt
	}
	return DiskSalt(b), nil
}

// String returns the salt in 64 lower-case hexadecimal digits.
func (s DiskSalt) String() string { return hex.EncodeToString(s[:]) }

// ClusterID identifies a cluster. It is not secret: machines extend PCR 15 with its SHA-256.
type ClusterID [Size]byte

// String returns the ID in 64 lower-case hexadecimal digits.
func (c ClusterID) String() string { return hex.EncodeToString(c[:]) }

// Root is a cluster's root secret with its salt and their version.
type Root struct {
	_       [0]func() // not comparable: == is not constant time
	key     secret
	salt    secret
	version Version
}

// NewRoot takes a root secret and a salt of the [FirstVersion]. The arrays are copied.
func NewRoot(root, salt [Size]byte) *Root {
	return &Root{key: hide(root[:]), salt: hide(salt[:]), version: FirstVersion}
}

// ParseRoot takes a root secret and a salt of exactly [Size] bytes each; otherwise the error wraps
// [ErrLength]. It also refuses 32 zero bytes, since they look like a secret that was never set, and
// version 0.
func ParseRoot(version Version, root, salt []byte) (*Root, error) {
	if version < FirstVersion {
		return nil, errors.New("a root secret's version is 1 or more")
	}
	if len(root) != Size || len(salt) != Size {
		return nil, fmt.Errorf("%w, not %d and %d", ErrLength, len(root), len(salt))
	}
	if [Size]byte(root) == [Size]byte{} {
		return nil, errors.New("the root secret is all zeroes")
	}
	return &Root{key: hide(root), salt: hide(salt), version: version}, nil
}

// Disk derives the key of one disk. For the zero DiskID the error wraps [ErrDiskID], for the zero
// salt [ErrDiskSalt]: without its salt a disk has no key (K4).
func (r *Root) Disk(id DiskID, salt DiskSalt) (Disk, error) {
	if id.s == "" {
		return Disk{}, ErrDiskID
	}
	if salt == (DiskSalt{}) { // K4
		return Disk{}, ErrDiskSalt
	}
	return Disk{key: derive(r.key, r.salt.reveal(), r.info(labelDisk)+id.s+string(salt[:]))}, nil
}

// EtcdEncryption derives the key with which the API servers encrypt their data in etcd. Every
// control plane has it, and an owner of the root secret can derive it again.
func (r *Root) EtcdEncryption() EtcdEncryption {
	return EtcdEncryption{key: derive(r.key, r.salt.reveal(), r.info(labelEtcd))}
}

// ClusterID derives the cluster's ID. It does not return the measurement secret.
func (r *Root) ClusterID(measurementSalt [Size]byte) ClusterID {
	m := derive(r.key, r.salt.reveal(), r.info(labelMeasurement))
	return ClusterID(derive(m, measurementSalt[:], r.info(labelClusterID)).reveal())
}

// info returns the first part of a key's info input: the purpose and the version.
func (r *Root) info(label string) string {
	return string(binary.BigEndian.AppendUint32([]byte(label+"\x00"), uint32(r.version)))
}

// Disk is the key of one state disk, 32 bytes.
type Disk struct {
	_   [0]func() // not comparable: == is not constant time
	key secret
}

// ParseDisk takes a key as received: exactly [Size] bytes, otherwise the error wraps [ErrLength].
// The slice is copied.
func ParseDisk(key []byte) (Disk, error) {
	if len(key) != Size {
		return Disk{}, fmt.Errorf("disk key: %w, not %d", ErrLength, len(key))
	}
	return Disk{key: hide(key)}, nil
}

// Expose returns a copy of the key, for the one place that sends or uses it. It is nil for the zero
// Disk.
func (d Disk) Expose() []byte { return d.key.reveal() }

// EtcdEncryption is the first key of encryption at rest, 32 bytes; an operator may add others.
type EtcdEncryption struct {
	_   [0]func() // not comparable: == is not constant time
	key secret
}

// Expose returns a copy of the key, for the one place that stores it. It is nil for the zero
// EtcdEncryption.
func (e EtcdEncryption) Expose() []byte { return e.key.reveal() }

// BootSecret distinguishes one boot of a machine from that of a copy: 32 random bytes that the
// machine makes once in each boot. No key is derived from it.
type BootSecret struct {
	_     [0]func() // not comparable: == is not constant time
	bytes secret
}

// NewBootSecret returns a random secret.
func NewBootSecret() BootSecret {
	b := make([]byte, Size)
	_, _ = rand.Read(b) // never fails
	return BootSecret{bytes: hide(b)}
}

// ParseBootSecret takes a secret as received or read from a file: exactly [Size] bytes that are not
// all zero. The slice is copied.
func ParseBootSecret(b []byte) (BootSecret, error) {
	if len(b) != Size || [Size]byte(b) == [Size]byte{} {
		return BootSecret{}, fmt.Errorf("a boot secret has %d bytes, not all of them zero; this one has %d", Size, len(b))
	}
	return BootSecret{bytes: hide(b)}, nil
}

// Expose returns a copy of the secret, for the places that send and store it. It is nil for the
// zero BootSecret.
func (b BootSecret) Expose() []byte { return b.bytes.reveal() }

// Hash returns the SHA-256 of the secret, which is not secret.
func (b BootSecret) Hash() [sha256.Size]byte { return sha256.Sum256(b.bytes.reveal()) }

// derive cannot fail: RFC 5869 limits the length to 255 hashes, and the key is 32 bytes long.
func derive(key secret, salt []byte, info string) secret {
	out, err := hkdf.Key(sha256.New, key.reveal(), salt, info, Size)
	if err != nil {
		panic("keys: HKDF-SHA256 of 32 bytes: " + err.Error())
	}
	return hide(out)
}
