package image

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The lab's units are small, since hardening needs a real systemd; their commands and restart rules are those of the
// shipped ones.
func TestTheLabStartsWhatTheShippedUnitsStart(t *testing.T) {
	for _, name := range []string{"muster-bootstrapper.service", "muster-attester.service", "muster-renewal.service", "muster-orders.service", "muster-upgrade.service", "muster-rotation.service"} {
		shipped, err := os.ReadFile(filepath.Join("..", "..", "..", "deploy", "systemd", name))
		if err != nil {
			t.Fatal(err)
		}
		lab, err := files.ReadFile("files/units/" + name)
		if err != nil {
			t.Fatal(err)
		}
		oneshot := value(string(shipped), "Type=") == "oneshot"
		for _, key := range []string{"ExecStart=", "Restart="} {
			if got, want := value(string(lab), key), value(string(shipped), key); got != want || got == "" && (!oneshot || key != "Restart=") {
				t.Errorf("%s: %s%s, shipped %s%s", name, key, got, key, want)
			}
		}
		if oneshot != (value(string(lab), "Type=") == "oneshot") {
			t.Errorf("%s: it is Type=oneshot either here or as shipped, and not in both", name)
		}
	}
}

func value(unit, key string) string {
	for line := range strings.Lines(unit) {
		if v, ok := strings.CutPrefix(line, key); ok {
			return strings.TrimSpace(v)
		}
	}
	return ""
}
