package alerts

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"sigs.k8s.io/yaml"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const rulesFile = "../charts/muster/files/muster.rules.yaml"

type rule struct {
	Alert       string            `json:"alert"`
	Expr        string            `json:"expr"`
	For         string            `json:"for"`
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
}

func rules(t *testing.T) []rule {
	t.Helper()
	var file struct {
		Groups []struct {
			Name  string `json:"name"`
			Rules []rule `json:"rules"`
		} `json:"groups"`
	}
	read(t, rulesFile, &file)
	var out []rule
	for _, g := range file.Groups {
		out = append(out, g.Rules...)
	}
	if len(out) < 20 {
		t.Fatalf("%d alerts", len(out))
	}
	return out
}

func read(t *testing.T, path string, into any) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.UnmarshalStrict(b, into); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
}

func promtool(t *testing.T, args ...string) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "promtool", args...).CombinedOutput()
	if err != nil {
		t.Errorf("promtool %s: %v (it is in Debian's package prometheus; `make deps` installs it)\n%s", strings.Join(args, " "), err, out)
	}
}

func TestPromtoolAcceptsTheRules(t *testing.T) {
	promtool(t, "check", "rules", "--lint=all", "--lint-fatal", rulesFile)
}

// unit is one case in testdata/cases.yaml.
type unit struct {
	Alert  string              `json:"alert"`
	Name   string              `json:"name"`
	At     string              `json:"at"`
	Series map[string]string   `json:"series"`
	Fires  []map[string]string `json:"fires"`
}

func TestAlertsFireWhenTheyShouldAndOnlyThen(t *testing.T) {
	var cases []unit
	read(t, filepath.Join("testdata", "cases.yaml"), &cases)
	byName := map[string]rule{}
	for _, r := range rules(t) {
		byName[r.Alert] = r
	}
	type object = map[string]any
	var tests []object
	fires, quiet := map[string]bool{}, map[string]bool{}
	for _, c := range cases {
		r, ok := byName[c.Alert]
		if !ok {
			t.Errorf("testdata/cases.yaml has %s, which is no alert", c.Alert)
			continue
		}
		fires[c.Alert], quiet[c.Alert] = fires[c.Alert] || len(c.Fires) > 0, quiet[c.Alert] || len(c.Fires) == 0
		var series, expected []object
		for _, s := range slices.Sorted(maps.Keys(c.Series)) {
			series = append(series, object{"series": s, "values": c.Series[s]})
		}
		for _, labels := range c.Fires {
			labels = maps.Clone(labels)
			labels["severity"] = r.Labels["severity"]
			expected = append(expected, object{"exp_labels": labels, "exp_annotations": r.Annotations})
		}
		tests = append(tests, object{
			"name": c.Alert + ": " + c.Name, "interval": "1m", "input_series": series,
			"alert_rule_test": []object{{"eval_time": c.At, "alertname": c.Alert, "exp_alerts": expected}},
		})
	}
	for name := range byName {
		if !fires[name] || !quiet[name] {
			t.Errorf("%s needs a case in which it fires and one in which it does not", name)
		}
	}
	path, err := filepath.Abs(rulesFile)
	if err != nil {
		t.Fatal(err)
	}
	b, err := yaml.Marshal(object{"rule_files": []string{path}, "evaluation_interval": "1m", "tests": tests})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "tests.yaml")
	if err := os.WriteFile(file, b, 0o600); err != nil {
		t.Fatal(err)
	}
	promtool(t, "test", "rules", file)
}

// metric finds the names of metrics, Muster's and those that come with every program.
var metric = regexp.MustCompile(`\b(?:muster|process|go)_[a-z0-9_]+\b`)

func TestAlertsAreAboutMetricsThatExist(t *testing.T) {
	documented, err := os.ReadFile(filepath.Join("..", "..", "docs", "metrics.md"))
	if err != nil {
		t.Fatal(err)
	}
	exists := func(name string) bool { return bytes.Contains(documented, []byte("`"+name+"`")) }
	used := map[string]bool{}
	for _, r := range rules(t) {
		for _, name := range metric.FindAllString(r.Expr, -1) {
			if base, ok := strings.CutSuffix(name, "_bucket"); ok && exists(base) {
				name = base
			}
			if strings.HasPrefix(name, "muster_") && !exists(name) {
				t.Errorf("%s asks for %s, which docs/metrics.md does not have", r.Alert, name)
			}
			used[name] = true
		}
	}
	// What docs/metrics.md says to alert on has an alert.
	for line := range strings.Lines(string(documented)) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		name := strings.Trim(strings.TrimSpace(cells[0]), "`")
		if strings.HasPrefix(line, "| `muster_") && strings.TrimSpace(cells[len(cells)-1]) != "" && !used[name] {
			t.Errorf("docs/metrics.md says when to alert on %s, and no alert asks for it", name)
		}
	}
}

// reasonList finds the values of a matcher of the label reason.
var reasonList = regexp.MustCompile(`reason[=!]~?"([A-Z_|]+)"`)

func TestAlertsNameReasonsThatExist(t *testing.T) {
	b, err := os.ReadFile(filepath.Join("..", "..", "docs", "reason-codes.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range rules(t) {
		for _, m := range reasonList.FindAllStringSubmatch(r.Expr, -1) {
			for reason := range strings.SplitSeq(m[1], "|") {
				if !bytes.Contains(b, []byte("| `"+reason+"` |")) {
					t.Errorf("%s asks for the reason %s, which docs/reason-codes.md does not have", r.Alert, reason)
				}
			}
		}
	}
}

func TestEachAlertHasARunbook(t *testing.T) {
	const page = "https://github.com/muster-k8s/muster/blob/main/docs/observe.md#"
	b, err := os.ReadFile(filepath.Join("..", "..", "docs", "observe.md"))
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, r := range rules(t) {
		if seen[r.Alert] {
			t.Errorf("%s is there twice", r.Alert)
		}
		seen[r.Alert] = true
		if want := page + strings.ToLower(r.Alert); r.Annotations["runbook_url"] != want {
			t.Errorf("%s: the runbook is %q, want %q", r.Alert, r.Annotations["runbook_url"], want)
		}
		if !bytes.Contains(b, fmt.Appendf(nil, "\n### %s\n", r.Alert)) {
			t.Errorf("docs/observe.md has no heading %s", r.Alert)
		}
		if s := r.Labels["severity"]; s != "critical" && s != "warning" {
			t.Errorf("%s: severity %q", r.Alert, s)
		}
		if strings.Contains(r.Annotations["summary"], "{{") || r.Annotations["summary"] == "" {
			t.Errorf("%s: the summary is %q; what is special about a case stands in its labels", r.Alert, r.Annotations["summary"])
		}
	}
	for line := range strings.Lines(string(b)) {
		if name, ok := strings.CutPrefix(strings.TrimSpace(line), "### Muster"); ok && !seen["Muster"+name] {
			t.Errorf("docs/observe.md has Muster%s, which is no alert", name)
		}
	}
}
