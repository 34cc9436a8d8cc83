// Command longtests runs tests that take hours, each in a process of its own, and continues after an interruption: a test that has
// passed on the same files is not run again. It runs all others even if one fails, and ends with a table of all times.
//
//	longtests [-tags TAGS] [-timeout DURATION] [-together 'TestA|TestB'] [-files 'PATHSPEC …'] -state FOLDER PACKAGE…
//
// -files names the files that the tests are made of, as git pathspecs; without it these are all files. With uncommitted changes of them it runs everything, and keeps nothing.
package main

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "longtests:", err)
		os.Exit(1)
	}
}

// options are the flags.
type options struct {
	tags, together, state string
	files                 []string
	timeout               time.Duration
	packages              []string
}

// result is the content of a test's file in the state folder, which exists once the test has passed.
type result struct {
	Seconds float64   `json:"seconds"`
	At      time.Time `json:"at"`
}

func run(ctx context.Context, args []string, out io.Writer) error {
	var o options
	flags := flag.NewFlagSet("longtests", flag.ContinueOnError)
	flags.StringVar(&o.tags, "tags", "", "build tags")
	flags.StringVar(&o.together, "together", "", "tests that run in one process, beside each other, separated by |")
	flags.StringVar(&o.state, "state", "", "folder that remembers what has passed")
	flags.DurationVar(&o.timeout, "timeout", 90*time.Minute, "time limit of one test")
	flags.Func("files", "git pathspecs of the files whose change has the tests run again, separated by spaces; without it a change of any file", func(s string) error {
		o.files = strings.Fields(s)
		return nil
	})
	if err := flags.Parse(args); err != nil {
		return err
	}
	if o.packages = flags.Args(); len(o.packages) == 0 || o.state == "" {
		return errors.New("-state and at least one package are required")
	}
	tree, err := tree(ctx, o.files)
	if err != nil {
		return err
	}
	binaries, err := os.MkdirTemp("", "longtests")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(binaries) }()
	suites := make([]suite, len(o.packages))
	var all []string
	for i, p := range o.packages {
		if suites[i], err = build(ctx, o, p, filepath.Join(binaries, fmt.Sprintf("%d.test", i))); err != nil {
			return err
		}
		all = append(all, suites[i].tests...)
	}
	for _, name := range strings.Split(o.together, "|") {
		if name != "" && !slices.Contains(all, name) {
			return fmt.Errorf("-together names %s, which is no test of these packages", name)
		}
	}
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	var sum time.Duration
	var failed error
	for i, p := range o.packages {
		for _, unit := range units(suites[i].tests, o.together) {
			took, before, err := one(ctx, o, unit, suites[i].dir, suites[i].binary, filepath.Join(o.state, tree, strings.ReplaceAll(strings.TrimPrefix(p, "./"), "/", "-")+"."+strings.Join(unit, "+")), tree != "", out)
			if ctx.Err() != nil {
				return fmt.Errorf("interrupted in %s; what has passed is kept", strings.Join(unit, ", "))
			}
			sum += took
			how := "passed"
			switch {
			case err != nil:
				how, failed = "FAILED", errors.Join(failed, fmt.Errorf("%s %s: %w", p, strings.Join(unit, ", "), err))
			case before:
				how = "passed in an earlier run"
			}
			fmt.Fprintf(table, "%s\t%s\t%.0f s\t%s\n", p, strings.Join(unit, ", "), took.Seconds(), how)
		}
	}
	fmt.Fprintf(table, "\tin all\t%.0f s\t\n", sum.Seconds())
	return errors.Join(table.Flush(), failed)
}

// tree returns the SHA-256 of names and contents of the committed files that the pathspecs name; it is empty if there are uncommitted
// changes of them.
func tree(ctx context.Context, pathspecs []string) (string, error) {
	git := func(args ...string) ([]byte, error) {
		out, err := exec.CommandContext(ctx, "git", append(append(args, "--"), pathspecs...)...).Output()
		if err != nil {
			return nil, fmt.Errorf("git %s: %w", args[0], err)
		}
		return out, nil
	}
	changes, err := git("status", "--porcelain")
	if err != nil || len(changes) > 0 {
		return "", err
	}
	files, err := git("ls-files", "--stage")
	if err != nil {
		return "", err
	}
	if len(files) == 0 {
		return "", fmt.Errorf("no file has a name like %q", pathspecs)
	}
	return fmt.Sprintf("%x", sha256.Sum256(files)), nil
}

// suite is a package's folder, its compiled tests, and their names.
type suite struct {
	dir, binary string
	tests       []string
}

// build compiles the tests of a package with the race detector, and lists them.
func build(ctx context.Context, o options, pkg, binary string) (suite, error) {
	where, err := exec.CommandContext(ctx, "go", "list", "-tags", o.tags, "-f", "{{.Dir}}", pkg).Output()
	if err != nil {
		return suite{}, fmt.Errorf("go list %s: %w", pkg, err)
	}
	compile := exec.CommandContext(ctx, "go", "test", "-race", "-vet=off", "-ldflags=-w", "-tags", o.tags, "-c", "-o", binary, pkg)
	compile.Stderr = os.Stderr
	if err := compile.Run(); err != nil {
		return suite{}, fmt.Errorf("build the tests of %s: %w", pkg, err)
	}
	dir := strings.TrimSpace(string(where))
	list := exec.CommandContext(ctx, binary, "-test.list", "^Test")
	list.Dir = dir
	names, err := list.Output()
	if err != nil {
		return suite{}, fmt.Errorf("list the tests of %s: %w", pkg, err)
	}
	tests := strings.Fields(string(names))
	if len(tests) == 0 {
		return suite{}, fmt.Errorf("%s has no test", pkg)
	}
	return suite{dir, binary, tests}, nil
}

// units returns the tests one by one, except those that run together, which come last.
func units(tests []string, together string) (out [][]string) {
	var group []string
	for _, name := range tests {
		if slices.Contains(strings.Split(together, "|"), name) {
			group = append(group, name)
		} else {
			out = append(out, []string{name})
		}
	}
	if len(group) > 0 {
		out = append(out, group)
	}
	return out
}

// one runs a unit, unless its file records that it has passed before.
func one(ctx context.Context, o options, unit []string, dir, binary, file string, keep bool, out io.Writer) (took time.Duration, before bool, err error) {
	if keep {
		if text, err := os.ReadFile(file); err == nil {
			var r result
			if err := json.Unmarshal(text, &r); err != nil {
				return 0, false, fmt.Errorf("%s: %w", file, err)
			}
			return time.Duration(r.Seconds * float64(time.Second)), true, nil
		}
	}
	names := make([]string, len(unit))
	for i, n := range unit {
		names[i] = regexp.QuoteMeta(n)
	}
	began := time.Now()
	cmd := exec.CommandContext(ctx, binary, "-test.v", "-test.timeout", o.timeout.String(), "-test.run", "^("+strings.Join(names, "|")+")$")
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, out, os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 5 * time.Minute // it takes its machines down
	if err := cmd.Run(); err != nil {
		return time.Since(began), false, err
	}
	took = time.Since(began)
	if !keep {
		return took, false, nil
	}
	text, err := json.Marshal(result{took.Seconds(), time.Now().UTC().Truncate(time.Second)})
	if err != nil {
		return took, false, err
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return took, false, err
	}
	return took, false, os.WriteFile(file, append(text, '\n'), 0o600)
}
