package ownerdir

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
)

// hexLine is the form of secrets in files: hexadecimal digits and a newline.
func hexLine(b []byte) []byte { return fmt.Appendf(nil, "%x\n", b) }

// ParseHex reads hexadecimal digits, with optional white space around them, into all of to. The error shows no digit
// (K3).
func ParseHex(text, to []byte) error {
	text = bytes.TrimSpace(text)
	if len(text) != hex.EncodedLen(len(to)) {
		return fmt.Errorf("want %d hexadecimal digits, got %d characters", hex.EncodedLen(len(to)), len(text))
	}
	if _, err := hex.Decode(to, text); err != nil {
		return errors.New("a character is not a hexadecimal digit")
	}
	return nil
}

// ReadInitSecret reads a file of 64 hexadecimal digits that only its owner can read.
func ReadInitSecret(path string) ([32]byte, error) {
	var s [32]byte
	b, err := readPrivate(path)
	if err != nil {
		return s, fmt.Errorf("init secret: %w", err)
	}
	if err := ParseHex(b, s[:]); err != nil {
		return s, fmt.Errorf("init secret %s: %w", path, err)
	}
	return s, nil
}

// ReadKey reads an owner's key from a file that only its owner can read.
func ReadKey(path string) (ed25519.PrivateKey, error) {
	b, err := readPrivate(path)
	if err != nil {
		return nil, fmt.Errorf("owner's key: %w", err)
	}
	k, err := parseKey(b)
	if err != nil {
		return nil, fmt.Errorf("owner's key %s: %w", path, err)
	}
	return k, nil
}

func readPrivate(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if err := private(f, 0o600); err != nil {
		return nil, err
	}
	b := make([]byte, 4096) // larger than a key in PEM or a secret in digits
	n, err := f.ReadAt(b, 0)
	if n == len(b) {
		return nil, fmt.Errorf("%s is too long", path)
	}
	if n == 0 {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return b[:n], nil
}

// parseKey reads an Ed25519 private key in PKCS #8, PEM (RFC 5958, RFC 8410).
func parseKey(text []byte) (ed25519.PrivateKey, error) {
	block, rest := pem.Decode(text)
	if block == nil || block.Type != "PRIVATE KEY" || len(bytes.TrimSpace(rest)) > 0 {
		return nil, errors.New("want exactly one PEM block PRIVATE KEY")
	}
	k, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, errors.New("the PEM block holds no PKCS #8 key") // the cause could quote the key
	}
	owner, ok := k.(ed25519.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("want an Ed25519 key, not a %T", k)
	}
	return owner, nil
}

func encodeKey(k ed25519.PrivateKey) ([]byte, error) {
	if len(k) != ed25519.PrivateKeySize {
		return nil, errors.New("no owner's key was given")
	}
	der, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

// NewKeyFile creates an owner's key in a new file, for images that contain the public key before there is a cluster,
// and returns the public key.
func NewKeyFile(path string) (ed25519.PublicKey, error) {
	public, k, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, err
	}
	text, err := encodeKey(k)
	if err != nil {
		return nil, err
	}
	return public, NewFile(path, text)
}

// NewInitSecretFile creates an init secret in a new file and returns it, so that its hash can be put into the
// machine's metadata.
func NewInitSecretFile(path string) ([32]byte, error) {
	var s [32]byte
	_, _ = rand.Read(s[:])
	return s, NewFile(path, hexLine(s[:]))
}

// NewFile writes a file that only its owner can read. It never replaces a file, which may be the only copy of a key.
func NewFile(path string, content []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.Write(content); err != nil {
		return err
	}
	return f.Sync()
}
