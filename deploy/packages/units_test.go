package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/services/bootstrapper/epoch"
)

// exposed is systemd's exposure level of each unit, from 0 to 10; docs/packages.md explains why it is not lower.
var exposed = map[string]float64{"muster-attester.service": 2.1, "muster-bootstrapper.service": 4.8, "muster-renewal.service": 2.1, "muster-orders.service": 2.1, "muster-reset.service": 1.2, "muster-upgrade.service": 3.6, "muster-rotation.service": 2.1}

// The programs of these units write the record of the TPM's counter (B7).
func TestUnitsThatCountMayWriteTheRecord(t *testing.T) {
	folder := "muster/" + filepath.Base(epoch.Folder)
	for _, unit := range []string{"muster-renewal.service", "muster-rotation.service"} {
		text, err := os.ReadFile(filepath.Join(source, "deploy", "systemd", unit))
		if err != nil {
			t.Fatal(err)
		}
		m := regexp.MustCompile(`(?m)^StateDirectory=(.*)$`).FindSubmatch(text)
		if m == nil || !slices.Contains(strings.Fields(string(m[1])), folder) || "/var/lib/"+folder != epoch.Folder {
			t.Errorf("%s can't write %s: StateDirectory is %q", unit, epoch.Folder, m)
		}
	}
}

func TestUnitsAreAsHardAsTheyWere(t *testing.T) {
	for unit, most := range exposed {
		out := command(t, "systemd-analyze", "security", "--offline=true", "--no-pager", filepath.Join(source, "deploy", "systemd", unit))
		m := regexp.MustCompile(`Overall exposure level for \S+: ([0-9.]+)`).FindStringSubmatch(out)
		if m == nil {
			t.Fatalf("%s: systemd-analyze says\n%s", unit, out)
		}
		score, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: exposure %.1f", unit, score)
		if score > most {
			t.Errorf("%s: exposure %.1f, was %.1f\n%s", unit, score, most, out)
		}
		if score < most {
			t.Errorf("%s: exposure %.1f is better than %.1f: write it down here and in docs/packages.md", unit, score, most)
		}
	}
}
