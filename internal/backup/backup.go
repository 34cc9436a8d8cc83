// Package backup is the format of a cluster's backup: all that new control planes need beside the owner's folder.
//
// A file is one age v1 file for the owner's Ed25519 key (recipient type ssh-ed25519). Its plaintext is a gzip stream of a tar archive with the entries
//
//	backup.json  the [Manifest]: what the backup is of, and size and SHA-256 of each file
//	backup.sig   signature of the manifest with the key of the cluster's certificate authority
//	…            the files of the manifest, in its order
//
// Whoever has the owner's public key can encrypt to it, so the encryption does not prove a file's origin: the signature does. Only control planes
// have the authority's key. The owner's folder has the authority's certificate.
package backup

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"time"

	"filippo.io/age"
	"filippo.io/age/agessh"
	"golang.org/x/crypto/ssh"

	"github.com/muster-k8s/muster/trust/attest"
)

// Names of entries.
const (
	manifestName  = "backup.json"
	signatureName = "backup.sig"
	// Snapshot is etcd's snapshot, as `etcdutl snapshot restore` reads it.
	Snapshot = "etcd.snapshot"
)

// Version is the version of the format.
const Version = 1

const (
	// maxManifest bounds the manifest, in bytes: 5,000 nodes take about 1 MiB.
	maxManifest = 16 << 20
	// maxSignature bounds the signature, in bytes: one of RSA 8192 has 1 KiB.
	maxSignature = 1 << 10
	// MaxSmall bounds each file but the snapshot, in bytes.
	MaxSmall = 1 << 20
	// MaxSnapshot bounds the snapshot, in bytes: etcd's documentation advises against more than 8 GiB.
	MaxSnapshot = 16 << 30
	// maxFiles bounds the files.
	maxFiles = 64
	// MaxFile bounds the encrypted file, in bytes. Encryption adds 16 bytes to each 64 KiB, gzip less than 1 in 1,000.
	MaxFile = MaxSnapshot + MaxSnapshot/500 + maxManifest + maxFiles*MaxSmall
)

// domain begins what is signed. A certificate, which the same key signs, begins with the byte 0x30.
const domain = "muster backup v1\x00"

// Manifest describes a backup.
type Manifest struct {
	Version int `json:"version"`
	// ClusterID is the cluster's, in hexadecimal digits.
	ClusterID string `json:"clusterID"`
	// Node is the control plane that made the backup.
	Node string `json:"node"`
	// TakenAt is before the snapshot was made: what the snapshot has is at least as new.
	TakenAt time.Time `json:"takenAt"`
	// OwnerKey is the owner's public key for which the backup is encrypted, 32 bytes.
	OwnerKey []byte `json:"ownerKey"`
	State
	// Files are the files, in the archive's order.
	Files []File `json:"files"`
}

// State is the cluster's state right before the snapshot.
type State struct {
	// Epoch and EpochID are the cluster's epoch (B7).
	Epoch   uint64 `json:"epoch"`
	EpochID string `json:"epochID"`
	// History is that of the epochs, as the ConfigMap muster-epoch has it.
	History string `json:"history,omitempty"`
	// PolicySerial is that of the owner's policy; 0: none that the machine could verify.
	PolicySerial uint64 `json:"policySerial"`
	// Cluster is the content of the ConfigMap muster-cluster.
	Cluster json.RawMessage `json:"cluster"`
	// Nodes are the enrollments.
	Nodes []Node `json:"nodes"`
}

// Node is an enrollment.
type Node struct {
	Name      string `json:"name"`
	UID       string `json:"uid"`
	Role      string `json:"role"`
	MachineID string `json:"machineID"`
	DiskID    string `json:"diskID,omitempty"`
	Banned    bool   `json:"banned,omitempty"`
}

// File is a file in a backup.
type File struct {
	// Name is a relative path with slashes, as pki/ca.key, or [Snapshot].
	Name string `json:"name"`
	// Size is in bytes.
	Size int64 `json:"size"`
	// SHA256 has 64 hexadecimal digits.
	SHA256 string `json:"sha256"`
}

func signed(manifest []byte) []byte { return append([]byte(domain), manifest...) }

