package clusterapi

import (
	"errors"
	"io/fs"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/muster-k8s/muster/api/crds"
)

// Definitions returns this program's CustomResourceDefinitions.
func Definitions() ([]*unstructured.Unstructured, error) {
	var out []*unstructured.Unstructured
	names, err := fs.Glob(crds.FS, "*.yaml")
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		text, err := crds.FS.ReadFile(name)
		if err != nil {
			return nil, err
		}
		objects, err := ParseManifests(name, text)
		if err != nil {
			return nil, err
		}
		out = append(out, objects...)
	}
	if len(out) == 0 {
		return nil, errors.New("this program contains no definitions")
	}
	return out, nil
}
