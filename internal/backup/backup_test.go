package backup_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/json"
	"errors"
	"io"
	"math/big"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"filippo.io/age"
	"filippo.io/age/agessh"
	"go.uber.org/goleak"
	"golang.org/x/crypto/ssh"

	"github.com/muster-k8s/muster/internal/backup"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// cluster is an owner and the certificate authority of a cluster.
type cluster struct {
	t         *testing.T
	owner     ed25519.PrivateKey
	key       crypto.Signer
	authority *x509.Certificate
}

func newCluster(t *testing.T, key crypto.Signer) *cluster {
	t.Helper()
	_, owner, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	authority, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &cluster{t, owner, key, authority}
}

func ecdsaKey(t *testing.T) crypto.Signer {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func (c *cluster) public() ed25519.PublicKey { return c.owner.Public().(ed25519.PublicKey) }

var (
	small    = map[string][]byte{"pki/ca.key": []byte("the key"), "pki/ca.crt": []byte("the certificate"), "pki/empty": nil}
	snapshot = bytes.Repeat([]byte("a database "), 20000)
	manifest = backup.Manifest{
		ClusterID: "c1", Node: "node1", TakenAt: time.Date(2026, 11, 26, 10, 0, 0, 0, time.UTC),
		State: backup.State{Epoch: 7, EpochID: "e", PolicySerial: 3, Cluster: json.RawMessage(`{"a":1}`), Nodes: []backup.Node{{Name: "node1", UID: "u", Role: "control-plane", MachineID: "m", DiskID: "d"}, {Name: "w", Banned: true}}},
	}
)

func (c *cluster) write() []byte {
	c.t.Helper()
	var out bytes.Buffer
	if err := backup.Write(&out, c.public(), c.key, manifest, small, bytes.NewReader(snapshot), int64(len(snapshot)), sha256.Sum256(snapshot)); err != nil {
		c.t.Fatal(err)
	}
	return out.Bytes()
}

func (c *cluster) read(file []byte) (*backup.Manifest, map[string][]byte, []byte, error) {
	c.t.Helper()
	id, err := backup.Identity([]ed25519.PrivateKey{c.owner})
	if err != nil {
		c.t.Fatal(err)
	}
	var db bytes.Buffer
	m, files, err := backup.Read(bytes.NewReader(file), id, c.authority, &db)
	return m, files, db.Bytes(), err
}

func TestWhatWasWrittenIsRead(t *testing.T) {
	rsaKey, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	for name, key := range map[string]crypto.Signer{"RSA, as kubeadm makes it": rsaKey, "ECDSA": ecdsaKey(t)} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t, key)
			file := c.write()
			m, files, db, err := c.read(file)
			if err != nil {
				t.Fatal(err)
			}
			want := manifest
			want.Version, want.OwnerKey, want.Files = backup.Version, c.public(), m.Files
			var compact bytes.Buffer
			if err := json.Compact(&compact, m.Cluster); err != nil {
				t.Fatal(err)
			}
			m.Cluster = compact.Bytes()
			if !reflect.DeepEqual(*m, want) || len(m.Files) != 4 || !bytes.Equal(db, snapshot) {
				t.Errorf("read %+v and %d bytes", m, len(db))
			}
			for name, content := range small {
				if got, ok := files[name]; !ok || !bytes.Equal(got, content) {
					t.Errorf("%s: %q", name, got)
				}
			}
			for _, secret := range []string{"the key", "node1"} {
				if bytes.Contains(file, []byte(secret)) {
					t.Errorf("%q is readable in the file", secret)
				}
			}
		})
	}
}

// Invariant K5.
func TestADamagedFileIsRefused(t *testing.T) {
	c := newCluster(t, ecdsaKey(t))
	file := c.write()
	for n := 0; n < len(file); n += max(1, len(file)/97) {
		if _, _, _, err := c.read(file[:n]); err == nil {
			t.Errorf("cut off after %d of %d bytes, it is read", n, len(file))
		}
		changed := slices.Clone(file)
		changed[n] ^= 1
		if _, _, _, err := c.read(changed); err == nil {
			t.Errorf("with a changed byte %d of %d, it is read", n, len(file))
		}
	}
	if _, _, _, err := c.read(file[:len(file)-1]); err == nil {
		t.Error("without its last byte, it is read")
	}
	if _, _, _, err := c.read(append(slices.Clone(file), 0)); err == nil {
		t.Error("with a byte more, it is read")
	}
}

