// Package explain puts into words how a machine differs from what a policy or an image's build expects. It decides nothing.
package explain

import (
	"errors"
	"fmt"
	"strings"

	"github.com/muster-k8s/muster/trust/attest"
)

// Meanings describe what each PCR holds (TCG PC Client Platform Firmware Profile, section 3.3.4, and the systemd boot
// loader's documentation).
var Meanings = map[int]string{
	0: "firmware code", 1: "firmware configuration", 2: "drivers of extension cards", 3: "their configuration",
	4: "boot loader and kernel image", 5: "boot loader's configuration, partition table", 6: "host specific", 7: "Secure Boot keys",
	8: "nothing: zero", 9: "initrd and what the kernel loads", 10: "not evaluated by Muster", 11: "unified kernel image and boot phases",
	12: "nothing: zero, no configuration from outside the image", 13: "nothing: zero, no system extensions", 14: "nothing: zero, no shim keys",
}

// Words describes a refusal in one sentence, without the values of PCRs. Parts of it may be texts of the machine's event log.
func Words(err error) string {
	m, ok := errors.AsType[*attest.MismatchError](err)
	if !ok {
		return err.Error()
	}
	if m.Name == "" {
		return "the policy has no " + m.Kind
	}
	var parts []string
	for _, d := range m.Mismatches {
		parts = append(parts, mismatch(d))
	}
	what := fmt.Sprintf("%s %s", m.Kind, m.Name)
	if m.Others > 0 {
		what = fmt.Sprintf("none of %d %s; the closest, %s", m.Others+1, plural(m.Kind), m.Name)
	}
	return what + ": " + strings.Join(parts, "; ")
}

func plural(kind string) string {
	if kind == "class" {
		return "classes"
	}
	return kind + "s"
}

func mismatch(d attest.Mismatch) string {
	if d.Expected == nil { // a rule over the event log, in words already
		return d.String()
	}
	return fmt.Sprintf("PCR %d (%s) differs", d.PCR, Meanings[d.PCR])
}
