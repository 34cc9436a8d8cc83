// Package versions knows which Kubernetes releases Muster supports, and reads the list of components that a node of such a
// release needs.
//
// A component is trusted only for its SHA-256: any mirror can serve it. Therefore the list has no default mirror and no
// entry without a hash.
package versions

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// newest is the patch release for a minor version. Each was tested: it builds and starts.
var newest = map[string]string{
	"1.34": "1.34.4",
	"1.35": "1.35.4",
	"1.36": "1.36.1",
}

// Supported lists the minor versions, oldest first.
func Supported() []string { return slices.Sorted(maps.Keys(newest)) }

// Resolve turns "1.36" or "1.36.1", each with or without a leading "v", into a full version without it. A minor version
// that is not supported is an error.
func Resolve(s string) (string, error) {
	bare := strings.TrimPrefix(s, "v")
	parts := strings.Split(bare, ".")
	for _, p := range parts {
		if n, err := strconv.ParseUint(p, 10, 16); err != nil || strconv.FormatUint(n, 10) != p {
			return "", fmt.Errorf("%q is no Kubernetes version: write it as in 1.36 or 1.36.1", s)
		}
	}
	if len(parts) != 2 && len(parts) != 3 {
		return "", fmt.Errorf("%q is no Kubernetes version: write it as in 1.36 or 1.36.1", s)
	}
	patch, ok := newest[parts[0]+"."+parts[1]]
	if !ok {
		return "", fmt.Errorf("version %s of Kubernetes is not supported: use one of %s", s, strings.Join(Supported(), ", "))
	}
	if len(parts) == 3 {
		return bare, nil
	}
	return patch, nil
}