// Whoever has the owner's public key can encrypt to it (K5).
func TestABackupOfSomebodyElseIsRefused(t *testing.T) {
	c, other := newCluster(t, ecdsaKey(t)), newCluster(t, ecdsaKey(t))
	other.owner = c.owner
	if _, _, db, err := c.read(other.write()); !errors.Is(err, backup.ErrForeign) || len(db) > 0 {
		t.Errorf("another authority's: %v, after %d bytes", err, len(db))
	}
	stranger := newCluster(t, c.key)
	if _, _, _, err := stranger.read(c.write()); err == nil || !strings.Contains(err.Error(), "not encrypted for a key of this owner") {
		t.Errorf("another owner's: %v", err)
	}
	// The owner's folder has the keys of before, too. Their order does not matter.
	for _, keys := range [][]ed25519.PrivateKey{{stranger.owner, c.owner}, {c.owner, stranger.owner}} {
		id, err := backup.Identity(keys)
		if err != nil {
			t.Fatal(err)
		}
		if m, _, err := backup.Read(bytes.NewReader(c.write()), id, c.authority, io.Discard); err != nil || !bytes.Equal(m.OwnerKey, c.public()) {
			t.Errorf("one of two keys: %v", err)
		}
		if _, err := backup.FileKey(bytes.NewReader(c.write()), keys); err != nil {
			t.Errorf("the file's key, by one of two keys: %v", err)
		}
	}
	if _, err := backup.FileKey(bytes.NewReader(c.write()), []ed25519.PrivateKey{stranger.owner}); err == nil {
		t.Error("the file's key is for anybody")
	}
	// The signature of a certificate is not one of a backup.
	text := c.authority.RawTBSCertificate
	if _, _, _, err := c.read(c.pack(entry{"backup.json", text}, entry{"backup.sig", c.authority.Signature})); !errors.Is(err, backup.ErrForeign) {
		t.Errorf("a certificate: %v", err)
	}
}

type entry struct {
	name    string
	content []byte
}

// pack makes a file of any entries.
func (c *cluster) pack(entries ...entry) []byte {
	c.t.Helper()
	key, err := ssh.NewPublicKey(c.public())
	if err != nil {
		c.t.Fatal(err)
	}
	to, err := agessh.NewEd25519Recipient(key)
	if err != nil {
		c.t.Fatal(err)
	}
	var out bytes.Buffer
	encrypted, err := age.Encrypt(&out, to)
	if err != nil {
		c.t.Fatal(err)
	}
	packed := gzip.NewWriter(encrypted)
	archive := tar.NewWriter(packed)
	for _, e := range entries {
		if err = archive.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: e.name, Size: int64(len(e.content)), Mode: 0o600}); err == nil {
			_, err = archive.Write(e.content)
		}
		if err != nil {
			c.t.Fatal(err)
		}
	}
	if err := errors.Join(archive.Close(), packed.Close(), encrypted.Close()); err != nil {
		c.t.Fatal(err)
	}
	return out.Bytes()
}

// entries unpacks a file.
func (c *cluster) entries(file []byte) (out []entry) {
	c.t.Helper()
	id, err := backup.Identity([]ed25519.PrivateKey{c.owner})
	if err != nil {
		c.t.Fatal(err)
	}
	plain, err := age.Decrypt(bytes.NewReader(file), id)
	if err != nil {
		c.t.Fatal(err)
	}
	packed, err := gzip.NewReader(plain)
	if err != nil {
		c.t.Fatal(err)
	}
	archive := tar.NewReader(packed)
	for {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			c.t.Fatal(err)
		}
		content, err := io.ReadAll(archive)
		if err != nil {
			c.t.Fatal(err)
		}
		out = append(out, entry{h.Name, content})
	}
}

