// Package builder signs the files of an image build, and checks them: SHA256SUMS, as `sha256sum -c` reads it, and
// SHA256SUMS.sig, an SSH signature (OpenSSH, PROTOCOL.sshsig), which `ssh-keygen -Y` makes and checks, too.
//
// The signature has a namespace, so a signature of the key for another purpose is not valid for an image.
package builder

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/crypto/ssh"
)

// Files beside the image.
const (
	SumsFile      = "SHA256SUMS"
	SignatureFile = SumsFile + ".sig"
)

// Namespace is the purpose of a signature.
const Namespace = "muster-image"

const (
	magic = "SSHSIG"
	hash  = "sha512"
	armor = "SSH SIGNATURE"
)

// envelope follows magic in a signature.
type envelope struct {
	Version   uint32
	PublicKey []byte
	Namespace string
	Reserved  string
	Hash      string
	Signature []byte
}

// signed follows magic in the signed data.
type signed struct {
	Namespace string
	Reserved  string
	Hash      string
	Sum       []byte
}

func toSign(message []byte) []byte {
	sum := sha512.Sum512(message)
	return append([]byte(magic), ssh.Marshal(signed{Namespace: Namespace, Hash: hash, Sum: sum[:]})...)
}

// ReadPrivateKey reads an Ed25519 key of ssh-keygen without a passphrase.
func ReadPrivateKey(file string) (ssh.Signer, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	key, err := ssh.ParsePrivateKey(b)
	if missing := (*ssh.PassphraseMissingError)(nil); errors.As(err, &missing) {
		return nil, fmt.Errorf("builder's key %s has a passphrase: build without it, and sign with `ssh-keygen -Y sign -n %s -f %[1]s %s`", file, Namespace, SumsFile)
	}
	if err != nil {
		return nil, fmt.Errorf("builder's key %s: %w", file, err)
	}
	return key, ed25519Only(file, key.PublicKey())
}

// ReadPublicKey reads the one key of a file like ssh-keygen's .pub.
func ReadPublicKey(file string) (ssh.PublicKey, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	key, _, _, rest, err := ssh.ParseAuthorizedKey(b)
	if err != nil {
		return nil, fmt.Errorf("builder's public key %s: %w", file, err)
	}
	if len(bytes.TrimSpace(rest)) > 0 {
		return nil, fmt.Errorf("builder's public key %s: it has more than one line", file)
	}
	return key, ed25519Only(file, key)
}

func ed25519Only(file string, key ssh.PublicKey) error {
	if key.Type() != ssh.KeyAlgoED25519 {
		return fmt.Errorf("builder's key %s is of type %s: make one with `ssh-keygen -t ed25519`", file, key.Type())
	}
	return nil
}

// Sign returns the signature of a message, in SSH's armor.
func Sign(key ssh.Signer, message []byte) ([]byte, error) {
	s, err := key.Sign(rand.Reader, toSign(message))
	if err != nil {
		return nil, err
	}
	e := envelope{Version: 1, PublicKey: key.PublicKey().Marshal(), Namespace: Namespace, Hash: hash, Signature: ssh.Marshal(s)}
	return pem.EncodeToMemory(&pem.Block{Type: armor, Bytes: append([]byte(magic), ssh.Marshal(e)...)}), nil
}

// verify checks a signature that [Sign] or ssh-keygen has made.
func verify(key ssh.PublicKey, message, signature []byte) error {
	block, rest := pem.Decode(signature)
	if block == nil || block.Type != armor || len(bytes.TrimSpace(rest)) > 0 {
		return errors.New("it is no SSH signature")
	}
	body, ok := bytes.CutPrefix(block.Bytes, []byte(magic))
	if !ok {
		return errors.New("it is no SSH signature")
	}
	var e envelope
	if err := ssh.Unmarshal(body, &e); err != nil {
		return err
	}
	if e.Version != 1 || e.Namespace != Namespace || e.Hash != hash {
		return fmt.Errorf("it is of version %d, for %q with %s: want version 1, for %q with %s", e.Version, e.Namespace, e.Hash, Namespace, hash)
	}
	if !bytes.Equal(e.PublicKey, key.Marshal()) { // S2
		return errors.New("it is by another key")
	}
	var s ssh.Signature
	if err := ssh.Unmarshal(e.Signature, &s); err != nil {
		return err
	}
	return key.Verify(toSign(message), &s) // S2
}

// Sums are the signed digests: name of a file → SHA-256.
type Sums map[string][sha256.Size]byte

// Format returns the text that `sha256sum -c` reads, in the order of names.
func Format(dir string, names ...string) ([]byte, error) {
	var out bytes.Buffer
	for _, name := range names {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(&out, "%x  %s\n", sha256.Sum256(b), name)
	}
	return out.Bytes(), nil
}

// Open returns the sums beside an image, if this key signed them.
func Open(dir string, key ssh.PublicKey) (Sums, error) {
	text, err := os.ReadFile(filepath.Join(dir, SumsFile))
	if err != nil {
		return nil, fmt.Errorf("the builder's sums: %w", err)
	}
	signature, err := os.ReadFile(filepath.Join(dir, SignatureFile))
	if err != nil {
		return nil, fmt.Errorf("the builder's signature: %w; `make vm-image BUILDER_KEY=FILE` signs", err)
	}
	if err := verify(key, text, signature); err != nil {
		return nil, fmt.Errorf("%s is no signature of %s by the builder's key %s: %w", filepath.Join(dir, SignatureFile), SumsFile, ssh.FingerprintSHA256(key), err)
	}
	sums := Sums{}
	for line := range strings.Lines(string(text)) {
		sum, name, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "  ")
		b, err := hex.DecodeString(sum)
		if !ok || err != nil || len(b) != sha256.Size || name != filepath.Base(name) {
			return nil, fmt.Errorf("%s: %q is no line of sha256sum", SumsFile, line)
		}
		if _, twice := sums[name]; twice {
			return nil, fmt.Errorf("%s names %s twice", SumsFile, name)
		}
		sums[name] = [sha256.Size]byte(b)
	}
	return sums, nil
}

// Check refuses a file's content that the builder has not signed.
func (s Sums) Check(name string, sum [sha256.Size]byte) error {
	want, ok := s[name]
	if !ok {
		return fmt.Errorf("the builder has signed no file %s", name)
	}
	if sum != want { // S2
		return fmt.Errorf("%s has SHA-256 %x, and the builder signed %x", name, sum, want)
	}
	return nil
}
