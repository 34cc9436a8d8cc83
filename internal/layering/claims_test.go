package layering

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// makers create claims, which need a verifier, and peers, which need a session (A2).
var makers = []string{"NewClaims", "NewPeer"}

// withUnsafe are the files that import package unsafe, which could create any value.
var withUnsafe = []string{
	"deploy/vm/initramfs/verity.go", // the kernel's device-mapper takes pointers
}

// TestClaimsAreMadeInTrustAlone finds code outside the module trust that names a function that creates claims or peers, or
// that could create them otherwise: with package unsafe or a linked name.
func TestClaimsAreMadeInTrustAlone(t *testing.T) {
	base := root(t)
	files := 0
	err := filepath.WalkDir(base, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(base, path)
		if err != nil {
			return err
		}
		if d.IsDir() {
			if rel == "trust" || rel == "gen" || rel == "bin" || rel == "dist" || d.Name() == ".git" || d.Name() == "testdata" {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(path, ".go") {
			return nil
		}
		files++
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ParseComments)
		if err != nil {
			return err
		}
		for _, what := range makesClaims(f) {
			if what != "package unsafe" || !slices.Contains(withUnsafe, rel) {
				t.Errorf("%s uses %s: outside trust nothing makes claims or peers (A2)", rel, what)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if files < 100 {
		t.Errorf("only %d files were looked at", files)
	}
}

// makesClaims returns the names in a file that could create claims or peers.
func makesClaims(f *ast.File) []string {
	var found []string
	named := map[string]bool{}
	for _, i := range f.Imports {
		path, err := strconv.Unquote(i.Path.Value)
		switch {
		case err != nil:
		case path == "unsafe":
			found = append(found, "package unsafe")
		case path != module+"/trust/attest":
		case i.Name == nil:
			named["attest"] = true
		case i.Name.Name == ".":
			found = append(found, "a dot import of package attest")
		default:
			named[i.Name.Name] = true
		}
	}
	ast.Inspect(f, func(n ast.Node) bool {
		s, ok := n.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		if x, ok := s.X.(*ast.Ident); ok && named[x.Name] && slices.Contains(makers, s.Sel.Name) {
			found = append(found, "attest."+s.Sel.Name)
		}
		return true
	})
	for _, group := range f.Comments {
		for _, c := range group.List {
			if strings.HasPrefix(c.Text, "//go:linkname") {
				found = append(found, "a linked name")
			}
		}
	}
	return found
}

func TestMakersOfClaimsAreFound(t *testing.T) {
	const attest = `"` + module + `/trust/attest"`
	for name, tt := range map[string]struct {
		source string
		want   string
	}{
		"a call":                  {"import " + attest + "\nvar _ = attest.NewClaims(x)", "attest.NewClaims"},
		"a function value":        {"import " + attest + "\nvar _ = forge(attest.NewPeer)", "attest.NewPeer"},
		"another name":            {"import a " + attest + "\nvar _ = a.NewClaims", "attest.NewClaims"},
		"a dot import":            {"import . " + attest + "\nvar _ = NewClaims", "a dot import of package attest"},
		"package unsafe":          {`import "unsafe"`, "package unsafe"},
		"a linked name":           {"//go:linkname claims x\nfunc claims()", "a linked name"},
		"another package's":       {"import attest \"example.com/attest\"\nvar _ = attest.NewClaims", ""},
		"what else attest offers": {"import " + attest + "\nvar _ = attest.PeerFrom", ""},
	} {
		f, err := parser.ParseFile(token.NewFileSet(), "x.go", "package x\n"+tt.source, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(makesClaims(f), ", "); got != tt.want {
			t.Errorf("%s: found %q, want %q", name, got, tt.want)
		}
	}
}