// Write encrypts a backup for the owner. Small are the files but the snapshot, by name; the snapshot has size bytes and the SHA-256 sum. authority is the
// cluster's certificate authority, whose key signs. It sets m.Version, m.OwnerKey and m.Files.
func Write(w io.Writer, to ed25519.PublicKey, authority crypto.Signer, m Manifest, small map[string][]byte, snapshot io.Reader, size int64, sum [sha256.Size]byte) error {
	key, err := ssh.NewPublicKey(to)
	if err != nil {
		return fmt.Errorf("the owner's key: %w", err)
	}
	recipient, err := agessh.NewEd25519Recipient(key)
	if err != nil {
		return fmt.Errorf("the owner's key: %w", err)
	}
	m.Version, m.OwnerKey, m.Files = Version, to, nil
	names := make([]string, 0, len(small))
	for name, content := range small {
		if len(content) > MaxSmall {
			return fmt.Errorf("%s has %d bytes: at most %d go into a backup", name, len(content), MaxSmall)
		}
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		digest := sha256.Sum256(small[name])
		m.Files = append(m.Files, File{Name: name, Size: int64(len(small[name])), SHA256: hex.EncodeToString(digest[:])})
	}
	m.Files = append(m.Files, File{Name: Snapshot, Size: size, SHA256: hex.EncodeToString(sum[:])})
	text, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	if _, err := parse(text); err != nil { // nothing is written that can't be read
		return err
	}
	digest := sha256.Sum256(signed(text))
	signature, err := authority.Sign(rand.Reader, digest[:], crypto.SHA256)
	if err != nil {
		return fmt.Errorf("sign with the cluster's authority: %w", err)
	}
	encrypted, err := age.Encrypt(w, recipient)
	if err != nil {
		return err
	}
	packed, err := gzip.NewWriterLevel(encrypted, gzip.BestSpeed)
	if err != nil {
		return err
	}
	archive := tar.NewWriter(packed)
	put := func(name string, size int64, content io.Reader) {
		if err != nil {
			return
		}
		if err = archive.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Size: size, Mode: 0o600, Format: tar.FormatPAX}); err == nil {
			_, err = io.Copy(archive, content)
		}
		if err != nil {
			err = fmt.Errorf("%s: %w", name, err)
		}
	}
	put(manifestName, int64(len(text)), bytes.NewReader(text))
	put(signatureName, int64(len(signature)), bytes.NewReader(signature))
	for _, name := range names {
		put(name, int64(len(small[name])), bytes.NewReader(small[name]))
	}
	put(Snapshot, size, snapshot)
	return errors.Join(err, archive.Close(), packed.Close(), encrypted.Close())
}

func parse(text []byte) (*Manifest, error) {
	if len(text) > maxManifest {
		return nil, fmt.Errorf("%s has %d bytes: at most %d", manifestName, len(text), maxManifest)
	}
	var m Manifest
	if err := json.Unmarshal(text, &m); err != nil {
		return nil, fmt.Errorf("%s: %w", manifestName, err)
	}
	if m.Version != Version {
		return nil, fmt.Errorf("%s: version %d: this program reads version %d", manifestName, m.Version, Version)
	}
	if len(m.Files) == 0 || len(m.Files) > maxFiles {
		return nil, fmt.Errorf("%s: %d files: want 1 to %d", manifestName, len(m.Files), maxFiles)
	}
	for i, f := range m.Files {
		last, limit := i == len(m.Files)-1, int64(MaxSmall)
		if last {
			limit = MaxSnapshot
		}
		if last != (f.Name == Snapshot) || f.Size < 0 || f.Size > limit || slices.ContainsFunc(m.Files[:i], func(o File) bool { return o.Name == f.Name }) {
			return nil, fmt.Errorf("%s: file %d, %q of %d bytes, has a wrong place, a wrong size, or is there twice", manifestName, i+1, f.Name, f.Size)
		}
	}
	return &m, nil
}

// identities reads what one of them can read.
type identities []age.Identity

