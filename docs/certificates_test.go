package docs_test

import (
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestEveryFileOfACertificateOrKeyIsInTheTable looks for the names in the code of what writes, renews, rotates and keeps such files. A key has its
// certificate's row.
func TestEveryFileOfACertificateOrKeyIsInTheTable(t *testing.T) {
	text := read(t, "docs/certificates.md")
	literal := regexp.MustCompile(`"(?:/?[a-z-]+/)*([a-z-]+\.(?:crt|key|pub|pem))"`)
	writers := regexp.MustCompile(`^(?:services/bootstrapper/(?:backups|joinclient|kubelet|clusterca|renewal|rotation)|cmd/muster/owner/ownerdir)/`)
	seen := map[string]bool{}
	for _, rel := range files(t, ".go") {
		if rel = filepath.ToSlash(rel); !writers.MatchString(rel) || strings.HasSuffix(rel, "_test.go") {
			continue
		}
		for _, m := range literal.FindAllStringSubmatch(read(t, rel), -1) {
			name := m[1]
			if name == "current.pem" { // the end of two names
				continue
			}
			seen[name] = true
			in := strings.Contains(text, "`"+name+"`")
			if stem, key := strings.CutSuffix(name, ".key"); key {
				in = in || strings.Contains(text, "`"+stem+".crt`")
			}
			if !in {
				t.Errorf("%s names %s, which is not in docs/certificates.md", rel, name)
			}
		}
	}
	for _, name := range []string{"muster-cross.crt", "former-cas.pem", "healthcheck-client.crt", "sa.key"} {
		if !seen[name] {
			t.Errorf("%s was not found: look whether the expressions still find the names", name)
		}
	}
}
