package imagestore

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

// put writes content of containerd, and returns its digest.
func (s Store) put(t *testing.T, text string) string {
	t.Helper()
	sum := sha256.Sum256([]byte(text))
	name := hex.EncodeToString(sum[:])
	if err := machine.WriteFile(blobAt(s, name), []byte(text), 0o600, 0o700); err != nil {
		t.Fatal(err)
	}
	return "sha256:" + name
}

// names writes the names that containerd lists.
func (s Store) lists(t *testing.T, names ...string) {
	t.Helper()
	if err := machine.WriteFile(s.on("io.containerd.metadata.v1.bolt/meta.db"), []byte(strings.Join(names, "\n")), 0o600, 0o700); err != nil {
		t.Fatal(err)
	}
}

func manifestOf(config, padding string) string {
	return fmt.Sprintf(`{"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{"digest":%q},"layers":[]%s}`, config, padding)
}

// A user of the cluster can have any image pulled. None makes the bootstrapper use more memory or time at the next boot than this.
func TestAnImageThatIsTooLargeToReadIsNotKept(t *testing.T) {
	padded := func(size int) func(config string) string {
		return func(config string) string {
			rest := size - len(manifestOf(config, ""))
			return manifestOf(config, strings.Repeat(" ", rest))
		}
	}
	for name, tt := range map[string]struct {
		manifest func(config string) string
		keeps    bool
	}{
		"a manifest of the maximum size":    {padded(maxManifest), true},
		"a manifest of one byte more":       {padded(maxManifest + 1), false},
		"a manifest with nothing but parts": {func(string) string { return `{"layers":[` + strings.Repeat("{},", maxManifest/3-10) + `{}]}` }, false},
	} {
		p := pull(t)
		s, _, found := rebooted(t, p)
		image := "registry.example/large@" + s.put(t, tt.manifest(s.put(t, "{}")))
		s.lists(t, p.app, image)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		if err := s.Renew(t.Context()); err != nil {
			t.Fatal(err)
		}
		runtime.ReadMemStats(&after)
		if got := s.list(t); slices.Contains(got, image) != tt.keeps || !slices.Contains(got, p.app) || len(*found) > 0 {
			t.Errorf("%s: keeps %q, found %q", name, got, *found)
		}
		if used := after.TotalAlloc - before.TotalAlloc; used > 64<<20 {
			t.Errorf("%s: %d MiB of memory were used", name, used>>20)
		}
	}
}

func TestAnIndexWithTooManyPartsIsNotKept(t *testing.T) {
	for parts, keeps := range map[int]bool{maxParts: true, maxParts + 1: false} {
		s, _, _ := rebooted(t, pull(t))
		manifest := fmt.Sprintf(`{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":%q}`, s.put(t, manifestOf(s.put(t, "{}"), "")))
		image := "registry.example/index@" + s.put(t, `{"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[`+strings.Repeat(manifest+",", parts-1)+manifest+`]}`)
		s.lists(t, image)
		if err := s.Renew(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := s.list(t); slices.Contains(got, image) != keeps {
			t.Errorf("%d parts: keeps %q", parts, got)
		}
	}
}

func TestNotMoreThanTheMaximumOfNamesIsKept(t *testing.T) {
	s, _, _ := rebooted(t, pull(t))
	digest := s.put(t, manifestOf(s.put(t, "{}"), ""))
	var names []string
	for i := range 3 * maxNames { // the list of all is too large to be read again
		names = append(names, fmt.Sprintf("registry.example/%0200d@%s", i, digest))
	}
	s.lists(t, names...)
	if err := s.Renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := s.list(t); !slices.Equal(got, names[:maxNames]) {
		t.Errorf("%d names", len(got))
	}
}

// A list of names that another program wrote is not read into memory, whatever its size.
func TestALargeListOfAnInterruptedRenewalIsNotRead(t *testing.T) {
	for size, keeps := range map[int]bool{maxIndex: true, maxIndex + 1: false} {
		p := pull(t)
		s, _, _ := rebooted(t, p)
		_, digest, _ := strings.Cut(p.app, "@")
		text := fmt.Sprintf(`{"manifests":[{"digest":%q,"annotations":{%q:%q}}]}`, digest, nameAnnotation, p.app)
		text += strings.Repeat(" ", size-len(text))
		if err := errors.Join(
			os.MkdirAll(s.on(kept), 0o700), os.Rename(s.on(blobs), s.on(kept+"/blobs")), os.WriteFile(s.on(kept+"/index.json"), []byte(text), 0o600),
		); err != nil {
			t.Fatal(err)
		}
		if err := s.Renew(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := s.list(t); slices.Contains(got, p.app) != keeps {
			t.Errorf("%d bytes: keeps %q", size, got)
		}
	}
}

// badSector can't be read to its end.
type badSector struct{ io.ReadCloser }

func (b badSector) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p[:min(len(p), 100)])
	if errors.Is(err, io.EOF) {
		err = errors.New("input/output error")
	}
	return n, err
}

// With integrity protection, a sector that was changed from outside can't be read. The machine becomes a node without this image.
func TestContentThatCannotBeReadIsRemoved(t *testing.T) {
	p := pull(t)
	s, _, found := rebooted(t, p)
	s.open = func(name string) (io.ReadCloser, error) {
		f, err := os.Open(name)
		if err == nil && filepath.Base(name) == p.layers[p.proxy] {
			return badSector{f}, nil
		}
		return f, err
	}
	if err := s.Renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := s.list(t); !slices.Equal(got, []string{p.app}) || len(*found) != 1 {
		t.Errorf("keeps %q, found %q", got, *found)
	}
	if _, err := os.Lstat(blobAt(s, p.layers[p.proxy])); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("it is left: %v", err)
	}
}
