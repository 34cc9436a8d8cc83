// Package layering has only tests: they check the import rules of docs/architecture.md.
package layering

import (
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const module = "github.com/muster-k8s/muster"

type pkg struct {
	ImportPath   string
	Standard     bool
	Imports      []string
	TestImports  []string
	XTestImports []string
	Deps         []string
}

func root(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func list(t *testing.T, dir string, args ...string) []pkg {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", append([]string{"list", "-json=ImportPath,Standard,Imports,TestImports,XTestImports,Deps"}, args...)...)
	cmd.Dir = dir
	// Released programs are built without cgo.
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, stderr.String())
	}
	var pkgs []pkg
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return pkgs
		} else if err != nil {
			t.Fatal(err)
		}
		pkgs = append(pkgs, p)
	}
}

func TestTrustedPackagesAreTheListedOnes(t *testing.T) {
	var got []string
	for _, p := range list(t, filepath.Join(root(t), "trust"), "-deps", "./attest/...", "./atls/...", "./keys/...", "./tpm/...", "./tsm/...") {
		// Test helpers are in the module, but not in released programs; see below.
		if !p.Standard && !isTestPackage(p.ImportPath) {
			got = append(got, p.ImportPath)
		}
	}
	slices.Sort(got)
	path := filepath.Join(root(t), "docs", "trusted-packages.txt")
	text := "# Every package outside the standard library that is trusted with secrets: go list -deps of the module trust.\n" + strings.Join(got, "\n") + "\n"
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if text != string(want) {
		t.Errorf("docs/trusted-packages.txt is not what trust imports. If the change is meant, review it and write this to the file:\n%s", text)
	}
}

func TestWhoImportsWhom(t *testing.T) {
	pkgs := list(t, root(t), "./...", "./gen/...", "./trust/...")
	if len(pkgs) < 20 {
		t.Fatalf("only %d packages found", len(pkgs))
	}
	for _, p := range pkgs {
		from := strings.TrimPrefix(p.ImportPath, module+"/")
		for _, imp := range p.Imports {
			to, ours := strings.CutPrefix(imp, module+"/")
			if !ours {
				continue
			}
			if why := forbidden(from, to); why != "" {
				t.Errorf("%s imports %s: %s", from, to, why)
			}
		}
	}
}

// forbidden returns why a package may not import another, both without the module's path.
func forbidden(from, to string) string {
	service := func(p string) string {
		parts := strings.Split(p, "/")
		if len(parts) > 1 && parts[0] == "services" {
			return parts[1]
		}
		return ""
	}
	top := func(p string) string { return strings.Split(p, "/")[0] }
	// program returns the folder of a program, whose packages are its own.
	program := func(p string) string {
		parts := strings.Split(p, "/")
		if parts[0] == "cmd" && len(parts) > 1 {
			return parts[1]
		}
		return ""
	}
	wires := program(from) != "" && strings.Count(from, "/") == 1 // not what a program's main uses
	switch {
	case top(from) == "gen" && top(to) != "gen":
		return "gen holds what buf writes and nothing else"
	case top(from) == "trust" && top(to) != "trust" && to != "gen/muster/attest/v1":
		return "trust is the audited core"
	case service(from) != "" && service(to) != "" && service(from) != service(to):
		return "a service never imports another"
	case strings.HasPrefix(from, "deploy/vm") && (to == "services/bootstrapper/metadata" || to == "services/bootstrapper/metadata/provider"):
		return "" // the image's tool and its first program read files that the bootstrapper will read
	case isTestPackage(from) && isTestPackage(to):
		return ""
	case service(to) != "" && service(from) == "" && !wires && top(from) != "lab" && top(from) != "e2e":
		return "services are wired in cmd alone"
	case program(to) != "" && program(from) == program(to):
		return ""
	case top(to) == "cmd" || (top(to) == "e2e" && top(from) != "e2e") || (top(to) == "lab" && top(from) != "lab" && top(from) != "e2e"):
		return "programs and laboratories are not imported by other packages"
	case isTestPackage(to) && !isTestPackage(from) && top(from) != "e2e":
		return "test packages are for tests"
	}
	return ""
}

