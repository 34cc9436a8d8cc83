package main

import (
	"crypto"
	"crypto/ed25519"
	"encoding/json"
	"encoding/pem"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/crypto/ssh"

	"github.com/muster-k8s/muster/internal/image"
	"github.com/muster-k8s/muster/internal/image/builder"
	"github.com/muster-k8s/muster/internal/image/imagetest"
)

// release is a folder as a build leaves it, and the builder's public key.
func release(t *testing.T) (dir, key string) {
	t.Helper()
	p := imagetest.New(t)
	dir = filepath.Dir(p.Write(t))
	for name, secure := range map[string]bool{"measurements.json": false, "measurements-secureboot.json": true} {
		m, err := image.Measurements(p.Program(t), crypto.SHA256, secure)
		if err != nil {
			t.Fatal(err)
		}
		b, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		save(t, filepath.Join(dir, name), b)
	}
	private := ed25519.NewKeyFromSeed(make([]byte, 32))
	public, err := ssh.NewPublicKey(private.Public())
	if err != nil {
		t.Fatal(err)
	}
	block, err := ssh.MarshalPrivateKey(private, "")
	if err != nil {
		t.Fatal(err)
	}
	signer, err := builder.ReadPrivateKey(save(t, filepath.Join(t.TempDir(), "builder"), pem.EncodeToMemory(block)))
	if err != nil {
		t.Fatal(err)
	}
	sums, err := builder.Format(dir, "muster.raw", "measurements.json")
	if err != nil {
		t.Fatal(err)
	}
	signature, err := builder.Sign(signer, sums)
	if err != nil {
		t.Fatal(err)
	}
	save(t, filepath.Join(dir, builder.SumsFile), sums)
	save(t, filepath.Join(dir, builder.SignatureFile), signature)
	return dir, save(t, filepath.Join(t.TempDir(), "builder.pub"), ssh.MarshalAuthorizedKey(public))
}

func save(t *testing.T, file string, b []byte) string {
	t.Helper()
	if err := os.WriteFile(file, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// makePolicy runs muster policy with flags that a policy needs.
func makePolicy(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out, log strings.Builder
	root := filepath.Join("..", "..", "internal", "policyfile", "testdata", "ek-root.pem")
	a := &app{stdout: &out, stderr: &log}
	err := a.run(t.Context(), append(append([]string{"policy"}, args...), "--ek-root", root, "--operator", "--node-cidr", "192.0.2.0/24"))
	return out.String(), err
}

func TestAPolicyIsMadeFromTheImageItself(t *testing.T) {
	dir, key := release(t)
	disk, file := filepath.Join(dir, "muster.raw"), filepath.Join(dir, "measurements.json")
	want, err := makePolicy(t, "from-measurements", file)
	if err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"from-image", disk},
		{"from-image", disk, "--measurements", file},
		{"from-image", disk, "--measurements", file, "--builder-key", key},
		{"from-measurements", file, "--builder-key", key},
	} {
		if got, err := makePolicy(t, args...); err != nil || got != want {
			t.Errorf("%v: %v\n%s", args, err, got)
		}
	}
	both, err := makePolicy(t, "from-measurements", file, filepath.Join(dir, "measurements-secureboot.json"))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := makePolicy(t, "from-image", disk, "--secure-boot", "both"); err != nil || got != both {
		t.Errorf("%v\n%s", err, got)
	}
}

func TestImagesAndMeasurementsThatDontFitMakeNoPolicy(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(t *testing.T, dir string)
		args   []string
		says   string
	}{
		"an altered image":                   {func(t *testing.T, dir string) { flip(t, filepath.Join(dir, "muster.raw"), 41<<20) }, []string{"from-image", "DIR/muster.raw"}, "the image was altered"},
		"an altered image of a builder's":    {func(t *testing.T, dir string) { flip(t, filepath.Join(dir, "muster.raw"), 30<<20) }, []string{"from-image", "DIR/muster.raw", "--builder-key", "KEY"}, "the builder signed"},
		"measurements of another build":      {otherMeasurements, []string{"from-image", "DIR/muster.raw", "--measurements", "DIR/measurements.json"}, "one of the files is from another build"},
		"measurements that were not signed":  {otherMeasurements, []string{"from-measurements", "DIR/measurements.json", "--builder-key", "KEY"}, "the builder signed"},
		"measurements that no signature has": {func(*testing.T, string) {}, []string{"from-measurements", "DIR/measurements-secureboot.json", "--builder-key", "KEY"}, "has signed no file"},
		"no signature": {func(t *testing.T, dir string) {
			if err := os.Remove(filepath.Join(dir, builder.SignatureFile)); err != nil {
				t.Fatal(err)
			}
		}, []string{"from-measurements", "DIR/measurements.json", "--builder-key", "KEY"}, "BUILDER_KEY"},
		"a key that is none":      {func(*testing.T, string) {}, []string{"from-measurements", "DIR/measurements.json", "--builder-key", "DIR/measurements.json"}, "--builder-key"},
		"Secure Boot neither way": {func(*testing.T, string) {}, []string{"from-image", "DIR/muster.raw", "--secure-boot", "maybe"}, "off, on or both"},
		"a device or folder":      {func(*testing.T, string) {}, []string{"from-image", "DIR"}, "it is not a regular file"},
	} {
		t.Run(name, func(t *testing.T) {
			dir, key := release(t)
			tt.change(t, dir)
			var args []string
			for _, a := range tt.args {
				args = append(args, strings.NewReplacer("DIR", dir, "KEY", key).Replace(a))
			}
			if out, err := makePolicy(t, args...); err == nil || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("%v; want %q\n%s", err, tt.says, out)
			}
		})
	}
}

// S2: an image that changes after it was compared with the builder's signature is not measured. The key is read after
// that: from a pipe here, so that the moment is certain.
func TestWhatIsMeasuredIsWhatTheBuilderSigned(t *testing.T) {
	dir, key := release(t)
	disk := filepath.Join(dir, "muster.raw")
	want, err := makePolicy(t, "from-measurements", filepath.Join(dir, "measurements.json"))
	if err != nil {
		t.Fatal(err)
	}
	public, err := os.ReadFile(key)
	if err != nil {
		t.Fatal(err)
	}
	pipe := filepath.Join(t.TempDir(), "builder.pub")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	changed := make(chan error, 1)
	go func() {
		w, err := os.OpenFile(pipe, os.O_WRONLY, 0) // until it is opened for reading
		if err != nil {
			changed <- err
			return
		}
		image, err := os.OpenFile(disk, os.O_WRONLY, 0)
		if err == nil {
			_, err = image.WriteAt([]byte{0xEE}, 41<<20)
			err = errors.Join(err, image.Close())
		}
		_, werr := w.Write(public)
		changed <- errors.Join(err, werr, w.Close())
	}()
	got, err := makePolicy(t, "from-image", disk, "--builder-key", pipe)
	if err := errors.Join(err, <-changed); err != nil || got != want {
		t.Errorf("%v\n%s", err, got)
	}
	if _, err := makePolicy(t, "from-image", disk, "--builder-key", key); err == nil || !strings.Contains(err.Error(), "the builder signed") {
		t.Errorf("what it was changed into: %v", err)
	}
}

func flip(t *testing.T, file string, at int) {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	b[at] ^= 1
	save(t, file, b)
}

func otherMeasurements(t *testing.T, dir string) {
	t.Helper()
	p := imagetest.New(t)
	p.Cmdline += " more"
	m, err := image.Measurements(p.Program(t), crypto.SHA256, false)
	if err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	save(t, filepath.Join(dir, "measurements.json"), b)
}
