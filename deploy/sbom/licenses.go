package sbom

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"sync"

	"github.com/google/licenseclassifier/v2/assets"
	"golang.org/x/mod/module"

	classifier "github.com/google/licenseclassifier/v2"
)

// licenses finds licenses in the module cache.
type licenses struct{ cache, goroot string }

var classify = sync.OnceValues(assets.DefaultClassifier)

// classified has the licenses of each text, by its hash. Most modules have one of a few texts, and to classify one takes long.
var classified sync.Map

// namesIn returns the licenses of a text.
func namesIn(c *classifier.Classifier, text []byte) []string {
	sum := sha256.Sum256(text)
	if known, ok := classified.Load(sum); ok {
		return known.([]string) //nolint:forcetypeassert // nothing else is put in
	}
	found := names(c.Match(text))
	classified.Store(sum, found)
	return found
}

// licenseFile matches the names of license files.
var licenseFile = regexp.MustCompile(`(?i)^(licen[cs]e|copying|unlicense)([._-].*)?$`)

// of returns the SPDX expression of a module's licenses: all files in its top folder.
func (l licenses) of(m *debug.Module) (string, error) {
	if isOwn(m.Path) {
		return ownLicense, nil
	}
	dir := l.goroot
	if m.Path != "std" {
		path, err := module.EscapePath(m.Path)
		if err != nil {
			return "", err
		}
		version, err := module.EscapeVersion(m.Version)
		if err != nil {
			return "", err
		}
		dir = filepath.Join(l.cache, path+"@"+version)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return "", fmt.Errorf("the source of %s %s, for its license: %w; `go mod download` fetches it", m.Path, m.Version, err)
	}
	c, err := classify()
	if err != nil {
		return "", err
	}
	var found []string
	for _, e := range entries {
		if e.IsDir() || !licenseFile.MatchString(e.Name()) || strings.HasSuffix(e.Name(), ".go") {
			continue
		}
		text, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return "", err
		}
		found = append(found, namesIn(c, text)...)
	}
	slices.Sort(found)
	found = slices.Compact(found)
	if len(found) == 0 {
		return unknown, nil
	}
	return strings.Join(found, " AND "), nil
}

func names(r classifier.Results) []string {
	const sure = 0.9
	var out []string
	for _, m := range r.Matches {
		if m.MatchType == "License" && m.Confidence >= sure {
			out = append(out, m.Name)
		}
	}
	return out
}
