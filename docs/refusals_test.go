package docs_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// elsewhere lists the reasons that no test checks in every place where they are visible, each with the cause.
var elsewhere = map[attestv1.Reason]string{
	attestv1.Reason_REASON_UNSPECIFIED: "never sent on purpose",
	attestv1.Reason_REASON_ACCEPTED:    "no refusal",

	attestv1.Reason_REASON_HARDWARE_TCB: "a service would need TCB data that Intel has signed and that are valid today, or AMD's present list; trust/attest tests it by the whole path of evidence",
}

// asserted returns for each test function the reasons that it checks in all places: those named in a test, or in a
// function that it passes them to, which calls refusaltest.Refused, Reported or EveryProcedure, itself or through
// functions of its package. A reason that is only compared with something does not count.
func asserted(t *testing.T) map[string]map[string]bool {
	t.Helper()
	packages := map[string][]*ast.File{}
	for _, rel := range files(t, "_test.go") {
		f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, rel), nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		packages[filepath.Dir(rel)] = append(packages[filepath.Dir(rel)], f)
	}
	out := map[string]map[string]bool{}
	for _, list := range packages {
		checks := checking(list)
		constants := reasonConstants(list)
		for _, f := range list {
			for _, d := range f.Decls {
				fn, ok := d.(*ast.FuncDecl)
				if !ok || !checks[fn.Name.Name] || !strings.HasPrefix(fn.Name.Name, "Test") {
					continue
				}
				out[fn.Name.Name] = reasonsIn(fn.Body, constants)
			}
		}
	}
	return out
}

// checking returns the names of the functions that check a refusal in all places.
func checking(list []*ast.File) map[string]bool {
	calls := map[string][]string{}
	checks := map[string]bool{}
	for _, f := range list {
		for _, d := range f.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok || fn.Body == nil {
				continue
			}
			ast.Inspect(fn.Body, func(n ast.Node) bool {
				c, ok := n.(*ast.CallExpr)
				if !ok {
					return true
				}
				switch f := c.Fun.(type) {
				case *ast.Ident:
					calls[fn.Name.Name] = append(calls[fn.Name.Name], f.Name)
				case *ast.SelectorExpr:
					if x, ok := f.X.(*ast.Ident); ok && x.Name == "refusaltest" {
						checks[fn.Name.Name] = checks[fn.Name.Name] || slices.Contains([]string{"Refused", "Reported", "EveryProcedure"}, f.Sel.Name)
						return true
					}
					calls[fn.Name.Name] = append(calls[fn.Name.Name], f.Sel.Name)
				}
				return true
			})
		}
	}
	for changed := true; changed; {
		changed = false
		for name, callees := range calls {
			if !checks[name] && slices.ContainsFunc(callees, func(c string) bool { return checks[c] && !strings.HasPrefix(c, "Test") }) {
				checks[name], changed = true, true
			}
		}
	}
	return checks
}

// reasonConstants returns the package's constants that stand for a reason.
func reasonConstants(list []*ast.File) map[string]string {
	out := map[string]string{}
	for _, f := range list {
		ast.Inspect(f, func(n ast.Node) bool {
			if v, ok := n.(*ast.ValueSpec); ok && len(v.Names) == len(v.Values) {
				for i := range v.Names {
					if r := reasonOf(v.Values[i], nil); r != "" {
						out[v.Names[i].Name] = r
					}
				}
			}
			return true
		})
	}
	return out
}

func reasonOf(e ast.Expr, constants map[string]string) string {
	switch e := e.(type) {
	case *ast.SelectorExpr:
		if name, ok := strings.CutPrefix(e.Sel.Name, "Reason_REASON_"); ok {
			return name
		}
	case *ast.Ident:
		return constants[e.Name]
	}
	return ""
}

func reasonsIn(body ast.Node, constants map[string]string) map[string]bool {
	out := map[string]bool{}
	ast.Inspect(body, func(n ast.Node) bool {
		if b, ok := n.(*ast.BinaryExpr); ok && (b.Op == token.EQL || b.Op == token.NEQ) {
			return reasonOf(b.X, constants) == "" && reasonOf(b.Y, constants) == ""
		}
		if e, ok := n.(ast.Expr); ok {
			if r := reasonOf(e, constants); r != "" {
				out[r] = true
			}
		}
		return true
	})
	return out
}

// R1: a new reason needs a test that checks it in error detail, metric, log and audit record.
func TestEveryReasonIsAskedForInAllPlaces(t *testing.T) {
	tests := asserted(t)
	for n := range attestv1.Reason_name {
		r := attestv1.Reason(n)
		name := attest.ReasonName(r)
		tried := slices.ContainsFunc(slices.Collect(maps.Values(tests)), func(reasons map[string]bool) bool { return reasons[name] })
		if elsewhere[r] == "" && !tried {
			t.Errorf("no test asks for %s in error detail, metric, log and audit record: use package refusaltest, and add a row to docs/refusals.md", name)
		}
	}
}

// The refusal table names the test of each attempt: that test must check that reason.
func TestTheTableOfRefusalsIsTrue(t *testing.T) {
	tests := asserted(t)
	text := read(t, "docs/refusals.md")
	table, _, found := strings.Cut(text, "\n## Before anything is asked\n")
	if !found {
		t.Fatal("docs/refusals.md has no section of refusals by clients")
	}
	test := regexp.MustCompile("`(Test\\w+)`")
	seen := map[string]bool{}
	for line := range strings.Lines(table) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if !strings.HasPrefix(line, "|") || len(cells) != 3 {
			continue
		}
		for _, reason := range regexp.MustCompile("`([A-Z_]+)`").FindAllStringSubmatch(cells[1], -1) {
			seen[reason[1]] = true
			names := test.FindAllStringSubmatch(cells[2], -1)
			if len(names) == 0 {
				t.Errorf("%s: no test is named", strings.TrimSpace(cells[0]))
			}
			for _, name := range names {
				if !tests[name[1]][reason[1]] {
					t.Errorf("%s: %s does not ask for %s in all places", strings.TrimSpace(cells[0]), name[1], reason[1])
				}
			}
		}
	}
	for n := range attestv1.Reason_name {
		if r := attestv1.Reason(n); !seen[attest.ReasonName(r)] && elsewhere[r] == "" {
			t.Errorf("docs/refusals.md has no row for %s", attest.ReasonName(r))
		}
	}
}
