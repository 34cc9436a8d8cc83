// Package keys derives a cluster's keys from its root secret.
//
// A cluster has one root secret and one salt, both made by its owner; both together have a version.
// Every purpose has a method of its own with its label inside (K1), so no name that a caller chooses
// can land on another purpose's key. Derivation is HKDF with SHA-256 (RFC 5869):
//
//	disk key            = HKDF(root, salt, "muster/v2/disk" || 0 || version || disk ID || disk salt)
//	etcd encryption key = HKDF(root, salt, "muster/v2/etcd-encryption" || 0 || version)
//	measurement secret  = HKDF(root, salt, "muster/v2/measurement-secret" || 0 || version)
//	cluster ID          = HKDF(measurement secret, measurement salt, "muster/v2/cluster-id" || 0 || version)
//
// each 32 bytes long. The version is that of the root secret, 4 bytes, big-endian; a disk ID has 36 bytes and
// a disk's salt 32. No label has a zero byte, so no two inputs are the same text. The key of a disk whose salt is deleted
// can't be derived any more (K4). The vectors in testdata are computed by a second, independent program.
//
// Secrets are types that print as their name under every verb of fmt and refuse to be
// marshaled (K3), and that cannot be compared with ==, which is not constant time.
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

// FirstVersion is that of the root secret that a cluster is made with.
const FirstVersion Version = 1

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

// String returns the ID as it was parsed; empty for the zero value.
func (d DiskID) String() string { return d.s }

// ErrDiskSalt says that a text is not the salt of a disk.
var ErrDiskSalt = errors.New("a disk's salt has 64 lower-case hexadecimal digits, and is not zero")

// DiskSalt is drawn at random for each disk, and its key depends on it. It is no secret, but a key can't be derived any more once
// it is deleted everywhere (K4). The zero value is no salt.
type DiskSalt [Size]byte

// NewDiskSalt draws one.
func NewDiskSalt() DiskSalt {
	var s DiskSalt
	_, _ = rand.Read(s[:]) // never fails
	return s
}

// ParseDiskSalt reads what [DiskSalt.String] returns; otherwise the error wraps [ErrDiskSalt].
func ParseDiskSalt(text string) (DiskSalt, error) {
	b, err := hex.DecodeString(text)
	if err != nil || len(b) != Size || DiskSalt(b) == (DiskSalt{}) || hex.EncodeToString(b) != text {
		return DiskSalt{}, ErrDiskSalt
	}
	return DiskSalt(b), nil
}

// String returns the salt in 64 lower-case hexadecimal digits.
func (s DiskSalt) String() string { return hex.EncodeToString(s[:]) }

// ClusterID names a cluster. It is no secret: machines extend PCR 15 with its SHA-256.
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

// ParseRoot takes a root secret and a salt of exactly [Size] bytes each; otherwise the
// error wraps [ErrLength]. 32 zero bytes are refused too: they are what a secret looks like
// that nobody filled in. So is version 0.
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

// Disk derives the key of one disk. The zero DiskID gives an error wrapping [ErrDiskID], and the zero salt one wrapping
// [ErrDiskSalt]: without its salt a disk has no key (K4).
func (r *Root) Disk(id DiskID, salt DiskSalt) (Disk, error) {
	if id.s == "" {
		return Disk{}, ErrDiskID
	}
	if salt == (DiskSalt{}) { // K4
		return Disk{}, ErrDiskSalt
	}
	return Disk{key: derive(r.key, r.salt.reveal(), r.info(labelDisk)+id.s+string(salt[:]))}, nil
}

// EtcdEncryption derives the key with which the API servers encrypt what they keep in etcd. Every
// control plane has it, and whoever has the root secret can derive it again.
func (r *Root) EtcdEncryption() EtcdEncryption {
	return EtcdEncryption{key: derive(r.key, r.salt.reveal(), r.info(labelEtcd))}
}

// ClusterID derives the cluster's ID. The measurement secret on the way stays inside.
func (r *Root) ClusterID(measurementSalt [Size]byte) ClusterID {
	m := derive(r.key, r.salt.reveal(), r.info(labelMeasurement))
	return ClusterID(derive(m, measurementSalt[:], r.info(labelClusterID)).reveal())
}

// info begins what a key is derived for: the purpose and the version.
func (r *Root) info(label string) string {
	return string(binary.BigEndian.AppendUint32([]byte(label+"\x00"), uint32(r.version)))
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

// Expose returns a copy of the key, for the one place that sends or uses it. It is nil for
// the zero Disk.
func (d Disk) Expose() []byte { return d.key.reveal() }

// EtcdEncryption is the first key of encryption at rest, 32 bytes: an operator may add others.
type EtcdEncryption struct {
	_   [0]func() // not comparable: == is not constant time
	key secret
}

// Expose returns a copy of the key, for the one place that writes it down. It is nil for the zero
// EtcdEncryption.
func (e EtcdEncryption) Expose() []byte { return e.key.reveal() }

// BootSecret tells one boot of a machine from that of a copy: 32 random bytes that the machine makes once in each boot, and
// that no key follows from.
type BootSecret struct {
	_     [0]func() // not comparable: == is not constant time
	bytes secret
}

// NewBootSecret makes one.
func NewBootSecret() BootSecret {
	b := make([]byte, Size)
	_, _ = rand.Read(b) // never fails
	return BootSecret{bytes: hide(b)}
}

// ParseBootSecret takes one as it came over the wire or out of a file: exactly [Size] bytes that are not all zeroes. The
// slice is copied.
func ParseBootSecret(b []byte) (BootSecret, error) {
	if len(b) != Size || [Size]byte(b) == [Size]byte{} {
		return BootSecret{}, fmt.Errorf("a boot secret has %d bytes, not all of them zero; this one has %d", Size, len(b))
	}
	return BootSecret{bytes: hide(b)}, nil
}

// Expose returns a copy of the secret, for the places that send it and keep it. It is nil for the zero BootSecret.
func (b BootSecret) Expose() []byte { return b.bytes.reveal() }

// Hash returns the SHA-256 of the secret, which is no secret.
func (b BootSecret) Hash() [sha256.Size]byte { return sha256.Sum256(b.bytes.reveal()) }

// derive cannot fail: RFC 5869 limits the length to 255 hashes, and the key is 32 bytes long.
func derive(key secret, salt []byte, info string) secret {
	out, err := hkdf.Key(sha256.New, key.reveal(), salt, info, Size)
	if err != nil {
		panic("keys: HKDF-SHA256 of 32 bytes: " + err.Error())
	}
	return hide(out)
}
