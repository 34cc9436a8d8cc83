package charts_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"
)

// TestEachRuleOfTheChartIsExplained compares the chart's roles with the tables of docs/rbac.md.
func TestEachRuleOfTheChartIsExplained(t *testing.T) {
	rules := map[string][]rbacv1.PolicyRule{}
	for _, r := range decode[rbacv1.ClusterRole](t, "ClusterRole") {
		rules[r.Name] = append(rules[r.Name], r.Rules...)
	}
	for _, r := range decode[rbacv1.Role](t, "Role") {
		rules[r.Name] = append(rules[r.Name], r.Rules...)
	}
	tokens, err := os.ReadFile(filepath.Join("testdata", "rendered-tokens.yaml")) // the additions of joinCredential: token
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range strings.Split(string(tokens), "\n---\n") {
		var r rbacv1.ClusterRole // a Role has the same fields
		if err := yaml.Unmarshal([]byte(d), &r); err != nil {
			t.Fatal(err)
		}
		if r.Kind == "Role" || r.Kind == "ClusterRole" {
			rules[r.Name] = append(rules[r.Name], r.Rules...)
		}
	}
	b, err := os.ReadFile(filepath.Join("..", "..", "docs", "rbac.md"))
	if err != nil {
		t.Fatal(err)
	}
	explained := map[string]int{} // role and first two cells of a row
	role := ""
	for line := range strings.Lines(string(b)) {
		if heading, ok := strings.CutPrefix(line, "## "); ok {
			role = "muster:" + strings.TrimSpace(heading)
		}
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if rules[role] == nil || !strings.HasPrefix(line, "| `") {
			continue
		}
		if len(cells) != 3 || strings.TrimSpace(cells[2]) == "" {
			t.Errorf("a row without an explanation: %s", line)
			continue
		}
		explained[row(role, strings.TrimSpace(cells[0]), strings.TrimSpace(cells[1]))]++
	}
	for role, list := range rules {
		for _, rule := range list {
			key := row(role, resources(rule), code(rule.Verbs))
			if explained[key] != 1 {
				t.Errorf("docs/rbac.md has %d rows for this rule of %s, want one: | %s | %s |", explained[key], role, resources(rule), code(rule.Verbs))
			}
			delete(explained, key)
		}
	}
	for key := range explained {
		t.Errorf("docs/rbac.md explains a rule that the chart does not have: %s", key)
	}
	if !strings.Contains(string(b), "equal being any node") {
		t.Error("docs/rbac.md no longer says what the right to approve comes to")
	}
}

func row(role, resources, verbs string) string {
	return fmt.Sprintf("%s: %s: %s", role, resources, verbs)
}

// resources writes a rule's resources as docs/rbac.md does: RESOURCE.GROUP, and after a colon the names.
func resources(r rbacv1.PolicyRule) string {
	var all []string
	for _, group := range r.APIGroups {
		for _, resource := range r.Resources {
			if group != "" {
				resource += "." + group
			}
			all = append(all, resource)
		}
	}
	out := code(all)
	if len(r.ResourceNames) > 0 {
		out += ": " + code(r.ResourceNames)
	}
	return out
}

func code(words []string) string { return "`" + strings.Join(words, "`, `") + "`" }
