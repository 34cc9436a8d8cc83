// Package ownerdir keeps in one folder the files that the owner of a cluster must not lose. They are:
//
//	owner.key         Ed25519 private key that signs policies (PKCS #8, PEM)
//	owner-*.key       the next, the previous and earlier ones, if it is rotated (muster rotate owner-key)
//	root-secret       root of all keys of the cluster
//	salt              salt of all derivations from it
//	init-secret       the secret that the first machine requires
//	measurement-salt  makes the cluster ID; no secret
//	idempotency-key   lets a lost init be resumed
//	policy.yaml       the policy, for the owner to edit
//	signed-policy.json  the last policy that was signed here, written before it was sent
//	cluster.json      parameters of the cluster, and the stage of init
//	known.json        the last recorded state of the cluster, for a recovery
//	admin.conf        administrator's kubeconfig, once there is a cluster
//	former-cas.pem    certificates of the cluster's former authorities, which verify backups of their time; no secret
//	backups/          the objects of the cluster from before each upgrade, and backups of the cluster
//
// The folder is 0700 and its files are 0600. Everything is stored on the disk before anything is sent (B3): a machine with a
// secret that its owner has lost could not be recovered.
package ownerdir

import (
	"bytes"
	"cmp"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// Names of the files that other packages read.
const (
	PolicyFile = "policy.yaml"
	AdminConf  = "admin.conf"
	KnownFile  = "known.json"
	SignedFile = "signed-policy.json"
	// FormerAuthorities has certificates that are no longer in admin.conf.
	FormerAuthorities = "former-cas.pem"

	ownerKeyFile        = "owner.key"
	rootFile            = "root-secret"
	saltFile            = "salt"
	measurementSaltFile = "measurement-salt"
	initFile            = "init-secret"

	idempotencyFile = "idempotency-key"
	clusterFile     = "cluster.json"
)

// ErrInUse is returned by [Open] and [Create] while another muster works with the folder.
var ErrInUse = errors.New("in use")

// ErrExposed is returned if other users can read a file of the folder.
var ErrExposed = errors.New("others may have read it")

// ErrOtherCluster is returned if a folder's content differs from the parameters.
var ErrOtherCluster = errors.New("the folder belongs to another cluster")

// Secrets are sent by init. They print as nothing (K3).
type Secrets struct {
	Init            [32]byte
	Root            [32]byte
	Salt            [32]byte
	MeasurementSalt [32]byte
	IdempotencyKey  [16]byte
}

// Format implements [fmt.Formatter]: no verb prints a byte.
func (Secrets) Format(w fmt.State, _ rune) { _, _ = w.Write([]byte("ownerdir.Secrets[secret]")) }

// MarshalJSON always fails.
func (Secrets) MarshalJSON() ([]byte, error) {
	return nil, errors.New("ownerdir: secrets are not marshalled")
}

// NewSecrets generates all of them but the init secret, whose hash is already in the machine's metadata.
func NewSecrets(initSecret [32]byte) Secrets {
	s := Secrets{Init: initSecret}
	for _, b := range [][]byte{s.Root[:], s.Salt[:], s.MeasurementSalt[:], s.IdempotencyKey[:]} {
		_, _ = rand.Read(b) // never fails: crypto/rand ends the program instead
	}
	return s
}

// Dir is an owner's folder, locked against other programs until Close.
type Dir struct {
	path    string
	lock    *os.File
	sync    func(*os.File) error // nil: opened to read only
	cluster Cluster
}

// Path returns the folder's path.
func (d *Dir) Path() string { return d.path }

// File returns the path of one of its files.
func (d *Dir) File(name string) string { return filepath.Join(d.path, name) }

// Cluster returns the content of cluster.json.
func (d *Dir) Cluster() Cluster { return d.cluster.clone() }

// New are the parameters of a new folder.
type New struct {
	Cluster  Cluster
	Secrets  Secrets
	OwnerKey ed25519.PrivateKey
	// Policy is the YAML text; nil to resume with the existing one.
	Policy []byte
}

// Create makes the folder, or opens an existing one of the same cluster, with the same parameters (see
// [Cluster.differences]) and init secret. It refuses any other folder with [ErrOtherCluster], and overwrites nothing.
func Create(path string, n New) (*Dir, error) { return create(path, n, (*os.File).Sync) }

func create(path string, n New, sync func(*os.File) error) (*Dir, error) {
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) && len(n.Policy) == 0 {
		return nil, errors.New("a new cluster needs a policy: give --policy")
	}
	err := os.Mkdir(path, 0o700)
	switch {
	case errors.Is(err, fs.ErrExist):
		return resume(path, n, sync)
	case err != nil:
		return nil, fmt.Errorf("owner's folder: %w", err)
	}
	d, err := open(path, sync)
	if err != nil {
		return nil, err
	}
	if err := d.fill(n); err != nil {
		_ = d.Close()
		return nil, fmt.Errorf("owner's folder: %w", err)
	}
	return d, nil
}