// isTestPackage reports whether a package exists for tests: its name ends in "test", as net/http/httptest's.
func isTestPackage(path string) bool {
	return slices.ContainsFunc(strings.Split(path, "/"), func(s string) bool { return strings.HasSuffix(s, "test") && s != "attest" })
}

func TestForbiddenSaysNoWhereItShould(t *testing.T) {
	for _, pair := range [][2]string{
		{"trust/atls", "internal/rpc"},
		{"services/kms", "services/joinservice"},
		{"cmd/muster/owner", "services/kms"},
		{"services/kms", "cmd/muster/owner"},
		{"cmd/kms", "cmd/muster/owner"},
		{"services/kms", "trust/attest/attesttest"},
		{"cmd/kms", "internal/kubetest"},
		{"gen/muster/kms/v1", "trust/attest"},
	} {
		if forbidden(pair[0], pair[1]) == "" {
			t.Errorf("%s may import %s", pair[0], pair[1])
		}
	}
	for _, pair := range [][2]string{
		{"cmd/kms", "services/kms"},
		{"cmd/muster", "cmd/muster/owner"},
		{"services/joinservice", "services/joinservice/enroll"},
		{"trust/atls", "gen/muster/attest/v1"},
		{"e2e/attack", "trust/attest/attesttest"},
	} {
		if why := forbidden(pair[0], pair[1]); why != "" {
			t.Errorf("%s may not import %s: %s", pair[0], pair[1], why)
		}
	}
}

func TestNothingThatShipsHoldsTestCode(t *testing.T) {
	for _, p := range list(t, root(t), "./cmd/...") {
		if isTestPackage(strings.TrimPrefix(p.ImportPath, module)) {
			continue // who links it is found below
		}
		for _, d := range p.Deps {
			// Helm's own packages link testing, to check whether they run in a test.
			linksTesting := d == "testing" && !slices.Contains(p.Deps, "helm.sh/helm/v4/pkg/chart/common")
			if strings.HasPrefix(d, "github.com/google/go-tpm-tools") || linksTesting || strings.HasPrefix(d, module) && isTestPackage(d) {
				t.Errorf("%s links %s", p.ImportPath, d)
			}
		}
	}
}

func TestEachTestPackageLooksForLeakedGoroutines(t *testing.T) {
	dirs := make(map[string]bool)
	err := filepath.WalkDir(root(t), func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && strings.HasPrefix(d.Name(), ".") || d.IsDir() && slices.Contains([]string{"bin", "dist", "gen", "testdata"}, d.Name()):
			return fs.SkipDir
		case !strings.HasSuffix(path, "_test.go"):
			return nil
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		// kubetest.Verify is goleak's check, after a cluster's processes have ended; ownertest.Main calls it.
		found := strings.Contains(string(b), "goleak.VerifyTestMain(m") || strings.Contains(string(b), "goleak.VerifyTestMain(disktest.InMemory(") || strings.Contains(string(b), "goleak.Find(") || strings.Contains(string(b), "kubetest.Verify(m") || strings.Contains(string(b), "ownertest.Main(m")
		dirs[filepath.Dir(path)] = dirs[filepath.Dir(path)] || found
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(dirs) < 20 {
		t.Fatalf("only %d test packages found", len(dirs))
	}
	for dir, found := range dirs {
		if !found {
			t.Errorf("%s has tests, but no TestMain with goleak", dir)
		}
	}
}

func TestEachReplacementOfAModuleHasAReason(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(root(t), "*", "*", "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range append(files, filepath.Join(root(t), "go.mod"), filepath.Join(root(t), "trust", "go.mod")) {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		before := ""
		for line := range strings.Lines(string(b)) {
			if strings.HasPrefix(line, "replace ") && !strings.HasPrefix(before, "//") {
				t.Errorf("%s: %s has no comment above it that says why", path, strings.TrimSpace(line))
			}
			before = line
		}
	}
}
