package luks2_test

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2"
	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2/luks2test"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// genuine returns a header with the JSON that cryptsetup 2.6.1 wrote for Muster, on a machine with device-mapper.
func genuine(t testing.TB, name string) luks2test.Header {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", "genuine-"+name+".json"))
	if err != nil {
		t.Fatal(err)
	}
	return luks2test.Header{UUID: luks2test.UUID, Label: luks2.LabelState, Epoch: 6, JSON: strings.TrimSpace(string(b))}
}

var kinds = map[string]luks2.Integrity{"hmac-sha256": luks2.HMACSHA256, "none": luks2.NoIntegrity}

func TestWhatCryptsetupWritesForMusterIsAccepted(t *testing.T) {
	for name, integrity := range kinds {
		for _, label := range []string{luks2.LabelNew, luks2.LabelState} {
			h := genuine(t, name)
			h.Label = label
			b := h.Bytes()
			got, err := luks2.Parse(b, integrity)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if got.ID.String() != h.UUID || got.Label != label || got.Epoch != h.Epoch || !bytes.Equal(got.Bytes(), b) {
				t.Errorf("%s: %+v", name, got)
			}
		}
	}
}

func TestWhatTheTestsWriteIsAcceptedToo(t *testing.T) {
	for name, integrity := range kinds {
		h := luks2test.Genuine(t, []byte("key"), integrity, luks2.LabelNew)
		if _, err := luks2.Parse(h.Bytes(), integrity); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestADiskWithTheOtherIntegrityIsRefused(t *testing.T) {
	for name, integrity := range kinds {
		for other, wanted := range kinds {
			if _, err := luks2.Parse(genuine(t, name).Bytes(), wanted); (err == nil) != (integrity == wanted) {
				t.Errorf("%s where %s is wanted: %v", name, other, err)
			}
		}
	}
	if _, err := luks2.Parse(genuine(t, "none").Bytes(), 0); err == nil {
		t.Error("no integrity was asked for, and the disk accepted")
	}
}

func TestWhatWasCheckedIsACopy(t *testing.T) {
	b := genuine(t, "none").Bytes()
	h, err := luks2.Parse(b, luks2.NoIntegrity)
	if err != nil {
		t.Fatal(err)
	}
	want := bytes.Clone(b)
	clear(b)
	if !bytes.Equal(h.Bytes(), want) {
		t.Error("whoever changes the buffer changes the header that was checked")
	}
}

// Each file has the reason in its first line, a part of the error in its second, and JSON in the third. Apart from the JSON the header is genuine, with
// right checksums (B5).
func TestHostileJSONIsRefused(t *testing.T) {
	files, err := filepath.Glob("testdata/refused/*.txt")
	if err != nil || len(files) < 60 {
		t.Fatal(len(files), err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			h, want := refused(t, file)
			if _, err := luks2.Parse(h.Bytes(), luks2.HMACSHA256); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("got %v, want %s", err, want)
			}
			h.JSON = genuine(t, "hmac-sha256").JSON
			if _, err := luks2.Parse(h.Bytes(), luks2.HMACSHA256); err != nil {
				t.Errorf("repaired: %v", err)
			}
		})
	}
}

func refused(t testing.TB, file string) (h luks2test.Header, want string) {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.SplitN(string(b), "\n", 3)
	if len(lines) != 3 || len(lines[0]) < 10 || len(lines[1]) < 10 {
		t.Fatalf("%s: %d lines", file, len(lines))
	}
	h = genuine(t, "hmac-sha256")
	h.JSON = strings.TrimSuffix(lines[2], "\n")
	return h, strings.TrimPrefix(lines[1], "# ")
}

const (
	second = luks2.MetadataSize
	all    = 2 * luks2.MetadataSize
)

// both returns a change of both binary headers that also corrects the checksums.
func both(change func(m []byte)) func(b []byte) {
	return func(b []byte) {
		change(b[:second])
		change(b[second:all])
		reseal(b)
	}
}

func reseal(b []byte) {
	luks2test.Seal(b[:second])
	luks2test.Seal(b[second:all])
}

