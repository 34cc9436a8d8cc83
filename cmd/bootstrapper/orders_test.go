package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"slices"
	"testing"
)

// inFile returns the names that find reports for the nodes of a Go file.
func inFile(t *testing.T, path string, find func(ast.Node) []string) []string {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	ast.Inspect(f, func(n ast.Node) bool {
		for _, name := range find(n) {
			names[name] = true
		}
		return true
	})
	return slices.Sorted(maps.Keys(names))
}

func TestAMachineExecutesEachAction(t *testing.T) {
	actions := inFile(t, "../../internal/ownerorder/machine.go", func(n ast.Node) (out []string) {
		if v, ok := n.(*ast.ValueSpec); ok {
			if of, ok := v.Type.(*ast.Ident); ok && of.Name == "Action" {
				for _, name := range v.Names {
					out = append(out, name.Name)
				}
			}
		}
		return out
	})
	executed := inFile(t, "orders.go", func(n ast.Node) []string {
		if kv, ok := n.(*ast.KeyValueExpr); ok {
			if key, ok := kv.Key.(*ast.SelectorExpr); ok {
				return []string{key.Sel.Name}
			}
		}
		return nil
	})
	if len(actions) < 8 || !slices.Equal(actions, executed) {
		t.Errorf("the actions are %v, and runOrders has %v", actions, executed)
	}
}