// Unwrap implements [age.Identity].
func (list identities) Unwrap(stanzas []*age.Stanza) ([]byte, error) {
	for _, i := range list {
		if key, err := i.Unwrap(stanzas); !errors.Is(err, age.ErrIncorrectIdentity) {
			return key, err
		}
	}
	return nil, age.ErrIncorrectIdentity
}

// Identity returns the identity that reads what is encrypted for one of the owner's keys.
func Identity(owner []ed25519.PrivateKey) (age.Identity, error) {
	var out identities
	for _, k := range owner {
		i, err := agessh.NewEd25519Identity(k)
		if err != nil {
			return nil, err
		}
		out = append(out, i)
	}
	return out, nil
}

// FileKeySize is the size of the key of one file, in bytes.
const FileKeySize = 16

// capture notes the file key that its identity finds.
type capture struct {
	age.Identity

	key []byte
}

func (c *capture) Unwrap(stanzas []*age.Stanza) (key []byte, err error) {
	key, err = c.Identity.Unwrap(stanzas)
	c.key = slices.Clone(key)
	return key, err
}

// FileKey returns the key of one file, which opens no other, from the beginning of the file.
func FileKey(r io.Reader, owner []ed25519.PrivateKey) ([]byte, error) {
	id, err := Identity(owner)
	if err != nil {
		return nil, err
	}
	c := &capture{Identity: id}
	if _, err := age.Decrypt(r, c); err != nil {
		return nil, fmt.Errorf("it is not encrypted for a key of this owner, or not a backup: %w", err)
	}
	return c.key, nil
}

type fileKey []byte

func (k fileKey) Unwrap([]*age.Stanza) ([]byte, error) { return slices.Clone(k), nil }

// WithFileKey returns the identity that reads the one file of that key.
func WithFileKey(key []byte) age.Identity { return fileKey(key) }

// Read decrypts and verifies a backup to its end. It writes the snapshot to snapshot, and returns the other files by name. What was written is good for
// nothing unless the error is nil. The authority is the cluster's certificate authority.
func Read(r io.Reader, identity age.Identity, authority *x509.Certificate, snapshot io.Writer) (*Manifest, map[string][]byte, error) {
	plain, err := age.Decrypt(r, identity)
	if err != nil {
		return nil, nil, fmt.Errorf("it is not encrypted for a key of this owner, or not a backup: %w", err)
	}
	whole := bufio.NewReader(plain) // from which gzip takes no more than its own
	packed, err := gzip.NewReader(whole)
	if err != nil {
		return nil, nil, fmt.Errorf("it is damaged: %w", err)
	}
	packed.Multistream(false)
	archive := tar.NewReader(packed)
	next := func(name string, limit int64) ([]byte, error) {
		size, err := begin(archive, name, limit)
		if err != nil {
			return nil, err
		}
		out := make([]byte, size)
		_, err = io.ReadFull(archive, out)
		return out, err
	}
	text, err := next(manifestName, maxManifest)
	if err != nil {
		return nil, nil, fmt.Errorf("it is damaged: %s: %w", manifestName, err)
	}
	signature, err := next(signatureName, maxSignature)
	if err != nil {
		return nil, nil, fmt.Errorf("it is damaged: %s: %w", signatureName, err)
	}
	// K5: before anything else is read, who made this?
	if err := verify(authority, text, signature); err != nil {
		return nil, nil, err
	}
	m, err := parse(text)
	if err != nil {
		return nil, nil, err
	}
	small := make(map[string][]byte, len(m.Files))
	for _, f := range m.Files {
		var content bytes.Buffer
		into := io.Writer(&content)
		if f.Name == Snapshot {
			into = snapshot
		}
		if err := copyFile(archive, f, into); err != nil {
			return nil, nil, fmt.Errorf("it is damaged: %s: %w", f.Name, err)
		}
		if f.Name != Snapshot {
			small[f.Name] = content.Bytes()
		}
	}
	if h, err := archive.Next(); err == nil {
		return nil, nil, fmt.Errorf("it is damaged: %q is not in the manifest", h.Name)
	} else if !errors.Is(err, io.EOF) {
		return nil, nil, fmt.Errorf("it is damaged: %w", err)
	}
	for _, rest := range []io.Reader{packed, whole} { // a file that was cut off lacks age's last chunk, or gzip's checksum
		n, err := io.Copy(io.Discard, rest)
		if err == nil && n > 0 {
			err = fmt.Errorf("%d bytes follow its end", n)
		}
		if err != nil {
			return nil, nil, fmt.Errorf("it is damaged: %w", err)
		}
	}
	return m, small, nil
}

