package keys_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/gob"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"reflect"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/muster-k8s/muster/trust/keys"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Invariant K1.
func TestDerivationsEqualTheVectorsOfAnIndependentProgram(t *testing.T) {
	raw, err := os.ReadFile("testdata/vectors.json")
	if err != nil {
		t.Fatal(err)
	}
	var vectors []struct {
		Version                                                                              keys.Version
		Root, Salt, DiskID, DiskSalt, DiskKey, EtcdEncryptionKey, MeasurementSalt, ClusterID string
	}
	if err := json.Unmarshal(raw, &vectors); err != nil {
		t.Fatal(err)
	}
	if len(vectors) < 3 {
		t.Fatalf("%d vectors, want at least 3", len(vectors))
	}
	for _, v := range vectors {
		root, err := keys.ParseRoot(v.Version, unhex(t, v.Root), unhex(t, v.Salt))
		if err != nil {
			t.Fatal(err)
		}
		id, err := keys.ParseDiskID(v.DiskID)
		if err != nil {
			t.Fatal(err)
		}
		salt, err := keys.ParseDiskSalt(v.DiskSalt)
		if err != nil {
			t.Fatal(err)
		}
		disk, err := root.Disk(id, salt)
		if err != nil {
			t.Fatal(err)
		}
		if got := hex.EncodeToString(disk.Expose()); got != v.DiskKey {
			t.Errorf("disk %s: %s, want %s", id, got, v.DiskKey)
		}
		if got := hex.EncodeToString(root.EtcdEncryption().Expose()); got != v.EtcdEncryptionKey {
			t.Errorf("etcd encryption key %s, want %s", got, v.EtcdEncryptionKey)
		}
		if got := root.ClusterID([32]byte(unhex(t, v.MeasurementSalt))).String(); got != v.ClusterID {
			t.Errorf("cluster ID %s, want %s", got, v.ClusterID)
		}
	}
}

// Invariant K1.
func TestOneDiskHasOneSpelling(t *testing.T) {
	const good = "5f0c95b6-2a3d-4c7e-9f10-0123456789ab"
	if _, err := keys.ParseDiskID(good); err != nil {
		t.Fatal(err)
	}
	for name, s := range map[string]string{
		"empty":                        "",
		"upper case":                   strings.ToUpper(good),
		"without dashes":               strings.ReplaceAll(good, "-", "") + "0000",
		"in braces":                    "{" + good + "}",
		"a dash too early":             "5f0c95b-62a3d-4c7e-9f10-0123456789ab",
		"a purpose smuggled in":        "../cluster-id/0000-0000-000000000000",
		"one character too many":       good + "0",
		"one character too few":        good[:35],
		"a NUL":                        good[:35] + "\x00",
		"full-width digits":            "５f0c95b6-2a3d-4c7e-9f10-0123456789",
		"a newline at the end":         good + "\n",
		"a letter that is no digit":    "gf0c95b6-2a3d-4c7e-9f10-0123456789ab",
		"a digit where a dash must be": "5f0c95b602a3d-4c7e-9f10-0123456789ab",
	} {
		if id, err := keys.ParseDiskID(s); !errors.Is(err, keys.ErrDiskID) || id != (keys.DiskID{}) {
			t.Errorf("%s: %q gave %q, %v", name, s, id, err)
		}
	}
}

func TestEveryDiskHasItsOwnKey(t *testing.T) {
	root := keys.NewRoot([32]byte{1}, [32]byte{2})
	seen := map[string]string{}
	rapid.Check(t, func(t *rapid.T) {
		b := rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "uuid")
		id, err := keys.ParseDiskID(fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:]))
		if err != nil {
			t.Fatal(err)
		}
		disk, err := root.Disk(id, keys.DiskSalt{3})
		if err != nil {
			t.Fatal(err)
		}
		key := string(disk.Expose())
		if other, ok := seen[key]; ok && other != id.String() {
			t.Fatalf("disks %s and %s have one key", other, id)
		}
		seen[key] = id.String()
	})
}

