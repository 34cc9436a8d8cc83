package kms

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// retrySealed is the pause that is sent to a caller for a root secret that may still be mounted.
const retrySealed = 10 * time.Second

// MountedRoot reads a version of the root secret from the folder where the Secret muster-kms-root is mounted. The files are
// root and salt of exactly 32 bytes for the first version, and root-N and salt-N for version N. Any other content gives
// ROOT_SEALED.
func MountedRoot(dir string) func(keys.Version) (*keys.Root, error) {
	return func(v keys.Version) (*keys.Root, error) {
		r, err := readRoot(dir, v)
		if err != nil {
			return nil, attest.RefuseFor(retrySealed, attestv1.Reason_REASON_ROOT_SEALED, "%w: does the Secret muster-system/muster-kms-root have version %d?", err, v)
		}
		return r, nil
	}
}

func readRoot(dir string, v keys.Version) (*keys.Root, error) {
	suffix := ""
	if v != keys.FirstVersion {
		suffix = "-" + strconv.FormatUint(uint64(v), 10)
	}
	// A mounted Secret changes when the link ..data is replaced. Both files must come from the same target of that link.
	if target, err := filepath.EvalSymlinks(filepath.Join(dir, "..data")); err == nil {
		dir = target
	} else if !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	root, err := readSecret(filepath.Join(dir, "root"+suffix))
	if err != nil {
		return nil, err
	}
	defer clear(root)
	salt, err := readSecret(filepath.Join(dir, "salt"+suffix))
	if err != nil {
		return nil, err
	}
	return keys.ParseRoot(v, root, salt)
}

// readSecret reads at most one byte more than a secret has, which is enough to detect one that is too long.
func readSecret(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(io.LimitReader(f, keys.Size+1))
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	return b, nil
}