// fill writes all files, cluster.json last: a folder with cluster.json is complete.
func (d *Dir) fill(n New) error {
	key, err := encodeKey(n.OwnerKey)
	if err != nil {
		return err
	}
	s := n.Secrets
	for _, f := range []struct {
		name    string
		content []byte
	}{
		{ownerKeyFile, key},
		{rootFile, hexLine(s.Root[:])},
		{saltFile, hexLine(s.Salt[:])},
		{measurementSaltFile, hexLine(s.MeasurementSalt[:])},
		{initFile, hexLine(s.Init[:])},
		{idempotencyFile, hexLine(s.IdempotencyKey[:])},
		{PolicyFile, n.Policy},
	} {
		if err := d.Write(f.name, f.content); err != nil {
			return err
		}
	}
	n.Cluster.Version = 1
	n.Cluster.OwnerID = OwnerID(n.OwnerKey.Public().(ed25519.PublicKey))
	if err := d.Save(n.Cluster); err != nil {
		return err
	}
	parent, err := os.Open(filepath.Dir(filepath.Clean(d.path)))
	if err != nil {
		return err
	}
	defer parent.Close()
	return d.sync(parent)
}

func resume(path string, n New, sync func(*os.File) error) (*Dir, error) {
	d, err := open(path, sync)
	if err != nil {
		return nil, err
	}
	if err := d.load(); err != nil {
		_ = d.Close()
		if errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("%w: %s exists, but holds no finished cluster.json: if an earlier `muster init` was interrupted before it sent anything, remove the folder; otherwise choose another --directory", ErrOtherCluster, path)
		}
		return nil, err
	}
	if err := d.same(n); err != nil {
		_ = d.Close()
		return nil, err
	}
	return d, nil
}

// CopyKnown writes a copy of known.json beside it, and returns its name: after a restore, the file describes another history of the cluster.
func (d *Dir) CopyKnown(now time.Time) (string, error) {
	content, err := d.Read(KnownFile)
	if err != nil {
		return "", err
	}
	name := "known-" + now.UTC().Format("20060102T150405Z") + ".json"
	return name, d.Write(name, content)
}

// same returns an error unless the folder belongs to the cluster of n.
func (d *Dir) same(n New) error {
	if diff := d.cluster.differences(n.Cluster); len(diff) > 0 {
		return fmt.Errorf("%w: %s was made with another %s; to resume, repeat the original flags, or choose another --directory", ErrOtherCluster, d.path, join(diff))
	}
	have, err := d.Secrets()
	if err != nil {
		return err
	}
	if have.Init != n.Secrets.Init {
		return fmt.Errorf("%w: %s was made with another init secret", ErrOtherCluster, d.path)
	}
	policy, err := d.Read(PolicyFile)
	if err != nil {
		return err
	}
	if n.Policy != nil && !bytes.Equal(policy, n.Policy) && !bytes.Equal(policy, d.cluster.listing(n.Policy)) {
		return fmt.Errorf("%w: %s is not the policy that was given; to change it, edit that file and leave out --policy", ErrOtherCluster, d.File(PolicyFile))
	}
	return nil
}

// Open opens the folder of a cluster.
func Open(path string) (*Dir, error) { return existing(open(path, (*os.File).Sync)) }

// View opens the folder of a cluster for reading, also while another program works with it. Writing fails.
func View(path string) (*Dir, error) {
	return existing(view(path, nil))
}

func existing(d *Dir, err error) (*Dir, error) {
	if err != nil {
		return nil, err
	}
	if err := d.load(); err != nil {
		_ = d.Close()
		return nil, fmt.Errorf("%s is not an owner's folder: %w; name the folder by --directory, or create one with `muster init`", d.path, err)
	}
	return d, nil
}

func view(path string, sync func(*os.File) error) (*Dir, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("owner's folder: %w", err)
	}
	if err := private(f, 0o700); err != nil {
		_ = f.Close()
		return nil, err
	}
	return &Dir{path: path, lock: f, sync: sync}, nil
}

