package lan

import (
	"context"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"regexp"

	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// NewRegistry returns an OCI registry. Blobs of the image layouts are served from their paths; pushed images are
// stored below dir.
func NewRegistry(dir string, layouts []string) (http.Handler, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	b := blobs{own: registry.NewDiskBlobHandler(dir).(diskBlobs), dirs: []string{dir}}
	for _, l := range layouts {
		b.dirs = append(b.dirs, filepath.Join(l, "blobs"))
	}
	return b.resumable(registry.New(registry.WithBlobHandler(b), registry.Logger(log.New(io.Discard, "", 0)))), nil
}

// openRange is a range to the end of a blob (RFC 9110, 14.1.2), as containerd asks for when it resumes a download.
var openRange = regexp.MustCompile(`^bytes=([0-9]+)-$`)

// resumable names the end of open ranges, which go-containerregistry's handler refuses: a machine whose power was cut
// during a pull could never finish it.
func (b blobs) resumable(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if m := openRange.FindStringSubmatch(r.Header.Get("Range")); m != nil {
			if h, err := v1.NewHash(path.Base(r.URL.Path)); err == nil {
				if _, size, err := b.path(h); err == nil {
					r = r.Clone(r.Context())
					r.Header.Set("Range", fmt.Sprintf("bytes=%s-%d", m[1], size-1))
				}
			}
		}
		next.ServeHTTP(w, r)
	})
}

// diskBlobs are the operations of go-containerregistry's handler for a folder.
type diskBlobs interface {
	registry.BlobHandler
	registry.BlobPutHandler
}

// blobs finds blobs in several folders. It doesn't hash what it finds: who pulls does that,
// and hashing 700 MB at each start is most of the lab's start.
type blobs struct {
	own  diskBlobs
	dirs []string
}

func (b blobs) path(h v1.Hash) (string, int64, error) {
	for _, d := range b.dirs {
		p := filepath.Join(d, h.Algorithm, h.Hex)
		if fi, err := os.Stat(p); err == nil {
			return p, fi.Size(), nil
		}
	}
	return "", 0, registry.ErrNotFound
}

// Stat implements [registry.BlobStatHandler].
func (b blobs) Stat(_ context.Context, _ string, h v1.Hash) (int64, error) {
	_, size, err := b.path(h)
	return size, err
}

// Get implements [registry.BlobHandler].
func (b blobs) Get(_ context.Context, _ string, h v1.Hash) (io.ReadCloser, error) {
	p, _, err := b.path(h)
	if err != nil {
		return nil, err
	}
	return os.Open(p)
}

// Put implements [registry.BlobPutHandler].
func (b blobs) Put(ctx context.Context, repo string, h v1.Hash, r io.ReadCloser) error {
	return b.own.Put(ctx, repo, h, r)
}

// A Files serves single files over HTTP: /components/NAME and /sha256/HEX, and what tests publish: /published/NAME.
type Files struct {
	Dir  string            // where they are
	Sums map[string]string // name → SHA-256, lower-case hex; other names are not served
	// Published has files that are served as they are at the time.
	Published string
}

// URL is where machines find a file.
func (f Files) URL(name string) string { return "http://" + FilesHost + "/components/" + name }

// Handler returns the HTTP handler.
func (f Files) Handler() http.Handler {
	bySum := map[string]string{}
	for name, sum := range f.Sums {
		bySum[sum] = name
	}
	serve := func(w http.ResponseWriter, r *http.Request, name string) {
		if f.Sums[name] == "" {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", "application/octet-stream")
		http.ServeFile(w, r, filepath.Join(f.Dir, name))
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /components/{name}", func(w http.ResponseWriter, r *http.Request) { serve(w, r, r.PathValue("name")) })
	mux.HandleFunc("GET /published/{name}", func(w http.ResponseWriter, r *http.Request) {
		http.ServeFileFS(w, r, os.DirFS(f.Published), r.PathValue("name"))
	})
	mux.HandleFunc("GET /sha256/{sum}", func(w http.ResponseWriter, r *http.Request) { serve(w, r, bySum[r.PathValue("sum")]) })
	return mux
}
