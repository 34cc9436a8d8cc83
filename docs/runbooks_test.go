package docs_test

import (
	"regexp"
	"strings"
	"testing"
)

// executed finds the titles of blocks in the tests that execute them: literals in a call of a function or method that
// takes a block's title, or a look into the page's blocks.
var executed = regexp.MustCompile(`(?:\.Block\(t, (?:"[^"\n]+"|[\w.]+), |\.owner\(t, |Runbooks\([^)\n]*\)\[)"([a-z-]+)"`)

// TestEachBlockOfTheRunbooksIsExecuted compares docs/runbooks.md with the tests that execute its titled blocks. Those with a build
// tag don't run with this one, but nothing can be on the page that they don't run, or be missing there.
func TestEachBlockOfTheRunbooksIsExecuted(t *testing.T) {
	where := map[string]string{}
	for _, rel := range files(t, "_test.go") {
		if strings.HasPrefix(rel, "e2e/") {
			for _, m := range executed.FindAllStringSubmatch(read(t, rel), -1) {
				where[m[1]] = rel
			}
		}
	}
	text := read(t, "docs/runbooks.md")
	blocks := map[string]string{}
	for _, m := range regexp.MustCompile("(?ms)^```sh title=([a-z-]+)\n(.*?)^```$").FindAllStringSubmatch(text, -1) {
		blocks[m[1]] = m[2]
	}
	if got, want := len(blocks), strings.Count(text, "title="); got != want {
		t.Errorf("%d of %d titled blocks were read, or two have one title", got, want)
	}
	for title := range blocks {
		if where[title] == "" {
			t.Errorf("docs/runbooks.md has the block %s, which no test in e2e executes", title)
		}
		if !strings.HasPrefix(blocks[title], "# "+title+"\n") {
			t.Errorf("docs/runbooks.md: the first line of the block %s is not its name, which readers do not see otherwise", title)
		}
	}
	for title, rel := range where {
		if blocks[title] == "" {
			t.Errorf("%s executes the block %s, which docs/runbooks.md does not have", rel, title)
		}
	}
	// Blocks that are executed by hand: every other block of commands only sets the folder.
	for _, m := range regexp.MustCompile("(?ms)^```sh\n(.*?)^```$").FindAllStringSubmatch(text, -1) {
		if !strings.HasPrefix(m[1], "export KUBECONFIG=") || strings.Count(m[1], "\n") != 1 {
			t.Errorf("a block of docs/runbooks.md has no title, so nothing executes it:\n%s", m[1])
		}
	}
	if len(where) < 10 {
		t.Errorf("only %d blocks are executed: %v", len(where), where)
	}
}

// TestTheRunbooksHaveAllTheirParts checks that each runbook has the parts that an operator needs.
func TestTheRunbooksHaveAllTheirParts(t *testing.T) {
	books := strings.Split(read(t, "docs/runbooks.md"), "\n## ")[1:]
	for _, book := range books {
		title, text, _ := strings.Cut(book, "\n")
		for _, part := range []string{"**When.**", "**You see**", "```sh title=", "**Over** when", "**Lost** is"} {
			if !strings.Contains(text, part) {
				t.Errorf("the runbook %q lacks %q", title, part)
			}
		}
	}
	if len(books) != 11 {
		t.Errorf("%d runbooks, want eleven", len(books))
	}
}

// A loop that waits for the API server ends at a kubeconfig that has expired: no wait repairs that.
func TestNoRunbookWaitsForAnExpiredKubeconfig(t *testing.T) {
	waits := 0
	for _, m := range regexp.MustCompile("(?ms)^```sh title=([a-z-]+)\n(.*?)^```$").FindAllStringSubmatch(read(t, "docs/runbooks.md"), -1) {
		for _, loop := range regexp.MustCompile(`(?s)until[^\n]*kubectl get --raw /readyz.*?done\n`).FindAllString(m[2], -1) {
			if waits++; !strings.Contains(loop, "*Unauthorized*) echo") {
				t.Errorf("the block %s waits for ever after the kubeconfig's end:\n%s", m[1], loop)
			}
		}
	}
	if waits != 2 {
		t.Errorf("%d blocks wait for the API server, want 2: look whether the expression still finds them", waits)
	}
}
