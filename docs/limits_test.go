package docs_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"
	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/internal/serve"
	"github.com/muster-k8s/muster/services/bootstrapper"
	"github.com/muster-k8s/muster/services/bootstrapper/recovery"
	"github.com/muster-k8s/muster/services/bootstrapper/unlock"
	"github.com/muster-k8s/muster/services/joinservice"
	"github.com/muster-k8s/muster/services/kms"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/peerlimit"
)

// The tables of docs/limits.md have the sums that follow from the limits, and they fit the memory that
// the chart and the units give.
func TestTheWorstCasesOfAllListenersAreDocumented(t *testing.T) {
	page, err := os.ReadFile("limits.md")
	if err != nil {
		t.Fatal(err)
	}
	row := func(name string) []string {
		t.Helper()
		for line := range strings.Lines(string(page)) {
			if cells := strings.Split(line, "|"); len(cells) > 8 && strings.TrimSpace(cells[1]) == name {
				return cells
			}
		}
		t.Fatalf("docs/limits.md has no row for %s", name)
		return nil
	}
	mib := func(n int64) string { return fmt.Sprintf("%d MiB", (n+1<<20-1)>>20) }
	for name, l := range map[string]atls.Limits{
		"joinservice": joinservice.Limits, "kms": kms.Limits, "init server": bootstrapper.InitLimits,
		"status in the initramfs": unlock.Limits, "recovery in the initramfs": recovery.Limits,
	} {
		unattested, attested := l.Memory()
		cells := row(name)
		want := []string{mib(unattested), mib(attested)}
		if !strings.Contains(name, "service") && name != "kms" {
			want[1] = "none" // it asks no peer for evidence
		}
		for i, w := range want {
			if got := strings.TrimSpace(cells[7+i]); got != w {
				t.Errorf("%s: docs/limits.md has %s in column %d, the limits add up to %s", name, got, 7+i, w)
			}
		}
	}

	values, err := os.ReadFile(root + "/deploy/charts/muster/values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	type service struct {
		Resources struct{ Limits struct{ Memory string } }
	}
	var chart map[string]any
	if err := yaml.Unmarshal(values, &chart); err != nil {
		t.Fatal(err)
	}
	const own, probes = 48 << 20, serve.ProbesMemory
	if got := strings.TrimSpace(row("metrics and probes")[7]); got != mib(probes) {
		t.Errorf("metrics and probes: docs/limits.md has %s, the limits add up to %s", got, mib(probes))
	}
	for name, l := range map[string]atls.Limits{"joinservice": joinservice.Limits, "kms": kms.Limits} {
		raw, err := yaml.Marshal(chart[name])
		if err != nil {
			t.Fatal(err)
		}
		var s service
		if err := yaml.Unmarshal(raw, &s); err != nil {
			t.Fatal(err)
		}
		limit := resource.MustParse(s.Resources.Limits.Memory)
		unattested, attested := l.Memory()
		sum, goes := own+probes+unattested+attested, limit.Value()/10*8
		if name == "joinservice" {
			sum += peerlimit.SourcesMemory // clients that order an administrator's certificate
		}
		if sum > goes {
			t.Errorf("%s: %s in the worst case, and the chart gives Go %s", name, mib(sum), mib(goes))
		}
		if row := fmt.Sprintf("| %s | %s | %d MiB | %s |\n", name, mib(limit.Value()), goes>>20, mib(sum)); !strings.Contains(string(page), row) {
			t.Errorf("docs/limits.md has no row %q", row)
		}
	}

	initServer, _ := bootstrapper.InitLimits.Memory()
	for unit, sum := range map[string]int64{"muster-bootstrapper.service": own + probes + initServer, "muster-renewal.service": own, "muster-orders.service": own} {
		text := read(t, "deploy/systemd/"+unit)
		limit := func(key string) resource.Quantity {
			_, value, _ := strings.Cut(text, "\n"+key+"=")
			value, _, _ = strings.Cut(value, "\n")
			return resource.MustParse(strings.TrimSuffix(value, "iB") + "i") // systemd's M is 1024² bytes, as Go's MiB
		}
		most := limit("MemoryMax")
		goes := most
		if strings.Contains(text, "GOMEMLIMIT=") {
			goes = limit("Environment=GOMEMLIMIT")
		}
		if sum > goes.Value() {
			t.Errorf("%s: %s in the worst case, and the unit gives Go %s", unit, mib(sum), mib(goes.Value()))
		}
		if row := fmt.Sprintf("| `%s` | %s | ", unit, mib(most.Value())); !strings.Contains(string(page), row) {
			t.Errorf("docs/limits.md has no row that begins with %q", row)
		}
		if cell := fmt.Sprintf(" | %s |\n", mib(sum)); !strings.Contains(string(page), cell) {
			t.Errorf("%s: docs/limits.md has no worst case of %s", unit, mib(sum))
		}
	}
}
