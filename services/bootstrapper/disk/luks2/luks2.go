// Package luks2 checks the header of a state disk, which is untrusted input.
//
// An attacker who has the disk can write its header, and nothing in a LUKS2 header is authenticated: its checksum has no key. A header may name a cipher
// that does not encrypt, a key derivation that accepts any key, or a re-encryption "under way" that turns a disk into plaintext. Therefore this package
// does not interpret a header. It accepts one that equals what Muster writes in every field, and refuses all others (B5). Only these differ from disk to
// disk: a UUID, a label, a counter, random salts, a digest, and which of two places has the one key slot.
//
// [Parse] keeps a copy of the bytes that it has checked. Only that copy may be opened.
//
// The format is that of the LUKS2 On-Disk Format Specification, version 1.1.2: two binary headers of 4096 bytes (section 2.1), each followed by a JSON
// area (section 3), then the key slots' areas.
package luks2

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/muster-k8s/muster/trust/keys"
)

// These are offsets and sizes on a state disk, in bytes.
const (
	// Size is the size of everything before the data: two metadata areas and the key slots' areas.
	Size = 1 << 20
	// MetadataSize is the size of a binary header with its JSON area. The first is at 0, the second follows it.
	MetadataSize = 16 << 10
	// KeyslotsSize is the size of the key slots' areas together, after the metadata.
	KeyslotsSize = Size - 2*MetadataSize
	// SectorSize is the size of the encrypted sectors.
	SectorSize = 4096
	// binarySize is the size of the binary header with its padding; its fields end at 512.
	binarySize = 4096
	jsonSize   = MetadataSize - binarySize
	// MarkSize is the size in bytes that a disk writes completely or not at all.
	MarkSize = 512
)

// These are the values that Muster writes.
const (
	// LabelNew means that the cluster's key is not set yet: the disk has no data of value.
	LabelNew = "muster-new"
	// LabelState means that the cluster's key is the disk's only key.
	LabelState = "muster-state"
	// Cipher encrypts the data and the key slot's area.
	Cipher = "aes-xts-plain64"
	// Hash is the hash of PBKDF2, of the anti-forensic splitter, and of the header's checksum.
	Hash = "sha256"
	// Iterations is the number of PBKDF2 iterations that Muster writes. Keys are random: more would only take time.
	Iterations = 1000
	// maxIterations is the highest number that a later version may have written: more would only delay a boot.
	maxIterations = 100_000
	// stripes is the number of stripes of the anti-forensic splitter: LUKS_STRIPES.
	stripes = 4000
	// maxEpoch is far above the epoch of any disk, and far below an overflow.
	maxEpoch = 1 << 32
)

// Integrity is how a disk's data are protected against change. Its zero value is not valid.
type Integrity int

// These are the two kinds.
const (
	// HMACSHA256 is dm-integrity below dm-crypt: each sector has a MAC.
	HMACSHA256 Integrity = iota + 1
	// NoIntegrity is encryption alone: a write to the disk garbles data and is not detected.
	NoIntegrity
)

// KeySize returns the size of the volume key in bytes: 64 for AES-256-XTS, and 32 for HMAC.
func (i Integrity) KeySize() int {
	if i == HMACSHA256 {
		return 96
	}
	return 64
}

// AreaSize returns the size of a key slot's area in bytes: the volume key in [stripes], rounded up to 4096 bytes.
func (i Integrity) AreaSize() int { return (i.KeySize()*stripes + 4095) / 4096 * 4096 }

// A Header is one that Muster wrote, or an equivalent one.
type Header struct {
	// ID is the disk's ID: the header's UUID.
	ID keys.DiskID
	// Label is [LabelNew] or [LabelState].
	Label string
	// Epoch counts the header's changes.
	Epoch uint64
	raw   []byte
}

// Bytes returns the bytes that were checked, [Size] of them. The caller must not change them.
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

const checksumOffset = MarkSize - 64

// Parse copies the first [Size] bytes of a disk and checks them. The error names the field that differs from what Muster writes.
func Parse(b []byte, want Integrity) (*Header, error) {
	if want != HMACSHA256 && want != NoIntegrity {
		return nil, fmt.Errorf("integrity %d is none", want)
	}
	if len(b) != Size {
		return nil, fmt.Errorf("want the first %d bytes, not %d", Size, len(b))
	}
	raw := bytes.Clone(b) // B5: the checked bytes are those that are opened
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

// parsed is the content of one of the two headers.
type parsed struct {
	id    keys.DiskID
	label string
	epoch uint64
	json  []byte
}

// parseMetadata checks the binary header at place 0 or 1 and returns it with the JSON text of its area.
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
		return parsed{}, fmt.Errorf("its offset is %d", h.HdrOffset)
	case h.SeqID == 0 || h.SeqID > maxEpoch:
		return parsed{}, fmt.Errorf("epoch %d, want 1 to %d", h.SeqID, maxEpoch)
	case !zero(h.Padding[:]) || !zero(b[MarkSize:binarySize]) || !zero(h.Checksum[sha256.Size:]):
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

// names checks the fields that identify the header, and returns its label and ID.
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
	// RFC 9562, section 5.4: Muster makes only random UUIDs.
	if variant := uuid[19]; uuid[14] != '4' || variant != '8' && variant != '9' && variant != 'a' && variant != 'b' {
		return "", keys.DiskID{}, errors.New("UUID: want a random one (version 4)")
	}
	return label, id, nil
}

// checksum returns the checksum of a binary header and its JSON area, with the checksum's own field zeroed (section 2.1).
func checksum(b []byte) [sha256.Size]byte {
	h := sha256.New()
	h.Write(b[:checksumOffset])
	h.Write(make([]byte, MarkSize-checksumOffset))
	h.Write(b[MarkSize:])
	return [sha256.Size]byte(h.Sum(nil))
}

// text returns the text before the first NUL; only NULs may follow.
func text(b []byte) (string, error) {
	end := bytes.IndexByte(b, 0)
	if end < 0 || !zero(b[end:]) {
		return "", errors.New("it does not end, or something follows its end")
	}
	return string(b[:end]), nil
}

func zero(b []byte) bool { return bytes.Count(b, []byte{0}) == len(b) }

// Blank reports whether no header was ever written.
func Blank(b []byte) bool { return zero(b) }

// New reports whether the first sector marks the disk as one that never became a cluster's, and returns its ID. The rest of such a disk is never read:
// it is formatted again. An attacker who writes this mark to a disk destroys its data, but every writer can do that.
func New(b []byte) (keys.DiskID, bool) {
	if len(b) < MarkSize {
		return keys.DiskID{}, false
	}
	h, err := decode(b)
	if err != nil {
		return keys.DiskID{}, false
	}
	label, id, err := h.names(0)
	return id, err == nil && label == LabelNew
}

// MarkNew returns the first sector of a header as [New] recognizes it. The rest of the header does not fit it any more: its
// checksum is wrong. It returns an error if the header is not one of Muster's.
func MarkNew(b []byte) ([]byte, error) {
	if len(b) < MarkSize {
		return nil, errors.New("it is shorter than a sector")
	}
	h, err := decode(b)
	if err == nil {
		_, _, err = h.names(0)
	}
	if err != nil {
		return nil, err
	}
	h.Label = [48]byte{}
	copy(h.Label[:], LabelNew)
	return binary.Append(nil, binary.BigEndian, h)
}