// K4: each input of a disk's key changes it, so without one of them there is no key.
func TestEachPartOfADisksKeyCounts(t *testing.T) {
	id, err := keys.ParseDiskID("5f0c95b6-2a3d-4c7e-9f10-0123456789ab")
	if err != nil {
		t.Fatal(err)
	}
	root := [32]byte{1}
	keyOf := func(version keys.Version, salt keys.DiskSalt) (disk, etcd, cluster string) {
		r, err := keys.ParseRoot(version, root[:], root[:])
		if err != nil {
			t.Fatal(err)
		}
		key, err := r.Disk(id, salt)
		if err != nil {
			t.Fatal(err)
		}
		return string(key.Expose()), string(r.EtcdEncryption().Expose()), r.ClusterID(root).String()
	}
	disk, etcd, cluster := keyOf(1, keys.DiskSalt{3})
	if other, _, _ := keyOf(1, keys.DiskSalt{4}); other == disk {
		t.Error("another salt gives the same key")
	}
	if d, e, c := keyOf(2, keys.DiskSalt{3}); d == disk || e == etcd || c == cluster {
		t.Error("another version gives the same disk key, etcd's key or cluster ID")
	}
	if _, err := keys.NewRoot(root, root).Disk(id, keys.DiskSalt{}); !errors.Is(err, keys.ErrDiskSalt) {
		t.Errorf("a key without a salt: %v", err)
	}
}

func TestADisksSaltHasOneSpelling(t *testing.T) {
	a, b := keys.NewDiskSalt(), keys.NewDiskSalt()
	if a == b || a == (keys.DiskSalt{}) {
		t.Fatalf("%s and %s", a, b)
	}
	if got, err := keys.ParseDiskSalt(a.String()); err != nil || got != a {
		t.Fatalf("%s, %v", got, err)
	}
	for _, s := range []string{"", strings.Repeat("0", 64), strings.ToUpper(keys.DiskSalt{0xab}.String()), a.String() + "00", a.String()[:62], strings.Repeat("g", 64)} {
		if got, err := keys.ParseDiskSalt(s); !errors.Is(err, keys.ErrDiskSalt) || got != (keys.DiskSalt{}) {
			t.Errorf("%q gave %s, %v", s, got, err)
		}
	}
}

func TestWrongLengthsAreRefused(t *testing.T) {
	full := bytes.Repeat([]byte{7}, 32)
	for _, n := range []int{0, 1, 31, 33, 64} {
		if _, err := keys.ParseRoot(1, bytes.Repeat([]byte{7}, n), full); !errors.Is(err, keys.ErrLength) {
			t.Errorf("root of %d bytes: %v", n, err)
		}
		if _, err := keys.ParseRoot(1, full, bytes.Repeat([]byte{7}, n)); !errors.Is(err, keys.ErrLength) {
			t.Errorf("salt of %d bytes: %v", n, err)
		}
		if _, err := keys.ParseDisk(bytes.Repeat([]byte{7}, n)); !errors.Is(err, keys.ErrLength) {
			t.Errorf("disk key of %d bytes: %v", n, err)
		}
	}
	if _, err := keys.ParseRoot(1, make([]byte, 32), full); err == nil {
		t.Error("a root secret of zeroes was accepted")
	}
	if _, err := keys.ParseRoot(0, full, full); err == nil {
		t.Error("a root secret without a version was accepted")
	}
	if _, err := keys.NewRoot([32]byte{1}, [32]byte{}).Disk(keys.DiskID{}, keys.DiskSalt{1}); !errors.Is(err, keys.ErrDiskID) {
		t.Errorf("a key for no disk: %v", err)
	}
	if (keys.Disk{}).Expose() != nil || (keys.EtcdEncryption{}).Expose() != nil || (keys.BootSecret{}).Expose() != nil {
		t.Error("a zero value has a key")
	}
}

func TestAnExposedKeyIsACopy(t *testing.T) {
	d, err := keys.ParseDisk(bytes.Repeat([]byte{7}, 32))
	if err != nil {
		t.Fatal(err)
	}
	clear(d.Expose())
	if d.Expose()[0] != 7 {
		t.Error("writing to an exposed key changed the key")
	}
}