func put(at int, text string, size int) func(m []byte) {
	return func(m []byte) {
		clear(m[at : at+size])
		copy(m[at:at+size], text)
	}
}

// Invariant B5.
func TestHostileBinaryHeadersAreRefused(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(b []byte)
		want   string
	}{
		"no LUKS header":                        {func(b []byte) { clear(b[:6]) }, "first header: it is not a LUKS2 header"},
		"LUKS1":                                 {func(b []byte) { b[7] = 1 }, "first header: it is not a LUKS2 header"},
		"a version that is not there":           {func(b []byte) { b[6] = 1 }, "first header: it is not a LUKS2 header"},
		"no second header":                      {func(b []byte) { clear(b[second:all]) }, "second header: it is not a LUKS2 header"},
		"the first header twice":                {func(b []byte) { copy(b[second:all], b[:second]) }, "second header: it is not a LUKS2 header"},
		"a flipped bit in the first JSON":       {func(b []byte) { b[5000] ^= 1 }, "first header: its checksum is wrong"},
		"a flipped bit in the second JSON":      {func(b []byte) { b[second+5000] ^= 1 }, "second header: its checksum is wrong"},
		"a flipped bit in the salt":             {func(b []byte) { b[110] ^= 1 }, "first header: its checksum is wrong"},
		"a checksum of zeroes":                  {func(b []byte) { clear(b[448:512]) }, "first header: its checksum is wrong"},
		"a longer checksum":                     {func(b []byte) { b[448+33] = 1 }, "its padding is not zero"},
		"a checksum of another algorithm":       {both(put(72, "sha1", 32)), "checksum algorithm"},
		"no checksum algorithm":                 {both(put(72, "", 32)), "checksum algorithm"},
		"a checksum algorithm with a tail":      {both(put(72, "sha256\x00x", 32)), "checksum algorithm"},
		"a bigger JSON area":                    {both(func(m []byte) { binary.BigEndian.PutUint64(m[8:], 32768) }), "size 32768"},
		"a header of 2^64 bytes":                {both(func(m []byte) { binary.BigEndian.PutUint64(m[8:], 1<<64-1) }), "size 18446744073709551615"},
		"a header of nothing":                   {both(func(m []byte) { binary.BigEndian.PutUint64(m[8:], 0) }), "size 0"},
		"a header that is elsewhere":            {both(func(m []byte) { binary.BigEndian.PutUint64(m[256:], 1<<40) }), "its offset is"},
		"an epoch of nothing":                   {both(func(m []byte) { binary.BigEndian.PutUint64(m[16:], 0) }), "epoch 0"},
		"an epoch that overflows":               {both(func(m []byte) { binary.BigEndian.PutUint64(m[16:], 1<<64-1) }), "epoch 18446744073709551615"},
		"another label":                         {both(put(24, "root", 48)), "label"},
		"no label":                              {both(put(24, "", 48)), "label"},
		"a label with a tail":                   {both(put(24, luks2.LabelState+"\x00x", 48)), "label"},
		"a label without an end":                {both(put(24, luks2.LabelState+strings.Repeat("\x01", 48), 48)), "label"},
		"a subsystem":                           {both(put(208, "x", 48)), "subsystem"},
		"no UUID":                               {both(put(168, "", 40)), "UUID"},
		"an upper-case UUID":                    {both(put(168, strings.ToUpper(luks2test.UUID), 40)), "UUID"},
		"a UUID that is no random one":          {both(put(168, "0f1e2d3c-4b5a-1968-8776-655443322110", 40)), "UUID: want a random one"},
		"a UUID of another variant":             {both(put(168, "0f1e2d3c-4b5a-4968-c776-655443322110", 40)), "UUID: want a random one"},
		"a UUID with a path":                    {both(put(168, "../../../../../../../../../etc/passwd", 40)), "UUID"},
		"something in the padding":              {both(func(m []byte) { m[300] = 1 }), "its padding is not zero"},
		"something in the padding behind":       {both(func(m []byte) { m[4095] = 1 }), "its padding is not zero"},
		"something behind the JSON":             {both(func(m []byte) { m[second-1] = 1 }), "something follows the JSON text"},
		"JSON without an end":                   {both(func(m []byte) { copy(m[4096:], bytes.Repeat([]byte(" "), second)) }), "something follows the JSON text"},
		"headers of two epochs":                 {func(b []byte) { b[second+23]++; reseal(b) }, "the two headers differ: epoch"},
		"headers of two disks":                  {func(b []byte) { b[second+168] = '1'; reseal(b) }, "the two headers differ in their UUID"},
		"headers with two labels":               {func(b []byte) { put(24, luks2.LabelNew, 48)(b[second:]); reseal(b) }, "the two headers differ: label"},
		"another cipher in the second":          {func(b []byte) { swap(b[second:all]); reseal(b) }, "the two headers differ in their JSON"},
		"another cipher in the first":           {func(b []byte) { swap(b[:second]); reseal(b) }, "the two headers differ in their JSON"},
		"a null cipher, and an old checksum":    {func(b []byte) { swap(b[:second]); swap(b[second:all]) }, "first header: its checksum is wrong"},
		"a space more in the second header's":   {func(b []byte) { b[second+4096+len(genuine(t, "none").JSON)] = ' '; reseal(b) }, "the two headers differ in their JSON"},
		"the headers of a disk that was zeroed": {func(b []byte) { clear(b) }, "first header: it is not a LUKS2 header"},
	} {
		t.Run(name, func(t *testing.T) {
			b := genuine(t, "none").Bytes()
			if _, err := luks2.Parse(b, luks2.NoIntegrity); err != nil {
				t.Fatal(err)
			}
			tt.change(b)
			if _, err := luks2.Parse(b, luks2.NoIntegrity); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %s", err, tt.want)
			}
		})
	}
}