func begin(archive *tar.Reader, name string, limit int64) (int64, error) {
	h, err := archive.Next()
	switch {
	case err != nil:
		return 0, err
	case h.Typeflag != tar.TypeReg || h.Name != name:
		return 0, fmt.Errorf("%q is in its place", h.Name)
	case h.Size > limit:
		return 0, fmt.Errorf("%d bytes: at most %d", h.Size, limit)
	}
	return h.Size, nil
}

func copyFile(archive *tar.Reader, f File, into io.Writer) error {
	size, err := begin(archive, f.Name, f.Size)
	if err != nil {
		return err
	}
	h := sha256.New()
	if _, err := io.Copy(io.MultiWriter(h, into), archive); err != nil {
		return err
	}
	if sum := hex.EncodeToString(h.Sum(nil)); size != f.Size || sum != f.SHA256 {
		return fmt.Errorf("%d bytes with the SHA-256 %s: the manifest has %d and %s", size, sum, f.Size, f.SHA256)
	}
	return nil
}

// ErrForeign means that a backup was not made by this cluster.
var ErrForeign = errors.New("it is not signed by this cluster's certificate authority, so it was made by another cluster, or forged")

func verify(authority *x509.Certificate, manifest, signature []byte) error {
	var algorithm x509.SignatureAlgorithm
	switch authority.PublicKey.(type) {
	case *rsa.PublicKey:
		algorithm = x509.SHA256WithRSA
	case *ecdsa.PublicKey:
		algorithm = x509.ECDSAWithSHA256
	default:
		return fmt.Errorf("the cluster's authority has a key of the type %T: want RSA or ECDSA", authority.PublicKey)
	}
	if authority.CheckSignature(algorithm, signed(manifest), signature) != nil {
		return ErrForeign
	}
	return nil
}

// On control planes, backups are in this folder of /var/log, from where the kubelet gives them to who may read logs of nodes: they are encrypted.
const (
	LogFolder = "muster-backup"
	// Latest is the file in it with the [Stored] of the newest one, in JSON.
	Latest = "latest.json"
)

// Stored is a backup on a control plane's disk.
type Stored struct {
	// Name is the file's, see [Name].
	Name string `json:"name"`
	// Size is in bytes.
	Size int64 `json:"size"`
	// SHA256 has 64 hexadecimal digits.
	SHA256  string    `json:"sha256"`
	TakenAt time.Time `json:"takenAt"`
	// OwnerKey is the owner's public key for which it is encrypted, 32 bytes in base64.
	OwnerKey string `json:"ownerKey"`
}

// Suffix is how the names of backups end.
const Suffix = ".age"

// Name returns the name of a backup's file. The names of one control plane are in the order of their times.
func Name(node string, at time.Time) string {
	return at.UTC().Format(nameTime) + "-" + node + Suffix
}

const nameTime = "20060102T150405Z"

// TimeOf returns the time in the name of a backup's file, and whether it is such a name.
func TimeOf(name string) (time.Time, bool) {
	if !nameForm.MatchString(name) {
		return time.Time{}, false
	}
	at, err := time.Parse(nameTime, name[:len(nameTime)])
	return at, err == nil
}

var nameForm = regexp.MustCompile(`^[0-9]{8}T[0-9]{6}Z-[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?\.age$`)

// Valid reports whether it can be a backup: a machine's report is not trusted.
func (s Stored) Valid() bool {
	sum, err := hex.DecodeString(s.SHA256)
	if _, kerr := attest.ParseOwnerKeys([]string{s.OwnerKey}); kerr != nil {
		return false
	}
	return nameForm.MatchString(s.Name) && s.Size > 0 && s.Size <= MaxFile && err == nil && len(sum) == sha256.Size
}