// inUseFile names the command that holds the lock, for the error of other commands. A file left by a killed command has no effect.
const inUseFile = ".in-use"

// open locks the folder. The folder's own descriptor carries the lock, so no lock file remains.
func open(path string, sync func(*os.File) error) (*Dir, error) {
	d, err := view(path, sync)
	if err != nil {
		return nil, err
	}
	f := d.lock
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		holder, _ := os.ReadFile(d.File(inUseFile)) // it may be gone already
		_ = f.Close()
		return nil, fmt.Errorf("owner's folder %s is %w by %s", path, ErrInUse, cmp.Or(string(holder), "another muster"))
	}
	command := append([]string{filepath.Base(os.Args[0])}, os.Args[1:]...)
	text := fmt.Sprintf("%.300s (process %d), since %s UTC", strings.Join(command, " "), os.Getpid(), time.Now().UTC().Format(time.DateTime))
	_ = os.WriteFile(d.File(inUseFile), []byte(text), 0o600) // the lock is valid without it
	return d, nil
}

// private refuses files that other users can read, so that the owner learns that a secret may be known.
func private(f *os.File, widest fs.FileMode) error {
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if st.Mode().Perm()&^widest != 0 {
		return fmt.Errorf("%s has mode %04o, so %w: run chmod %04o, and consider who could", f.Name(), st.Mode().Perm(), ErrExposed, widest)
	}
	return nil
}

// Close releases the lock.
func (d *Dir) Close() error {
	if d.sync != nil {
		_ = os.Remove(d.File(inUseFile)) // a remaining file has no effect
	}
	return d.lock.Close()
}

// Write replaces a file atomically: when it returns, the content is stored on the disk, and the file was complete at any
// time.
func (d *Dir) Write(name string, content []byte) error {
	if d.sync == nil {
		return errors.New("the owner's folder was opened to read only")
	}
	tmp, err := os.OpenFile(d.File("."+name+".new"), os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name()) // finds nothing after the rename
	defer tmp.Close()
	if err := tmp.Chmod(0o600); err != nil { // an umask may have removed permission bits
		return err
	}
	if _, err := tmp.Write(content); err != nil {
		return err
	}
	if err := d.sync(tmp); err != nil {
		return err
	}
	if err := os.Rename(tmp.Name(), d.File(name)); err != nil {
		return err
	}
	return d.sync(d.lock)
}

// Read returns a file's content. It refuses a file that other users may read.
func (d *Dir) Read(name string) ([]byte, error) {
	f, err := os.Open(d.File(name))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if err := private(f, 0o600); err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	limit := int64(1 << 20) // all files but one are smaller
	if name == KnownFile {
		limit = maxKnownFile
	}
	if st.Size() > limit {
		return nil, fmt.Errorf("%s is longer than %d bytes", f.Name(), limit)
	}
	b := make([]byte, st.Size())
	n, err := f.ReadAt(b, 0)
	if n == len(b) {
		return b, nil
	}
	return nil, err
}

// Save writes cluster.json.
func (d *Dir) Save(c Cluster) error {
	b, err := json.MarshalIndent(c, "", "  ")
	if err != nil {
		return err
	}
	if err := d.Write(clusterFile, append(b, '\n')); err != nil {
		return err
	}
	d.cluster = c.clone()
	return nil
}

func (d *Dir) load() error {
	b, err := d.Read(clusterFile)
	if err != nil {
		return err
	}
	c, err := parseCluster(b)
	if err != nil {
		return fmt.Errorf("%s: %w", d.File(clusterFile), err)
	}
	d.cluster = c
	return nil
}

// Secrets reads the secrets that init sends.
func (d *Dir) Secrets() (Secrets, error) {
	var s Secrets
	for _, f := range []struct {
		name string
		to   []byte
	}{
		{rootFile, s.Root[:]},
		{saltFile, s.Salt[:]},
		{measurementSaltFile, s.MeasurementSalt[:]},
		{initFile, s.Init[:]},
		{idempotencyFile, s.IdempotencyKey[:]},
	} {
		b, err := d.Read(f.name)
		if err != nil {
			return Secrets{}, err
		}
		if err := ParseHex(b, f.to); err != nil {
			return Secrets{}, fmt.Errorf("%s: %w", d.File(f.name), err)
		}
	}
	return s, nil
}

// OwnerID identifies an owner: SHA-256 of the public key, in hexadecimal digits.
func OwnerID(k ed25519.PublicKey) string {
	sum := sha256.Sum256(k)
	return hex.EncodeToString(sum[:])
}