func swap(m []byte) {
	copy(m, bytes.Replace(m, []byte("aes-xts-plain64"), []byte("cipher_null-ecb"), 1))
}

func TestEachLengthButOneIsRefused(t *testing.T) {
	b := genuine(t, "none").Bytes()
	for _, n := range []int{0, 1, 511, 512, 4096, second, all, luks2.Size - 1} {
		if _, err := luks2.Parse(b[:n], luks2.NoIntegrity); err == nil {
			t.Errorf("%d bytes were accepted", n)
		}
	}
	if _, err := luks2.Parse(append(b, 0), luks2.NoIntegrity); err == nil {
		t.Error("one byte more was accepted")
	}
}

// Each checked bit matters: no header passes with a flipped bit and the old checksum.
func TestEachFlippedBitIsRefused(t *testing.T) {
	b := genuine(t, "hmac-sha256").Bytes()
	for i := 0; i < all; i += 61 {
		if i >= 8192 && i < second || i >= second+8192 {
			i += 500 // all zeros
		}
		if i >= all {
			break
		}
		b[i] ^= 1 << (i % 8)
		if _, err := luks2.Parse(b, luks2.HMACSHA256); err == nil {
			t.Errorf("byte %d", i)
		}
		b[i] ^= 1 << (i % 8)
	}
}

func TestBlankAndNewDisksAreTold(t *testing.T) {
	h := genuine(t, "hmac-sha256")
	h.Label = luks2.LabelNew
	isNew, state := h.Bytes(), genuine(t, "hmac-sha256").Bytes()
	if id, ok := luks2.New(isNew); !ok || id.String() != h.UUID || luks2.Blank(isNew) {
		t.Error("a new disk was not recognized", id, ok)
	}
	clear(isNew[512:])
	if _, ok := luks2.New(isNew); !ok {
		t.Error("a disk whose formatting was cut off behind its first sector is new")
	}
	if _, ok := luks2.New(state); ok {
		t.Error("a disk with a cluster's key is not new")
	}
	for n := range 512 {
		if _, ok := luks2.New(isNew[:n]); ok {
			t.Fatal(n, "bytes")
		}
	}
	if !luks2.Blank(make([]byte, luks2.Size)) {
		t.Error("nothing but zeroes is blank")
	}
	b := make([]byte, luks2.Size)
	b[luks2.Size-1] = 1
	if luks2.Blank(b) {
		t.Error("one bit is not blank")
	}
}
