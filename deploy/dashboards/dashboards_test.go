package main

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestTheFilesAreThoseOfThePanels(t *testing.T) {
	for _, d := range dashboards {
		want, err := d.render()
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(filepath.Join("..", "charts", "muster", "files", d.file()))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s is out of date: go generate ./deploy/dashboards", d.file())
		}
		if !json.Valid(got) {
			t.Errorf("%s is no JSON", d.file())
		}
	}
}

func TestEachQueryParses(t *testing.T) {
	var rules strings.Builder
	rules.WriteString("groups:\n- name: x\n  rules:\n")
	for _, d := range dashboards {
		for _, p := range d.panels {
			if p.unit == "" || len(p.queries) == 0 {
				t.Errorf("%s: %s has no unit or no query", d.title, p.title)
			}
			for _, q := range p.queries {
				expr, err := json.Marshal(strings.ReplaceAll(q.expr, "$__rate_interval", "5m"))
				if err != nil {
					t.Fatal(err)
				}
				rules.WriteString("  - record: x\n    expr: " + string(expr) + "\n")
			}
		}
	}
	file := filepath.Join(t.TempDir(), "rules.yaml")
	if err := os.WriteFile(file, []byte(rules.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), "promtool", "check", "rules", "--lint=none", file).CombinedOutput(); err != nil {
		t.Errorf("promtool: %v (it is in Debian's package prometheus; `make deps` installs it)\n%s", err, out)
	}
}

var metric = regexp.MustCompile(`\bmuster_[a-z0-9_]+\b`)

// Each metric is shown in a panel, and each shown metric exists.
func TestDashboardsShowTheMetricsThatExist(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "docs", "metrics.md"))
	if err != nil {
		t.Fatal(err)
	}
	exists := map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| `(muster_[a-z0-9_]+)` \\|").FindAllSubmatch(text, -1) {
		exists[string(m[1])] = true
	}
	shown := map[string]bool{}
	for _, d := range dashboards {
		for _, p := range d.panels {
			for _, q := range p.queries {
				for _, name := range metric.FindAllString(q.expr, -1) {
					name = strings.TrimSuffix(name, "_bucket")
					shown[name] = true
					if !exists[name] {
						t.Errorf("%s: %s asks for %s, which docs/metrics.md does not have", d.title, p.title, name)
					}
				}
			}
		}
	}
	for name := range exists {
		if !shown[name] {
			t.Errorf("no dashboard shows %s", name)
		}
	}
}
