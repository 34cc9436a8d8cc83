// Package luks2 reads the header of a state disk as what it is: the work of a stranger.
//
// Whoever has the disk in hand can write its header, and nothing in a LUKS2 header is
// authenticated: its checksum has no key. A header may name a cipher that encrypts nothing,
// a key derivation that any key satisfies, or a re-encryption that is "under way" and so
// turns a disk into plaintext. Therefore nothing is judged here by what it means.
// A header is accepted if it is what Muster writes, in every field, and refused otherwise
// (B5); the few things that differ from disk to disk are a UUID, a label, a
// counter, random salts, a digest, and which of two places the one key slot is in.
//
// [Parse] keeps a copy of the bytes that it has checked. Only that copy may be opened.
//
// The format is that of the LUKS2 On-Disk Format Specification, version 1.1.2: two
// binary headers of 4096 bytes (section 2.1), each followed by a JSON area (section 3), then
// the key slots' areas.
package luks2

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/muster-k8s/muster/trust/keys"
)

// Where things are on a state disk, in bytes.
const (
	// Size is that of all that comes before the data: two metadata areas and the key slots' areas.
	Size = 1 << 20
	// MetadataSize is that of a binary header and its JSON area. The first is at 0, the second behind it.
	MetadataSize = 16 << 10
	// KeyslotsSize is that of the key slots' areas together, behind the metadata.
	KeyslotsSize = Size - 2*MetadataSize
	// SectorSize is that of the encrypted sectors.
	SectorSize = 4096
	// binarySize is that of the binary header with its padding; what has a meaning ends at 512.
	binarySize = 4096
	jsonSize   = MetadataSize - binarySize
	// markSize is what a disk writes whole or not at all.
	markSize = 512
)

// What Muster writes.
const (
	// LabelNew says that the disk's key is not yet the cluster's: nothing of value is on it.
	LabelNew = "muster-new"
	// LabelState says that the disk's only key is the cluster's.
	LabelState = "muster-state"
	// Cipher encrypts the data and the key slot's area.
	Cipher = "aes-xts-plain64"
	// Hash is that of PBKDF2, of the anti-forensic splitter, and of the header's checksum.
	Hash = "sha256"
	// Iterations are those of PBKDF2 that Muster writes. Keys are random: more would only cost time.
	Iterations = 1000
	// maxIterations is what a later version may have written: more only delays a boot.
	maxIterations = 100_000
	// stripes are those of the anti-forensic splitter: LUKS_STRIPES.
	stripes = 4000
	// maxEpoch is far above what a disk reaches, and far from where a counter turns over.
	maxEpoch = 1 << 32
)

// Integrity says how a disk's data are protected against change. Its zero value is neither.
type Integrity int

// The two ways.
const (
	// HMACSHA256 is dm-integrity below dm-crypt: each sector has a MAC.
	HMACSHA256 Integrity = iota + 1
	// NoIntegrity is encryption alone: who writes to the disk garbles it and is not noticed.
	NoIntegrity
)

// KeySize gives the size of the volume key in bytes: 64 for AES-256-XTS, and 32 for HMAC.
func (i Integrity) KeySize() int {
	if i == HMACSHA256 {
		return 96
	}
	return 64
}

// AreaSize gives the size of a key slot's area in bytes: the volume key in [stripes], in whole 4096 bytes.
func (i Integrity) AreaSize() int { return (i.KeySize()*stripes + 4095) / 4096 * 4096 }

// A Header is one that Muster wrote, or one that can't be told from it.
type Header struct {
	// ID is the disk's: the header's UUID.
	ID keys.DiskID
	// Label is [LabelNew] or [LabelState].
	Label string
	// Epoch counts the header's changes.
	Epoch uint64
	raw   []byte
}

// Bytes gives the bytes that were checked, [Size] of them. They are not to be changed.
func (h *Header) Bytes() []byte { return h.raw }

// magic of the first and of the second binary header (section 2.1).
var magic = [2]string{"LUKS\xba\xbe", "SKUL\xba\xbe"}

// binaryHeader is struct luks2_hdr_disk (section 2.1), big endian.
type binaryHeader struct {
	Magic       [6]byte
	Version     uint16
	HdrSize     uint64
	SeqID       uint64
	Label       [48]byte
	ChecksumAlg [32]byte
	Salt        [64]byte
	UUID        [40]byte
	Subsystem   [48]byte
	HdrOffset   uint64
	Padding     [184]byte
	Checksum    [64]byte
}

const checksumOffset = markSize - 64

// Parse checks the first [Size] bytes of a disk, which it copies before it looks at them. The error says what
// is not as Muster writes it.
func Parse(b []byte, want Integrity) (*Header, error) {
	if want != HMACSHA256 && want != NoIntegrity {
		return nil, fmt.Errorf("integrity %d is none", want)
	}
	if len(b) != Size {
		return nil, fmt.Errorf("want the first %d bytes, not %d", Size, len(b))
	}
	raw := bytes.Clone(b) // B5: what is checked is what is opened
	first, err := parseMetadata(raw[:MetadataSize], 0)
	if err != nil {
		return nil, fmt.Errorf("first header: %w", err)
	}
	second, err := parseMetadata(raw[MetadataSize:2*MetadataSize], 1)
	if err != nil {
		return nil, fmt.Errorf("second header: %w", err)
	}
	switch {
	case first.epoch != second.epoch:
		return nil, fmt.Errorf("the two headers differ: epoch %d and %d", first.epoch, second.epoch)
	case first.id != second.id:
		return nil, errors.New("the two headers differ in their UUID")
	case first.label != second.label:
		return nil, fmt.Errorf("the two headers differ: label %q and %q", first.label, second.label)
	case !bytes.Equal(first.json, second.json):
		return nil, errors.New("the two headers differ in their JSON")
	}
	root, err := parseJSON(first.json)
	if err != nil {
		return nil, fmt.Errorf("JSON: %w", err)
	}
	if err := metadata(want)("metadata", root); err != nil {
		return nil, err
	}
	return &Header{ID: first.id, Label: first.label, Epoch: first.epoch, raw: raw}, nil
}

