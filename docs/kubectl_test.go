package docs_test

import (
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestPagesSayWhichClusterKubectlAsks checks that a reader who runs a page's blocks has set a kubeconfig: the page sets it, or
// links to the section that does.
func TestPagesSayWhichClusterKubectlAsks(t *testing.T) {
	block, bare := regexp.MustCompile("(?ms)^ *```sh[^\n]*\n(.*?)^ *```$"), regexp.MustCompile(`(?m)^.*\bkubectl .*$`)
	where := regexp.MustCompile(`export KUBECONFIG=|\]\([a-z./]*operate\.md#kubectl\)`)
	found := 0
	for _, rel := range files(t, ".md") {
		if !strings.HasPrefix(filepath.ToSlash(rel), "docs/") {
			continue
		}
		text, uses := read(t, rel), ""
		for _, b := range block.FindAllStringSubmatch(text, -1) {
			for _, line := range bare.FindAllString(b[1], -1) {
				if !strings.Contains(line, "--kubeconfig") && !strings.HasPrefix(strings.TrimSpace(line), "#") {
					uses = line
				}
			}
		}
		if uses == "" {
			continue
		}
		if found++; !where.MatchString(text) {
			t.Errorf("%s does not say which kubeconfig its kubectl uses, and has no link to operate.md#kubectl: %s", rel, uses)
		}
	}
	if found < 5 {
		t.Errorf("only %d pages use kubectl: look whether the expressions still find them", found)
	}
}
