package docs_test

import (
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestWhatPagesReplaceIsThere checks the commands of pages that change files of the checkout: sed succeeds also if it finds nothing.
func TestWhatPagesReplaceIsThere(t *testing.T) {
	command := regexp.MustCompile(`(?m)^sed (?:-i )?'s([/|])([^'\n]*)'(?: |\n)([a-z/.-]+)`)
	found := 0
	for _, rel := range files(t, ".md") {
		for _, m := range command.FindAllStringSubmatch(read(t, rel), -1) {
			old, _, _ := strings.Cut(m[2], m[1])
			if found++; !strings.Contains(read(t, filepath.FromSlash(m[3])), old) {
				t.Errorf("%s replaces %q in %s, which does not have it", rel, old, m[3])
			}
		}
	}
	if found < 3 {
		t.Errorf("%d commands found: look whether the expression still finds them", found)
	}
}
