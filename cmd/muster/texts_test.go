package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// commandLine is a command of muster in a text; in backquotes it is one for certain.
var commandLine = regexp.MustCompile("(`?)\\bmuster ((?:--)?[a-z][a-z-]*[^`\"\\n]*)")

// placeholder is an argument in a text: NAME, MACHINE:9000, %s, a file, a number.
var placeholder = regexp.MustCompile(`^(%[sqd]|[A-Z][A-Z0-9:=|-]*|[\w./-]*[./][\w./-]*|[0-9a-f.…-]+)$`)

// A remedy that names a command or a flag that does not exist costs the operator the night.
func TestEachCommandThatTextsNameExists(t *testing.T) {
	root := (&app{stdout: io.Discard, stderr: io.Discard}).command()
	root.InitDefaultCompletionCmd()
	root.InitDefaultHelpFlag()
	seen := 0
	for path, text := range texts(t) {
		for _, m := range commandLine.FindAllStringSubmatch(text, -1) {
			line, sure := m[2], m[1] == "`"
			ok, counted := exists(root, strings.Fields(line), sure)
			if !ok {
				t.Errorf("%s: muster %s: no such command or flag", path, line)
			}
			if counted {
				seen++
			}
		}
	}
	if seen < 300 {
		t.Errorf("only %d commands were found in all texts", seen)
	}
}

// exists reports whether the words begin with a command and flags that it has. In prose, where sure is false, a first word
// that is no command is not meant as one.
func exists(cmd *cobra.Command, words []string, sure bool) (ok, counted bool) {
	clean := func(w string) (word string, last bool) {
		word = strings.TrimRight(w, ".,;:)'\\")
		return word, word != w && !strings.HasSuffix(w, ",")
	}
	for len(words) > 0 {
		word, last := clean(words[0])
		i := slices.IndexFunc(cmd.Commands(), func(c *cobra.Command) bool { return c.Name() == word || c.HasAlias(word) })
		if i < 0 {
			break
		}
		cmd, words, counted = cmd.Commands()[i], words[1:], true
		if last {
			return true, true
		}
	}
	if !counted && (len(words) == 0 || !strings.HasPrefix(words[0], "--") && words[0] != "COMMAND") {
		return !sure, false
	}
	if sure && cmd.HasSubCommands() && !cmd.Runnable() && len(words) > 0 && !strings.HasPrefix(words[0], "--") && words[0] != "COMMAND" {
		return false, counted // policy FILE
	}
	for _, w := range words {
		word, last := clean(strings.Trim(w, "[]"))
		flag, isFlag := strings.CutPrefix(word, "--")
		flag, _, _ = strings.Cut(flag, "=")
		switch {
		case isFlag && flag != "help" && cmd.Flag(flag) == nil && cmd.InheritedFlags().Lookup(flag) == nil:
			return false, counted
		case !isFlag && !sure && !placeholder.MatchString(word):
			return true, counted // the sentence goes on
		}
		if last {
			break
		}
	}
	return true, counted
}

// written is where people write. The tree's top itself is not read: bin, dist and .git in it change with each run, and go
// test would cache no result of this package. A test of internal/layering compares the folders.
var written = []string{
	"api", "cmd", "deploy", "docs", "e2e", "internal", "lab", "proto", "services", "tools", "trust",
	"README.md", "CONTRIBUTING.md", "SECURITY.md", "buf.yaml", "buf.gen.yaml", ".golangci.yaml",
}