// Each way of printing or marshaling is tried on the secrets and on structs around them. The output
// must not contain the bytes raw, in hexadecimal in both cases, or as decimal numbers (K3).
func TestSecretsNeverPrint(t *testing.T) {
	raw := [32]byte{0xde, 0xad, 0xbe, 0xef, 0xfe, 0xed, 0xfa, 0xce}
	root := keys.NewRoot(raw, raw)
	disk, err := keys.ParseDisk(raw[:])
	if err != nil {
		t.Fatal(err)
	}
	// No method makes one of chosen bytes, so the test searches for the derived bytes below.
	etcd := root.EtcdEncryption()
	derived := etcd.Expose()
	boot, err := keys.ParseBootSecret(raw[:])
	if err != nil {
		t.Fatal(err)
	}
	type exported struct {
		Root *keys.Root
		Disk keys.Disk
	}
	type unexported struct {
		root *keys.Root
		disk keys.Disk
		deep map[string][]any
	}
	values := map[string]any{
		"root": root, "root value": reflect.ValueOf(root).Elem().Interface(), "disk": disk, "pointer to a disk": &disk,
		"boot secret": boot, "boot secret inside": struct{ secret keys.BootSecret }{boot}, "etcd key": etcd, "etcd key inside": struct{ key keys.EtcdEncryption }{etcd},
		"struct": exported{root, disk}, "pointer to a struct": &exported{root, disk},
		"unexported fields": unexported{root, disk, map[string][]any{"x": {disk, root}}},
		"slice":             []keys.Disk{disk}, "error": fmt.Errorf("wrapped: %v", disk),
	}
	for name, v := range values {
		var out bytes.Buffer
		for _, verb := range strings.Split("v +v #v s q x X # x # X d o b c U e g t p T", " ") {
			if verb != "#" {
				fmt.Fprintf(&out, "%"+verb+"\n", v)
			}
		}
		fmt.Fprint(&out, v)
		for _, h := range []slog.Handler{slog.NewJSONHandler(&out, nil), slog.NewTextHandler(&out, nil)} {
			slog.New(h).Info("x", "v", v, "group", slog.GroupValue(slog.Any("inner", v)))
		}
		if b, err := json.Marshal(v); err == nil {
			out.Write(b)
		}
		_ = gob.NewEncoder(&out).Encode(v)
		for kind, leak := range map[string]string{
			"raw": "\xde\xad\xbe\xef", "hexadecimal": "deadbeef", "decimal": "222 173 190", "with commas": "0xde, 0xad", "base64": "3q2+7",
			"derived, raw": string(derived[:4]), "derived, hexadecimal": hex.EncodeToString(derived[:4]),
			"derived, decimal": fmt.Sprintf("%d %d %d", derived[0], derived[1], derived[2]),
		} {
			if strings.Contains(strings.ToLower(out.String()), strings.ToLower(leak)) {
				t.Errorf("%s leaks as %s: %q", name, kind, out.String())
			}
		}
	}
	for name, marshal := range map[string]func() ([]byte, error){
		"root JSON": func() ([]byte, error) { return json.Marshal(root) }, "disk JSON": func() ([]byte, error) { return json.Marshal(disk) },
		"root text": root.MarshalText, "disk text": disk.MarshalText,
		"root binary": root.MarshalBinary, "disk binary": disk.MarshalBinary,
		"etcd key JSON": func() ([]byte, error) { return json.Marshal(etcd) }, "etcd key text": etcd.MarshalText, "etcd key binary": etcd.MarshalBinary,
	} {
		if b, err := marshal(); err == nil {
			t.Errorf("%s was marshalled: %q", name, b)
		}
	}
}

func TestSecretsAreNotComparable(t *testing.T) {
	for _, typ := range []reflect.Type{reflect.TypeFor[keys.Root](), reflect.TypeFor[keys.Disk](), reflect.TypeFor[keys.EtcdEncryption](), reflect.TypeFor[keys.BootSecret]()} {
		if typ.Comparable() {
			t.Errorf("%s is comparable with ==", typ)
		}
	}
}

func unhex(t *testing.T, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func FuzzParseDiskID(f *testing.F) {
	f.Add("5f0c95b6-2a3d-4c7e-9f10-0123456789ab")
	f.Add("")
	f.Fuzz(func(t *testing.T, s string) {
		if id, err := keys.ParseDiskID(s); err == nil && (id.String() != s || len(s) != 36) {
			t.Errorf("%q was read as %q", s, id)
		}
	})
}

func TestABootSecretHasOneForm(t *testing.T) {
	for name, b := range map[string][]byte{"none": nil, "a short one": make([]byte, 31), "a long one": bytes.Repeat([]byte{1}, 33), "one that was never set": make([]byte, 32)} {
		if _, err := keys.ParseBootSecret(b); err == nil {
			t.Errorf("%s is accepted", name)
		}
	}
	one, two := keys.NewBootSecret(), keys.NewBootSecret()
	if one.Hash() == two.Hash() || one.Hash() != sha256.Sum256(one.Expose()) {
		t.Error("two are the same, or the hash is another one")
	}
	if again, err := keys.ParseBootSecret(one.Expose()); err != nil || again.Hash() != one.Hash() {
		t.Errorf("it does not come back: %v", err)
	}
}
