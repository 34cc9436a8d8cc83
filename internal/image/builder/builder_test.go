package builder

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"encoding/pem"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/crypto/ssh"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func write(t *testing.T, file string, b []byte) string {
	t.Helper()
	if err := os.WriteFile(file, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// keys makes a builder's key pair, as files.
func keys(t *testing.T, seed byte) (private, public string) {
	t.Helper()
	k := ed25519.NewKeyFromSeed(append(make([]byte, 31), seed))
	block, err := ssh.MarshalPrivateKey(k, "builder")
	if err != nil {
		t.Fatal(err)
	}
	p, err := ssh.NewPublicKey(k.Public())
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	return write(t, filepath.Join(dir, "builder"), pem.EncodeToMemory(block)), write(t, filepath.Join(dir, "builder.pub"), ssh.MarshalAuthorizedKey(p))
}

// built returns a folder as after a build, and the builder's public key.
func built(t *testing.T) (dir string, key ssh.PublicKey) {
	t.Helper()
	private, public := keys(t, 1)
	signer, err := ReadPrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	if key, err = ReadPublicKey(public); err != nil {
		t.Fatal(err)
	}
	dir = t.TempDir()
	write(t, filepath.Join(dir, "a"), []byte("content of a"))
	write(t, filepath.Join(dir, "b"), []byte("content of b"))
	sums, err := Format(dir, "a", "b")
	if err != nil {
		t.Fatal(err)
	}
	signature, err := Sign(signer, sums)
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, SumsFile), sums)
	write(t, filepath.Join(dir, SignatureFile), signature)
	return dir, key
}

func TestASignedBuildIsAccepted(t *testing.T) {
	dir, key := built(t)
	sums, err := Open(dir, key)
	if err != nil || len(sums) != 2 {
		t.Fatal(sums, err)
	}
	if err := sums.Check("a", sha256.Sum256([]byte("content of a"))); err != nil {
		t.Error(err)
	}
	if err := sums.Check("a", sha256.Sum256([]byte("content of b"))); err == nil {
		t.Error("another content is accepted")
	}
	if err := sums.Check("c", sha256.Sum256([]byte("content of a"))); err == nil {
		t.Error("a file that was not signed is accepted")
	}
	check := exec.CommandContext(t.Context(), "sha256sum", "-c", SumsFile)
	check.Dir = dir
	if out, err := check.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// Invariant S2.
func TestSignaturesThatAreRefused(t *testing.T) {
	for name, change := range map[string]func(t *testing.T, dir string) string{
		"no signature": func(t *testing.T, dir string) string {
			if err := os.Remove(filepath.Join(dir, SignatureFile)); err != nil {
				t.Fatal(err)
			}
			return "BUILDER_KEY"
		},
		"other sums": func(t *testing.T, dir string) string {
			write(t, filepath.Join(dir, "a"), []byte("another a"))
			sums, err := Format(dir, "a", "b")
			if err != nil {
				t.Fatal(err)
			}
			write(t, filepath.Join(dir, SumsFile), sums)
			return "is no signature of SHA256SUMS"
		},
		"another key": func(t *testing.T, dir string) string {
			private, _ := keys(t, 2)
			resign(t, dir, private, Namespace)
			return "another key"
		},
		"another purpose": func(t *testing.T, dir string) string {
			private, _ := keys(t, 1)
			resign(t, dir, private, "git")
			return `for "git"`
		},
		"another's signature by the name of the key": func(t *testing.T, dir string) string {
			private, _ := keys(t, 2)
			resign(t, dir, private, Namespace)
			b, err := os.ReadFile(filepath.Join(dir, SignatureFile))
			if err != nil {
				t.Fatal(err)
			}
			block, _ := pem.Decode(b)
			var e envelope
			if err := ssh.Unmarshal(block.Bytes[len(magic):], &e); err != nil {
				t.Fatal(err)
			}
			_, public := keys(t, 1)
			key, err := ReadPublicKey(public)
			if err != nil {
				t.Fatal(err)
			}
			e.PublicKey = key.Marshal()
			write(t, filepath.Join(dir, SignatureFile), pem.EncodeToMemory(&pem.Block{Type: armor, Bytes: append([]byte(magic), ssh.Marshal(e)...)}))
			return "verif"
		},
		"no armor": func(t *testing.T, dir string) string {
			write(t, filepath.Join(dir, SignatureFile), []byte("signature"))
			return "no SSH signature"
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir, key := built(t)
			says := change(t, dir)
			if sums, err := Open(dir, key); err == nil || !strings.Contains(err.Error(), says) {
				t.Errorf("%v, %v; want %q", sums, err, says)
			}
		})
	}
}

// resign lets ssh-keygen sign the sums.
func resign(t *testing.T, dir, private, namespace string) {
	t.Helper()
	if err := os.Remove(filepath.Join(dir, SignatureFile)); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), "ssh-keygen", "-Y", "sign", "-q", "-n", namespace, "-f", private, filepath.Join(dir, SumsFile)).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

func TestSSHKeygenSignsAndVerifies(t *testing.T) {
	dir, key := built(t)
	private, _ := keys(t, 1)
	signers := write(t, filepath.Join(t.TempDir(), "signers"), append([]byte("builder "), ssh.MarshalAuthorizedKey(key)...))
	sums, err := os.Open(filepath.Join(dir, SumsFile))
	if err != nil {
		t.Fatal(err)
	}
	defer sums.Close()
	check := exec.CommandContext(t.Context(), "ssh-keygen", "-Y", "verify", "-n", Namespace, "-I", "builder", "-f", signers, "-s", filepath.Join(dir, SignatureFile))
	check.Stdin = sums
	if out, err := check.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	resign(t, dir, private, Namespace)
	if _, err := Open(dir, key); err != nil {
		t.Error(err)
	}
}

// Invariant S2.
func TestKeysOfOtherKindsAreRefused(t *testing.T) {
	dir := t.TempDir()
	k, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	block, err := ssh.MarshalPrivateKey(k, "")
	if err != nil {
		t.Fatal(err)
	}
	p, err := ssh.NewPublicKey(&k.PublicKey)
	if err != nil {
		t.Fatal(err)
	}
	locked, err := ssh.MarshalPrivateKeyWithPassphrase(ed25519.NewKeyFromSeed(make([]byte, 32)), "", []byte("secret"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ReadPrivateKey(write(t, filepath.Join(dir, "rsa"), pem.EncodeToMemory(block))); err == nil || !strings.Contains(err.Error(), "ed25519") {
		t.Error(err)
	}
	if _, err := ReadPrivateKey(write(t, filepath.Join(dir, "locked"), pem.EncodeToMemory(locked))); err == nil || !strings.Contains(err.Error(), "ssh-keygen -Y sign") {
		t.Error(err)
	}
	if _, err := ReadPublicKey(write(t, filepath.Join(dir, "rsa.pub"), ssh.MarshalAuthorizedKey(p))); err == nil || !strings.Contains(err.Error(), "ed25519") {
		t.Error(err)
	}
	_, public := keys(t, 1)
	one, err := os.ReadFile(public)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ReadPublicKey(write(t, filepath.Join(dir, "two.pub"), append(one, one...))); err == nil {
		t.Error("two keys are one")
	}
}