// texts returns what ships to users: documents, messages in the code, alerts.
func texts(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	top := filepath.Join("..", "..")
	visit := func(path string, d fs.DirEntry, err error) error {
		rel, _ := filepath.Rel(top, path)
		switch {
		case err != nil:
			return err
		case d.IsDir() && (strings.HasPrefix(d.Name(), ".") || slices.Contains([]string{"bin", "dist", "gen", "testdata", "performance"}, d.Name())):
			return fs.SkipDir
		case d.IsDir() || strings.HasSuffix(path, "_test.go") || !slices.Contains([]string{".go", ".md", ".yaml", ".8"}, filepath.Ext(path)) || rel == "CHANGELOG.md":
			return nil
		}
		b, err := os.ReadFile(path)
		out[rel] = string(b)
		return err
	}
	for _, name := range written {
		if err := filepath.WalkDir(filepath.Join(top, name), visit); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

func TestACommandThatDoesNotExistIsFound(t *testing.T) {
	root := (&app{stdout: io.Discard, stderr: io.Discard}).command()
	for line, want := range map[string]bool{
		"forget NAME": true, "forget NAME --erase, which": true, "policy apply": true, "policy check FILE": true, "status --endpoint HOST": true, "--help": true,
		"forgets NAME": false, "forget NAME --erased": false, "policy aply": false, "policy add-class NAME --for HOST": false, "status --nodes": false,
	} {
		if got, _ := exists(root, strings.Fields(line), true); got != want {
			t.Errorf("`muster %s`: %t", line, got)
		}
	}
	if got, _ := exists(root, strings.Fields("that accepts all"), false); !got {
		t.Error("prose is taken for a command")
	}
	if got, _ := exists(root, strings.Fields("forget NAME --erased."), false); got {
		t.Error("a wrong flag in prose is not found")
	}
}

// shell is what only a person with a login on a machine can do. Muster's image has none.
var shell = regexp.MustCompile(`\bjournalctl\b|\bsystemctl (start|stop|restart|status|enable|disable)\b|\brm -|\bremove (%s|/var/lib/muster) and\b|\bremove /var/lib/muster\b`)

// needsLogin reports whether a text sends its reader to a shell of a machine. A pod on the node runs from the workstation.
func needsLogin(text string) bool {
	return shell.MatchString(strings.ReplaceAll(text, "-- chroot /host journalctl ", ""))
}

// A person who reads a text of a program has the owner's workstation and the console.
func TestNoTextOfAProgramNeedsALogin(t *testing.T) {
	const runs = "services/bootstrapper/machine/machine.go" // runs systemctl, and names in errors what it ran
	seen := 0
	for path, source := range texts(t) {
		if top, _, _ := strings.Cut(path, "/"); !slices.Contains([]string{"cmd", "internal", "services", "trust"}, top) || filepath.Ext(path) != ".go" || path == runs {
			continue
		}
		for _, text := range stringsOf(t, path, source) {
			seen++
			if needsLogin(text) {
				t.Errorf("%s: %q: name a command for the workstation, as muster doctor --node, muster reset, or checkup.Journal", path, text)
			}
		}
	}
	if seen < 10000 {
		t.Errorf("only %d texts were found", seen)
	}
	for text, want := range map[string]bool{
		"Look at journalctl -u muster-renewal.": true, "systemctl start muster-bootstrapper: it": true, "To start over, remove /var/lib/muster": true, "remove %s and reboot it": true, "rm -rf /x": true,
		"kubectl -n kube-system debug node/w1 -it -q --profile=sysadmin --image=IMAGE -- chroot /host journalctl -u x": false, "systemctl": false, "muster policy remove-image NAME": false, "confirm -": false,
	} {
		if needsLogin(text) != want {
			t.Errorf("%q: %t", text, !want)
		}
	}
}

// stringsOf returns the strings of a Go file; of a sum, all parts as one, with %s for what is no literal.
func stringsOf(t *testing.T, path, source string) (out []string) {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), path, source, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	var text func(e ast.Expr) string
	text = func(e ast.Expr) string {
		switch e := e.(type) {
		case *ast.BasicLit:
			if s, err := strconv.Unquote(e.Value); err == nil && e.Kind == token.STRING {
				return s
			}
		case *ast.BinaryExpr:
			if e.Op == token.ADD {
				return text(e.X) + text(e.Y)
			}
		}
		return "%s"
	}
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.BinaryExpr:
			if n.Op == token.ADD {
				out = append(out, text(n))
				return true // what a function in it gets
			}
		case *ast.BasicLit:
			if n.Kind == token.STRING {
				out = append(out, text(n))
			}
		}
		return true
	})
	return out
}

// kubectl logs of a DaemonSet shows one of its pods, and the refusal may be in the log of another.
func TestNoTextReadsTheLogOfOnePodOnly(t *testing.T) {
	for path, text := range texts(t) {
		if strings.Contains(text, "logs ds/") || strings.Contains(text, "logs daemonset/") {
			t.Errorf("%s: kubectl logs ds/ shows one pod: use -l app.kubernetes.io/name=NAME --prefix --tail=-1", path)
		}
	}
}