// parsed is what one of the two headers says.
type parsed struct {
	id    keys.DiskID
	label string
	epoch uint64
	json  []byte
}

// parseMetadata checks the binary header at place 0 or 1 and cuts the JSON text out of its area.
func parseMetadata(b []byte, place int) (parsed, error) {
	h, err := decode(b)
	if err != nil {
		return parsed{}, err
	}
	p := parsed{epoch: h.SeqID}
	if p.label, p.id, err = h.names(place); err != nil {
		return parsed{}, err
	}
	subsystem, err := text(h.Subsystem[:])
	if err != nil || subsystem != "" {
		return parsed{}, fmt.Errorf("subsystem %.48q, want none", h.Subsystem)
	}
	if alg, err := text(h.ChecksumAlg[:]); err != nil || alg != Hash {
		return parsed{}, fmt.Errorf("checksum algorithm %.32q, want %s", h.ChecksumAlg, Hash)
	}
	switch {
	case h.HdrSize != MetadataSize:
		return parsed{}, fmt.Errorf("size %d, want %d", h.HdrSize, MetadataSize)
	case h.HdrOffset != uint64(place)*MetadataSize:
		return parsed{}, fmt.Errorf("it says that it is at %d", h.HdrOffset)
	case h.SeqID == 0 || h.SeqID > maxEpoch:
		return parsed{}, fmt.Errorf("epoch %d, want 1 to %d", h.SeqID, maxEpoch)
	case !zero(h.Padding[:]) || !zero(b[markSize:binarySize]) || !zero(h.Checksum[sha256.Size:]):
		return parsed{}, errors.New("its padding is not zero")
	}
	if sum := checksum(b); !bytes.Equal(sum[:], h.Checksum[:sha256.Size]) {
		return parsed{}, errors.New("its checksum is wrong")
	}
	area := b[binarySize:]
	end := bytes.IndexByte(area, 0)
	if end < 0 || !zero(area[end:]) {
		return parsed{}, errors.New("something follows the JSON text")
	}
	p.json = area[:end]
	return p, nil
}

func decode(b []byte) (h binaryHeader, err error) {
	err = binary.Read(bytes.NewReader(b), binary.BigEndian, &h)
	return h, err
}

// names checks what says whose header it is.
func (h *binaryHeader) names(place int) (label string, id keys.DiskID, err error) {
	if string(h.Magic[:]) != magic[place] || h.Version != 2 {
		return "", id, errors.New("it is not a LUKS2 header")
	}
	if label, err = text(h.Label[:]); err != nil || label != LabelNew && label != LabelState {
		return "", id, fmt.Errorf("label %.48q, want %s or %s", h.Label, LabelNew, LabelState)
	}
	uuid, err := text(h.UUID[:])
	if err != nil {
		return "", id, fmt.Errorf("UUID: %w", err)
	}
	if id, err = keys.ParseDiskID(uuid); err != nil {
		return "", id, fmt.Errorf("UUID: %w", err)
	}
	// RFC 9562, section 5.4: random ones are all that Muster makes.
	if variant := uuid[19]; uuid[14] != '4' || variant != '8' && variant != '9' && variant != 'a' && variant != 'b' {
		return "", keys.DiskID{}, errors.New("UUID: want a random one (version 4)")
	}
	return label, id, nil
}

// checksum is that of a binary header and its JSON area, with the checksum's place zeroed (section 2.1).
func checksum(b []byte) [sha256.Size]byte {
	h := sha256.New()
	h.Write(b[:checksumOffset])
	h.Write(make([]byte, markSize-checksumOffset))
	h.Write(b[markSize:])
	return [sha256.Size]byte(h.Sum(nil))
}

// text gives what is before the first NUL; only NULs may follow.
func text(b []byte) (string, error) {
	end := bytes.IndexByte(b, 0)
	if end < 0 || !zero(b[end:]) {
		return "", errors.New("it does not end, or something follows its end")
	}
	return string(b[:end]), nil
}

func zero(b []byte) bool { return bytes.Count(b, []byte{0}) == len(b) }

// Blank says whether nothing was ever written where a header would be.
func Blank(b []byte) bool { return zero(b) }

// New says whether the first sector alone says that the disk never became a cluster's, and which ID it
// has. What else is on such a disk does not matter, and is never read: it is
// formatted again. Who writes this on a disk of value destroys it, which who can write can do anyway.
func New(b []byte) (keys.DiskID, bool) {
	if len(b) < markSize {
		return keys.DiskID{}, false
	}
	h, err := decode(b)
	if err != nil {
		return keys.DiskID{}, false
	}
	label, id, err := h.names(0)
	return id, err == nil && label == LabelNew
}
