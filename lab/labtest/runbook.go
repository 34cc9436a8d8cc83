package labtest

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

var titled = regexp.MustCompile("(?ms)^```sh title=([a-z-]+)\n(.*?)^```$")

// Runbooks returns the titled blocks of docs/runbooks.md, as they stand there; root is that of the checkout.
func Runbooks(t *testing.T, root string) map[string]string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(root, "docs", "runbooks.md"))
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, m := range titled.FindAllStringSubmatch(string(b), -1) {
		if out[m[1]] != "" {
			t.Fatalf("docs/runbooks.md has two blocks %s", m[1])
		}
		out[m[1]] = m[2]
	}
	if got, want := len(out), strings.Count(string(b), "```sh title="); got != want || got == 0 {
		t.Fatalf("%d of %d blocks were read", got, want)
	}
	return out
}

// Block executes a block of docs/runbooks.md as it stands there: on the owner's workstation, with kubectl as the owner, or on a
// machine. The variables (NAME=VALUE) are those that the page names. It gives what the block printed.
func (c *Cluster) Block(t *testing.T, where, title string, variables ...string) string {
	t.Helper()
	start := time.Now()
	out, said, err := c.RunBlock(t.Context(), Runbooks(t, c.Root)[title], where, variables...)
	if err != nil {
		t.Fatalf("block %s: %v", title, err)
	}
	t.Logf("block %s on %s, %.1f s\n%s%s", title, where, time.Since(start).Seconds(), said, out)
	return out
}

// RunBlock executes a block's script as [Cluster.Block] does, and gives what it printed on each stream.
func (c *Cluster) RunBlock(ctx context.Context, script, where string, variables ...string) (out, problems string, err error) {
	if script == "" {
		return "", "", errors.New("docs/runbooks.md has no such block")
	}
	folders, err := filepath.Glob(filepath.Join(c.OwnerDir(), "muster-*")) // there after the first init
	if err != nil {
		return "", "", err
	}
	argv := append([]string{"env"}, variables...)
	for _, f := range folders {
		argv = append(argv, "KUBECONFIG="+filepath.Join(f, "admin.conf"))
	}
	return c.Run(ctx, where, "", append(argv, "bash", "-euo", "pipefail", "-c", script)...)
}
