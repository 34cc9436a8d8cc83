package imagestore

import (
	"archive/tar"
	"encoding/json"
	"io"
	"os"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// archive writes one image of the layout, with its names, as a tar archive (OCI Image Format Specification 1.1, image-layout.md).
func (s Store) archive(w io.Writer, c content) error {
	index, err := json.Marshal(v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex, Manifests: c.names})
	if err != nil {
		return err
	}
	t := tar.NewWriter(w)
	for _, f := range []struct {
		name string
		text []byte
	}{{"oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)}, {"index.json", index}} {
		if err := t.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: f.name, Mode: 0o600, Size: int64(len(f.text))}); err != nil {
			return err
		}
		if _, err := t.Write(f.text); err != nil {
			return err
		}
	}
	written := map[string]bool{}
	for _, b := range c.blobs {
		if written[b] {
			continue
		}
		written[b] = true
		if err := s.archiveBlob(t, b); err != nil {
			return err
		}
	}
	return t.Close()
}

func (s Store) archiveBlob(t *tar.Writer, name string) error {
	f, err := os.Open(s.on(kept + "/blobs/sha256/" + name))
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if err := t.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "blobs/sha256/" + name, Mode: 0o600, Size: info.Size()}); err != nil {
		return err
	}
	_, err = io.Copy(t, f)
	return err
}
