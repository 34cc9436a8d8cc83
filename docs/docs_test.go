// Package docs_test checks the documents against the code: names in them must exist, and everything that must be
// documented must be named.
package docs_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"connectrpc.com/connect"
	gotpm "github.com/google/go-tpm/tpm2"
	"go.uber.org/goleak"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/tpm"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const root = ".."

// files returns the paths of all files of the tree with one of the suffixes, relative to its
// root, without generated code and build results.
func files(t *testing.T, suffixes ...string) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		if d.IsDir() {
			if slices.Contains([]string{".git", ".cache", "bin", "dist", "gen"}, rel) || strings.HasPrefix(rel, "muster-") {
				return filepath.SkipDir
			}
			return nil
		}
		if slices.ContainsFunc(suffixes, func(s string) bool { return strings.HasSuffix(rel, s) }) {
			out = append(out, rel)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func read(t *testing.T, rel string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(root, rel))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// outsideFences drops fenced and indented blocks.
func outsideFences(text string) string {
	var out []string
	fenced := false
	for line := range strings.Lines(text) {
		if strings.HasPrefix(strings.TrimSpace(line), "```") {
			fenced = !fenced
			continue
		}
		if !fenced && !strings.HasPrefix(line, "    ") {
			out = append(out, line)
		}
	}
	return strings.Join(out, "")
}

// rows returns the cells of each table row whose first cell is a code word that matches.
func rows(text string, first *regexp.Regexp) [][]string {
	var out [][]string
	for line := range strings.Lines(text) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		if len(cells) > 1 && strings.HasPrefix(line, "|") && first.MatchString(cells[0]) {
			cells[0] = strings.Trim(cells[0], "`")
			out = append(out, cells)
		}
	}
	return out
}

func TestEveryReasonCodeIsDocumentedOnce(t *testing.T) {
	seen := map[string]int{}
	for _, cells := range rows(read(t, "docs/reason-codes.md"), regexp.MustCompile("^`[A-Z_]+`$")) {
		seen[cells[0]]++
		if r, ok := attestv1.Reason_value["REASON_"+cells[0]]; ok && attestv1.Reason(r) != attestv1.Reason_REASON_ACCEPTED {
			err := rpc.Error(attest.Refuse(attestv1.Reason(r), "cause"))
			if want := "`" + connect.CodeOf(err).String() + "`"; cells[1] != want {
				t.Errorf("%s: the code is %s, docs/reason-codes.md says %s", cells[0], want, cells[1])
			}
		}
		for i, cell := range cells {
			if cell == "" {
				t.Errorf("%s: cell %d is empty", cells[0], i+1)
			}
		}
	}
	for n := range attestv1.Reason_name {
		name := attest.ReasonName(attestv1.Reason(n))
		if seen[name] != 1 {
			t.Errorf("%s stands %d times in docs/reason-codes.md, want once", name, seen[name])
		}
		delete(seen, name)
	}
	for name := range seen {
		t.Errorf("docs/reason-codes.md has %s, which is no reason code", name)
	}
}

// TestTheSpecificationHasTheTemplate marshals the attestation key's templates and looks for
// their parts in the tables of docs/attested-tls.md.
func TestTheSpecificationHasTheTemplate(t *testing.T) {
	text := read(t, "docs/attested-tls.md")
	for name, tt := range map[string]struct {
		rsa   bool
		parts []string // from the first byte to the last
	}{
		"ECC": {parts: []string{"0023", "000B", "00050472", "0020", akMarker, "0010", "0018", "000B", "0003", "0010", "0000", "0000"}},
		"RSA": {rsa: true, parts: []string{"0001", "000B", "00050472", "0020", akMarker, "0010", "0014", "000B", "0800", "00000000", "0000"}},
	} {
		t.Run(name, func(t *testing.T) {
			got := fmt.Sprintf("%x", gotpm.Marshal(tpm.AKTemplate(tt.rsa)))
			if want := strings.ToLower(strings.Join(tt.parts, "")); got != want {
				t.Errorf("the template is\n%s, the document's parts are\n%s", got, want)
			}
			for _, part := range tt.parts {
				if !strings.Contains(text, "`"+part+"`") {
					t.Errorf("docs/attested-tls.md lacks %s", part)
				}
			}
		})
	}
	if !strings.Contains(text, "`"+atls.ALPN+"`") {
		t.Errorf("docs/attested-tls.md lacks the protocol's name %s", atls.ALPN)
	}
	if hex := fmt.Sprintf("%x", atls.ALPN); !strings.Contains(strings.ReplaceAll(text, " ", ""), hex) {
		t.Errorf("docs/attested-tls.md lacks the protocol's name in hexadecimal digits, %s", hex)
	}
}

// akMarker is SHA-256("muster-atls/1 attestation key").
const akMarker = "410ebcea952ee7b7bd710922aaa019a7b6b80404cf1b1a467b4bba477fbd0501"

var metricName = regexp.MustCompile(`^muster_[a-z0-9_]+$`)

// registered returns the metrics' names in shipped code: Prometheus options carry them as
// whole string literals.
func registered(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, rel := range files(t, ".go") {
		if strings.HasSuffix(rel, "_test.go") || strings.HasPrefix(rel, "e2e/") || strings.HasPrefix(rel, "lab/") || strings.HasPrefix(rel, "deploy/") { // deploy/dashboards asks for metrics
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, rel), nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(f, func(n ast.Node) bool {
			lit, ok := n.(*ast.BasicLit)
			if !ok || lit.Kind != token.STRING {
				return true
			}
			if s, err := strconv.Unquote(lit.Value); err == nil && metricName.MatchString(s) {
				out[s] = rel
			}
			return true
		})
	}
	return out
}