// What the authority has signed is all of it, and nothing beside it (K5).
func TestWhatTheManifestDoesNotSayIsRefused(t *testing.T) {
	c := newCluster(t, ecdsaKey(t))
	genuine := c.entries(c.write())
	if _, _, _, err := c.read(c.pack(genuine...)); err != nil {
		t.Fatalf("packed again: %v", err)
	}
	for name, change := range map[string]func([]entry) []entry{
		"another epoch": func(e []entry) []entry {
			e[0].content = bytes.Replace(e[0].content, []byte(`"epoch": 7`), []byte(`"epoch": 9`), 1)
			return e
		},
		"another file's content": func(e []entry) []entry { e[2].content = []byte("another"); return e },
		"another snapshot":       func(e []entry) []entry { e[len(e)-1].content = []byte("another"); return e },
		"a longer snapshot": func(e []entry) []entry {
			e[len(e)-1].content = append(slices.Clone(snapshot), 0)
			return e
		},
		"one file less":            func(e []entry) []entry { return slices.Delete(e, 2, 3) },
		"no snapshot":              func(e []entry) []entry { return e[:len(e)-1] },
		"one file more":            func(e []entry) []entry { return append(e, entry{"pki/more", nil}) },
		"two files exchanged":      func(e []entry) []entry { e[2], e[3] = e[3], e[2]; return e },
		"a path out of the folder": func(e []entry) []entry { e[2].name = "../../etc/passwd"; return e },
		"no signature":             func(e []entry) []entry { return slices.Delete(e, 1, 2) },
		"an empty signature":       func(e []entry) []entry { e[1].content = nil; return e },
		"nothing":                  func([]entry) []entry { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			e := slices.Clone(genuine)
			if _, _, _, err := c.read(c.pack(change(e)...)); err == nil {
				t.Error("it is read")
			}
		})
	}
}

func TestWhatCouldNotBeReadIsNotWritten(t *testing.T) {
	c := newCluster(t, ecdsaKey(t))
	for name, tt := range map[string]struct {
		small map[string][]byte
		size  int64
	}{
		"a large file":           {map[string][]byte{"x": make([]byte, backup.MaxSmall+1)}, int64(len(snapshot))},
		"too large a snapshot":   {nil, backup.MaxSnapshot + 1},
		"a file of that name":    {map[string][]byte{backup.Snapshot: nil}, int64(len(snapshot))},
		"a snapshot that is cut": {nil, int64(len(snapshot)) + 1},
		"a snapshot that grows":  {nil, int64(len(snapshot)) - 1},
	} {
		t.Run(name, func(t *testing.T) {
			if err := backup.Write(io.Discard, c.public(), c.key, manifest, tt.small, bytes.NewReader(snapshot), tt.size, sha256.Sum256(snapshot)); err == nil {
				t.Error("it is written")
			}
		})
	}
}

func TestWhatAMachineSaysOfItsBackupIsChecked(t *testing.T) {
	good := backup.Stored{Name: backup.Name("node-1.example", time.Unix(0, 0)), Size: 1, SHA256: strings.Repeat("0a", 32), OwnerKey: strings.Repeat("A", 43) + "="}
	if !good.Valid() || good.Name != "19700101T000000Z-node-1.example.age" {
		t.Errorf("%+v is refused", good)
	}
	for name, change := range map[string]func(*backup.Stored){
		"another folder": func(s *backup.Stored) { s.Name = "../" + s.Name },
		"a folder":       func(s *backup.Stored) { s.Name = "19700101T000000Z-a/b.age" },
		"a hidden file":  func(s *backup.Stored) { s.Name = ".x.age" },
		"a newline":      func(s *backup.Stored) { s.Name += "\n" },
		"no size":        func(s *backup.Stored) { s.Size = 0 },
		"a huge one":     func(s *backup.Stored) { s.Size = 1 << 40 },
		"a short digest": func(s *backup.Stored) { s.SHA256 = "00" },
		"no key":         func(s *backup.Stored) { s.OwnerKey = "" },
		"half a key":     func(s *backup.Stored) { s.OwnerKey = s.OwnerKey[:24] },
		"no hexadecimal": func(s *backup.Stored) { s.SHA256 = strings.Repeat("x", 64) },
	} {
		s := good
		if change(&s); s.Valid() {
			t.Errorf("%s: %+v is accepted", name, s)
		}
	}
}
