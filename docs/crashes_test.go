package docs_test

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/services/bootstrapper/journal"
)

// TestTheCrashTableHasEveryPointAndEveryTest compares docs/crashes.md with the points at which
// tests kill, and with the tests of e2e/crash.
func TestTheCrashTableHasEveryPointAndEveryTest(t *testing.T) {
	text := read(t, "docs/crashes.md")
	tables := map[string]bool{} // code words of the tables' first column
	for line := range strings.Lines(text) {
		if cells := strings.Split(line, "|"); strings.HasPrefix(line, "|") && len(cells) > 2 {
			for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(cells[1], -1) {
				if step, ok := strings.CutPrefix(m[1], "journal: "); ok {
					tables["the journal is about to say "+step] = true
					tables["the journal says "+step] = true
					continue
				}
				tables[m[1]] = true
			}
		}
	}
	points := map[string]bool{}
	for s := journal.StepWaiting; !strings.HasPrefix(s.String(), "step("); s++ {
		points["the journal is about to say "+s.String()] = true
		points["the journal says "+s.String()] = true
	}
	// Names of effects: whole literals in the process's code, and those of the fake kubeadm.
	processes := read(t, "e2e/crash/process_test.go") + read(t, "e2e/crash/luksprocess_test.go")
	for _, m := range regexp.MustCompile(`\.(?:step|last)\("([^"]+[^" ])"`).FindAllStringSubmatch(processes, -1) {
		points[m[1]] = true
	}
	// The texts of the programs that replace cryptsetup.
	for _, m := range regexp.MustCompile(`(?m)^\s*say "([^"$]+)"$`).FindAllStringSubmatch(processes, -1) {
		points[m[1]] = true
	}
	fake := read(t, "services/bootstrapper/machine/machinetest/machine.go")
	for _, verb := range []string{"init", "join"} {
		for _, m := range regexp.MustCompile(`step\(ctx, "kubeadm "\+verb\+"([^"]+)"`).FindAllStringSubmatch(fake, -1) {
			points["kubeadm "+verb+m[1]] = true
		}
	}
	for _, m := range regexp.MustCompile(`step\(ctx, "(kubeadm [^"]+[^" ])"\)`).FindAllStringSubmatch(fake, -1) {
		points[m[1]] = true
	}
	for _, verb := range []string{"enable", "start"} {
		for _, unit := range []string{"muster-attester.service", "kubelet.service"} {
			points[fmt.Sprint(verb, " ", unit)] = true
		}
	}
	for _, unit := range []string{"muster-renewal.service", "muster-orders.service"} { // not enabled: the bootstrapper starts them at each boot
		points["start "+unit] = true
	}
	if len(points) < 30 {
		t.Fatalf("only %d points were found: %q", len(points), slices.Sorted(maps.Keys(points)))
	}
	for _, p := range slices.Sorted(maps.Keys(points)) {
		if !tables[p] {
			t.Errorf("docs/crashes.md has no row for %q", p)
		}
	}
	for name := range tables {
		if strings.HasPrefix(name, "the journal ") && !points[name] {
			t.Errorf("docs/crashes.md has a row for %q, at which nothing kills", name)
		}
	}
	for _, rel := range files(t, "_test.go") {
		if !strings.HasPrefix(rel, "e2e/crash/") {
			continue
		}
		for _, m := range regexp.MustCompile(`(?m)^func (Test[A-Z]\w+)\(t `).FindAllStringSubmatch(read(t, rel), -1) {
			if !strings.Contains(text, "`"+m[1]+"`") {
				t.Errorf("docs/crashes.md does not name %s (%s)", m[1], rel)
			}
		}
	}
}