func TestMetricsInCodeAndDocumentAreTheSame(t *testing.T) {
	documented := map[string]bool{}
	for _, cells := range rows(read(t, "docs/metrics.md"), regexp.MustCompile("^`muster_[a-z0-9_]+`$")) {
		if documented[cells[0]] {
			t.Errorf("docs/metrics.md has %s twice", cells[0])
		}
		documented[cells[0]] = true
	}
	code := registered(t)
	for _, name := range slices.Sorted(maps.Keys(code)) {
		if !documented[name] {
			t.Errorf("%s (%s) is not in docs/metrics.md", name, code[name])
		}
	}
	for name := range documented {
		if code[name] == "" {
			t.Errorf("docs/metrics.md has %s, which no code registers", name)
		}
	}
}

var link = regexp.MustCompile(`\]\(([^)\s]+)\)`)

func anchors(text string) map[string]bool {
	out := map[string]bool{}
	drop := regexp.MustCompile(`[^a-z0-9 \-_]`)
	for line := range strings.Lines(outsideFences(text)) {
		if h := strings.TrimLeft(line, "#"); h != line {
			h = drop.ReplaceAllString(strings.ToLower(strings.TrimSpace(h)), "")
			out[strings.ReplaceAll(h, " ", "-")] = true
		}
	}
	return out
}

func TestLinksLeadSomewhere(t *testing.T) {
	for _, rel := range files(t, ".md") {
		for _, m := range link.FindAllStringSubmatch(outsideFences(read(t, rel)), -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			path, anchor, _ := strings.Cut(m[1], "#")
			target := rel
			if path != "" {
				target = filepath.Join(filepath.Dir(rel), path)
			}
			if _, err := os.Stat(filepath.Join(root, target)); err != nil {
				t.Errorf("%s: link to %s: %v", rel, m[1], err)
				continue
			}
			if anchor != "" && !anchors(read(t, target))[anchor] {
				t.Errorf("%s: link to %s: %s has no such heading", rel, m[1], target)
			}
		}
	}
}

// Each page must be linked: docs/README.md lists those of docs, and docs/decisions/README.md the decisions.
func TestEachPageIsInTheListOfItsFolder(t *testing.T) {
	for _, dir := range []string{"docs", "docs/decisions"} {
		linked := map[string]bool{}
		for _, m := range link.FindAllStringSubmatch(read(t, dir+"/README.md"), -1) {
			linked[filepath.Join(dir, m[1])] = true
		}
		pages := 0
		for _, rel := range files(t, ".md") {
			if filepath.Dir(rel) != dir || filepath.Base(rel) == "README.md" {
				continue
			}
			if pages++; !linked[rel] {
				t.Errorf("%s is not in the list of %s/README.md", rel, dir)
			}
		}
		if pages < 5 {
			t.Errorf("only %d pages found in %s", pages, dir)
		}
	}
}

func TestPathsInDocumentsExist(t *testing.T) {
	path := regexp.MustCompile("`((?:api|cmd|deploy|docs|e2e|gen|internal|lab|proto|services|tools|trust)/[A-Za-z0-9_./-]*)`")
	for _, rel := range files(t, ".md") {
		for _, m := range path.FindAllStringSubmatch(outsideFences(read(t, rel)), -1) {
			if strings.Contains(m[1], "NNNN") {
				continue
			}
			if _, err := os.Stat(filepath.Join(root, m[1])); err != nil {
				t.Errorf("%s names %s: %v", rel, m[1], err)
			}
		}
	}
}

func TestTestsThatDocumentsNameExist(t *testing.T) {
	declared := map[string]bool{}
	function := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Benchmark)\w+)\(`)
	for _, rel := range files(t, "_test.go") {
		for _, m := range function.FindAllStringSubmatch(read(t, rel), -1) {
			declared[m[1]] = true
		}
	}
	named := regexp.MustCompile("`((?:Test|Fuzz|Benchmark)[A-Z]\\w+)`")
	for _, rel := range files(t, ".md") {
		for _, m := range named.FindAllStringSubmatch(read(t, rel), -1) {
			if !declared[m[1]] {
				t.Errorf("%s names %s, which is no test", rel, m[1])
			}
		}
	}
}

// A package of e2e that no target names would never run, since `make unit` leaves e2e out.
func TestEachEndToEndPackageHasATarget(t *testing.T) {
	makefile, table := read(t, "Makefile"), read(t, "CONTRIBUTING.md")
	long := regexp.MustCompile(`(?m)^E2E_LONG := (.*)$`).FindStringSubmatch(makefile)
	if long == nil {
		t.Fatal("the Makefile has no E2E_LONG")
	}
	for _, pkg := range strings.Fields(long[1]) {
		if name := strings.TrimPrefix(pkg, "./"); !strings.Contains(table, "`"+name+"`") {
			t.Errorf("CONTRIBUTING.md does not say why %s is not part of `make test`", name)
		}
	}
	folders := map[string]bool{}
	for _, f := range files(t, "_test.go") {
		if parts := strings.Split(filepath.ToSlash(f), "/"); parts[0] == "e2e" {
			folders[parts[1]] = true
		}
	}
	if len(folders) == 0 {
		t.Fatal("e2e has no tests")
	}
	for name := range folders {
		if !regexp.MustCompile(`\./e2e/` + name + `(/|\s|$)`).MatchString(makefile) {
			t.Errorf("no target of the Makefile runs e2e/%s", name)
		}
	}
}
