package layering

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// longest is the maximum number of lines of a handwritten file.
const longest = 500

// sources returns the paths of the handwritten Go files.
func sources(t *testing.T) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(root(t), func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && strings.HasPrefix(d.Name(), ".") || d.IsDir() && slices.Contains([]string{"bin", "dist", "gen", "testdata"}, d.Name()):
			return fs.SkipDir
		case !d.IsDir() && strings.HasSuffix(path, ".go"):
			out = append(out, path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(out) < 200 {
		t.Fatalf("only %d files found", len(out))
	}
	return out
}

func TestNoFileIsTooLong(t *testing.T) {
	for _, path := range sources(t) {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if n := bytes.Count(b, []byte("\n")); n > longest {
			t.Errorf("%s has %d lines, more than %d: divide it", path, n, longest)
		}
	}
}

// cmd/muster tests the texts of the folders that it lists.
func TestTheTextsOfEachFolderAreTested(t *testing.T) {
	list, err := os.ReadFile(filepath.Join(root(t), "cmd", "muster", "texts_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(root(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		made := slices.Contains([]string{"bin", "dist", "gen"}, e.Name()) || strings.HasPrefix(e.Name(), "muster-") || strings.HasPrefix(e.Name(), ".")
		if e.IsDir() && !made && !bytes.Contains(list, []byte(`"`+e.Name()+`"`)) {
			t.Errorf("cmd/muster/texts_test.go does not read %s", e.Name())
		}
	}
}

// A package comment starts with one sentence on the package's purpose, and is in one file only.
func TestEachPackageSaysWhatItIsFor(t *testing.T) {
	docs := map[string][]string{}
	for _, path := range sources(t) {
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.PackageClauseOnly|parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		dir := filepath.Dir(path)
		docs[dir] = append(docs[dir], text(f)...)
	}
	for dir, list := range docs {
		if len(list) != 1 {
			t.Errorf("%s has %d package comments, want one", dir, len(list))
			continue
		}
		if first, _, _ := strings.Cut(list[0], "\n\n"); !strings.Contains(first+"\n", ".\n") && !strings.Contains(first, ". ") {
			t.Errorf("%s: its comment does not begin with a sentence", dir)
		}
	}
}

// text returns a file's package comment, if it has one.
func text(f *ast.File) []string {
	if f.Doc == nil {
		return nil
	}
	return []string{strings.TrimSpace(f.Doc.Text())}
}

// Each program that makes a configuration for the API server refuses the answers of kubelets: internal/apiserver.
func TestEachClientOfTheAPIServerRefusesKubelets(t *testing.T) {
	found := 0
	for _, path := range sources(t) {
		rel, err := filepath.Rel(root(t), path)
		if err != nil {
			t.Fatal(err)
		}
		if folder, _, _ := strings.Cut(rel, "/"); strings.HasSuffix(rel, "_test.go") || !slices.Contains([]string{"cmd", "internal", "services"}, folder) {
			continue
		}
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		made := 0
		for _, f := range []string{"RESTConfigFromKubeConfig(", "BuildConfigFromFlags(", "InClusterConfig("} {
			made += bytes.Count(b, []byte(f))
		}
		found += made
		if made > 0 && bytes.Count(b, []byte("Wrap(apiserver.Only)")) < made {
			t.Errorf("%s: %d configurations, not all with apiserver.Only", rel, made)
		}
	}
	if found < 5 {
		t.Errorf("only %d configurations found", found)
	}
}
