package lan

import (
	"context"
	"io"
	"log"
	"net/http"
	"os"
	"path/filepath"

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
	return registry.New(registry.WithBlobHandler(b), registry.Logger(log.New(io.Discard, "", 0))), nil
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
