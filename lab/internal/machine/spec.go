// Package machine is a machine of the lab from the inside: the process that enters its
// cgroups and makes its namespaces ([Enter]), its PID 1 ([Init]), and the systemctl that
// talks to it ([Systemctl]).
//
// PID 1 goes through the stages of a real boot. It puts a root file system together, plays firmware
// (package firmware), and only then starts units by their files. The process tree is contained
// twice: the PID namespace dies with PID 1, and PID 1 dies with the process that made it.
package machine

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/muster-k8s/muster/lab/internal/host"
)

// A Spec has all parameters of a machine's start: machine.json in its folder.
type Spec struct {
	Name      string       `json:"name"`
	Address   string       `json:"address"`
	Dir       string       `json:"dir"`       // the machine's folder on the host; disk/ in it survives a reboot
	Layers    []string     `json:"layers"`    // folders with usr, opt and etc that lie over the host's, topmost first
	Manifest  string       `json:"manifest"`  // what firmware measures; empty: no firmware, no TPM
	TPMSocket string       `json:"tpmSocket"` // on the host
	Cgroups   host.Cgroups `json:"cgroups"`
	Cgroup    string       `json:"cgroup"`  // path below each hierarchy's mount
	KeepEtc   bool         `json:"keepEtc"` // what it writes to /etc survives a reboot
	Start     []string     `json:"start"`   // units to start; nil: what multi-user.target wants
}

// File descriptors that a machine's processes inherit, besides the standard three.
const (
	fdReport = 3 // write: JSON lines of [Report]
	fdPlug   = 4 // read: one byte when eth0 has been plugged in
)

// A Report is one line about the progress of a boot.
type Report struct {
	PID   int    `json:"pid,omitempty"`   // PID 1 runs, with this pid on the host
	Ready bool   `json:"ready,omitempty"` // firmware is done and the units are started
	Error string `json:"error,omitempty"` // the boot has failed
}

func report(r Report) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	_, err = os.NewFile(fdReport, "report").Write(append(b, '\n'))
	return err
}

func loadSpec(path string) (Spec, error) {
	var s Spec
	b, err := os.ReadFile(path)
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(b, &s); err != nil {
		return s, fmt.Errorf("%s: %w", path, err)
	}
	return s, nil
}
