package layering

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const endorsements = "trust/internal/endorsement"

// nameAnEndorsement are the files that import the package of one endorsement, beside the registry.
var nameAnEndorsement = map[string]string{
	"trust/attest/tpm2/endorse.go": "the machine's side: the order of endorsements is fixed (A8)",
	"trust/attest/claims.go":       "Azure's hardware reports are bound to the platform key",
	"trust/attest/sameboot.go":     "a machine's first server has an EK certificate",
}

// For verifiers (docs/decisions/0022), an endorsement is one package and one line.
func TestAnEndorsementIsOnePackageAndOneLineOfTheRegistry(t *testing.T) {
	base := root(t)
	dirs, err := os.ReadDir(filepath.Join(base, endorsements))
	if err != nil {
		t.Fatal(err)
	}
	var packages []string
	for _, d := range dirs {
		if d.IsDir() && d.Name() != "registry" {
			packages = append(packages, d.Name())
		}
	}
	f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(base, endorsements, "registry", "registry.go"), nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	ast.Inspect(f, func(n ast.Node) bool {
		v, ok := n.(*ast.ValueSpec)
		if !ok || v.Names[0].Name != "All" {
			return true
		}
		for _, e := range v.Values[0].(*ast.CompositeLit).Elts {
			lines = append(lines, e.(*ast.CompositeLit).Type.(*ast.SelectorExpr).X.(*ast.Ident).Name)
		}
		return false
	})
	slices.Sort(lines)
	if len(packages) < 4 || !slices.Equal(packages, lines) {
		t.Errorf("the packages in %s are %v, and registry.All has lines for %v", endorsements, packages, lines)
	}

	found := map[string]bool{}
	err = filepath.WalkDir(filepath.Join(base, "trust"), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		rel, err := filepath.Rel(base, path)
		if err != nil {
			return err
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		for _, i := range f.Imports {
			imported, err := strconv.Unquote(i.Path.Value)
			if err != nil {
				return err
			}
			name, ok := strings.CutPrefix(imported, module+"/"+endorsements+"/")
			if !ok || name == "registry" || rel == endorsements+"/registry/registry.go" {
				continue
			}
			if found[rel] = true; nameAnEndorsement[rel] == "" {
				t.Errorf("%s imports endorsement %s: verifiers use the registry", rel, name)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for file := range nameAnEndorsement {
		if !found[file] {
			t.Errorf("%s names no endorsement any more: delete its exception", file)
		}
	}
}
