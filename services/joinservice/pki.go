package joinservice

import (
	"errors"
	"fmt"
	"io"
	"os"

	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
)

// controlPlaneFiles is the allow-list of the files in a control-plane ticket (J6).
var controlPlaneFiles = clusterinfo.ControlPlaneFiles()

// maxPKIFile is the limit of one file in bytes.
const maxPKIFile = 64 << 10

// authorities are those of them that are public, and by which a control plane recognizes its cluster (B8); a worker gets
// only the first.
var authorities = []string{caFile, "etcd/ca.crt", "front-proxy-ca.crt", "sa.pub"}

const caFile = "ca.crt"

// readPKI reads files below dir, and follows no link that leads outside of it.
func readPKI(dir string, names []string) ([]*joinv1.ControlPlaneFile, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	out := make([]*joinv1.ControlPlaneFile, 0, len(names))
	for _, name := range names {
		content, err := readBounded(root, name)
		if err != nil {
			return nil, errors.Join(err, root.Close())
		}
		out = append(out, &joinv1.ControlPlaneFile{Path: name, Content: content})
	}
	return out, root.Close()
}

func readBounded(root *os.Root, name string) ([]byte, error) {
	f, err := root.Open(name)
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(io.LimitReader(f, maxPKIFile+1))
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	if len(b) == 0 || len(b) > maxPKIFile {
		return nil, fmt.Errorf("%s has %d bytes, want 1 to %d", name, len(b), maxPKIFile)
	}
	return b, nil
}
