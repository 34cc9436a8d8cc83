// Package luks2test writes genuine and hostile LUKS2 headers without cryptsetup: a second implementation, whose genuine headers cryptsetup opens, and
// which can also write headers that cryptsetup would not.
package luks2test

import (
	"crypto/aes"
	"crypto/pbkdf2"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/crypto/xts"

	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2"
)

// Header is the content of a header.
type Header struct {
	UUID, Label string
	Epoch       uint64
	// JSON is the text of both JSON areas.
	JSON string
	// Areas are the key slots' areas; they may be shorter than the space for them.
	Areas []byte
}

// UUID is the UUID of headers that set none.
const UUID = "0f1e2d3c-4b5a-4968-8776-655443322110"

// Bytes returns the header as it is on a disk, both copies with right checksums.
func (h Header) Bytes() []byte {
	b := make([]byte, luks2.Size)
	for i, magic := range []string{"LUKS\xba\xbe\x00\x02", "SKUL\xba\xbe\x00\x02"} {
		m := b[i*luks2.MetadataSize:][:luks2.MetadataSize]
		copy(m, magic)
		binary.BigEndian.PutUint64(m[8:], luks2.MetadataSize)
		binary.BigEndian.PutUint64(m[16:], h.Epoch)
		copy(m[24:72], h.Label)
		copy(m[72:104], "sha256")
		_, _ = rand.Read(m[104:168]) // never fails
		copy(m[168:208], h.UUID)
		binary.BigEndian.PutUint64(m[256:], uint64(i)*luks2.MetadataSize)
		copy(m[4096:], h.JSON)
		Seal(m)
	}
	copy(b[2*luks2.MetadataSize:], h.Areas)
	return b
}

// Seal corrects the checksum of a binary header with its JSON area, which needs no key.
func Seal(metadata []byte) {
	clear(metadata[448:512])
	sum := sha256.Sum256(metadata)
	copy(metadata[448:], sum[:])
}

// Genuine returns a header as Muster writes it, with a new random volume key that this key opens.
func Genuine(t testing.TB, key []byte, integrity luks2.Integrity, label string) Header {
	t.Helper()
	volume, salt, digestSalt := random(integrity.KeySize()), random(32), random(32)
	area := make([]byte, integrity.AreaSize())
	split(area, volume, 4000)
	areaKey, err := pbkdf2.Key(sha256.New, string(key), salt, luks2.Iterations, 64)
	if err != nil {
		t.Fatal(err)
	}
	c, err := xts.NewCipher(aes.NewCipher, areaKey)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(area); i += 512 {
		c.Encrypt(area[i:i+512], area[i:i+512], uint64(i/512))
	}
	digest, err := pbkdf2.Key(sha256.New, string(volume), digestSalt, luks2.Iterations, 32)
	if err != nil {
		t.Fatal(err)
	}
	segment := map[string]any{"type": "crypt", "offset": "1048576", "size": "dynamic", "iv_tweak": "0", "encryption": "aes-xts-plain64", "sector_size": 4096}
	if integrity == luks2.HMACSHA256 {
		segment["integrity"] = map[string]any{"type": "hmac(sha256)", "journal_encryption": "none", "journal_integrity": "none"}
	}
	type m = map[string]any
	text, err := json.Marshal(m{
		"keyslots": m{"0": m{
			"type": "luks2", "key_size": integrity.KeySize(), "af": m{"type": "luks1", "stripes": 4000, "hash": "sha256"},
			"area": m{"type": "raw", "offset": "32768", "size": strconv.Itoa(integrity.AreaSize()), "encryption": "aes-xts-plain64", "key_size": 64},
			"kdf":  m{"type": "pbkdf2", "hash": "sha256", "iterations": luks2.Iterations, "salt": base64.StdEncoding.EncodeToString(salt)},
		}},
		"tokens":   m{},
		"segments": m{"0": segment},
		"digests": m{"0": m{
			"type": "pbkdf2", "keyslots": []string{"0"}, "segments": []string{"0"}, "hash": "sha256", "iterations": luks2.Iterations,
			"salt": base64.StdEncoding.EncodeToString(digestSalt), "digest": base64.StdEncoding.EncodeToString(digest),
		}},
		"config": m{"json_size": "12288", "keyslots_size": "1015808"},
	})
	if err != nil {
		t.Fatal(err)
	}
	return Header{UUID: UUID, Label: label, Epoch: 3, JSON: string(text), Areas: area}
}

// Replace replaces old, which the JSON text has once.
func (h Header) Replace(t testing.TB, old, with string) Header {
	t.Helper()
	if strings.Count(h.JSON, old) != 1 {
		t.Fatalf("%q is %d times in %s", old, strings.Count(h.JSON, old), h.JSON)
	}
	h.JSON = strings.Replace(h.JSON, old, with, 1)
	return h
}

// split is the anti-forensic splitter of LUKS (On-Disk Format Specification of LUKS1, section 2.4), with SHA-256.
func split(area, key []byte, stripes int) {
	n := len(key)
	sum := make([]byte, n)
	for i := range stripes - 1 {
		s := area[i*n:][:n]
		_, _ = rand.Read(s) // never fails
		for j := range s {
			sum[j] ^= s[j]
		}
		diffuse(sum)
	}
	last := area[(stripes-1)*n:][:n]
	for j := range last {
		last[j] = sum[j] ^ key[j]
	}
}

func diffuse(b []byte) {
	for i := 0; i*sha256.Size < len(b); i++ {
		block := b[i*sha256.Size : min(len(b), (i+1)*sha256.Size)]
		in := binary.BigEndian.AppendUint32(nil, uint32(i))
		sum := sha256.Sum256(append(in, block...))
		copy(block, sum[:])
	}
}

func random(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails
	return b
}
