package ownerdir

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/muster-k8s/muster/trust/attest"
)

// Files of the owner's other keys, during a rotation and after it. The signing key is [Dir.OwnerKey].
const (
	nextKeyFile     = "owner-next.key"
	previousKeyFile = "owner-previous.key"
	retiredPrefix   = "owner-retired-"
	keySuffix       = ".key"
)

// KeyRotation is the progress of the owner key's rotation in a folder.
type KeyRotation struct {
	// Signs is the key that signs.
	Signs ed25519.PublicKey
	// Next is the key that will sign; nil if none is prepared.
	Next ed25519.PublicKey
	// Previous is the key that signed before, which is accepted until the rotation is finished; nil if there is none.
	Previous ed25519.PublicKey
	// Since is when the last step was: the time of the file with Next or Previous; zero if no rotation is in progress.
	Since time.Time
}

// Keys returns the keys whose signatures the services and the owner's commands accept.
func (r KeyRotation) Keys() attest.OwnerKeys {
	var out attest.OwnerKeys
	for _, k := range []ed25519.PublicKey{r.Signs, r.Next, r.Previous} {
		if k != nil && !out.Has(k) {
			out = append(out, k)
		}
	}
	return out
}

// Command returns the owner's command for the next step; empty if no rotation is in progress. Before each step, an image is rolled out.
func (r KeyRotation) Command() string {
	switch {
	case r.Next != nil:
		return "muster rotate owner-key --commit"
	case r.Previous != nil:
		return "muster rotate owner-key --finish"
	}
	return ""
}

// OwnerKeys returns the public keys of the folder's owner; see [KeyRotation.Keys].
func (d *Dir) OwnerKeys() (attest.OwnerKeys, error) {
	r, err := d.KeyRotation()
	return r.Keys(), err
}

// KeyRotation reads the progress of the owner key's rotation.
func (d *Dir) KeyRotation() (r KeyRotation, err error) {
	signs, err := d.OwnerKey()
	if err != nil {
		return r, err
	}
	r.Signs = publicOf(signs)
	for _, f := range []struct {
		name string
		to   *ed25519.PublicKey
	}{{nextKeyFile, &r.Next}, {previousKeyFile, &r.Previous}} {
		k, err := d.key(f.name)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return r, err
		case f.name == previousKeyFile && bytes.Equal(publicOf(k), r.Signs): // SwitchKey was interrupted
		default:
			*f.to = publicOf(k)
			info, err := os.Stat(d.File(f.name))
			if err != nil {
				return r, err
			}
			r.Since = info.ModTime()
		}
	}
	return r, nil
}

// ReadingKeys returns all keys of the owner, also former signing keys, because backups may be encrypted to them.
func (d *Dir) ReadingKeys() ([]ed25519.PrivateKey, error) {
	first, err := d.OwnerKey()
	if err != nil {
		return nil, err
	}
	out := []ed25519.PrivateKey{first}
	retired, err := filepath.Glob(d.File(retiredPrefix + "*" + keySuffix))
	if err != nil {
		return nil, err
	}
	slices.Sort(retired)
	names := []string{nextKeyFile, previousKeyFile}
	for _, path := range retired {
		names = append(names, filepath.Base(path))
	}
	for _, name := range names {
		k, err := d.key(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		out = append(out, k)
	}
	return out, nil
}

// PrepareKey creates the next signing key, or uses given if it is not nil, and returns the public key. It keeps a key that is already prepared, and
// then refuses another given one.
func (d *Dir) PrepareKey(given ed25519.PrivateKey) (ed25519.PublicKey, error) {
	r, err := d.KeyRotation()
	if err != nil {
		return nil, err
	}
	switch {
	case r.Previous != nil:
		return nil, fmt.Errorf("%s still has the previous key: that rotation is unfinished", d.path)
	case r.Next != nil && given != nil && !bytes.Equal(r.Next, publicOf(given)):
		return nil, fmt.Errorf("another key is prepared already, in %s", d.File(nextKeyFile))
	case r.Next != nil:
		return r.Next, nil
	case given != nil && bytes.Equal(r.Signs, publicOf(given)):
		return nil, fmt.Errorf("this is the key of %s, which signs already", d.File(ownerKeyFile))
	case given == nil:
		if _, given, err = ed25519.GenerateKey(rand.Reader); err != nil {
			return nil, err
		}
	}
	used, err := d.ReadingKeys()
	if err != nil {
		return nil, err
	}
	if slices.ContainsFunc(used, func(k ed25519.PrivateKey) bool { return k.Equal(given) }) {
		return nil, fmt.Errorf("this is a former signing key (%s), which may have been replaced because it was stolen; omit --key, or give a new key", d.File(retiredName(publicOf(given))))
	}
	text, err := encodeKey(given)
	if err != nil {
		return nil, err
	}
	return publicOf(given), d.Write(nextKeyFile, text)
}

// SwitchKey makes the prepared key the signing key, and the present one the previous key. After an interruption at any point, the same call completes
// it; the folder has a signing key at any time.
func (d *Dir) SwitchKey() error {
	r, err := d.KeyRotation()
	if err != nil {
		return err
	}
	switch {
	case r.Next == nil && r.Previous == nil:
		return nil // nothing is prepared
	case r.Next != nil:
		if r.Previous != nil {
			return fmt.Errorf("%s has a previous key and a next one: no step of a rotation leaves both", d.path)
		}
		text, err := d.Read(ownerKeyFile)
		if err != nil {
			return err
		}
		if err := d.Write(previousKeyFile, text); err != nil { // B3: copy the key before its file is replaced
			return err
		}
		if err := d.rename(nextKeyFile, ownerKeyFile); err != nil {
			return err
		}
		r.Signs = r.Next
	}
	c := d.Cluster()
	if c.OwnerID == OwnerID(r.Signs) {
		return nil
	}
	c.OwnerID = OwnerID(r.Signs)
	return d.Save(c)
}

// RetireKey ends the acceptance of the previous key, and keeps it for backups that are encrypted to it. It returns the file's name; empty if there
// was no previous key.
func (d *Dir) RetireKey() (string, error) {
	r, err := d.KeyRotation()
	if err != nil || r.Previous == nil {
		return "", err
	}
	name := retiredName(r.Previous)
	return name, d.rename(previousKeyFile, name)
}

func retiredName(k ed25519.PublicKey) string { return retiredPrefix + OwnerID(k)[:16] + keySuffix }

func (d *Dir) rename(from, to string) error {
	if d.sync == nil {
		return errors.New("the owner's folder was opened to read only")
	}
	if err := os.Rename(d.File(from), d.File(to)); err != nil {
		return err
	}
	return d.sync(d.lock)
}

// OwnerKey reads the key that signs policies.
func (d *Dir) OwnerKey() (ed25519.PrivateKey, error) { return d.key(ownerKeyFile) }

func (d *Dir) key(name string) (ed25519.PrivateKey, error) {
	b, err := d.Read(name)
	if err != nil {
		return nil, err
	}
	k, err := parseKey(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", d.File(name), err)
	}
	return k, nil
}

func publicOf(k ed25519.PrivateKey) ed25519.PublicKey {
	return ed25519.PublicKey(k[ed25519.PrivateKeySize-ed25519.PublicKeySize:])
}
