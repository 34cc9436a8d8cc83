package imagestore

import (
	"archive/tar"
	"io"
	"os"
)

// archive writes the layout as a tar archive (OCI Image Format Specification 1.1, image-layout.md).
func (s Store) archive(w io.Writer) error {
	t := tar.NewWriter(w)
	const version = `{"imageLayoutVersion":"1.0.0"}`
	if err := t.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "oci-layout", Mode: 0o600, Size: int64(len(version))}); err != nil {
		return err
	}
	if _, err := io.WriteString(t, version); err != nil {
		return err
	}
	if err := t.AddFS(os.DirFS(s.on(kept))); err != nil {
		return err
	}
	return t.Close()
}
